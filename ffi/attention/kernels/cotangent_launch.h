// What the host decides for both kernels of the transpose of attention's derivative.
#pragma once

#include <algorithm>
#include <string>

#include "attention/kernels/cotangent.h"
#include "attention/kernels/tensor_maps.h"
#include "host/variant.h"

namespace jaxsparse {

// rows.cc: the kernel of ct_query, which is launched first, and clears the counters before.
extern const CudaKernel<AttentionCotangentProblem> kAttentionCotangentOfRows;

// Items of heads of which each is one of so many of a batch entry. `sharing` of them read the same
// `positions` of two operands, which the L2 cache has room for.
inline CotangentItems ItemsOf(const AttentionCotangentProblem& p, const MaskTiles& mask,
                              int64_t heads, int64_t sharing, int64_t positions) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t all = p.batch.count * heads;
  const int64_t bytes = positions * (p.head_size + p.value_size) * SizeOf(p.dtype);
  const int64_t most = std::max<int64_t>(kCacheBytes / std::max<int64_t>(bytes, 1), 1) * sharing;
  const int64_t at_once = all == 0 ? 1 : CeilDivide(all, CeilDivide(all, most));
  return {static_cast<uint32_t>(all), static_cast<uint32_t>(mask.rows),
          static_cast<uint32_t>(at_once)};
}
inline CotangentItems RowItemsOf(const AttentionCotangentProblem& p) {
  return ItemsOf(p, p.mask, p.groups * p.per_group, p.per_group, p.keys);
}
inline CotangentItems KeyItemsOf(const AttentionCotangentProblem& p) {
  return ItemsOf(p, p.transposed_mask, p.groups, 1, p.queries * p.per_group);
}

inline LaunchShape ShapeOf(const AttentionCotangentProblem& p, const CotangentItems& items,
                           int shared_bytes) {
  const int64_t blocks = p.gpu.multiprocessors;
  return {std::min<int64_t>(items.Count(), blocks), kCotangentThreads, shared_bytes};
}

// Launches a kernel that has so many positions copied at once.
inline std::string LaunchCotangent(const AttentionCotangentProblem& p, const CudaLaunch& launch,
                                   const CotangentItems& items, int queries_at_once,
                                   int keys_at_once) {
  constexpr double kLog2OfE = 1.4426950408889634;
  AttentionCotangentTiles tiles{p};
  tiles.items = items;
  tiles.log2_scale = static_cast<float>(p.scale * kLog2OfE);
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
