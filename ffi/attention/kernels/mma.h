// How attention's kernels by the tensor cores of single warps are configured, by the host, for the
// device.
#pragma once

#include "attention/kernels/items.h"
#include "attention/problem.h"

namespace jaxsparse {

// Heads are compiled for multiples of this size; what they lack of it is 0 in shared memory.
constexpr int kMmaSizeStep = 32;
constexpr int kMmaMostSize = 256;
constexpr int MmaSizeOf(int64_t size) {
  return static_cast<int>((size + kMmaSizeStep - 1) / kMmaSizeStep * kMmaSizeStep);
}
constexpr int kMmaStrip = 16;  // rows of a warp's product
constexpr int kMmaControlBytes = 512;

// Tiles that a block has in shared memory: its own rows, all of a mask's tile or of a cell, and 64
// rows of what they meet, of keys' sizes and of values'.
struct MmaTiles {
  int head_size = 128;  // multiples of kMmaSizeStep
  int value_size = 128;
  int number_bytes = 2;
  int rows = kMaskTile;  // of a block
  int strips = 1;        // of a warp

  constexpr int Threads() const { return rows / (kMmaStrip * strips) * kWarp; }
  constexpr int BlocksOfTile() const { return kMaskTile / rows; }
  // With eight numbers behind each row, so that eight rows lie in different banks (PlainTile).
  constexpr int KeyRowBytes() const { return (head_size + 8) * number_bytes; }
  constexpr int ValueRowBytes() const { return (value_size + 8) * number_bytes; }
};

// Forward: queries, a cell's keys, its values, and what controls the block's work.
struct AttentionMmaConfig {
  MmaTiles tiles = {};

  constexpr int KeysAt() const { return tiles.rows * tiles.KeyRowBytes(); }
  constexpr int ValuesAt() const { return KeysAt() + kMaskCell * tiles.KeyRowBytes(); }
  constexpr int ControlAt() const { return ValuesAt() + kMaskCell * tiles.ValueRowBytes(); }
  constexpr int SharedBytes() const { return ControlAt() + kMmaControlBytes; }
};

// Backward: the block's rows of two operands, and stages of a cell's rows of the two others, with
// lse and ct_sums where these are queries.
struct CotangentMmaConfig {
  MmaTiles tiles = {};
  int stages = 2;
  int columns = kMaskCell;  // of a product: a cell's, or half of them
  bool split = false;       // of cotangents of keys and of values each has blocks of its own

  constexpr int RowBytes() const { return tiles.KeyRowBytes() + tiles.ValueRowBytes(); }
  constexpr int OwnValuesAt() const { return tiles.rows * tiles.KeyRowBytes(); }
  constexpr int StagesAt() const { return tiles.rows * RowBytes(); }
  constexpr int StageBytes() const { return kMaskCell * RowBytes() + 2 * kMaskCell * 4; }
  constexpr int ValuesOfStageAt() const { return kMaskCell * tiles.KeyRowBytes(); }
  constexpr int LseOfStageAt() const { return kMaskCell * RowBytes(); }
  constexpr int ControlAt() const { return StagesAt() + stages * StageBytes(); }
  constexpr int SharedBytes() const { return ControlAt() + kMmaControlBytes; }
};

// Tangents: the block's queries and their tangents, and stages of a cell's keys, their tangents,
// values and theirs.
struct TangentMmaConfig {
  MmaTiles tiles = {};
  int stages = 2;
  int columns = kMaskCell;  // of a product: a cell's, or half of them

  constexpr int OwnTangentsAt() const { return tiles.rows * tiles.KeyRowBytes(); }
  constexpr int StagesAt() const { return 2 * OwnTangentsAt(); }
  constexpr int KeyBytes() const { return kMaskCell * tiles.KeyRowBytes(); }
  constexpr int ValueBytes() const { return kMaskCell * tiles.ValueRowBytes(); }
  constexpr int StageBytes() const { return 2 * (KeyBytes() + ValueBytes()); }
  constexpr int ControlAt() const { return StagesAt() + stages * StageBytes(); }
  constexpr int SharedBytes() const { return ControlAt() + kMmaControlBytes; }
};

struct AttentionTangentWork : AttentionTangentProblem {
  AttentionItems items = {};
};

struct AttentionMmaProblem : AttentionProblem {
  AttentionItems items = {};
};

}  // namespace jaxsparse
