// What a recurrent scan runs as on a GPU: which weights lie where, and in which kernel. A plan
// follows from the scan's form and a description of the GPU, and needs no GPU. A kernel is
// specialised for its plan, because weights can only stay in registers if all sizes are known when
// it is compiled; the sizes are those of the headers in kernels/.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "recurrent/kernels/sparse.h"
#include "recurrent/kernels/wave.h"
#include "recurrent/launches.h"
#include "recurrent/variants.h"
#include "types.h"

namespace jaxsparse {

struct ScanForm {
  int64_t products = 1;  // of a step
  int64_t state_parts = 1;
  int64_t inputs = 0;  // arrays of h units in all, of outputs too
  int64_t outputs = 0;
  int64_t hidden = 1;
  int64_t batch = 1;
  int64_t length = 1;
  DType state_dtype = DType::kFloat32;
  DType weight_dtype = DType::kFloat32;
  bool sparse = false;
  std::optional<SparseForm> layout_form;  // of a sparse matrix
  std::string not_laid_out;               // or why it has none, if that is known
  int64_t directions = 1;                 // scans by weights of their own
  int64_t loops = 1;                      // of XLA that make all of them
};

// Layers of one form, each with a scan's form. Bits stand for products and states: of those that a
// layer's matrices lead to and from.
struct WaveForm : ScanForm {
  int64_t layers = 1;
  int own_products = 1;  // from the last step
  int own_states = 1;
  int below_products = 1;  // from the layer below
  int below_states = 1;
  WaveSkip skip;
  WaveMean means[kMaxWaveMeans];
  bool scales = false;  // the products of the layer below, by a norm
};

// Of a batch, for which the times of waves by mma.sync are predicted well; those of more rows run
// by name, and by default as waves of stationary weights.
constexpr int64_t kMostRowsOfMma = 16;

// A kernel for a scan, and its launch.
struct ScanPlan {
  const ScanVariant* variant = nullptr;
  std::string file;       // of the kernel, below the folder of device sources
  std::string constants;  // members of the kernel's Plan that do not follow from types, in C++
  int blocks = 1;         // of a scan
  int threads = 0;
  int64_t shared_bytes = 0;
  int poll_delay = 0;           // clock cycles from a product to the first poll for the next state
  int poll_delay_increase = 0;  // after a poll in vain
  int poll_delay_decrease = 0;  // after one in time
  double microseconds = 0;      // predicted, for a step of all scans
  double total_microseconds = 0;  // predicted, for all steps and what comes before them
  double in_registers = 0;        // share of the weights; the rest lies in shared memory
  int cluster = 1;
  int resident = 1;  // blocks on a multiprocessor
  ScanLaunches launches;
};

struct ScanChoice {
  std::optional<ScanPlan> best;
  std::string reason;              // why there is no plan
  int64_t most_batch = 0;          // that any kernel takes, in parts
  double loop_microseconds = 0.0;  // predicted for all steps of XLA's loop by dense weights
};

// The plan of least predicted time: of the variant that is wanted by its name, or, if that is
// empty, of all without a barrier.
ScanChoice PlanScan(const ScanForm& form, const Gpu& gpu, const std::string& wanted);

// The same of layers in one launch: by the variant that is wanted, or by those without a barrier
// that were measured for so many rows.
ScanChoice PlanWave(const WaveForm& form, const Gpu& gpu, const std::string& wanted);

}  // namespace jaxsparse
