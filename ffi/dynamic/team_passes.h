// What plans of one pass (team_plan.h) and of several (loss_plan.h) are made of.
#pragma once

#include <cstdint>
#include <string>

#include "dynamic/kernels/team.h"
#include "dynamic/team_plan.h"

namespace jaxsparse {

constexpr double kStartMicroseconds = 5.0;  // in which a launch loads weights
constexpr int kMostSets = 2;                // of pointwise warps

// Warps that make products, stages of the ring that they fill, and whether they ask for states
// ahead. Where several are predicted to take as long, the first one is taken.
struct RingKind {
  int warps, stages;
  bool asks_ahead;
};
constexpr RingKind kRings[] = {{8, 4, true},  {4, 4, true},  {2, 4, true}, {1, 4, true},
                               {8, 2, true},  {4, 2, true},  {2, 2, true}, {8, 4, false},
                               {4, 4, false}, {8, 2, false}, {4, 2, false}};
// Where rows emit, more stages let steps run ahead.
constexpr RingKind kEmittingRings[] = {{8, 6, true},  {8, 6, false}, {4, 6, true},  {4, 6, false},
                                       {2, 6, false}, {1, 6, false}, {8, 4, false}, {4, 4, false},
                                       {8, 2, false}, {4, 2, false}, {2, 2, false}};

// Clock cycles from a product to the second look at the next states, as a plan says them. Where
// rows emit, much is exchanged: looks in vain would delay what they look for.
struct Polling {
  int delay, change;  // after a look in vain, and after one in time
};
constexpr Polling PollingOf(bool emits) { return emits ? Polling{1000, 0} : Polling{400, 8}; }

// Whether blocks of so many units may be best.
bool IsWorthPlanning(const GraphScanForm& form, int64_t units);

// What the blocks of a pass are, of so many units, with such a ring and so many sets of pointwise
// warps, before they are given registers and a window.
TeamConfig PassConfig(const GraphScanForm& form, int64_t units, const RingKind& ring, int sets);

// Of a thread of product warps, of pointwise warps and of the others; or none, for equal shares.
struct ThreadRegisters {
  int product = 0, pointwise = 0, others = 0;
};
// What all but product warps need.
ThreadRegisters NeededRegisters(const GraphScanForm& form, const TeamConfig& config);
// What threads have if those keep no more than they need; `others`: warps.
ThreadRegisters DistributeRegisters(const TeamSizes& sizes, int others,
                                    const ThreadRegisters& needed);
// A pass with such registers, and the weights that lie in them. `spare`: of a product thread, of
// what it is estimated to need beside weights, that it can do without if all weights find room so.
void KeepWeights(const GraphScanForm& form, const ThreadRegisters& registers, int spare,
                 TeamConfig* config);

// The fewest tiles whose carries or sums a window has.
int LeastWindowOf(const TeamConfig& config, const GraphScanForm& form);
// The most tiles whose carries or sums have room in shared memory, or 0 if those that must be there
// have none.
int WindowOf(TeamConfig config, const GraphScanForm& form, int64_t shared_bytes);

// The members of the kernel's Plan that do not follow from types.
std::string PassConstants(const TeamConfig& config, const GraphScanForm& form, int64_t teams,
                          bool barrier);

// The times of a pass by so many teams as the plan has.
void PredictPass(const GraphScanForm& form, const TeamSizes& sizes, TeamPlan* plan);

// Why a kind of kernels takes no pass of a form, or nothing.
std::string ReasonAgainst(const TeamVariant& variant, const GraphScanForm& form);

}  // namespace jaxsparse
