// Attention with few queries on an emulated GPU, against float64.
#include "attention/kernels/decode.cu"
#include "attention/kernels/decode_merge.cu"
#include "device/attention_results.h"
#include "emulated/gpu.h"

namespace jaxsparse {

alignas(1024) unsigned char decode_shared[128 << 10];

namespace {

template <typename T, AttentionDecodeConfig kConfig>
class Test : AttentionResults<T, kConfig.head_size, kConfig.value_size, AttentionDecodeProblem> {
  using Results =
      AttentionResults<T, kConfig.head_size, kConfig.value_size, AttentionDecodeProblem>;
  using Results::operands;
  using Results::p;
  static_assert(kConfig.SharedBytes() <= sizeof(decode_shared));

  std::vector<T> key_pool_, value_pool_;
  std::vector<int32_t> pages_;

 public:
  Test(const AttentionSize& size, const AttentionOptions& options) : Results(size, options) {
    p.lists = static_cast<uint32_t>(DecodeLists(p));
    p.items_of_list = static_cast<uint32_t>(DecodeItemsOfList(p));
    p.heads_of_list = static_cast<uint32_t>(DecodeHeadsOfList(p));
  }

  void Run(uint32_t blocks) {
    Results::Clear();
    std::memset(decode_shared, 0xff, sizeof(decode_shared));  // that nothing must read
    p.blocks = blocks;
    const auto workspace = SpaceFor(CeilDivide(DecodeWorkspaceBytes(p, blocks), 16) * 16);
    p.workspace.data = reinterpret_cast<char*>(workspace.get());
    emulated::Launch(static_cast<int>(blocks), kConfig.warps * kWarp,
                     [&] { AttentionDecode<T, kConfig>(p); });
    emulated::Launch(static_cast<int>(blocks), kDecodeMergeWarps * kWarp,
                     [&] { AttentionDecodeMerge<T, kDecodeMergeWarps>(p); });
  }

  // Has keys and values lie in pages of so many positions, in any order and the last ones first,
  // with one that is of no sequence.
  void Page(int64_t size, bool spoils) {
    const AttentionSize& of = operands.size();
    KeyPages& pages = p.pages;
    pages.size = size;
    pages.of_sequence = CeilDivide(of.keys, size);
    pages.count = of.batch * pages.of_sequence + 1;
    pages_.resize(static_cast<size_t>(pages.count));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), generator);
    InPages(kConfig.head_size, p.key, &key_pool_);
    InPages(kConfig.value_size, p.value, &value_pool_);
    if (spoils) Spoil(pages_);
    pages.numbers = Of(pages_, 0, pages.of_sequence);
    p.keys = pages.of_sequence * size;
  }

  // By one block, which has all items whole, and by some that share them.
  void Check() {
    for (const uint32_t blocks : {1, 3, 11}) {
      Run(blocks);
      Results::Check();
      if (blocks == 3) Results::CheckRepeats([&] { Run(blocks); });
    }
  }

 private:
  // Behind the end of a sequence, and in the page that is of none, are numbers that nothing sees.
  void InPages(int64_t width, Array& array, std::vector<T>* pool) const {
    const AttentionSize& of = operands.size();
    const int64_t line = of.groups * width, page = p.pages.size * line;
    pool->assign(static_cast<size_t>(p.pages.count * page), FromFloat<T>(NAN));
    for (int64_t entry = 0; entry < of.batch; ++entry) {
      const T* from = static_cast<const T*>(array.data) + entry * array.strides[0];
      for (int64_t u = 0; u < of.keys; ++u) {
        const int64_t number = pages_[entry * p.pages.of_sequence + u / p.pages.size];
        std::copy_n(from + u * line, line, &(*pool)[number * page + u % p.pages.size * line]);
      }
    }
    array = Of(*pool);
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
