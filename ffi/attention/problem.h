// Attention over the positions that a block mask stores, or a pattern of entries:
//
//   s = f(scale * q_t . k_u, t, u),   lse_t = log(sum_{u seen by t} exp(s_tu)),
//   out_t = sum_{u seen by t} drop_tu(exp(s_tu - lse_t)) v_u
//
// where f is a function of scores, without one its first argument, and dropout makes drop_tu(x)
// either 0 or x / (1 - rate), without it x.
//
// and the transpose of its derivative. For p_tu = exp(s_tu - lse_t) at stored positions and 0
// elsewhere, the tangents dq, dk, dv of its operands have
//
//   ds = scale * (dq . k + q . dk),   u_t = sum_u p_tu (ds_tu v_u + dv_u),   r_t = sum_u p_tu ds_tu
//
// of which d out = u - r out and d lse = r: u is `weighted`, r is `sums`. The cotangents of u and r
// are `ct_out` and `ct_sums`:
//
//   dp = p_tu (ct_out_t . v_u + ct_sums_t),   ct_query_t = scale * sum_u dp_tu k_u,
//   ct_key_u = scale * sum_t dp_tu q_t,       ct_value_u = sum_t p_tu ct_out_t
//
// A query that sees no key has out 0, lse -infinity and cotangents 0.
//
// Query heads are `groups` groups of `per_group`, which share a key head. Neighbours in an array of
// queries are `groups * per_group` heads apart.
#pragma once

#include "types.h"

namespace jaxsparse {

// A block mask says which positions are stored by tiles of the score matrix and by cells, of which
// a tile has two by two. A tile without stored positions is not listed; cells are empty, partial or
// full. A partial cell has a word for each of 128 threads, in the order in which tensor cores give
// a product of 64 x 64 to a warpgroup: bit i of word 32 w + l is
//   row 16 w + l / 4 + 8 (i / 2 % 2),  column 8 (i / 4) + 2 (l % 4) + i % 2.
constexpr int kMaskTile = 128;  // rows and columns of a tile
constexpr int kMaskCell = 64;   // rows and columns of a cell
constexpr int kMaskCellWords = 128;
enum class MaskCell : int { kEmpty, kPartial, kFull };

// A listed tile: its column of tiles in the lower bits; above them the states of its cells, in two
// bits each: top left, top right, bottom left, bottom right.
constexpr int kMaskStatesAt = 24;
JAXSPARSE_INLINE uint32_t MaskColumnOf(uint32_t entry) {
  return entry & ((1u << kMaskStatesAt) - 1);
}
JAXSPARSE_INLINE MaskCell MaskCellOf(uint32_t entry, int down, int across) {
  return static_cast<MaskCell>(entry >> (kMaskStatesAt + 4 * down + 2 * across) & 3);
}

// Which heads have masks of their own: all arrays of masks have one or all of the groups in front,
// then one or all of a group's heads.
struct MasksOfHeads {
  int64_t groups = 1, per_group = 1;

  // Which of the masks a head has, of those of a batch entry.
  JAXSPARSE_INLINE int64_t Own(int64_t group, int64_t of_group) const {
    return (groups > 1 ? group : 0) * per_group + (per_group > 1 ? of_group : 0);
  }
};

// A block mask by its rows of tiles, or a transposed one, whose rows are keys.
struct MaskTiles : MasksOfHeads {
  int64_t rows = 0, columns = 0;  // of tiles
  int64_t capacity = 0;           // entries that there is room for
  int64_t cells = 0;              // partial cells that there is room for
  Array offsets;                  // int32 (rows + 1): where a row's entries begin
  Array entries;                  // uint32 (capacity), by rising column in each row
  Array bits_at;  // int32 (capacity): the words of an entry's first partial cell; others follow
  Array bits;     // uint32 (cells, 128)
  Array order;    // int32 (rows): rows of tiles, those with most cells first
};

// The same positions as entries of rows. It has no permutation: entries have no values.
struct MaskPattern : MasksOfHeads, Pattern {};

// What becomes of scores before they are probabilities, and of these: a printed function of scores
// (kernels/scores.cuh), whose operands have the sizes that it says by what they are indexed by; and
// dropout (kernels/dropout.cuh).
constexpr int kMaxScoreOperands = 8;

enum class ScoreType : int { kFloat32, kBFloat16, kFloat16, kInt32, kUint32, kBool };

// By what an operand is indexed, beside the sequence, and the type of its elements.
struct ScoreOperand {
  bool by_head = false, by_row = false, by_column = false, by_distance = false;
  ScoreType type = ScoreType::kFloat32;

  bool operator==(const ScoreOperand&) const = default;
};

// What a cotangent of an operand has for each head: a sum for each row, for each column or for each
// distance, row - column + keys - 1; or, summed by nothing, a number for each score.
enum class ScoreSums : int { kByRow, kByColumn, kByDistance, kNone };

struct AttentionScores {
  const char* text = nullptr;  // of the function, on the host
  int64_t text_size = 0;       // 0: there is none
  int64_t most_elements = 0;   // of an operand
  int operands = 0;
  ScoreOperand operand[kMaxScoreOperands];
  Array values[kMaxScoreOperands];
  // Cotangents of operands of which they are wanted, float32: (groups, per_group, queries), or
  // keys, distances, or queries and keys, as `sums` say.
  int gradients = 0;
  ScoreSums sums[kMaxScoreOperands] = {};
  Array ct_values[kMaxScoreOperands];
  Array offsets;       // int32 (2): positions of the first query and key; or null, and they are 0
  Array seeds;         // uint32 (groups, per_group), or null: nothing is dropped
  Array dropout_rate;  // float32

  JAXSPARSE_INLINE bool Exist() const { return text_size > 0 || seeds.data != nullptr; }
};

// What attention, its derivative and the transpose of that all take.
struct AttentionOperands {
  Gpu gpu;
  Batch batch;
  DType dtype =
      DType::kBFloat16;  // of all but lse and ct_sums, which have sums' type: float32, or float64
  int64_t queries = 0, keys = 0;
  int64_t groups = 1, per_group = 1;
  int64_t head_size = 0, value_size = 0;
  double scale = 1;                            // kernels take it in sums' type
  bool has_mask = false, has_pattern = false;  // one of them or both
  MaskTiles mask;                              // rows are queries
  Array query;                                 // (queries, groups, per_group, head_size)
  Array key;                                   // (keys, groups, head_size)
  Array value;                                 // (keys, groups, value_size)
  AttentionScores scores;
  Workspace workspace;
};

struct AttentionProblem : AttentionOperands {
  MaskPattern pattern;
  Array out;  // (queries, groups, per_group, value_size)
  Array lse;  // (groups, per_group, queries), as sums
};

struct AttentionTangentProblem : AttentionOperands {
  Array lse;       // (groups, per_group, queries), as sums
  Array d_query;   // as query
  Array d_key;     // as key
  Array d_value;   // as value
  Array weighted;  // (queries, groups, per_group, value_size), of sums' type
  Array sums;      // as lse
};

// Keys and values in pages of so many positions, each at any place of a pool that sequences share.
struct KeyPages {
  int64_t size = 0;         // positions of a page, a multiple of a cell's; 0: there are no pages
  int64_t of_sequence = 0;  // pages
  int64_t count = 0;        // of the pool
  Array numbers;            // int32 (of_sequence): which page of the pool each of them is
};

// Here `key` is (pages of the pool, positions of a page, groups, head_size), `value` likewise; keys
// of a sequence are the positions of its pages. Numbers of pages that the pool has not are taken
// for its last one.
struct PagedAttentionProblem : AttentionProblem {
  KeyPages pages;
};

// What kernels by tiles are given: with both patterns it would be more than a kernel can take.
struct AttentionCotangentOfTiles : AttentionOperands {
  MaskTiles transposed_mask;  // rows are keys
  Array lse;                  // (groups, per_group, queries), as sums
  Array ct_out;               // (queries, groups, per_group, value_size)
  Array ct_sums;              // as lse
  Array ct_query;             // as query
  Array ct_key;               // as key
  Array ct_value;             // as value
};

struct AttentionCotangentProblem : AttentionCotangentOfTiles {
  MaskPattern pattern;
  MaskPattern transposed_pattern;  // rows are keys
};

}  // namespace jaxsparse
