// The workspace of a scan over graphs: for the plan, by which the program is compiled, and for the
// call itself.
#pragma once

#include <cstdint>

#include "dynamic/loss_problem.h"
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

// The workspace of a loss and its gradient. Behind the words of both passes' teams lie arrays of
// all computed rows: the sums of the second pass, as above, the gradient by their states, their
// carries, and what the first pass saves for the second; then what warps add up, `parts` floats.
struct LossWorkspace {
  ScanLaunches launches;
  int64_t sums, carries, floats, saved_bytes, parts;

  LossWorkspace(int64_t teams, int64_t sums, int64_t carries, int64_t floats, int64_t saved_bytes,
                int64_t parts)
      : launches{.directions = teams, .scans = teams, .layers = 2},
        sums(sums),
        carries(carries),
        floats(floats),
        saved_bytes(saved_bytes),
        parts(parts) {}

  // What the warps of a launch add up, as if all of them made heads.
  static int64_t PartsOf(int64_t blocks, int64_t threads, int64_t classes) {
    return blocks * (threads / kWarp) * (classes + kLossTotals);
  }
  int64_t SumsAt(int64_t array) const { return ArrayAt(array); }
  int64_t OfStatesAt() const { return ArrayAt(sums); }
  int64_t CarriesAt(int64_t carry) const { return ArrayAt(sums + 1 + carry); }
  int64_t SavedAt() const { return ArrayAt(sums + 1 + carries); }
  int64_t PartsAt() const { return SavedAt() + saved_bytes; }
  int64_t PartsBytes() const { return parts * static_cast<int64_t>(sizeof(float)); }
  int64_t Bytes() const { return PartsAt() + PartsBytes(); }

 private:
  int64_t ArrayAt(int64_t array) const {
    return launches.WorkspaceBytes() + array * floats * static_cast<int64_t>(sizeof(float));
  }
};

}  // namespace jaxsparse
