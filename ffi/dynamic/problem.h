// What the host tells the kernels of graph scans: one cell over any graph, by a script (script.h).
//
// Rows 0 to leaves - 1 are given; row leaves + tile * kTileRows + lane is computed, tile by tile.
// Either it gathers from its sources, for every unit:
//
//   product[g] = sum over (k, c) of weights[(g, unit), (k, c)] * state[source(row, k)][c]
//   (product, carries of the sources, inputs) -> (state, carries, outputs)         pointwise
//
// or it emits to them, from the last tile to the first:
//
//   (sum, sums of carries, inputs) -> (states, carries for each source, outputs)   pointwise
//   sum of source(row, k) += sum over (g, c) of weights[(k, unit), (g, c)] * states[g][c]
//   sums of carries of source(row, k) += the carries for it
//
// The rows of a tile are of one kind, and each kind has weights of its own.
//
// What decides the use of registers is a template argument of the kernel; what is here may change
// between launches of one kernel, the sizes of a script among it.
#pragma once

#include "persistent/problem.h"
#include "recurrent/problem.h"

namespace jaxsparse {

constexpr int kTileRows = 8;         // rows of a tile: columns of a tensor core
constexpr int kMaxGraphArrays = 24;  // arrays of one kind that a launch takes

struct GraphScanProblem {
  const int32_t* group_tiles = nullptr;  // of the script, with groups + 1 numbers
  const int32_t* records = nullptr;      // of the script, one for each tile
  int32_t leaves = 0;
  int32_t tiles = 0;
  int32_t groups = 0;

  // Of rows of the first kind: rows (g, unit) and columns (k, c), or (k, unit) and (g, c).
  DenseWeights weights;
  int64_t weight_kind_bytes = 0;  // from a kind's to those of the next one
  // State dtype or float32 (tiles * kTileRows, parts, h); where all rows or all units have the same
  // one row or unit.
  const void* inputs[kMaxGraphArrays] = {};
  const void* leaf_states = nullptr;          // state dtype (leaves, h); where rows gather
  float* leaf_carries[kMaxGraphArrays] = {};  // (leaves, h) each; where rows emit, as leaf_sums

  // State dtype (tiles * kTileRows, states of a row, h); every byte of tiles that the script uses
  // is 0xff behind WaitForPrologue: blocks find each other's there.
  void* states = nullptr;
  float* carries[kMaxGraphArrays] = {};  // (tiles * kTileRows, h) each
  // Where rows emit: what has come to each row from tiles that are a window away or more, if there
  // can be such, (tiles * kTileRows, h), and in `carries` of their carries.
  float* sums = nullptr;
  float* leaf_sums = nullptr;           // and to each leaf, (leaves, h); filled with zeros, too
  void* outputs[kMaxGraphArrays] = {};  // state dtype or float32 (tiles * kTileRows, parts, h)

  PollDelays poll_delays;
  WaitLimits wait_limits;
  uint32_t* arrivals =
      nullptr;  // of each team at its barrier, kScanFlagBytes apart; every byte 0xff
};

}  // namespace jaxsparse
