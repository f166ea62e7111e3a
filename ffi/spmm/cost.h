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

// Patterns that cuts of rows come with are those of graphs. Their rows of x come from L2 in no
// order, and their lengths vary most: on five of them, of 0.2 to 10 million entries, tiled rows
// took 1.8 to 3 times as long as costs say.
constexpr double kSpmmForGraphs = 2.4;

// Microseconds that tiled rows take, from which the generic kernel's follow (kernels/tiled.cc).
double SpmmTiledMicroseconds(const SpmmProblem& p);
// Whether 32-bit counters serve for tiles of rows.
bool SpmmFitsTiledRows(const SpmmProblem& p);

}  // namespace jaxsparse
