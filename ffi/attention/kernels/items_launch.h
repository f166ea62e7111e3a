// How the host orders items of work of attention's kernels.
#pragma once

#include <algorithm>

#include "attention/kernels/items.h"
#include "attention/problem.h"

namespace jaxsparse {

// Items of heads of which each is one of so many of a batch entry. `sharing` of them read the same
// `positions` of two operands, which the L2 cache has room for.
inline AttentionItems ItemsOf(const AttentionOperands& p, const MaskTiles& mask, int64_t heads,
                              int64_t sharing, int64_t positions) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t all = p.batch.count * heads;
  const int64_t bytes = positions * (p.head_size + p.value_size) * SizeOf(p.dtype);
  const int64_t most = std::max<int64_t>(kCacheBytes / std::max<int64_t>(bytes, 1), 1) * sharing;
  const int64_t at_once = all == 0 ? 1 : CeilDivide(all, CeilDivide(all, most));
  return {static_cast<uint32_t>(all), static_cast<uint32_t>(mask.rows),
          static_cast<uint32_t>(at_once)};
}
inline AttentionItems RowItemsOf(const AttentionOperands& p) {
  return ItemsOf(p, p.mask, p.groups * p.per_group, p.per_group, p.keys);
}
inline AttentionItems KeyItemsOf(const AttentionCotangentProblem& p) {
  return ItemsOf(p, p.transposed_mask, p.groups, 1, p.queries * p.per_group);
}

}  // namespace jaxsparse
