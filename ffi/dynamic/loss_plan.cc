#include "dynamic/loss_plan.h"

#include <algorithm>
#include <utility>

#include "dynamic/kernels/loss_sizes.h"
#include "dynamic/problem.h"
#include "dynamic/team_passes.h"

namespace jaxsparse {
namespace {

constexpr int kHeadWarps = 4, kHeadRegisters = 80;
// Registers of a thread that estimates of what it needs leave free, and that a launch can do
// without where they would cost a set of warps, or weights in registers. Found by compiling
// Tree-LSTMs and chains, whose loops are as long without them.
struct Spare {
  int product, pointwise, head;
};
constexpr Spare kSpares[] = {{0, 0, 0}, {24, 16, 16}};
// Microseconds from the last state of all to what it emits, and what heads add for each tile of a
// team beyond so many.
constexpr double kHeads = 7.0, kHeadsOfTile = 0.67, kTilesForFree = 14;

// What shared memory has room for of both windows: first the one of carries, of near tiles.
void OpenWindows(const GraphLossForm& form, int64_t room, TeamConfig* gather, TeamConfig* emit) {
  TeamConfig beside = *emit, first = *gather;
  beside.window = LeastWindowOf(beside, form.emit);
  first.window = WindowOf(first, form.gather, room - TeamSizes(beside).shared_bytes);
  beside.window = WindowOf(beside, form.emit, room - TeamSizes(first).shared_bytes);
  // The one of sums takes the place of the first pass' ring, unless it is larger beside it.
  const int64_t of_emit = TeamSizes(*emit).shared_bytes;
  gather->window = WindowOf(*gather, form.gather, room - of_emit);
  const TeamSizes sizes(*gather);
  emit->window = WindowOf(*emit, form.emit, of_emit + sizes.barriers_at);
  emit->window_before = LossSizes::EmitAt(sizes);
  if (emit->window >= beside.window) return;
  *gather = first;
  *emit = beside;
}

// Both passes with the same registers, if the launch fits.
std::optional<GraphLossPlan> PlanOf(const TeamVariant& variant, const GraphLossForm& form,
                                    const Gpu& gpu, int64_t units, const RingKind& of_gather,
                                    const RingKind& of_emit, int sets, int sets_of_emit,
                                    const Spare& spare) {
  TeamConfig gather = PassConfig(form.gather, units, of_gather, sets);
  TeamConfig emit = PassConfig(form.emit, units, of_emit, sets_of_emit);
  const int of_pass = emit.pointwise_warps + emit.sum_warps;
  const int others = std::max(gather.pointwise_warps + kHeadWarps, of_pass);
  gather.beside_warps = others - gather.pointwise_warps;
  emit.beside_warps = others - of_pass;
  // Warps keep their registers when they go from one pass to the other. Where one pass has more
  // sets than the other, some make steps in that one and something else in this one.
  ThreadRegisters needed = NeededRegisters(form.gather, gather);
  const ThreadRegisters of_back = NeededRegisters(form.emit, emit);
  needed.pointwise = std::max(needed.pointwise - spare.pointwise, of_back.pointwise);
  needed.others = std::max(of_back.others, kHeadRegisters - spare.head);
  if (sets > sets_of_emit) needed.pointwise = std::max(needed.pointwise, of_back.others);
  if (sets < sets_of_emit) needed.others = std::max(needed.others, of_back.pointwise);
  const ThreadRegisters registers =
      DistributeRegisters(TeamSizes(gather), gather.beside_warps, needed);
  KeepWeights(form.gather, registers, spare.product, &gather);
  KeepWeights(form.emit, registers, spare.product, &emit);
  const int classes = static_cast<int>(form.classes);
  const TeamSizes without(gather), without_back(emit);
  const int of_heads = LossSizes(without, without_back, classes).shared_bytes -
                       without.shared_bytes - without_back.shared_bytes;
  OpenWindows(form, gpu.shared_bytes - of_heads, &gather, &emit);
  if (emit.window == 0) return std::nullopt;
  const TeamSizes first(gather), second(emit);
  const LossSizes sizes(first, second, classes);
  const int64_t room = gpu.multiprocessors / first.blocks;
  const int64_t teams = std::min({form.gather.groups, room, int64_t{kMaxScansOfLaunch}});
  if (teams == 0 || sizes.shared_bytes > gpu.shared_bytes ||
      std::min(first.chunks, second.chunks) < of_gather.warps) {
    return std::nullopt;
  }
  GraphLossPlan plan;
  TeamPlan& launch = plan.launch;
  launch.variant = &variant;
  launch.teams = static_cast<int>(teams);
  launch.constants = PassConstants(gather, form.gather, teams, variant.barrier);
  plan.emit_constants = PassConstants(emit, form.emit, teams, variant.barrier);
  launch.blocks = first.blocks;
  launch.threads = sizes.threads;
  launch.shared_bytes = sizes.shared_bytes;
  launch.window = second.window;
  const Polling polling = PollingOf(form.gather.emits);
  launch.poll_delay = polling.delay;
  launch.poll_delay_increase = launch.poll_delay_decrease = polling.change;
  plan.emit_poll_delay = PollingOf(form.emit.emits).delay;
  const int chunks = first.register_chunks + second.register_chunks;
  launch.in_registers = static_cast<double>(chunks) / (first.weight_chunks + second.weight_chunks);
  TeamPlan back = launch;
  PredictPass(form.gather, first, &launch);
  PredictPass(form.emit, second, &back);
  launch.tile_microseconds += back.tile_microseconds;
  launch.beside_microseconds += back.beside_microseconds;
  const double tiles = static_cast<double>(form.gather.tiles) / static_cast<double>(teams);
  launch.total_microseconds += back.total_microseconds - kStartMicroseconds + kHeads +
                               kHeadsOfTile * std::max(tiles - kTilesForFree, 0.0);
  return plan;
}

void KeepFaster(std::optional<GraphLossPlan> plan, std::optional<GraphLossPlan>* best) {
  if (plan && (!*best || plan->launch.total_microseconds < (*best)->launch.total_microseconds)) {
    *best = std::move(plan);
  }
}

std::optional<GraphLossPlan> BestOf(const TeamVariant& variant, const GraphLossForm& form,
                                    const Gpu& gpu) {
  std::optional<GraphLossPlan> best;
  const int64_t hidden = form.gather.hidden;
  for (int64_t units = 8; units < hidden + 8; units += 8) {
    if (!IsWorthPlanning(form.gather, units)) continue;
    for (const RingKind& of_gather : kRings) {
      for (const RingKind& of_emit : kEmittingRings) {
        if (of_gather.warps != of_emit.warps) continue;
        const int most_sets = variant.barrier ? 1 : kMostSets;
        for (int sets = 1; sets <= most_sets; ++sets) {
          for (int sets_of_emit = 1; sets_of_emit <= most_sets; ++sets_of_emit) {
            for (const Spare& spare : kSpares) {
              // Exact products have no registers to spare: the compiler would spill some.
              if (!variant.tensor_cores && spare.product > 0) continue;
              KeepFaster(
                  PlanOf(variant, form, gpu, units, of_gather, of_emit, sets, sets_of_emit, spare),
                  &best);
            }
          }
        }
      }
    }
  }
  return best;
}

}  // namespace

LossChoice PlanLoss(const GraphLossForm& form, const Gpu& gpu, const std::string& wanted) {
  LossChoice choice;
  for (const TeamVariant& variant : kTeamVariants) {
    if (wanted.empty() ? variant.barrier : wanted != variant.name) continue;
    std::string reason = ReasonAgainst(variant, form.emit);
    if (reason.empty()) {
      choice.best = BestOf(variant, form, gpu);
      if (choice.best) return choice;
      reason = "both passes and the head of " + std::to_string(form.classes) + " classes of " +
               std::to_string(form.gather.hidden) +
               " units don't fit the registers and shared memory of " +
               std::to_string(gpu.multiprocessors) + " multiprocessors";
    }
    if (!choice.reason.empty()) choice.reason += "; ";
    choice.reason += std::string(variant.name) + ": " + reason;
  }
  return choice;
}

}  // namespace jaxsparse
