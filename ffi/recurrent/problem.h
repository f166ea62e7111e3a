// A whole recurrent scan, or several side by side, in one launch. Per step t (falling if
// `reverse`), for every batch entry b and unit u:
//
//   product[g] = sum over (s, k) of weights[(g, u), (s, k)] * state[b][s][k]
//   (product, carry, input) -> (state[b][.][u], carry, output)         pointwise
//
// Forward pass of a cell: one state part s, as many products g as gates. Its adjoint: one product,
// as many state parts as gates. The pointwise step and all sizes that decide register use are
// template arguments of the kernel; what is here may change between launches of one kernel.
#pragma once

#include "persistent/problem.h"

namespace jaxsparse {

// Arrays of one kind that a launch takes.
constexpr int kMaxScanArrays = 24;
// Scans of one launch: directions of a layer, parts of a batch.
constexpr int kMaxScansOfLaunch = 4;

// Values of the state's dtype or of float32 for every step, batch entry and unit, of several parts;
// the distance in elements between neighbours is 0 where it repeats.
struct ScanInput {
  const void* data = nullptr;
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

struct RecurrentScanProblem {
  int64_t steps = 0;   // T
  int64_t batch = 0;   // B of all arrays; a scan of a part of it points to its first entry
  int64_t hidden = 0;  // h
  bool reverse = false;

  ScanInput inputs[kMaxScanArrays];
  const float* initial_carry[kMaxScanArrays] = {};  // (B, h) each
  const void* initial_state = nullptr;              // state dtype (B, state parts, h)
  const void* weights = nullptr;     // weight dtype: stored values, or a dense matrix
  int64_t weights_size = 0;          // of them
  int64_t weight_row_stride = 0;     // dense: elements between rows (g, u)
  int64_t weight_column_stride = 0;  // dense: elements between columns (s, k)
  const uint32_t* layout = nullptr;  // sparse: what sparse_layout.h makes of a pattern

  void* states = nullptr;                   // state dtype (T, B, state parts, h)
  void* outputs[kMaxScanArrays] = {};       // state dtype (T, B, parts, h) each
  float* final_carry[kMaxScanArrays] = {};  // (B, h) each

  // Workspace, every byte 0xff before the launch: a slot per step. Its layout is the kernel's.
  void* exchange = nullptr;
  PollDelays poll_delays;
  WaitLimits wait_limits;
  uint32_t* arrivals = nullptr;  // counts blocks that meet at a barrier (grid_barrier.cuh)
};

template <int kScans>
struct RecurrentScans {
  RecurrentScanProblem scan[kScans];
};

// A layer of a stack whose layers run at once, a step behind each other: to the products of a step
// it adds those of what the layer below it has as its states after that step.
struct RecurrentWaveLayer : RecurrentScanProblem {
  DenseWeights below_weights;
  const void* below_exchange = nullptr;  // of the layer below; null: there is none
};

// Layers, or parts of their batches, of one launch.
constexpr int kMaxScansOfWave = 16;

template <int kScans>
struct RecurrentWave {
  RecurrentWaveLayer scan[kScans];
};

}  // namespace jaxsparse
