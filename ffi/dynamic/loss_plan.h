// What a loss over graphs and its gradient run as in one launch on a GPU: both passes by the same
// teams, blocks and warps, and the heads between them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "dynamic/team_plan.h"

namespace jaxsparse {

struct GraphLossForm {
  GraphScanForm gather, emit;  // of the same units, tiles, groups and dtype
  int64_t classes = 1;
};

struct GraphLossPlan {
  TeamPlan launch;  // its constants are those of the first pass
  std::string emit_constants;
  int emit_poll_delay = 0;  // of the second pass
};

struct LossChoice {
  std::optional<GraphLossPlan> best;
  std::string reason;  // why there is no plan
};

// The plan of least predicted time; `wanted`: the only variant to consider, if not empty.
LossChoice PlanLoss(const GraphLossForm& form, const Gpu& gpu, const std::string& wanted);

}  // namespace jaxsparse
