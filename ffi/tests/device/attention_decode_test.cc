// Attention with few queries on an emulated GPU, against float64.
#include "attention/kernels/decode.cu"
#include "attention/kernels/decode_merge.cu"
#include "device/attention_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {

alignas(1024) unsigned char decode_shared[128 << 10];

namespace {

template <typename T, AttentionDecodeConfig kConfig>
class Test {
  static constexpr int kValueSize = kConfig.value_size;
  static_assert(kConfig.SharedBytes() <= sizeof(decode_shared));

  AttentionTest<T, kConfig.head_size, kValueSize> operands_;
  AttentionDecodeProblem p_;
  std::vector<T> out_;
  std::vector<float> lse_;
  std::vector<T> key_pool_, value_pool_;
  std::vector<int32_t> pages_;

 public:
  Test(const AttentionSize& size, const AttentionOptions& options) : operands_(size, options) {
    operands_.WriteTo(&p_);
    const int64_t rows = size.queries * operands_.Heads();
    out_.resize(static_cast<size_t>(size.batch * rows * kValueSize));
    lse_.resize(static_cast<size_t>(size.batch * rows));
    p_.out = Of(out_, 0, rows * kValueSize);
    p_.lse = Of(lse_, 0, rows);
    p_.lists = static_cast<uint32_t>(DecodeLists(p_));
    p_.items_of_list = static_cast<uint32_t>(DecodeItemsOfList(p_));
    p_.heads_of_list = static_cast<uint32_t>(DecodeHeadsOfList(p_));
  }

  void Run(uint32_t blocks) {
    std::fill(out_.begin(), out_.end(), FromFloat<T>(NAN));
    std::fill(lse_.begin(), lse_.end(), NAN);
    std::memset(decode_shared, 0xff, sizeof(decode_shared));  // that nothing must read
    p_.blocks = blocks;
    const auto workspace = SpaceFor(CeilDivide(DecodeWorkspaceBytes(p_, blocks), 16) * 16);
    p_.workspace.data = reinterpret_cast<char*>(workspace.get());
    emulated::Launch(static_cast<int>(blocks), kConfig.warps * kWarp,
                     [&] { AttentionDecode<T, kConfig>(p_); });
    emulated::Launch(static_cast<int>(blocks), kDecodeMergeWarps * kWarp,
                     [&] { AttentionDecodeMerge<T, kDecodeMergeWarps>(p_); });
  }

  // Has keys and values lie in pages of so many positions, in any order and the last ones first,
  // with one that is of no sequence.
  void Page(int64_t size, bool spoils) {
    const AttentionSize& of = operands_.size();
    KeyPages& pages = p_.pages;
    pages.size = size;
    pages.of_sequence = CeilDivide(of.keys, size);
    pages.count = of.batch * pages.of_sequence + 1;
    pages_.resize(static_cast<size_t>(pages.count));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), generator);
    InPages(kConfig.head_size, p_.key, &key_pool_);
    InPages(kValueSize, p_.value, &value_pool_);
    if (spoils) Spoil(pages_);
    pages.numbers = Of(pages_, 0, pages.of_sequence);
    p_.keys = pages.of_sequence * size;
  }

  // By one block, which has all items whole, and by some that share them.
  void Check() {
    for (const uint32_t blocks : {1, 3, 11}) {
      Run(blocks);
      CheckResults();
      const std::vector<float> lse = lse_;
      CheckRepeats("attention", out_, [&] { Run(blocks); });
      CheckRepeats("lse", lse, [&] {});
    }
  }

 private:
  // Behind the end of a sequence, and in the page that is of none, are numbers that nothing sees.
  void InPages(int64_t width, Array& array, std::vector<T>* pool) const {
    const AttentionSize& of = operands_.size();
    const int64_t line = of.groups * width, page = p_.pages.size * line;
    pool->assign(static_cast<size_t>(p_.pages.count * page), FromFloat<T>(NAN));
    for (int64_t entry = 0; entry < of.batch; ++entry) {
      const T* from = static_cast<const T*>(array.data) + entry * array.strides[0];
      for (int64_t u = 0; u < of.keys; ++u) {
        const int64_t number = pages_[entry * p_.pages.of_sequence + u / p_.pages.size];
        std::copy_n(from + u * line, line, &(*pool)[number * page + u % p_.pages.size * line]);
      }
    }
    array = Of(*pool);
  }
  void CheckResults() const {
    if (operands_.IsWrong()) return;
    const AttentionSize& size = operands_.size();
    for (int64_t entry = 0; entry < size.batch; ++entry) {
      for (int64_t head = 0; head < operands_.Heads(); ++head) {
        for (int64_t t = 0; t < size.queries; ++t) CheckRow(entry, head, t);
      }
    }
  }
  void CheckRow(int64_t entry, int64_t head, int64_t t) const {
    const AttentionSize& size = operands_.size();
    const auto row = operands_.RowOf(entry, head, t);
    const float lse = lse_[(entry * operands_.Heads() + head) * size.queries + t];
    if (!IsClose<float>(lse, row.lse, 20)) Fail("lse", head, t, lse, row.lse);
    for (int i = 0; i < kValueSize; ++i) {
      double sum = 0, most = 0;
      for (size_t k = 0; k < row.keys.size(); ++k) {
        const double part =
            row.probabilities[k] * ToAccumulator(operands_.Value(entry, head, row.keys[k])[i]);
        sum += part;
        most += std::fabs(part);
      }
      const T got = out_[((entry * size.queries + t) * operands_.Heads() + head) * kValueSize + i];
      if (!IsClose<T>(ToAccumulator(got), sum, most)) {
        Fail("attention", t, i, ToAccumulator(got), sum);
      }
    }
  }
};

template <typename T, AttentionDecodeConfig kConfig>
void Check(const AttentionSize& size, const AttentionOptions& options) {
  Test<T, kConfig>(size, options).Check();
}

// Rows of one head and of several, one item and several, masks shared and not.
template <typename T, AttentionDecodeConfig kConfig>
void CheckSizes() {
  Check<T, kConfig>({1, 1}, {.mask = MaskKind::kAll});
  Check<T, kConfig>({1, 700, 2, 1, 2}, {.mask = MaskKind::kScattered, .mask_of_entry = true});
  Check<T, kConfig>({3, 300, 2, 7, 2}, {.mask_of_group = true, .mask_of_entry = true});
  Check<T, kConfig>({16, 260, 1, 3}, {.mask = MaskKind::kCells, .mask_of_head = true});
  Check<T, kConfig>({33, 129, 2, 2}, {.mask = MaskKind::kCausal, .shared_keys = true});
  Check<T, kConfig>({2, 200, 1, 1, 2}, {.mask = MaskKind::kNothing});
}

// Numbers that are not finite and lists that are wrong.
template <typename T, AttentionDecodeConfig kConfig>
void CheckDisorder() {
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
    for (const MaskKind mask : {MaskKind::kAll, MaskKind::kScattered, MaskKind::kCells}) {
      Check<T, kConfig>({3, 500, 2, 2}, {.mask = mask, .disorder = disorder});
      Check<T, kConfig>({1, 300}, {.mask = mask, .disorder = disorder});
    }
  }
}

template <typename T, AttentionDecodeConfig kConfig>
void CheckPages() {
  for (const bool spoils : {false, true}) {
    for (const Disorder disorder : {Disorder::kNone, Disorder::kNan}) {
      for (const int64_t size : {64, 192}) {
        Test<T, kConfig> test({2, 300, 2, 3, 2},
                              {.mask = MaskKind::kScattered, .disorder = disorder});
        test.Page(size, spoils);
        if (!spoils) test.Check();
        else test.Run(3);
      }
    }
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  CheckSizes<bfloat16, {.head_size = 64, .value_size = 64, .warps = 4}>();
  CheckSizes<float16, {.head_size = 48, .value_size = 96, .stages = 2}>();
  CheckDisorder<bfloat16, {.head_size = 32, .value_size = 32, .warps = 2}>();
  CheckPages<float16, {.head_size = 64, .value_size = 32}>();
  std::puts("all results agree");
}
