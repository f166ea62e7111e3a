// What plans of one pass (team_plan.h) and of several (loss_plan.h) are made of.
#pragma once

#include <cstdint>
#include <string>

#include "dynamic/kernels/team.h"
#include "dynamic/team_plan.h"

namespace jaxsparse {

// Warps that make products, stages of the ring that they fill, and whether they ask for states
// ahead. Where several are predicted to take as long, the first one is taken.
struct RingKind {
  int warps, stages;
  bool asks_ahead;
};
constexpr RingKind kRings[] = {{8, 4, true},  {4, 4, true},  {2, 4, true}, {1, 4, true},
                               {8, 2, true},  {4, 2, true},  {2, 2, true}, {8, 4, false},
                               {4, 4, false}, {8, 2, false}, {4, 2, false}};

constexpr double kStartMicroseconds = 7.0;  // in which a launch loads weights

// Whether blocks of so many units may be best.
bool IsWorthPlanning(const GraphScanForm& form, int64_t units);

// What the blocks of a pass are, of so many units and with such a ring, before registers are given.
TeamConfig PassConfig(const GraphScanForm& form, int64_t units, const RingKind& ring);

// What a thread needs that makes the pointwise step.
int PointwiseRegisters(const GraphScanForm& form, const TeamSizes& sizes);

// The registers that threads have if all but those of products keep no more than they need, and the
// weights that lie in these.
void DistributeRegisters(int needed, TeamConfig* config);

// The members of the kernel's Plan that do not follow from types.
std::string PassConstants(const TeamConfig& config, const GraphScanForm& form, int64_t teams,
                          bool barrier);

// The times of a pass by so many teams as the plan has.
void PredictPass(const GraphScanForm& form, const TeamSizes& sizes, TeamPlan* plan);

// Why a kind of kernels takes no pass of a form, or nothing.
std::string ReasonAgainst(const TeamVariant& variant, const GraphScanForm& form);

}  // namespace jaxsparse
