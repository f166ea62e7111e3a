// Plans of scans over graphs on an emulated GPU, and their launches.
#pragma once

#include "device/graph_scan_operands.h"
#include "dynamic/kernels/team.h"

namespace jaxsparse {

alignas(16) __shared__ Words4 shared[4096];

struct TeamOptions {
  int units, warps, pointwise_warps, stages, register_chunks, teams;
  bool asks_ahead = false, barrier = false;
  unsigned most_delay = 0;
  int sum_warps = 0;  // where rows emit
  int window = 8;
  int sets = 1;
  int kinds = 1;
};

// What ffi/dynamic/team_plan.cc and jaxsparse/dynamic/engine.py print.
template <typename Step, typename OfArrays, typename S, int kHidden, int kSlotCount,
          TeamOptions kOptions>
struct TeamPlan {
  using State = S;
  using Weight = S;
  using Arrays = OfArrays;
  static constexpr bool kEmits = kOptions.sum_warps > 0;
  static constexpr TeamSizes kSizes{TeamConfig{.row_parts = kEmits ? kSlotCount : Step::kProducts,
                                               .column_parts = kEmits ? Step::kStates : kSlotCount,
                                               .kinds = kOptions.kinds,
                                               .state_bytes = sizeof(S),
                                               .hidden = kHidden,
                                               .units = kOptions.units,
                                               .warps = kOptions.warps,
                                               .pointwise_warps = kOptions.pointwise_warps,
                                               .sets = kOptions.sets,
                                               .carries = kEmits ? 0 : Step::kCarries / kSlotCount,
                                               .sum_warps = kOptions.sum_warps,
                                               .passed = kEmits ? kSlotCount * Step::kCarries : 0,
                                               .window = kOptions.window,
                                               .stages = kOptions.stages,
                                               .register_chunks = kOptions.register_chunks,
                                               .asks_ahead = kOptions.asks_ahead}};
  static constexpr int kSlots = kSlotCount;
  static constexpr int kScans = kOptions.teams, kBlocks = kSizes.blocks, kLayers = 1;
  static constexpr auto& kInputIsOfRow = OfArrays::kInputIsOfRow;
  static constexpr auto& kInputIsOfUnit = OfArrays::kInputIsOfUnit;
  static constexpr bool kBarrier = kOptions.barrier;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
};

struct Case {
  RandomScript script;
  bool has_nan = false, backwards = false;
  int missing = -1;  // a block
};

template <typename Plan, typename Test>
void Run(const Case& c, Test* test, void (*kernel)(const GraphScanProblem)) {
  GraphScanProblem p = test->Problem();
  if (c.missing >= 0) p.wait_limits.limit_ns = 1000;
  if (c.script.is_damaged) p.wait_limits.limit_ns = 100'000;  // else a wrong wait would last
  emulated::Launch({.blocks = Plan::kScans * Plan::kBlocks,
                    .threads = Plan::kSizes.threads,
                    .missing = c.missing,
                    .backwards = c.backwards,
                    .prologue = [&] { test->Fill(); }},
                   {reinterpret_cast<char*>(shared), sizeof(shared)}, Plan::kSizes.shared_bytes,
                   [&] { kernel(p); });
  if (c.missing >= 0) return test->CheckTimedOut();
  test->CheckWaits();
  if (!c.script.is_damaged) test->Check();
}

}  // namespace jaxsparse
