// Attention by mma.sync on tensor cores of an emulated GPU, against float64.
#include "attention/kernels/tiles_mma.cu"
#include "device/attention_results.h"
#include "device/attention_shared.h"

namespace jaxsparse {
namespace {

// What beside sizes a kernel is compiled for.
struct Shape {
  int rows = kMaskTile, strips = 1;
};

template <typename T, int kHeadSize, int kValueSize, Shape kShape, typename Scoring = NoScoring>
void Check(const AttentionSize& size, const AttentionOptions& options = {}) {
  constexpr AttentionMmaConfig kConfig{.tiles = {.head_size = MmaSizeOf(kHeadSize),
                                                 .value_size = MmaSizeOf(kValueSize),
                                                 .number_bytes = sizeof(T),
                                                 .rows = kShape.rows,
                                                 .strips = kShape.strips}};
  AttentionResults<T, kHeadSize, kValueSize, AttentionMmaProblem, Scoring> results(size, options);
  AttentionMmaProblem& p = results.p;
  p.items = {static_cast<uint32_t>(size.batch * results.operands.Heads()),
             static_cast<uint32_t>(p.mask.rows), 3};
  results.Clear();
  LaunchShared(kConfig.SharedBytes(), p.items.Count() * kConfig.tiles.BlocksOfTile(),
               kConfig.tiles.Threads(), [&] { AttentionTilesMma<T, kConfig, Scoring>(p); });
  results.Check();
}

template <typename T, int kHeadSize, int kValueSize, Shape kShape, typename Scoring>
void CheckScores() {
  constexpr auto Of = Check<T, kHeadSize, kValueSize, kShape, Scoring>;
  Of({1, 1}, {.mask = MaskKind::kAll});
  Of({130, 140, 2, 2, 2}, {.mask_of_head = true, .mask_of_entry = true});
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
    Of({80, 140}, {.mask = MaskKind::kScattered, .disorder = disorder});
  }
  if constexpr (Scoring::kDrops) Of({70, 80}, {.dropout_rate = 1});
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  ForEachMask(Check<bfloat16, 64, 64, Shape{.strips = 2}>);
  ForEachMask(Check<float16, 40, 72, Shape{.rows = 64}>);
  ForEachMask(Check<float, 32, 32, Shape{}>);
  Check<bfloat16, 64, 64, Shape{.strips = 2}>({129, 65},
                                              {.mask = MaskKind::kAll, .disorder = Disorder::kNan});
  Check<bfloat16, 96, 24, Shape{}>({130, 130});
  Check<float16, 256, 256, Shape{.rows = 64}>({70, 70});
  Check<float, 20, 68, Shape{.rows = 64}>({70, 130});
  CheckScores<bfloat16, 64, 64, Shape{}, Scoring<TestScore, true, true>>();
  CheckScores<float16, 40, 72, Shape{.rows = 64}, Scoring<TestScore, false, false>>();
  CheckScores<bfloat16, 32, 32, Shape{}, Scoring<NoFunction, true, false>>();
  std::puts("all results agree");
}
