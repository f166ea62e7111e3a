// What the driver says of operands of attention, for copies of their tiles: of so many positions of
// one head, in blocks of 64 numbers (attention/kernels/products.cuh).
#pragma once

#include <string>

#include "nvrtc/tensor_map.h"
#include "types.h"

namespace jaxsparse {

// An operand (positions, heads, size) of each of its own batch entries: its numbers of 16 bits, its
// heads, its positions and its own entries are the dimensions of the map.
inline ArrayOfHalves HeadsOf(const Batch& batch, const Array& array, int64_t positions,
                             int64_t heads, int64_t size) {
  return {array.data,
          {size, heads, positions, OwnEntries(batch, array)},
          {size, heads * size, positions * heads * size}};
}

// Whether copies can take an array from there.
inline bool IsAlignedForCopies(const Array& array) {
  constexpr uint64_t kAlignment = 16;
  return reinterpret_cast<uint64_t>(array.data) % kAlignment == 0;
}

// The maps of a problem's query, key and value, in copies of so many positions. Returns the reason
// of a failure, or an empty string.
struct AttentionMaps {
  TensorMap *query, *key, *value;
  int queries_at_once, keys_at_once;
};
template <typename Problem>
std::string EncodeAttentionMaps(const Problem& p, const AttentionMaps& maps) {
  const int64_t heads = p.groups * p.per_group;
  std::string reason = EncodeTensorMap(HeadsOf(p.batch, p.query, p.queries, heads, p.head_size),
                                       maps.queries_at_once, maps.query);
  if (reason.empty()) {
    reason = EncodeTensorMap(HeadsOf(p.batch, p.key, p.keys, p.groups, p.head_size),
                             maps.keys_at_once, maps.key);
  }
  if (reason.empty()) {
    reason = EncodeTensorMap(HeadsOf(p.batch, p.value, p.keys, p.groups, p.value_size),
                             maps.keys_at_once, maps.value);
  }
  return reason;
}

}  // namespace jaxsparse
