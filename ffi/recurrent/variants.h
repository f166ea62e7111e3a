// The kinds of kernels that a recurrent scan can run as.
#pragma once

#include "types.h"

namespace jaxsparse {

// In which form a scan's weights come to the chip.
enum class ScanWeights {
  kDense,
  kMasked,  // a sparse matrix, kept in dense form
  kPairs,   // of index and value
};

struct NamedScanWeights {
  const char* name;
  ScanWeights value;
};
inline constexpr NamedScanWeights kScanWeights[] = {{"dense", ScanWeights::kDense},
                                                    {"masked", ScanWeights::kMasked},
                                                    {"pairs", ScanWeights::kPairs}};

// Of states and weights.
struct NamedScanDType {
  const char* name;
  DType value;
};
inline constexpr NamedScanDType kScanDTypes[] = {
    {"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16}, {"float16", DType::kFloat16}};

struct ScanVariant {
  const char* name;
  ScanWeights weights;
  bool tensor_cores;  // or else FMA
  // The blocks meet after each step, instead of polling each other's data. Slower, so only by
  // name.
  bool barrier;
  // Warps have all gates of their units, and keep all of the weights for these: one block makes a
  // scan, or a few do.
  bool resident = false;
  // Products of warpgroups.
  bool warpgroups = false;
  // Their weights are the operand that stays, and states pass by; or else the other way round.
  bool stationary = false;
  // Waves whose blocks send each other sums instead of states.
  bool sums = false;

  // Which passes it is for. Products of warpgroups take all states of a layer through every block.
  // Those of an adjoint, one for each gate, are so many that layers one by one are faster, or sums.
  constexpr const char* passes() const {
    return warpgroups ? "forward" : sums ? "backward" : "both";
  }
};
inline constexpr ScanVariant kScanVariants[] = {
    {"dense_tensor_cores", ScanWeights::kDense, true, false},
    {"dense_tensor_cores_barrier", ScanWeights::kDense, true, true},
    {"dense_resident", ScanWeights::kDense, true, false, true},
    {"dense_fma", ScanWeights::kDense, false, false},
    {"dense_fma_barrier", ScanWeights::kDense, false, true},
    {"masked_tensor_cores", ScanWeights::kMasked, true, false},
    {"masked_tensor_cores_barrier", ScanWeights::kMasked, true, true},
    {"masked_fma", ScanWeights::kMasked, false, false},
    {"masked_fma_barrier", ScanWeights::kMasked, false, true},
    {"sparse_pairs", ScanWeights::kPairs, false, false},
    {"sparse_pairs_barrier", ScanWeights::kPairs, false, true},
};

// Of several layers at once.
inline constexpr ScanVariant kWaveVariants[] = {
    {"wave_mma", ScanWeights::kDense, true, false},
    {"wave_mma_barrier", ScanWeights::kDense, true, true},
    {"wave_wgmma", ScanWeights::kDense, true, false, false, true},
    {"wave_wgmma_barrier", ScanWeights::kDense, true, true, false, true},
    {"wave_stationary", ScanWeights::kDense, true, false, false, true, true},
    {"wave_stationary_barrier", ScanWeights::kDense, true, true, false, true, true},
    {"wave_scatter", ScanWeights::kDense, true, false, false, false, false, true},
};

}  // namespace jaxsparse
