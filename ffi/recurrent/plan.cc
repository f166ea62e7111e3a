// The choice of a plan. Its constants come from measurements on an H200 (docs/performance.md).
#include "recurrent/plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"

namespace jaxsparse {
namespace {

constexpr int64_t kStaysInCache = 4 << 20;  // bytes of an exchange buffer, beside what a scan
                                            // reads and writes
constexpr double kCacheMegabytes = 50;
constexpr double kStart = 15.0;       // microseconds in which a launch clears its buffers and loads
                                      // weights
constexpr int kWarpgroups = 90;       // the compute capability of the GPUs that have wgmma
constexpr double kWriteOut = 1.2e-6;  // microseconds for each byte of a sparse matrix in dense form

std::string NameOf(DType dtype) {
  for (const NamedScanDType& named : kScanDTypes) {
    if (named.value == dtype) return named.name;
  }
  return "";
}

// Fitted to measurements on an H200. Beyond 64 rows products fill the GPU better: a row takes less.
double LoopMicroseconds(const ScanForm& form) {
  const bool wide = !IsNarrow(form.state_dtype) || !IsNarrow(form.weight_dtype);
  const double size = Double(form.directions) / Double(form.loops) *
                      Double(form.products * form.state_parts) * Double(form.hidden) *
                      Double(form.hidden) * (wide ? 4 : 2);
  const double megabytes = size / 1e6;
  const double start = wide ? 5.3 : 3.6, per_megabyte = wide ? 0.2 : 0.11;
  const int64_t fewer_rows = wide ? form.batch : std::min<int64_t>(form.batch, 64);
  const double more_rows = Double(form.batch - fewer_rows);
  const double cached = start + per_megabyte * megabytes +
                        (0.03 + 0.005 * megabytes) * Double(fewer_rows) +
                        (0.002 * megabytes + 6.5e-6 * Double(form.hidden)) * more_rows;
  const double from_memory = megabytes > kCacheMegabytes ? megabytes / 4 : 0.0;
  const double before = form.sparse ? size * kWriteOut : 0.0;
  return Double(form.loops) * (Double(form.length) * std::max(cached, from_memory) + before);
}

// Why no kernel takes a scan of such sizes; empty if some may. Within these bounds the sizes of all
// plans are those of their integers.
std::string ReasonAgainstSizes(const ScanForm& form) {
  const auto more = [](int64_t count, const char* what, int64_t most) {
    return std::to_string(count) + what + " are more than " + std::to_string(most);
  };
  if (form.batch == 0 || form.length == 0) return "there is nothing to scan";
  if (form.products > kMaxScanArrays) {
    return more(form.products, " products of a step", kMaxScanArrays);
  }
  if (form.state_parts > kMaxScanArrays) {
    return more(form.state_parts, " states of a step", kMaxScanArrays);
  }
  if (form.directions > kMaxDirections) return more(form.directions, " matrices", kMaxDirections);
  const int64_t most_units = kMaxMatrixRows / std::max(form.products, form.state_parts);
  return form.hidden > most_units ? more(form.hidden, " units", most_units) : "";
}

// Why a variant can't run a scan on any GPU; empty if it can on some.
std::string ReasonAgainst(const ScanVariant& variant, const ScanForm& form) {
  const std::string batch = "a batch of " + std::to_string(form.batch) + " is more than ";
  if (form.sparse != (variant.weights != ScanWeights::kDense)) {
    return form.sparse ? "the weights are sparse" : "the weights are dense";
  }
  if (variant.weights == ScanWeights::kPairs) {
    if (!form.layout_form) {
      return !form.not_laid_out.empty()
                 ? form.not_laid_out
                 : "its matrix is not laid out: recurrent.pack does, if it fits";
    }
    const int most = MostPairsBatch(static_cast<int>(SizeOf(form.state_dtype)));
    return form.batch > most ? batch + std::to_string(most) : "";
  }
  const int64_t most = MostDenseBatch(variant.tensor_cores);
  const int64_t most_parts = MostBatchParts(variant.tensor_cores);
  if (!variant.resident &&
      std::all_of(std::begin(kBatchParts), std::end(kBatchParts), [&](int64_t parts) {
        return parts > most_parts || form.batch % parts != 0 || form.batch / parts > most;
      })) {
    return batch + std::to_string(most) + ", and not 2 to " + std::to_string(most_parts) +
           " equal parts of at most that";
  }
  const bool narrow = form.state_dtype == form.weight_dtype && IsNarrow(form.state_dtype);
  if (variant.tensor_cores && !narrow) {
    return "needs 16-bit state and weights of one dtype, got " + NameOf(form.state_dtype) +
           " and " + NameOf(form.weight_dtype);
  }
  if (!variant.tensor_cores && narrow) return "16-bit products run on tensor cores";
  return "";
}

// Where waves may exchange sums though nobody asked for them: adjoints whose states are so many
// that sums are fewer, of batches that were measured. Those of few rows may be faster by states.
constexpr int64_t kMostRowsOfSums = 64, kLeastStatesOfSums = 3;

bool TakesSums(const WaveForm& form) {
  return form.products == 1 && form.state_parts >= kLeastStatesOfSums && form.skip.product < 0 &&
         form.means[0].product < 0 && form.batch <= kMostRowsOfSums;
}

std::string DoesNotFit(const ScanForm& scan, const Gpu& gpu) {
  const std::string hidden = std::to_string(scan.hidden);
  return std::to_string(scan.products) + " x " + std::to_string(scan.state_parts) + " x " + hidden +
         " x " + hidden + " weights in " + NameOf(scan.weight_dtype) + " and a batch of " +
         std::to_string(scan.batch) + " don't fit the registers and shared memory of " +
         std::to_string(gpu.multiprocessors) + " multiprocessors";
}

}  // namespace

std::string PlanConstants(const char* type, const std::string& config, const ScanLaunches& launches,
                          bool barrier) {
  const bool prefetch = launches.exchange_bytes > kStaysInCache;
  std::string text = "  static constexpr jaxsparse::";
  text += type;
  text += " kSizes{" + config + "};\n";
  text += "  static constexpr int kScans = " + std::to_string(launches.scans) + ";\n";
  text += "  static constexpr int kBlocks = kSizes.blocks;\n";
  text += "  static constexpr int kLayers = " + std::to_string(launches.layers) + ";\n";
  text += "  static constexpr int kGroups = " + std::to_string(launches.groups) + ";\n";
  text += "  static constexpr int kLaunches = " + std::to_string(launches.Count()) + ";\n";
  text += "  static constexpr bool kBarrier = " + Literal(barrier) + ";\n";
  text += "  static constexpr bool kPrefetch = " + Literal(prefetch) + ";\n";
  return text;
}

double TotalMicroseconds(const ScanPlan& plan, const ScanForm& form) {
  const ScanLaunches& launches = plan.launches;
  const double before = Double(launches.Count()) * kStart +
                        Double(launches.directions * launches.dense_bytes) * kWriteOut;
  return Double(form.length) * plan.microseconds + before;
}

void PredictWave(const WaveForm& form, int poll_delay, double microseconds, ScanPlan* plan) {
  plan->poll_delay = poll_delay;
  plan->poll_delay_increase = 8;
  plan->poll_delay_decrease = 2;
  plan->microseconds = microseconds * Double(plan->launches.Count());
  plan->total_microseconds =
      TotalMicroseconds(*plan, form) + Double(form.layers - 1) * plan->microseconds;
}

void KeepFaster(std::optional<ScanPlan> plan, std::optional<ScanPlan>* best) {
  if (plan && (!*best || plan->total_microseconds < (*best)->total_microseconds)) {
    *best = std::move(plan);
  }
}

ScanChoice PlanWave(const WaveForm& form, const Gpu& gpu, const std::string& wanted) {
  ScanChoice choice;
  choice.reason = ReasonAgainstSizes(form);
  if (!choice.reason.empty()) return choice;
  const bool narrow = form.state_dtype == form.weight_dtype && IsNarrow(form.state_dtype);
  const bool takes_sums = TakesSums(form);
  for (const ScanVariant& variant : kWaveVariants) {
    const bool of_many = form.batch > kMostRowsOfMma;
    const bool by_default = variant.sums ? takes_sums
                                         : !variant.barrier && !(of_many && takes_sums) &&
                                               variant.warpgroups == of_many &&
                                               variant.stationary == of_many;
    if (wanted.empty() ? !by_default : wanted != variant.name) continue;
    if (!narrow) {
      choice.reason = "needs 16-bit state and weights of one dtype, got " +
                      NameOf(form.state_dtype) + " and " + NameOf(form.weight_dtype);
    } else if (variant.warpgroups && gpu.compute_capability != kWarpgroups) {
      choice.reason = "products of warpgroups run on GPUs of compute capability 9.0 alone";
    } else if (form.layers > kMaxLayersOfWave) {
      choice.reason = std::to_string(form.layers) + " layers are more than the " +
                      std::to_string(kMaxLayersOfWave) + " of a launch";
    } else if (variant.warpgroups && form.means[0].product >= 0) {
      choice.reason = "products of warpgroups give no means of the states below, which norms take";
    } else if (variant.sums && (form.skip.product >= 0 || form.means[0].product >= 0)) {
      choice.reason = "blocks send sums of matrices, and no skips or norms";
    } else if (variant.sums && form.products != 1) {
      choice.reason =
          "blocks send sums of one product, and a step has " + std::to_string(form.products);
    } else if (variant.stationary && form.own_products != form.below_products) {
      choice.reason = "some gates take only one of the two matrices, as those of a GRU do";
    } else if (variant.stationary && form.batch % kStationaryRows != 0) {
      choice.reason = "a batch of " + std::to_string(form.batch) + " is no multiple of " +
                      std::to_string(kStationaryRows);
    } else {
      KeepFaster(variant.sums         ? PlanWaveOfSums(variant, form, gpu)
                 : variant.stationary ? PlanStationaryWave(variant, form, gpu)
                 : variant.warpgroups ? PlanWaveByWarpgroups(variant, form, gpu)
                                      : PlanWaveLayers(variant, form, gpu),
                 &choice.best);
      if (!choice.best) {
        choice.reason = std::to_string(form.layers) + " layers of " + DoesNotFit(form, gpu);
      }
    }
  }
  return choice;
}

ScanChoice PlanScan(const ScanForm& form, const Gpu& gpu, const std::string& wanted) {
  ScanChoice choice;
  choice.most_batch =
      MostDenseBatch(IsNarrow(form.state_dtype)) * MostBatchParts(IsNarrow(form.state_dtype));
  choice.reason = ReasonAgainstSizes(form);
  if (!choice.reason.empty()) return choice;
  choice.loop_microseconds = LoopMicroseconds(form);
  for (const ScanVariant& variant : kScanVariants) {
    const bool by_default =
        !variant.barrier && form.sparse == (variant.weights != ScanWeights::kDense);
    if (wanted.empty() ? !by_default : wanted != variant.name) continue;
    std::string reason = ReasonAgainst(variant, form);
    if (reason.empty()) {
      const bool pairs = variant.weights == ScanWeights::kPairs;
      std::optional<ScanPlan> plan = pairs ? PlanPairs(variant, form, gpu, !wanted.empty())
                                     : variant.resident
                                         ? PlanResident(variant, form, gpu, !wanted.empty())
                                         : PlanDense(variant, form, gpu);
      if (!plan && pairs) {
        reason =
            "its matrix is laid out for another batch, dtype or GPU, or does not fit: "
            "recurrent.pack it for what one device gets";
      } else if (!plan) {
        reason = variant.resident
                     ? "no few blocks have room for its weights, and for what belongs to "
                       "a part of the batch"
                     : DoesNotFit(form, gpu);
      }
      KeepFaster(std::move(plan), &choice.best);
    }
    if (!reason.empty()) {
      if (!choice.reason.empty()) choice.reason += "; ";
      choice.reason += std::string(variant.name) + ": " + reason;
    }
  }
  return choice;
}

}  // namespace jaxsparse
