// What the host tells the kernels of graph scans: one cell over any graph, by a script (script.h).
//
// Rows 0 to leaves - 1 are given; row leaves + tile * kTileRows + lane is computed, tile by tile,
// for every unit:
//
//   product[g] = sum over (k, c) of weights[(g, unit), (k, c)] * state[source(row, k)][c]
//   (product, carries of the sources, inputs) -> (state, carries, outputs)         pointwise
//
// What decides the use of registers is a template argument of the kernel; what is here may change
// between launches of one kernel, the sizes of a script among it.
#pragma once

#include "persistent/problem.h"
#include "recurrent/problem.h"

namespace jaxsparse {

constexpr int kTileRows = 8;             // rows of a tile: columns of a tensor core
constexpr int kMaxGraphArrays = 24;      // arrays of one kind that a launch takes

// Values of the state's dtype or of float32 for every computed row and unit, of several parts; the
// distance in elements between neighbours is 0 where it repeats.
struct GraphInput {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t part_stride = 0;
  int64_t unit_stride = 0;
};

struct GraphScanProblem {
  const int32_t* group_tiles = nullptr;  // of the script, with groups + 1 numbers
  const int32_t* records = nullptr;      // of the script, one for each tile
  int32_t leaves = 0;
  int32_t tiles = 0;
  int32_t groups = 0;

  DenseWeights weights;  // rows (g, unit), columns (k, c)
  const void* leaf_states = nullptr;                // state dtype (leaves, h)
  const float* leaf_carries[kMaxGraphArrays] = {};  // (leaves, h) each
  GraphInput inputs[kMaxGraphArrays];

  void* states = nullptr;                 // state dtype (tiles * kTileRows, h); every byte 0xff
                                          // before the launch: blocks find each other's there
  float* carries[kMaxGraphArrays] = {};   // (tiles * kTileRows, h) each
  void* outputs[kMaxGraphArrays] = {};    // state dtype or float32 (tiles * kTileRows, parts, h)

  PollDelays poll_delays;
  WaitLimits wait_limits;
  uint32_t* arrivals = nullptr;  // of each team at its barrier, kScanFlagBytes apart; every byte 0xff
};

}  // namespace jaxsparse
