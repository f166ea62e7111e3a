// Scans over random graphs, whose teams run at once on an emulated GPU.
#include "device/graph_scan_operands.h"
// The steps come first.
#include "dynamic/kernels/graph_scan.cu"

namespace jaxsparse {

alignas(16) __shared__ Words4 shared[4096];

namespace {

struct TeamOptions {
  int units, warps, pointwise_warps, stages, register_chunks, teams;
  bool asks_ahead = false, barrier = false;
  unsigned most_delay = 0;
};

// What ffi/dynamic/plan.cc and jaxsparse/dynamic/engine.py print.
template <typename Step, typename OfArrays, typename S, int kHidden, int kSlotCount,
          TeamOptions kOptions>
struct TeamPlan {
  using State = S;
  using Weight = S;
  using Arrays = OfArrays;
  static constexpr TeamSizes kSizes{TeamConfig{.row_parts = Step::kProducts,
                                               .column_parts = kSlotCount,
                                               .state_bytes = sizeof(S),
                                               .hidden = kHidden,
                                               .units = kOptions.units,
                                               .warps = kOptions.warps,
                                               .pointwise_warps = kOptions.pointwise_warps,
                                               .stages = kOptions.stages,
                                               .register_chunks = kOptions.register_chunks,
                                               .asks_ahead = kOptions.asks_ahead}};
  static constexpr int kSlots = kSlotCount;
  static constexpr int kScans = kOptions.teams, kBlocks = kSizes.blocks, kLayers = 1;
  static constexpr bool kBarrier = kOptions.barrier;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
};

struct Case {
  RandomScript script;
  bool has_nan = false, backwards = false;
  int missing = -1;  // a block
};

template <typename Step, typename Arrays, typename S, int kHidden, int kSlots, TeamOptions kOptions>
void Test(const Case& c) {
  using Plan = TeamPlan<Step, Arrays, S, kHidden, kSlots, kOptions>;
  GraphTest<Step, Plan> test(c.script, c.has_nan);
  GraphScanProblem p = test.Problem();
  if (c.missing >= 0) p.wait_limits.limit_ns = 1000;
  emulated::Launch({.blocks = Plan::kScans * Plan::kBlocks,
                    .threads = Plan::kSizes.threads,
                    .missing = c.missing,
                    .backwards = c.backwards},
                   {reinterpret_cast<char*>(shared), sizeof(shared)}, Plan::kSizes.shared_bytes,
                   [&] { GraphGather<Step, Plan>(p); });
  c.missing >= 0           ? test.CheckTimedOut()
  : c.script.is_damaged    ? test.CheckDamaged()
                           : test.Check();
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  {  // two slots, all weights in registers, two teams for three groups
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, bfloat16, 24, 2, TeamOptions{8, 2, 2, 3, 1, 2, true}>;
    Tree({.script = {.tiles = 9, .groups = 3}});
    Tree({.script = {.tiles = 9, .unused = 0, .groups = 3}, .has_nan = true, .backwards = true});
    Tree({.script = {.leaves = 1, .tiles = 1, .groups = 1}});
    Tree({.script = {.tiles = 0, .groups = 1}});
    Tree({.script = {.tiles = 9, .groups = 3, .is_damaged = true}});
    Tree({.script = {.tiles = 9, .groups = 3}, .missing = 1});
  }
  {  // a last block with fewer units, several items of a thread, weights in shared memory
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, float16, 40, 2, TeamOptions{32, 1, 2, 2, 1, 1, false}>;
    Tree({.script = {.groups = 2}});
  }
  {  // blocks that meet, and warps that are held up
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, bfloat16, 32, 2, TeamOptions{16, 2, 4, 2, 0, 2, false, true}>;
    Tree({.script = {.tiles = 8}});
    constexpr auto Chain =
        Test<ChainStep, NoArrays, bfloat16, 64, 1,
             TeamOptions{16, 2, 1, 4, 1, 2, true, false, 3000}>;
    Chain({.script = {.tiles = 12}, .has_nan = true});
    Chain({.script = {.tiles = 12}, .backwards = true});
  }
  std::puts("all results agree");
}
