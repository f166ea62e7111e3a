// How the scans of a call share launches and their workspace: for the plan, by which the program is
// compiled, and for the call itself.
#pragma once

#include <algorithm>
#include <cstdint>

#include "recurrent/problem.h"

namespace jaxsparse {

struct ScanLaunches {
  int64_t directions = 1;
  int64_t groups = 1;  // parts of the batch, a scan each
  int64_t scans = 1;   // side by side in a launch: parts of the batch, directions. The last launch
                       // may have fewer
  int64_t layers = 1;  // of a wave, each with so many scans
  int64_t exchange_bytes = 0;  // of a scan
  int64_t dense_bytes = 0;     // of a direction's sparse matrix in dense form

  int64_t All() const { return directions * groups; }
  int64_t Count() const { return (All() + scans - 1) / scans; }
  int64_t ScansOf(int64_t launch) const { return std::min(scans, All() - launch * scans); }

  // Workspace: what launches share, one after another, and behind that what they only read. First,
  // with every byte 0xff before a launch: exchange buffers, and the words that `wait_limits.error`
  // and each scan's `arrivals` point to.
  int64_t ExchangeAt(int64_t scan) const { return scan * exchange_bytes; }
  int64_t ErrorAt() const { return ExchangeAt(layers * scans); }
  int64_t ArrivalsAt(int64_t scan) const { return ErrorAt() + kScanFlagBytes * (1 + scan); }
  int64_t ClearedBytes() const { return ArrivalsAt(layers * scans); }
  int64_t DenseAt(int64_t direction) const { return ClearedBytes() + direction * dense_bytes; }
  int64_t WorkspaceBytes() const { return DenseAt(directions); }
};

}  // namespace jaxsparse
