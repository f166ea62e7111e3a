// Attention by tiles on tensor cores of an emulated GPU, against float64.
#include "attention/kernels/tiles.cu"
#include "attention/kernels/tiles_prologue.cu"
#include "device/attention_maps.h"
#include "device/attention_results.h"
#include "device/attention_shared.h"

namespace jaxsparse {
namespace {

template <typename T, int kSize, typename Scoring>
class Test : AttentionResults<T, kSize, kSize, AttentionTilesProblem, Scoring> {
  using Results = AttentionResults<T, kSize, kSize, AttentionTilesProblem, Scoring>;
  using Results::operands;
  using Results::p;
  static constexpr AttentionTilesConfig kConfig{.head_size = kSize, .value_size = kSize};

 public:
  Test(const AttentionSize& size, const AttentionOptions& options) : Results(size, options) {
    const auto map_of = [&](const Array& array, int64_t positions, int64_t heads) {
      return EmulatedMapOf(p.batch, array, positions, heads, kSize, kMaskTile);
    };
    p.query_tiles = map_of(p.query, p.queries, operands.Heads());
    p.key_tiles = map_of(p.key, p.keys, p.groups);
    p.value_tiles = map_of(p.value, p.keys, p.groups);
    p.items = static_cast<uint32_t>(AttentionItemsOf(p));
  }

  void Run(int blocks, uint32_t heads_at_once) {
    Results::Clear();
    const auto workspace = SpaceFor(16);
    p.workspace.data = reinterpret_cast<char*>(workspace.get());
    p.heads_at_once = heads_at_once;
    emulated::Launch(1, 1, [&] { AttentionTilesPrologue(p); });
    LaunchShared(kConfig.SharedBytes(), blocks, kAttentionTilesThreads,
                 [&] { AttentionTiles<T, kConfig, Scoring>(p); });
  }

  // By one block, and with others that take the heads in another order.
  void Check() {
    Run(1, 1);
    Results::Check();
    Results::CheckRepeats([&] { Run(3, 2); });
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
  CheckRising<bfloat16, 128>();
  CheckDisorder<float16, 64>();
  CheckScores<bfloat16, 64, Scoring<TestScore, false, false>>();
  CheckScores<float16, 64, Scoring<NoFunction, true, false>>();
  CheckScores<bfloat16, 128, Scoring<TestScore, true, true>>();
  std::puts("all results agree");
}
