// What fits and cost models of several kernels of the sparse-dense product share.
#pragma once

#include "spmm/problem.h"

namespace jaxsparse {

inline double SpmmMeanRowLength(const SpmmProblem& p) {
  return p.pattern.rows > 0 ? static_cast<double>(p.pattern.nse) / p.pattern.rows : 0;
}

// What patterns hide from costs, which are fitted to rows of about one length: where lengths vary
// by twice their mean tensor cores take 4 % longer, staged rows 15 %, and tiled rows of one group
// each 1.7 times as long. So something is added to what the latter two take.
constexpr double kSpmmForUnevenRows = 1.06;

// Microseconds that tiled rows take, from which the generic kernel's follow (kernels/tiled.cc).
double SpmmTiledMicroseconds(const SpmmProblem& p);
// Whether 32-bit counters serve for tiles of rows.
bool SpmmFitsTiledRows(const SpmmProblem& p);

}  // namespace jaxsparse
