// Attention by tiles on tensor cores of an emulated GPU, against float64.
#include <cstring>

#include "attention/kernels/tensor_maps.h"
#include "attention/kernels/tiles.cu"
#include "attention/kernels/tiles_prologue.cu"
#include "device/attention_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {

alignas(1024) unsigned char attention_shared[AttentionTilesConfig{}.SharedBytes()];

namespace {

TensorMap MapOf(const ArrayOfHalves& array) {
  EmulatedArrayMap map{static_cast<const uint16_t*>(array.data), {}, {}, kMaskTile};
  std::copy(array.sizes, array.sizes + 4, map.sizes);
  std::copy(array.strides, array.strides + 3, map.strides);
  TensorMap opaque;
  std::memcpy(&opaque, &map, sizeof(map));
  return opaque;
}

template <typename T, int kSize, typename Scoring>
class Test {
  static constexpr AttentionTilesConfig kConfig{.head_size = kSize, .value_size = kSize};
  static_assert(kConfig.SharedBytes() <= sizeof(attention_shared));

  AttentionTest<T, kSize, kSize, Scoring> operands_;
  AttentionTilesProblem p_;
  std::vector<T> out_;
  std::vector<float> lse_;

 public:
  Test(const AttentionSize& size, const AttentionOptions& options) : operands_(size, options) {
    operands_.WriteTo(&p_);
    const int64_t rows = size.queries * operands_.Heads();
    out_.resize(static_cast<size_t>(size.batch * rows * kSize));
    lse_.resize(static_cast<size_t>(size.batch * rows));
    p_.out = Of(out_, 0, rows * kSize);
    p_.lse = Of(lse_, 0, rows);
    p_.query_tiles =
        MapOf(HeadsOf(p_.batch, p_.query, p_.queries, operands_.Heads(), p_.head_size));
    p_.key_tiles = MapOf(HeadsOf(p_.batch, p_.key, p_.keys, p_.groups, p_.head_size));
    p_.value_tiles = MapOf(HeadsOf(p_.batch, p_.value, p_.keys, p_.groups, p_.value_size));
    p_.items = static_cast<uint32_t>(AttentionItemsOf(p_));
  }

  void Run(int blocks, uint32_t heads_at_once) {
    std::fill(out_.begin(), out_.end(), FromFloat<T>(NAN));
    std::fill(lse_.begin(), lse_.end(), NAN);
    std::memset(attention_shared, 0xff, sizeof(attention_shared));  // that nothing must read
    const auto workspace = SpaceFor(16);
    p_.workspace.data = reinterpret_cast<char*>(workspace.get());
    p_.heads_at_once = heads_at_once;
    emulated::Launch(1, 1, [&] { AttentionTilesPrologue(p_); });
    emulated::Launch(blocks, kAttentionTilesThreads,
                     [&] { AttentionTiles<T, kConfig, Scoring>(p_); });
  }

  // By one block, and with others that take the heads in another order.
  void Check() {
    Run(1, 1);
    operands_.Check(out_, lse_);
    const std::vector<float> lse = lse_;
    CheckRepeats("attention", out_, [&] { Run(3, 2); });
    CheckRepeats("lse", lse, [&] {});
  }
};

template <typename T, int kSize, typename Scoring = NoScoring>
void Check(const AttentionSize& size, const AttentionOptions& options) {
  Test<T, kSize, Scoring>(size, options).Check();
}

template <typename T, int kSize>
void CheckSizes() {
  for (const auto& [queries, keys] :
       {std::pair{1, 1}, {63, 129}, {64, 65}, {127, 300}, {200, 64}}) {
    Check<T, kSize>({queries, keys}, {});
  }
  Check<T, kSize>({300, 300}, {.mask = MaskKind::kCausal});
  Check<T, kSize>({129, 200, 2, 2, 2}, {.mask = MaskKind::kScattered, .mask_of_head = true});
}

template <typename T, int kSize>
void CheckMasks() {
  Check<T, kSize>({65, 127}, {.mask = MaskKind::kAll});
  Check<T, kSize>({200, 200}, {.mask = MaskKind::kNothing});
  Check<T, kSize>({300, 300}, {.mask = MaskKind::kScattered});
  Check<T, kSize>({300, 520, 2, 1, 2}, {.mask_of_group = true, .mask_of_entry = true});
  Check<T, kSize>({130, 260, 1, 3, 2}, {.mask_of_head = true, .shared_keys = true});
}

// Scores far above the largest ones of earlier tiles, whether rows have seen some of these or none.
template <typename T, int kSize>
void CheckRising() {
  for (const MaskKind mask : {MaskKind::kAll, MaskKind::kCausal, MaskKind::kScattered}) {
    Check<T, kSize>({200, 400}, {.mask = mask, .rising = true});
  }
}

// Numbers that are not finite and lists that are wrong.
template <typename T, int kSize>
void CheckDisorder() {
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
    for (const MaskKind mask : {MaskKind::kScattered, MaskKind::kCells}) {
      Check<T, kSize>({200, 300}, {.mask = mask, .disorder = disorder});
    }
    Check<T, kSize>({129, 65}, {.mask = MaskKind::kAll, .disorder = disorder});
    Check<T, kSize>({300, 300}, {.mask = MaskKind::kCausal, .disorder = disorder});
  }
}

template <typename T, int kSize, typename Scoring>
void CheckScores() {
  Check<T, kSize, Scoring>({1, 1}, {.mask = MaskKind::kAll});
  Check<T, kSize, Scoring>({130, 260, 2, 2, 2}, {.mask_of_head = true, .mask_of_entry = true});
  Check<T, kSize, Scoring>({200, 140},
                           {.mask = MaskKind::kScattered, .disorder = Disorder::kInfinite});
  if constexpr (Scoring::kDrops) Check<T, kSize, Scoring>({70, 80}, {.dropout_rate = 1});
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  CheckSizes<bfloat16, 64>();
  CheckSizes<float16, 128>();
  CheckMasks<bfloat16, 64>();
  CheckRising<float16, 64>();
  CheckDisorder<float16, 64>();
  CheckScores<bfloat16, 64, Scoring<TestScore, false, false>>();
  CheckScores<float16, 64, Scoring<NoFunction, true, false>>();
  CheckScores<bfloat16, 128, Scoring<TestScore, true, true>>();
  std::puts("all results agree");
}
