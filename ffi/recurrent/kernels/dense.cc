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

// Of blocks of many scans side by side, on tensor cores: warps that make products, pointwise warps
// if there are items for so many, and loads on their way at once (0: all).
struct ManyScansKind {
  int warps, pointwise_warps, loads_ahead;
};
constexpr ManyScansKind kManyScansKinds[] = {{4, 4, 0}, {4, 8, 0}, {8, 4, 0}, {8, 4, 4},
                                             {8, 4, 8}, {8, 8, 0}, {8, 8, 4}, {8, 8, 8}};
// What has been measured of them.
constexpr int64_t kLeastManyBatch = 8;  // entries of a scan
constexpr int64_t kLeastManyScans = 4, kMostManyScans = 8;
// Of other blocks: parts of a batch, only some of which are side by side.
constexpr int64_t kMostPartsOfFew = 4;

// One of the scans that share a GPU, or of those that follow each other.
struct DenseShare {
  int64_t groups = 1;  // parts of the batch
  int64_t batch = 1;   // of a part
  int64_t scans = 1;   // side by side
  int resident = 1;
  int64_t multiprocessors = 1;  // for this scan, those that blocks share counted for each
  int64_t shared_bytes = 0;     // of a block
  bool many = false;            // blocks of kManyScansKinds
};

// How many of a product thread's chunks its registers hold.
int ChunksThatFit(const DenseSizes& sizes, int registers) {
  const int chunks = std::max(0, registers - sizes.other_registers) / sizes.chunk_registers;
  return std::min(sizes.loads, chunks);
}

// What a pointwise thread with several items needs: found by compiling adjoints and forward passes
// of LSTMs, GRUs and RNNs.
int PointwiseRegisters(const ScanForm& scan, const DenseSizes& sizes) {
  const int64_t inputs = sizes.near > 1 ? scan.inputs : 2 * scan.inputs;
  const int64_t item = inputs + 2 * (scan.outputs + scan.state_parts);
  return static_cast<int>(RoundUp(32 + sizes.items * item, 8));
}

// Registers of a thread that makes products and of one that makes the pointwise step.
struct DenseRegisters {
  int product = 0, pointwise = 0;
};

// Decides which weights stay in registers, and whether it is better that threads don't get equal
// shares of them.
DenseRegisters DistributeRegisters(const ScanForm& scan, bool many_scans, DenseConfig* config) {
  const DenseSizes sizes(*config);
  const int warps = config->warps, pointwise = config->pointwise_warps;
  const int equal = EqualRegisters(warps + pointwise, config->resident);
  const int share = std::min(equal, kMostThreadRegisters);
  config->product_registers = config->pointwise_registers = 0;
  config->register_chunks = ChunksThatFit(sizes, share);
  const auto give = [&](int warps_of_items, int few) {
    const int threads = warps + warps_of_items;
    const int all = EqualRegisters(threads, config->resident) * threads;
    const int many = std::min((all - warps_of_items * few) / warps / 8 * 8, kMostThreadRegisters);
    config->pointwise_warps = warps_of_items;
    config->product_registers = many;
    config->pointwise_registers = few;
    config->register_chunks = ChunksThatFit(sizes, many);
    return DenseRegisters{many, few};
  };
  const bool all_fit = config->register_chunks == sizes.loads;
  if (many_scans) {
    const int needed = PointwiseRegisters(scan, sizes);
    const bool can_give = warps % 4 == 0 && pointwise % 4 == 0 && needed < equal;
    return can_give && !all_fit ? give(pointwise, needed) : DenseRegisters{share, share};
  }
  const bool light =
      scan.inputs + scan.outputs + scan.products <= 10 && config->units * sizes.batch_slots <= 128;
  if (all_fit || warps % 4 != 0 || !light) return {share, share};
  // Pointwise threads need few registers: the product's get theirs.
  const int few = config->tensor_cores ? 56 : 72;
  const DenseConfig before = *config;
  const DenseRegisters registers = give(4, few);
  const bool gains = few <= EqualRegisters(warps + 4, config->resident) &&
                     config->register_chunks > before.register_chunks;
  if (gains) return registers;
  *config = before;
  return {share, share};
}

// Fitted to measurements of some 100 plans on an H200, to within 7 % on average. `item_warps`: as
// many as there are items.
double DenseMicroseconds(const ScanForm& scan, const DenseShare& share, const DenseSizes& sizes,
                         int item_warps, DenseRegisters registers) {
  const int resident = sizes.resident;
  const int64_t scans = share.scans;
  // KB that every block receives in a step.
  const double received = Double(static_cast<int64_t>(sizes.slot) * sizes.state_bytes) / 1e3;
  const double from_shared =
      Double(static_cast<int64_t>(resident) * (sizes.shared_bytes - sizes.weights_at)) / 128 /
      kClocks;
  const double spilled = resident * std::max(0, sizes.other_registers - registers.product);
  if (sizes.tensor_cores) {
    // On one tensor core of four.
    const double products =
        Double(int64_t{2} * sizes.loads * sizes.row_tiles * sizes.batch_tiles * sizes.warps) /
        kClocks;
    // What a step reads and writes beside the exchanged state, in MB.
    const double streamed = 2e-6 * Double((scan.inputs + scan.outputs + scan.state_parts) * scans *
                                          sizes.batch * scan.hidden);
    // Where a thread's items don't fit its registers, each load of an input is waited for.
    const int lacking =
        sizes.items > 1 ? std::max(0, PointwiseRegisters(scan, sizes) - registers.pointwise) : 0;
    return 0.45 + 0.014 * received +
           0.39 * Double(scans) * sizes.blocks * received / 5.5e3  // what the L2 cache sends
           + 1.5 * resident * products + 0.52 * from_shared + 0.064 * sizes.ahead +
           (0.0045 + 0.0092 * (sizes.products - 1)) * sizes.warps + (scans > 1 ? 0.12 : 0.0) +
           0.074 * (sizes.state_parts - 1) +
           0.24 * sizes.products *
               std::max(0.0, static_cast<double>(item_warps) / sizes.pointwise_warps - 2) +
           0.15 * (sizes.items - 1) + 0.1 * spilled + 0.3 * lacking + (share.many ? 0.3 : 0.0) +
           0.25 * streamed;
  }
  const int64_t multiplied = int64_t{1} * resident * sizes.rows * sizes.columns * sizes.batch;
  return 0.25 + 0.03 * received + Double(multiplied) / 128 / kClocks + 0.53 * from_shared +
         0.032 * sizes.loads + 0.02 * sizes.warps + (scans > 1 ? 0.3 : 0.0) + 0.1 * spilled;
}

// A block of a plan, and the time of a step that is predicted with it.
struct PlannedBlock {
  DenseConfig config;
  double microseconds = 0;
};

// One with so many units and warps, if it fits and is faster.
void KeepFasterBlock(const ScanForm& scan, const DenseShare& share, DenseConfig config,
                     std::optional<PlannedBlock>* best) {
  const int item_warps =
      static_cast<int>(CeilDivide(config.units * DenseSizes(config).batch_slots, kWarp));
  config.pointwise_warps = std::min(item_warps, config.pointwise_warps);
  if (DenseSizes(config).has_idle_warps) return;
  const DenseRegisters registers = DistributeRegisters(scan, share.many, &config);
  const DenseSizes sizes(config);
  if (sizes.blocks > share.multiprocessors || sizes.shared_bytes > share.shared_bytes ||
      !sizes.gets_its_registers) {
    return;
  }
  const double microseconds = DenseMicroseconds(scan, share, sizes, item_warps, registers);
  if (!*best || microseconds < (*best)->microseconds) *best = {config, microseconds};
}

// Where not all weights fit registers, a warp that asks for half of its columns at a time leaves
// more of them to weights: faster where it was measured, an adjoint of 8 batch entries and 8 loads.
void AskForLessAhead(const ScanForm& scan, const DenseShare& share, PlannedBlock* block) {
  const DenseSizes sizes(block->config);
  if (!sizes.tensor_cores || sizes.loads != 8 || sizes.batch != 8 || sizes.resident > 1) return;
  std::optional<PlannedBlock> fewer;
  DenseConfig config = block->config;
  config.loads_ahead = 4;
  KeepFasterBlock(scan, share, config, &fewer);
  if (fewer && fewer->config.register_chunks > sizes.register_chunks) *block = *fewer;
}

ScanPlan PlanOf(const ScanVariant& variant, const ScanForm& scan, const DenseShare& share,
                const PlannedBlock& block) {
  const DenseSizes sizes(block.config);
  const ScanLaunches launches{
      .directions = scan.directions,
      .groups = share.groups,
      .scans = share.scans,
      .exchange_bytes = ExchangeBytes(scan.length, int64_t{sizes.slot} * sizes.state_bytes),
      .dense_bytes = scan.sparse ? WeightsOf(scan) * SizeOf(scan.weight_dtype) : 0};
  ScanPlan plan =
      PlanOfSizes(variant, "dense.cu", sizes, "DenseSizes", ExpressionOf(block.config), launches);
  plan.poll_delay = DensePollDelay(block.config);
  plan.poll_delay_increase = variant.tensor_cores ? 8 : 0;
  plan.poll_delay_decrease = variant.tensor_cores ? 2 : 0;
  plan.microseconds = block.microseconds * Double(plan.launches.Count());
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
    DenseConfig config = DenseConfigOf(scan, share.batch, units);
    config.tensor_cores = variant.tensor_cores;
    config.batch_tile = std::min(4, config.batch);
    config.resident = share.resident;
    std::optional<PlannedBlock> best;
    if (share.many) {
      for (const ManyScansKind& kind : kManyScansKinds) {
        config.warps = kind.warps;
        config.pointwise_warps = kind.pointwise_warps;
        config.loads_ahead = kind.loads_ahead;
        KeepFasterBlock(scan, share, config, &best);
      }
    } else {
      config.pointwise_warps = 4;  // twice and four times as many were not faster
      for (config.warps = 1; config.warps <= 16; ++config.warps) {
        KeepFasterBlock(scan, share, config, &best);
      }
      if (best) AskForLessAhead(scan, share, &*best);
    }
    // More, smaller blocks do better, as far as there are multiprocessors.
    if (best) return PlanOf(variant, scan, share, *best);
  }
  return std::nullopt;
}

}  // namespace

DenseConfig DenseConfigOf(const ScanForm& form, int64_t batch, int64_t units) {
  DenseConfig config;
  config.products = static_cast<int>(form.products);
  config.state_parts = static_cast<int>(form.state_parts);
  config.state_bytes = static_cast<int>(SizeOf(form.state_dtype));
  config.hidden = static_cast<int>(form.hidden);
  config.batch = static_cast<int>(batch);
  config.units = static_cast<int>(units);
  return config;
}

std::string ExpressionOf(const DenseConfig& c) {
  return ConfigExpression(
      "DenseConfig",
      {Field("products", c.products), Field("state_parts", c.state_parts),
       Field("state_bytes", c.state_bytes), Field("hidden", c.hidden), Field("batch", c.batch),
       Field("units", c.units), Field("warps", c.warps),
       Field("pointwise_warps", c.pointwise_warps), Field("tensor_cores", c.tensor_cores),
       Field("warpgroups", c.warpgroups), Field("column_parts", c.column_parts),
       Field("register_chunks", c.register_chunks), Field("loads_ahead", c.loads_ahead),
       Field("product_registers", c.product_registers),
       Field("pointwise_registers", c.pointwise_registers), Field("groups_beside", c.groups_beside),
       Field("row_groups", c.row_groups), Field("batch_tile", c.batch_tile),
       Field("resident", c.resident)});
}

int DensePollDelay(const DenseConfig& config) {
  if (config.batch > 8) return 1200;
  if (config.batch > 4 || config.state_parts > 1 || config.product_registers != 0) return 900;
  if (!config.tensor_cores) return 600;
  return config.products == 1 ? 700 : 800;
}

int64_t MostBatchParts(bool tensor_cores) { return tensor_cores ? 16 : kMostPartsOfFew; }

// More would spill registers.
int64_t MostDenseBatch(bool tensor_cores) { return tensor_cores ? 32 : 16; }

std::optional<ScanPlan> PlanDense(const ScanVariant& variant, const ScanForm& scan,
                                  const Gpu& gpu) {
  std::optional<ScanPlan> best;
  const auto keep = [&](DenseShare share) {
    share.multiprocessors = int64_t{gpu.multiprocessors} * share.resident / share.scans;
    share.shared_bytes = (gpu.shared_bytes + kReservedShared) / share.resident - kReservedShared;
    if (share.multiprocessors > 0) KeepFaster(PlanDenseShare(variant, scan, share), &best);
  };
  const int64_t few_scans = std::min<int64_t>(2 * scan.directions, kMaxScansOfLaunch);
  for (const int64_t groups : kBatchParts) {
    const int64_t batch = scan.batch / groups;
    if (scan.batch % groups != 0 || batch > MostDenseBatch(variant.tensor_cores)) continue;
    const int64_t all = scan.directions * groups;
    const int64_t few = groups > kMostPartsOfFew ? 0 : std::min(all, few_scans);
    for (int64_t scans = few; scans > 0; scans = FewerScans(all, scans)) {
      for (int resident = 1; resident <= std::min<int64_t>(2, scans); ++resident) {
        keep({groups, batch, scans, resident});
      }
    }
    if (!variant.tensor_cores || batch < kLeastManyBatch) continue;
    for (int64_t scans = std::min(all, kMostManyScans); scans >= kLeastManyScans;
         scans = FewerScans(all, scans)) {
      DenseShare share{groups, batch, scans};
      share.many = true;
      keep(share);
    }
  }
  return best;
}

}  // namespace jaxsparse
