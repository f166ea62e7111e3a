// The plans of each kernel, defined beside it in kernels/, and what they share. plan.cc takes the
// fastest of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "recurrent/kernels/dense.h"
#include "recurrent/kernels/wave.h"
#include "recurrent/plan.h"

namespace jaxsparse {

// kernels/dense.cc: parts that a batch may be cut into, a scan each, side by side or one after
// another; the most of them, and batch entries of a part.
inline constexpr int64_t kBatchParts[] = {1, 2, 4, 8, 16};
int64_t MostBatchParts(bool tensor_cores);
int64_t MostDenseBatch(bool tensor_cores);
// The best of all ways to share the GPU among scans, or to let them follow each other.
std::optional<ScanPlan> PlanDense(const ScanVariant& variant, const ScanForm& scan, const Gpu& gpu);

// What the configuration of a block has of the form, before its warps are chosen.
DenseConfig DenseConfigOf(const ScanForm& form, int64_t batch, int64_t units);
std::string ExpressionOf(const DenseConfig& config);
int DensePollDelay(const DenseConfig& config);

// kernels/wave.cc: the best of all ways to share the GPU among layers and parts of their batch.
std::optional<ScanPlan> PlanWaveLayers(const ScanVariant& variant, const WaveForm& form,
                                       const Gpu& gpu);

// kernels/wave_wgmma.cc: the same, of states that are rows of wgmma.
std::optional<ScanPlan> PlanWaveByWarpgroups(const ScanVariant& variant, const WaveForm& form,
                                             const Gpu& gpu);

// kernels/wave_scatter.cc: the same, of blocks that send each other sums.
std::optional<ScanPlan> PlanWaveOfSums(const ScanVariant& variant, const WaveForm& form,
                                       const Gpu& gpu);

// Registers of a thread that makes the pointwise step beside warpgroups, for so many items, each
// with what a step reads a step ahead.
int RegistersBesideWarpgroups(const WaveForm& form, const DenseBlock& block);

// kernels/wave_stationary.cc: the same, of weights that are rows of wgmma, and parts of a batch of
// so many entries, or twice as many.
inline constexpr int64_t kStationaryRows = 32;
std::optional<ScanPlan> PlanStationaryWave(const ScanVariant& variant, const WaveForm& form,
                                           const Gpu& gpu);

// kernels/wave.cc: the same of a layer's block.
WaveConfig WaveConfigOf(const WaveForm& form, int64_t batch, int64_t units);
std::string ExpressionOf(const WaveConfig& config);

// kernels/resident.cc: the best of all ways to cut the batch into parts that one block scans, or a
// few do; none if these don't hold the weights. `by_name`: even where it was not measured.
std::optional<ScanPlan> PlanResident(const ScanVariant& variant, const ScanForm& scan,
                                     const Gpu& gpu, bool by_name);

// kernels/sparse.cc: the plan of a matrix that is laid out; none if it is laid out for something
// else. `by_name`: even where its layout would make it slow.
std::optional<ScanPlan> PlanPairs(const ScanVariant& variant, const ScanForm& scan, const Gpu& gpu,
                                  bool by_name);

inline constexpr int64_t kReservedShared = 1024;       // bytes of a multiprocessor that each block
                                                       // costs
inline constexpr double kClocks = 1.9e3;               // in a microsecond
inline constexpr int kMostThreadRegisters = 248;       // with some to spare
inline constexpr int64_t kMostBlockWeights = 1 << 25;  // far more than any block has room for

inline int64_t RoundUp(int64_t a, int64_t multiple) { return CeilDivide(a, multiple) * multiple; }
inline double Double(int64_t x) { return static_cast<double>(x); }
inline bool IsNarrow(DType dtype) { return SizeOf(dtype) == 2; }

// Bytes of an exchange buffer: of all steps, in whole lines of the cache.
inline int64_t ExchangeBytes(int64_t length, int64_t step_bytes) {
  return RoundUp(length * step_bytes, 128);
}

// What a kernel's Plan has beside types. `type` has the sizes of a block, as DenseSizes does;
// `config` is the expression that it is made of.
std::string PlanConstants(const char* type, const std::string& config, const ScanLaunches& launches,
                          bool barrier);

// What a plan says of a kernel, and of blocks of such sizes. It lacks when to poll and the times
// that are predicted.
template <typename Sizes>
ScanPlan PlanOfSizes(const ScanVariant& variant, const char* kernel, const Sizes& sizes,
                     const char* type, const std::string& config, const ScanLaunches& launches) {
  ScanPlan plan;
  plan.variant = &variant;
  plan.file = std::string("recurrent/kernels/") + kernel;
  plan.constants = PlanConstants(type, config, launches, variant.barrier);
  plan.blocks = sizes.blocks;
  plan.threads = sizes.threads;
  plan.shared_bytes = sizes.shared_bytes;
  plan.launches = launches;
  return plan;
}

// Predicted for all steps.
double TotalMicroseconds(const ScanPlan& plan, const ScanForm& form);

// Sets how a wave's blocks poll, and its times, if a step of a launch is predicted to take so long.
void PredictWave(const WaveForm& form, int poll_delay, double microseconds, ScanPlan* plan);

// The plan of a wave of so many groups of the batch, some of them at a time, whose steps are
// predicted to take so long in a launch.
template <typename Sizes>
ScanPlan PlanOfWave(const ScanVariant& variant, const WaveForm& form, const Sizes& sizes,
                    const DenseConfig& block, const char* type, const std::string& config,
                    int64_t groups, int64_t at_a_time, double microseconds) {
  const ScanLaunches launches{
      .groups = groups,
      .scans = at_a_time,
      .layers = form.layers,
      // The states before all steps, and that after the last one.
      .exchange_bytes = ExchangeBytes(form.length + 1, int64_t{sizes.slot} * sizes.state_bytes)};
  ScanPlan plan = PlanOfSizes(variant, "wave.cu", sizes, type, config, launches);
  PredictWave(form, DensePollDelay(block), microseconds, &plan);
  return plan;
}

// Replaces the best plan by one that is predicted to be faster.
void KeepFaster(std::optional<ScanPlan> plan, std::optional<ScanPlan>* best);

}  // namespace jaxsparse
