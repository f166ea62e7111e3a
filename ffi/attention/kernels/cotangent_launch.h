// What the host decides for both kernels of the transpose of attention's derivative.
#pragma once

#include <algorithm>
#include <string>

#include "attention/kernels/cotangent.h"
#include "attention/kernels/items_launch.h"
#include "attention/kernels/logarithms.h"
#include "attention/kernels/tensor_maps.h"
#include "host/variant.h"

namespace jaxsparse {

// rows.cc: the kernel of ct_query, which is launched first, and clears the counters before.
extern const CudaKernel<AttentionCotangentProblem> kAttentionCotangentOfRows;

// rows.cc: sets cotangents of operands of scores to 0 of which there is one for each score, since
// nothing is stored at positions of tiles that are not listed. Returns the reason of a failure, or
// an empty string.
std::string ClearWholeCotangents(const AttentionCotangentProblem& p, const CudaLaunch& launch);

inline LaunchShape ShapeOf(const AttentionCotangentProblem& p, const AttentionItems& items,
                           int shared_bytes) {
  const int64_t blocks = p.gpu.multiprocessors;
  return {std::min<int64_t>(items.Count(), blocks), kCotangentThreads, shared_bytes};
}

// Launches a kernel that has so many positions copied at once.
inline std::string LaunchCotangent(const AttentionCotangentProblem& p, const CudaLaunch& launch,
                                   const AttentionItems& items, int queries_at_once,
                                   int keys_at_once) {
  AttentionCotangentTiles tiles{p};
  tiles.items = items;
  tiles.log2_scale = static_cast<float>(p.scale * kLog2OfE<double>);
  std::string reason = EncodeAttentionMaps(
      p, {&tiles.query_tiles, &tiles.key_tiles, &tiles.value_tiles, queries_at_once, keys_at_once});
  if (reason.empty()) {
    const int64_t heads = p.groups * p.per_group;
    reason = EncodeTensorMap(HeadsOf(p.batch, p.ct_out, p.queries, heads, p.value_size),
                             queries_at_once, &tiles.ct_out_tiles);
  }
  return reason.empty() ? launch.With(&tiles) : reason;
}

}  // namespace jaxsparse
