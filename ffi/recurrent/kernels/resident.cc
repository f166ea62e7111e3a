// Plans of recurrent scans that one block makes (resident.cu).
#include "recurrent/kernels/resident.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"
#include "recurrent/problem.h"

namespace jaxsparse {
namespace {

// Batch entries of a block: more take as long as two blocks with half of them.
constexpr int64_t kMostRows = 16;

std::string ExpressionOf(const ResidentConfig& c) {
  return ConfigExpression(
      "ResidentConfig",
      {Field("products", c.products), Field("state_parts", c.state_parts),
       Field("state_bytes", c.state_bytes), Field("hidden", c.hidden), Field("batch", c.batch)});
}

// A model, of the clock cycles of what a step does one after the other.
double ResidentMicroseconds(const ResidentSizes& sizes) {
  const double loads = Double(int64_t{4} * sizes.warps * sizes.chunks * sizes.batch_tiles);
  const double products = Double(int64_t{2} * sizes.chunks * sizes.tiles);
  const double on_tensor_cores = 10 * products * static_cast<double>((sizes.warps + 3) / 4);
  const double in_turn = 35.0 * 2 * sizes.chunks / sizes.chains * std::min(sizes.tiles, 2);
  const double pointwise = 60.0 * sizes.cells * static_cast<double>((sizes.warps + 3) / 4);
  return 0.15 + (loads + std::max(on_tensor_cores, in_turn) + pointwise) / kClocks;
}

std::optional<ScanPlan> PlanOfParts(const ScanVariant& variant, const ScanForm& scan,
                                    const Gpu& gpu, int64_t groups) {
  ResidentConfig config;
  config.products = static_cast<int>(scan.products);
  config.state_parts = static_cast<int>(scan.state_parts);
  config.state_bytes = static_cast<int>(SizeOf(scan.state_dtype));
  config.hidden = static_cast<int>(scan.hidden);
  config.batch = static_cast<int>(scan.batch / groups);
  const ResidentSizes sizes(config);
  // What a lane keeps of its cells, inputs of the next step, too.
  const int64_t of_cells =
      sizes.cells * (2 * scan.inputs + scan.outputs + scan.products + scan.state_parts + 4);
  const int64_t registers = std::min<int64_t>(65536 / sizes.threads / 8 * 8, kMostThreadRegisters);
  if (sizes.weight_registers + sizes.other_registers + of_cells > registers ||
      sizes.shared_bytes > gpu.shared_bytes) {
    return std::nullopt;
  }
  ScanLaunches launches{.directions = scan.directions, .groups = groups};
  launches.scans =
      std::min<int64_t>({launches.All(), kMaxScansOfLaunch, int64_t{gpu.multiprocessors}});
  ScanPlan plan =
      PlanOfSizes(variant, "resident.cu", sizes, "ResidentSizes", ExpressionOf(config), launches);
  plan.microseconds = ResidentMicroseconds(sizes) * Double(plan.launches.Count());
  plan.in_registers = 1;
  plan.total_microseconds = TotalMicroseconds(plan, scan);
  return plan;
}

}  // namespace

std::optional<ScanPlan> PlanResident(const ScanVariant& variant, const ScanForm& scan,
                                     const Gpu& gpu) {
  constexpr int64_t kMostUnits = 256;  // whose warps a block has room for
  std::optional<ScanPlan> best;
  if (scan.hidden > kMostUnits || scan.products > 16 || scan.state_parts > 16) return best;
  for (int64_t rows = 1; rows <= std::min(kMostRows, scan.batch); ++rows) {
    if (scan.batch % rows != 0) continue;
    KeepFaster(PlanOfParts(variant, scan, gpu, scan.batch / rows), &best);
  }
  return best;
}

}  // namespace jaxsparse
