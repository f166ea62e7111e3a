// A whole recurrent scan, or several side by side, in one launch. Per step t (falling where a scan
// is reversed), for every batch entry b and unit u:
//
//   product[g] = sum over (s, k) of weights[(g, u), (s, k)] * state[b][s][k]
//   (product, carry, input) -> (state[b][.][u], carry, output)         pointwise
//
// The scans of a call are told apart by their number, direction * parts of the batch + part: a
// direction has weights of its own and a place of its own in every array, a part takes a share of
// the rows. So a launch of many scans has no more parameters than one of a single scan, and what
// a block reads lies at a distance from constants that takes no register.
//
// Forward pass of a cell: one state part s, as many products g as gates. Its adjoint: one product,
// as many state parts as gates. The pointwise step and all sizes that decide register use are
// template arguments of the kernel; what is here may change between launches of one kernel.
#pragma once

#include "persistent/problem.h"

namespace jaxsparse {

// Arrays of one kind that a launch takes, and products of a step.
constexpr int kMaxScanArrays = 24;
// Scans of one launch: directions of a layer, parts of a batch.
constexpr int kMaxScansOfLaunch = 128;
// Directions of a call: more than any layer has heads.
constexpr int64_t kMaxDirections = 4096;
// Rows or columns of a direction's matrix: products, or state parts, of all units.
constexpr int64_t kMaxMatrixRows = 1 << 24;
// Words that blocks poll or count at have a cache line each.
constexpr int64_t kScanFlagBytes = 128;

// Values of the state's dtype or of float32 for every step, batch entry and unit, of several parts;
// the distance in elements between neighbours is 0 where it repeats.
struct ScanInput {
  const void* data = nullptr;
  int64_t direction_stride = 0;
  int64_t step_stride = 0;
  int64_t row_stride = 0;
  int64_t part_stride = 0;
  int64_t unit_stride = 0;
};

// A dense matrix, (rows (g, u), columns (s, k)); distances between neighbours in elements.
struct DenseWeights {
  const void* values = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// Arrays are those of all D directions and of the whole batch.
struct RecurrentScanProblem {
  int64_t steps = 0;        // T
  int64_t batch = 0;        // B
  int64_t hidden = 0;       // h
  bool reverse = false;     // the launch's first scan, and all of them in a call of one direction
  uint32_t first_scan = 0;  // of this launch, if there are several; the others follow
  // A bit for each scan of the launch, which counts if there are several directions.
  uint32_t reversed_scans[kMaxScansOfLaunch / 32] = {};

  ScanInput inputs[kMaxScanArrays];
  const float* initial_carry[kMaxScanArrays] = {};  // (D, B, h) each
  const void* initial_state = nullptr;              // state dtype (D, B, state parts, h)
  const void* weights = nullptr;     // weight dtype: stored values, or a dense matrix
  int64_t weights_size = 0;          // elements of a direction
  int64_t weight_row_stride = 0;     // dense: elements between rows (g, u)
  int64_t weight_column_stride = 0;  // dense: elements between columns (s, k)
  const uint32_t* layout = nullptr;  // sparse: what sparse_layout.h makes of the patterns

  void* states = nullptr;                   // state dtype (D, T, B, state parts, h)
  void* outputs[kMaxScanArrays] = {};       // state dtype or float32 (D, T, B, parts, h) each
  float* final_carry[kMaxScanArrays] = {};  // (D, B, h) each

  // Workspace, every byte 0xff before the launch: for each scan of the launch, a slot per step, and
  // one more in waves. Its layout is the kernel's.
  void* exchange = nullptr;
  int64_t exchange_bytes = 0;  // of a scan
  PollDelays poll_delays;
  WaitLimits wait_limits;
  // Counts of blocks that meet at a barrier (grid_barrier.cuh), kScanFlagBytes apart.
  uint32_t* arrivals = nullptr;
};

// A layer of a stack whose layers run at once, a step behind each other: to the products of a step
// it adds those of what the layer below it has as its states after that step.
struct RecurrentWaveLayer : RecurrentScanProblem {
  DenseWeights below_weights;
  const void* below_exchange = nullptr;  // of the layer below; null: there is none
  const void* skip_exchange = nullptr;   // of a lower layer whose state is added; the same
  float norm_epsilon = 0;                // where the products of the layer below are normalised
};

// Layers of one launch, whose parameters they are.
constexpr int kMaxLayersOfWave = 16;

template <int kLayers>
struct RecurrentWave {
  RecurrentWaveLayer layer[kLayers];
};

}  // namespace jaxsparse
