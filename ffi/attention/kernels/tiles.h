// How the forward kernel of attention by tiles is configured, by the host, for the device.
#pragma once

#include "attention/problem.h"
#include "cuda/tensor_map.h"

namespace jaxsparse {

// A block has two consumer warpgroups, each of which has the 64 queries of a row of cells, and a
// warpgroup of producer warps.
constexpr int kAttentionConsumers = 2 * 128, kAttentionTilesThreads = 3 * 128;
constexpr int kAttentionItemSlots = 2;  // of items that are scheduled ahead
constexpr int kAttentionControlBytes = 1024;
constexpr int kAttentionCounterBytes = 4;  // in the workspace: items that blocks have taken

struct AttentionTilesConfig {
  int head_size = 128;  // a multiple of 64, as value_size
  int value_size = 128;

  // Bytes of what passes through shared memory: a tile's queries, keys and values, and the words of
  // its partial cells, of which each stage of keys has room for four.
  constexpr int QueryBytes() const { return kMaskTile * head_size * 2; }
  constexpr int KeyBytes() const { return kMaskTile * head_size * 2; }
  constexpr int ValueBytes() const { return kMaskTile * value_size * 2; }
  static constexpr int kWordBytes = 4 * kMaskCellWords * 4;
  constexpr int Stages() const {  // of keys, and of values
    constexpr int kMost = 4, kBytes = 216 << 10;
    const int room = (kBytes - QueriesBytes()) / (KeyBytes() + ValueBytes() + kWordBytes);
    return room < kMost ? room : kMost;
  }
  // Shared memory: queries of each item slot, then stages of keys, of values and of words, then
  // what controls the block's work.
  constexpr int QueriesBytes() const { return kAttentionItemSlots * QueryBytes(); }
  constexpr int KeysAt() const { return QueriesBytes(); }
  constexpr int ValuesAt() const { return KeysAt() + Stages() * KeyBytes(); }
  constexpr int WordsAt() const { return ValuesAt() + Stages() * ValueBytes(); }
  constexpr int ControlAt() const { return WordsAt() + Stages() * kWordBytes; }
  constexpr int SharedBytes() const { return ControlAt() + kAttentionControlBytes; }
};

struct AttentionTilesProblem : AttentionProblem {
  TensorMap query_tiles = {}, key_tiles = {}, value_tiles = {};
  uint32_t items = 0;
  // Heads, of all batch entries, whose rows of tiles are taken in turn: keys and values of so many
  // stay in the L2 cache.
  uint32_t heads_at_once = 1;
};

// An item of work is a row of tiles of a head.
JAXSPARSE_INLINE int64_t AttentionItemsOf(const AttentionProblem& p) {
  return p.batch.count * p.groups * p.per_group * p.mask.rows;
}

}  // namespace jaxsparse
