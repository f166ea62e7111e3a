// The workspace of a scan over graphs: for the plan, by which the program is compiled, and for the
// call itself.
#pragma once

#include <cstdint>

#include "recurrent/launches.h"

namespace jaxsparse {

// Teams are the scans of a launch, whose words come first. Behind these lie, of a scan whose rows
// emit and that has more tiles than its window, the sums of computed rows, as many floats in each
// array.
struct GraphWorkspace {
  ScanLaunches launches;
  int64_t sums, floats;

  GraphWorkspace(int64_t teams, int64_t sums, int64_t floats)
      : launches{.directions = teams, .scans = teams}, sums(sums), floats(floats) {}

  int64_t SumsAt(int64_t array) const {
    return launches.WorkspaceBytes() + array * floats * static_cast<int64_t>(sizeof(float));
  }
  int64_t Bytes() const { return SumsAt(sums); }
};

}  // namespace jaxsparse
