// Plans of recurrent scans with dense weights, and with sparse ones in dense form (dense.cu). The
// rules for the constants, and the model of the time of a step, come from measurements on an H200
// (docs/performance.md).
#include "recurrent/kernels/dense.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"
#include "recurrent/problem.h"

namespace jaxsparse {
namespace {

int64_t WeightsOf(const ScanForm& form) {
  return form.products * form.state_parts * form.hidden * form.hidden;
}

// One of the scans that share a GPU, or of those that follow each other.
struct DenseShare {
  int64_t groups = 1;  // parts of the batch
  int64_t batch = 1;   // of a part
  int64_t scans = 1;   // side by side
  int resident = 1;
  int64_t multiprocessors = 1;  // for this scan, those that blocks share counted for each
  int64_t shared_bytes = 0;     // of a block
};

// How many of a product thread's chunks its registers hold.
int ChunksThatFit(const DenseSizes& sizes, int registers) {
  const int chunks = std::max(0, registers - sizes.other_registers) / sizes.chunk_registers;
  return std::min(sizes.loads, chunks);
}

// Decides which weights stay in registers, of which each thread has so many if all get the same,
// and whether it is better that they don't.
void DistributeRegisters(const ScanForm& scan, int registers, DenseConfig* config) {
  const DenseSizes sizes(*config);
  const int warps = config->warps, resident = config->resident;
  config->register_chunks = ChunksThatFit(sizes, registers);
  const bool light =
      scan.inputs + scan.outputs + scan.products <= 10 && config->units * sizes.batch_slots <= 128;
  if (config->register_chunks == sizes.loads || warps % 4 != 0 || !light) return;
  // Pointwise threads need few registers: the product's get theirs.
  const int equal = EqualRegisters(warps + 4, resident);
  const int few = config->tensor_cores ? 56 : 72;
  const int many = std::min((equal * (warps + 4) - 4 * few) / warps / 8 * 8, kMostThreadRegisters);
  if (few > equal || equal > many) return;
  const int more_chunks = ChunksThatFit(sizes, many);
  if (more_chunks <= config->register_chunks) return;
  config->pointwise_warps = 4;
  config->product_registers = many;
  config->pointwise_registers = few;
  config->register_chunks = more_chunks;
}

// Fitted to measurements of some 100 plans on an H200, to within 7 % on average. `pointwise_warps`
// and `registers` are those of threads before registers were redistributed.
double DenseMicroseconds(const DenseSizes& sizes, int64_t scans, int item_warps, int registers) {
  const int resident = sizes.resident;
  // KB that every block receives in a step.
  const double received = Double(static_cast<int64_t>(sizes.slot) * sizes.state_bytes) / 1e3;
  const double from_shared =
      Double(static_cast<int64_t>(resident) * (sizes.shared_bytes - sizes.weights_at)) / 128 /
      kClocks;
  const double spilled = resident * std::max(0, sizes.other_registers - registers);
  if (sizes.tensor_cores) {
    // On one tensor core of four.
    const double products =
        Double(int64_t{2} * sizes.loads * sizes.row_tiles * sizes.batch_tiles * sizes.warps) /
        kClocks;
    return 0.45 + 0.014 * received +
           0.39 * Double(scans) * sizes.blocks * received / 5.5e3  // what the L2 cache sends
           + 1.5 * resident * products + 0.52 * from_shared + 0.064 * sizes.loads +
           (0.0045 + 0.0092 * (sizes.products - 1)) * sizes.warps + (scans > 1 ? 0.12 : 0.0) +
           0.074 * (sizes.state_parts - 1) +
           0.24 * sizes.products *
               std::max(0.0, static_cast<double>(item_warps) / sizes.pointwise_warps - 2) +
           0.1 * spilled;
  }
  const int64_t multiplied = int64_t{1} * resident * sizes.rows * sizes.columns * sizes.batch;
  return 0.25 + 0.03 * received + Double(multiplied) / 128 / kClocks + 0.53 * from_shared +
         0.032 * sizes.loads + 0.02 * sizes.warps + (scans > 1 ? 0.3 : 0.0) + 0.1 * spilled;
}

// A plan with so many units and product warps.
std::optional<ScanPlan> PlanDenseBlock(const ScanVariant& variant, const ScanForm& scan,
                                       const DenseShare& share, int64_t units, int warps) {
  DenseConfig config;
  config.products = static_cast<int>(scan.products);
  config.state_parts = static_cast<int>(scan.state_parts);
  config.state_bytes = static_cast<int>(SizeOf(scan.state_dtype));
  config.hidden = static_cast<int>(scan.hidden);
  config.batch = static_cast<int>(share.batch);
  config.units = static_cast<int>(units);
  config.warps = warps;
  config.tensor_cores = variant.tensor_cores;
  config.batch_tile = std::min(4, config.batch);
  config.resident = share.resident;
  // Twice and four times as many pointwise warps were not faster.
  const int item_warps =
      static_cast<int>(CeilDivide(units * DenseSizes(config).batch_slots, kWarp));
  config.pointwise_warps = std::min(item_warps, 4);
  const int registers = std::min(EqualRegisters(warps + config.pointwise_warps, share.resident),
                                 kMostThreadRegisters);
  if (DenseSizes(config).has_idle_warps) return std::nullopt;
  DistributeRegisters(scan, registers, &config);
  const DenseSizes sizes(config);
  if (sizes.blocks > share.multiprocessors || sizes.shared_bytes > share.shared_bytes) {
    return std::nullopt;
  }
  ScanPlan plan;
  plan.variant = &variant;
  plan.file = "recurrent/kernels/dense.cu";
  plan.blocks = sizes.blocks;
  plan.threads = sizes.threads;
  plan.shared_bytes = sizes.shared_bytes;
  plan.launches = {
      .directions = scan.directions,
      .groups = share.groups,
      .scans = share.scans,
      .exchange_bytes = ExchangeBytes(scan.length, int64_t{sizes.slot} * sizes.state_bytes),
      .dense_bytes = scan.sparse ? WeightsOf(scan) * SizeOf(scan.weight_dtype) : 0};
  plan.constants =
      PlanConstants("DenseSizes", ExpressionOf(config), plan.launches, variant.barrier);
  plan.poll_delay = DensePollDelay(sizes);
  plan.poll_delay_increase = variant.tensor_cores ? 8 : 0;
  plan.poll_delay_decrease = variant.tensor_cores ? 2 : 0;
  plan.microseconds =
      DenseMicroseconds(sizes, share.scans, item_warps, registers) * Double(plan.launches.Count());
  plan.in_registers = static_cast<double>(sizes.register_chunks) / sizes.loads;
  plan.resident = share.resident;
  plan.total_microseconds = TotalMicroseconds(plan, scan);
  return plan;
}

// How many side by side make the next more launches of so many scans; 0 if there is no more.
int64_t FewerScans(int64_t all, int64_t scans) {
  return scans == 1 ? 0 : CeilDivide(all, CeilDivide(all, scans - 1));
}

// The best plan of one of so many scans side by side, on its share of the GPU.
std::optional<ScanPlan> PlanDenseShare(const ScanVariant& variant, const ScanForm& scan,
                                       const DenseShare& share) {
  const int64_t part = RoundUp(scan.hidden, 16 / SizeOf(scan.state_dtype));
  const int64_t multiple = variant.tensor_cores ? 8 : 4;
  const int64_t first = RoundUp(CeilDivide(part, share.multiprocessors), multiple);
  for (int64_t units = first; units < first + 4 * multiple; units += multiple) {
    const int64_t rows = scan.products * units;
    if (variant.tensor_cores && rows < 16 && units < part) {
      continue;  // a tensor core would multiply by rows of zeros
    }
    if (Double(rows) * Double(scan.state_parts) * Double(part) > kMostBlockWeights) continue;
    std::optional<ScanPlan> best;
    for (int warps = 1; warps <= 16; ++warps) {
      KeepFaster(PlanDenseBlock(variant, scan, share, units, warps), &best);
    }
    if (best) return best;  // more, smaller blocks do better, as far as there are multiprocessors
  }
  return std::nullopt;
}

}  // namespace

std::string ExpressionOf(const DenseConfig& c) {
  return ConfigExpression(
      "DenseConfig",
      {Field("products", c.products), Field("state_parts", c.state_parts),
       Field("state_bytes", c.state_bytes), Field("hidden", c.hidden), Field("batch", c.batch),
       Field("units", c.units), Field("warps", c.warps),
       Field("pointwise_warps", c.pointwise_warps), Field("tensor_cores", c.tensor_cores),
       Field("register_chunks", c.register_chunks), Field("product_registers", c.product_registers),
       Field("pointwise_registers", c.pointwise_registers), Field("row_groups", c.row_groups),
       Field("batch_tile", c.batch_tile), Field("resident", c.resident)});
}

int DensePollDelay(const DenseConfig& config) {
  if (config.batch > 8) return 1200;
  if (config.batch > 4 || config.state_parts > 1 || config.product_registers != 0) return 900;
  if (!config.tensor_cores) return 600;
  return config.products == 1 ? 700 : 800;
}

// More would spill registers.
int64_t MostDenseBatch(bool tensor_cores) { return tensor_cores ? 32 : 16; }

std::optional<ScanPlan> PlanDense(const ScanVariant& variant, const ScanForm& scan,
                                  const Gpu& gpu) {
  std::optional<ScanPlan> best;
  // More than two parts of a batch side by side have not been measured.
  const int64_t most_scans = std::min<int64_t>(2 * scan.directions, kMaxScansOfLaunch);
  for (const int64_t groups : kBatchParts) {
    const int64_t batch = scan.batch / groups;
    if (scan.batch % groups != 0 || batch > MostDenseBatch(variant.tensor_cores)) continue;
    const int64_t all = scan.directions * groups;
    for (int64_t scans = std::min(all, most_scans); scans > 0; scans = FewerScans(all, scans)) {
      for (int resident = 1; resident <= std::min<int64_t>(2, scans); ++resident) {
        DenseShare share{groups, batch, scans, resident};
        share.multiprocessors = int64_t{gpu.multiprocessors} * resident / scans;
        share.shared_bytes = (gpu.shared_bytes + kReservedShared) / resident - kReservedShared;
        if (share.multiprocessors == 0) continue;
        KeepFaster(PlanDenseShare(variant, scan, share), &best);
      }
    }
  }
  return best;
}

}  // namespace jaxsparse
