// What a scan over graphs runs as on a GPU: how many blocks make a team, how many teams run side by
// side, and where the weights lie. A plan follows from the scan's form and a description of the
// GPU, and needs no GPU. Of the graphs it depends on the numbers of tiles and groups alone, and the
// kernel serves scripts of any form.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "types.h"

namespace jaxsparse {

struct GraphScanForm {
  bool emits = false;    // or gathers
  int64_t products = 1;  // of a cell
  int64_t slots = 1;     // children of a row
  int64_t carries = 0;   // of a row
  int64_t arrays = 0;    // what the pointwise step reads and writes for a unit beside products
  int64_t hidden = 1;
  int64_t tiles = 1;
  int64_t groups = 1;             // of the script; 0: as many as teams do best
  DType dtype = DType::kFloat32;  // of states and weights
};

// The kinds of kernels. Those with a barrier meet before each tile, instead of polling each other's
// data: slower, so only by name.
struct TeamVariant {
  const char* name;
  bool tensor_cores;  // or else FMA
  bool barrier;
};
inline constexpr TeamVariant kTeamVariants[] = {
    {"team_tensor_cores", true, false},
    {"team_tensor_cores_barrier", true, true},
    {"team_fma", false, false},
    {"team_fma_barrier", false, true},
};

struct TeamPlan {
  const TeamVariant* variant = nullptr;
  std::string constants;  // members of the kernel's Plan that do not follow from types, in C++
  int teams = 1;
  int blocks = 1;  // of a team
  int threads = 0;
  int64_t shared_bytes = 0;
  int window = 0;               // tiles of a group whose sums need no memory, where rows emit
  int poll_delay = 0;           // clock cycles from a product to the second look at the next states
  int poll_delay_increase = 0;  // after a look in vain
  int poll_delay_decrease = 0;  // after one in time
  double tile_microseconds = 0;    // predicted, of a tile that waits for the one before it
  double beside_microseconds = 0;  // of one that does not
  double total_microseconds = 0;   // of all tiles, and what comes before them
  double in_registers = 0;         // share of the weights; the rest lies in shared memory
};

struct TeamChoice {
  std::optional<TeamPlan> best;
  std::string reason;  // why there is no plan
};

// The plan of least predicted time; `wanted`: the only variant to consider, if not empty.
TeamChoice PlanTeams(const GraphScanForm& form, const Gpu& gpu, const std::string& wanted);

}  // namespace jaxsparse
