// The rules for the constants, and the models of the time of a step, come from measurements on an
// H200 (docs/performance.md).
#include "recurrent/plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "nvrtc/expression.h"
#include "recurrent/kernels/dense_sizes.h"
#include "recurrent/problem.h"

namespace jaxsparse {
namespace {

constexpr int64_t kBatchParts[] = {1, 2, 4};    // a scan each, side by side or one after another
constexpr int64_t kCacheLine = 128;             // bytes
constexpr int64_t kReservedShared = 1024;       // bytes of a multiprocessor that each block costs
constexpr int64_t kStaysInCache = 4 << 20;      // bytes of an exchange buffer, beside what a scan
                                                // reads and writes
constexpr int64_t kMostBlockWeights = 1 << 25;  // far more than any block has room for
constexpr double kCacheMegabytes = 50;
constexpr double kStart = 15.0;       // microseconds in which a launch clears its buffers and loads
                                      // weights
constexpr double kWriteOut = 1.2e-6;  // microseconds for each byte of a sparse matrix in dense form
constexpr double kClocks = 1.9e3;     // in a microsecond

int64_t RoundUp(int64_t a, int64_t multiple) { return CeilDivide(a, multiple) * multiple; }

double Double(int64_t x) { return static_cast<double>(x); }

bool IsNarrow(DType dtype) { return SizeOf(dtype) == 2; }

// More would spill registers.
int64_t MostDenseBatch(bool tensor_cores) { return tensor_cores ? 32 : 16; }

std::string NameOf(DType dtype) {
  for (const NamedScanDType& named : kScanDTypes) {
    if (named.dtype == dtype) return named.name;
  }
  return "";
}

int64_t WeightsOf(const ScanForm& form) {
  return form.products * form.states * form.hidden * form.hidden;
}

// Predicted for all steps.
double TotalMicroseconds(const ScanPlan& plan, const ScanForm& form) {
  const int64_t launches = form.directions * plan.groups / plan.scans;
  const double before =
      Double(launches) * kStart + Double(form.directions * plan.dense_bytes) * kWriteOut;
  return Double(form.length) * plan.microseconds + before;
}

// Fitted to measurements on an H200.
double LoopMicroseconds(const ScanForm& form) {
  const bool wide = !IsNarrow(form.state_dtype) || !IsNarrow(form.weight_dtype);
  const double size = Double(form.products * form.states) * Double(form.hidden) *
                      Double(form.hidden) * (wide ? 4 : 2);
  const double megabytes = size / 1e6;
  const double start = wide ? 5.3 : 3.6, per_megabyte = wide ? 0.2 : 0.11;
  const double cached =
      start + per_megabyte * megabytes + (0.03 + 0.005 * megabytes) * Double(form.batch);
  const double from_memory = megabytes > kCacheMegabytes ? megabytes / 4 : 0.0;
  const double before = form.sparse ? size * kWriteOut : 0.0;
  return Double(form.directions) * (Double(form.length) * std::max(cached, from_memory) + before);
}

// Why a variant can't run a scan on any GPU; empty if it can on some.
std::string ReasonAgainst(const ScanVariant& variant, const ScanForm& form) {
  const std::string batch = "a batch of " + std::to_string(form.batch) + " is more than ";
  if (form.sparse != (variant.weights != ScanWeights::kDense)) {
    return form.sparse ? "the weights are sparse" : "the weights are dense";
  }
  if (variant.weights == ScanWeights::kPairs) {
    if (!form.layout_form) {
      return "the pattern is traced or does not fit: recurrent.pack tells, and lays it out "
             "beforehand";
    }
    const int most = MostPairsBatch(static_cast<int>(SizeOf(form.state_dtype)));
    return form.batch > most ? batch + std::to_string(most) : "";
  }
  const int64_t most = MostDenseBatch(variant.tensor_cores);
  if (std::all_of(std::begin(kBatchParts), std::end(kBatchParts), [&](int64_t parts) {
        return form.batch % parts != 0 || form.batch / parts > most;
      })) {
    return batch + std::to_string(most) + ", and not 2 or 4 parts of at most that";
  }
  const bool narrow = form.state_dtype == form.weight_dtype && IsNarrow(form.state_dtype);
  if (variant.tensor_cores && !narrow) {
    return "needs 16-bit state and weights of one dtype, got " + NameOf(form.state_dtype) +
           " and " + NameOf(form.weight_dtype);
  }
  if (!variant.tensor_cores && narrow) return "16-bit products run on tensor cores";
  return "";
}

// What a kernel's Plan has beside types. `config` is the expression that makes a `type`, DenseSizes
// or SparseSizes.
std::string Constants(const char* type, const std::string& config, int64_t scans, bool barrier,
                      int64_t exchange_bytes) {
  const bool prefetch = exchange_bytes > kStaysInCache;
  std::string text = "  static constexpr jaxsparse::";
  text += type;
  text += " kSizes{" + config + "};\n";
  text += "  static constexpr int kScans = " + std::to_string(scans) + ";\n";
  text += "  static constexpr int kBlocks = kSizes.blocks;\n";
  text += "  static constexpr bool kBarrier = " + Literal(barrier) + ";\n";
  text += "  static constexpr bool kPrefetch = " + Literal(prefetch) + ";\n";
  return text;
}

// ---- Sparse matrices as pairs ----

std::string ExpressionOf(const SparseConfig& c) {
  const SparseShape& s = c.form.shape;
  const std::string shape = ConfigExpression(
      "SparseShape", {Field("products", s.products), Field("state_parts", s.state_parts),
                      Field("blocks", s.blocks), Field("cluster", s.cluster),
                      Field("units", s.units), Field("threads", s.threads), Field("lanes", s.lanes),
                      Field("entries", s.entries), Field("group", s.group)});
  const std::string form = ConfigExpression(
      "SparseForm", {Field("shape", shape), Field("partial_sums", c.form.partial_sums),
                     Field("row_sums", c.form.row_sums), Field("piece_bytes", c.form.piece_bytes)});
  return ConfigExpression("SparseConfig",
                          {Field("form", form), Field("state_bytes", c.state_bytes),
                           Field("batch", c.batch), Field("shared_entries", c.shared_entries),
                           Field("cell_threads", c.cell_threads), Field("packed", c.packed)});
}

// The plan of a matrix that is laid out; none if it is laid out for something else. `by_name`: even
// where its layout would make it slow.
std::optional<ScanPlan> PlanPairs(const ScanVariant& variant, const ScanForm& scan, const Gpu& gpu,
                                  bool by_name) {
  const SparseForm& form = *scan.layout_form;
  const SparseShape& shape = form.shape;
  const bool side_by_side = scan.directions * shape.blocks <= gpu.multiprocessors;
  const int64_t scans = side_by_side ? scan.directions : 1;
  SparseConfig config;
  config.form = form;
  config.state_bytes = static_cast<int>(SizeOf(scan.state_dtype));
  config.batch = PaddedBatch(static_cast<int>(scan.batch), config.state_bytes);
  const int widest = WidestPiece(scan.batch, config.state_bytes);
  if (shape.products != scan.products || shape.state_parts != scan.states ||
      form.piece_bytes > widest || shape.blocks > gpu.multiprocessors) {
    return std::nullopt;
  }
  if (form.piece_bytes < widest && !by_name) {
    return std::nullopt;  // for another batch; it would do, but slowly
  }
  const int64_t cells = static_cast<int64_t>(shape.units) * config.batch;
  config.cell_threads = static_cast<int>(std::max<int64_t>(
      kWarp, std::min<int64_t>({RoundUp(cells, kWarp), 1024 - shape.threads, 256})));
  const int64_t threads = shape.threads + config.cell_threads;
  // A register holds an index, another one its value; what has no room lies in shared memory.
  config.packed = IsNarrow(scan.weight_dtype) && shape.part_columns() + 64 <= 1 << 16 &&
                  scan.weight_dtype == scan.state_dtype;
  const int64_t registers =
      std::min<int64_t>(65536 / RoundUp(threads, 4 * kWarp) / 8 * 8, kMostThreadRegisters);
  const int64_t room =
      std::max<int64_t>(0, registers - 44 - config.batch) / (config.packed ? 1 : 2) / shape.lanes;
  config.shared_entries = static_cast<int>(std::max<int64_t>(0, shape.entries - room));
  const int64_t shared_slots =
      static_cast<int64_t>(config.shared_entries) * shape.lanes * shape.threads;
  if (shared_slots > kMostBlockWeights) return std::nullopt;
  const SparseSizes sizes(config);
  if (sizes.shared_bytes + kStaticSharedBytes > gpu.shared_bytes) return std::nullopt;

  // Fitted to measurements of 17 layers on an H200, to within 4 % on average.
  const double received = sizes.pieces * sizes.part_plane / 1e3;
  const int per_entry = config.state_bytes == 4 ? 5 : 9;
  const double issued = Double(static_cast<int64_t>(shape.lanes) * shape.entries * shape.threads) /
                        kWarp * per_entry * config.batch / 4 / 4 / kClocks;
  const double from_shared = Double(shared_slots * 8) / 128 / kClocks;
  const double microseconds = 0.81 + 0.0216 * received + 1.87 * issued + 2.16 * from_shared +
                              (sizes.clustered ? 0.72 : 0.0) + 0.05 * Double(scan.products - 1);
  ScanPlan plan;
  plan.variant = &variant;
  plan.file = "recurrent/recurrent_scan_sparse.cu";
  plan.blocks = sizes.blocks;
  plan.threads = sizes.threads;
  plan.shared_bytes = sizes.shared_bytes;
  plan.exchange_bytes = RoundUp(scan.length * sizes.slot, kCacheLine);
  plan.constants =
      Constants("SparseSizes", ExpressionOf(config), scans, variant.barrier, plan.exchange_bytes);
  plan.poll_delay = 900;
  plan.poll_delay_increase = 64;
  plan.poll_delay_decrease = 2;
  plan.microseconds = microseconds * Double(scan.directions / scans);
  plan.in_registers = 1 - static_cast<double>(config.shared_entries) / shape.entries;
  plan.cluster = shape.cluster;
  plan.scans = scans;
  plan.total_microseconds = TotalMicroseconds(plan, scan);
  return plan;
}

// ---- Dense weights, and sparse ones in dense form ----

std::string ExpressionOf(const DenseConfig& c) {
  return ConfigExpression(
      "DenseConfig",
      {Field("products", c.products), Field("states", c.states),
       Field("state_bytes", c.state_bytes), Field("hidden", c.hidden), Field("batch", c.batch),
       Field("units", c.units), Field("warps", c.warps),
       Field("pointwise_warps", c.pointwise_warps), Field("tensor_cores", c.tensor_cores),
       Field("register_chunks", c.register_chunks), Field("product_registers", c.product_registers),
       Field("pointwise_registers", c.pointwise_registers), Field("row_groups", c.row_groups),
       Field("batch_tile", c.batch_tile), Field("resident", c.resident)});
}

// One of the scans that share a GPU, or of those that follow each other.
struct DenseShare {
  int64_t groups = 1;    // parts of the batch
  int64_t batch = 1;     // of a part
  int64_t scans = 1;     // side by side
  int64_t launches = 1;  // one after another
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
double DenseMicroseconds(const DenseSizes& sizes, int64_t scans, int cell_warps, int registers) {
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
           0.074 * (sizes.states - 1) +
           0.24 * sizes.products *
               std::max(0.0, static_cast<double>(cell_warps) / sizes.pointwise_warps - 2) +
           0.1 * spilled;
  }
  const int64_t multiplied = int64_t{1} * resident * sizes.rows * sizes.columns * sizes.batch;
  return 0.25 + 0.03 * received + Double(multiplied) / 128 / kClocks + 0.53 * from_shared +
         0.032 * sizes.loads + 0.02 * sizes.warps + (scans > 1 ? 0.3 : 0.0) + 0.1 * spilled;
}

int DensePollDelay(const DenseSizes& sizes) {
  if (sizes.batch > 8) return 1200;
  if (sizes.batch > 4 || sizes.states > 1 || sizes.product_registers != 0) return 900;
  if (!sizes.tensor_cores) return 600;
  return sizes.products == 1 ? 700 : 800;
}

// A plan with so many units and product warps.
std::optional<ScanPlan> PlanDenseBlock(const ScanVariant& variant, const ScanForm& scan,
                                       const DenseShare& share, int64_t units, int warps) {
  DenseConfig config;
  config.products = static_cast<int>(scan.products);
  config.states = static_cast<int>(scan.states);
  config.state_bytes = static_cast<int>(SizeOf(scan.state_dtype));
  config.hidden = static_cast<int>(scan.hidden);
  config.batch = static_cast<int>(share.batch);
  config.units = static_cast<int>(units);
  config.warps = warps;
  config.tensor_cores = variant.tensor_cores;
  config.batch_tile = std::min(4, config.batch);
  config.resident = share.resident;
  // Twice and four times as many pointwise warps were not faster.
  const int cell_warps =
      static_cast<int>(CeilDivide(units * DenseSizes(config).batch_slots, kWarp));
  config.pointwise_warps = std::min(cell_warps, 4);
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
  plan.file = "recurrent/recurrent_scan_dense.cu";
  plan.blocks = sizes.blocks;
  plan.threads = sizes.threads;
  plan.shared_bytes = sizes.shared_bytes;
  plan.exchange_bytes = RoundUp(scan.length * sizes.slot * sizes.state_bytes, kCacheLine);
  plan.constants = Constants("DenseSizes", ExpressionOf(config), share.scans, variant.barrier,
                             plan.exchange_bytes);
  plan.poll_delay = DensePollDelay(sizes);
  plan.poll_delay_increase = variant.tensor_cores ? 8 : 0;
  plan.poll_delay_decrease = variant.tensor_cores ? 2 : 0;
  plan.microseconds =
      DenseMicroseconds(sizes, share.scans, cell_warps, registers) * Double(share.launches);
  plan.in_registers = static_cast<double>(sizes.register_chunks) / sizes.loads;
  plan.groups = share.groups;
  plan.scans = share.scans;
  plan.resident = share.resident;
  plan.dense_bytes = scan.sparse ? WeightsOf(scan) * SizeOf(scan.weight_dtype) : 0;
  plan.total_microseconds = TotalMicroseconds(plan, scan);
  return plan;
}

void KeepFaster(std::optional<ScanPlan> plan, std::optional<ScanPlan>* best) {
  if (plan && (!*best || plan->total_microseconds < (*best)->total_microseconds)) {
    *best = std::move(plan);
  }
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
    if (Double(rows) * Double(scan.states) * Double(part) > kMostBlockWeights) continue;
    std::optional<ScanPlan> best;
    for (int warps = 1; warps <= 16; ++warps) {
      KeepFaster(PlanDenseBlock(variant, scan, share, units, warps), &best);
    }
    if (best) return best;  // more, smaller blocks do better, as far as there are multiprocessors
  }
  return std::nullopt;
}

// The best of all ways to share the GPU among scans, or to let them follow each other.
std::optional<ScanPlan> PlanDense(const ScanVariant& variant, const ScanForm& scan,
                                  const Gpu& gpu) {
  std::optional<ScanPlan> best;
  // More than two of a direction side by side have not been measured.
  const int64_t most_scans = std::min<int64_t>(2 * scan.directions, kMaxScansOfLaunch);
  for (const int64_t groups : kBatchParts) {
    const int64_t batch = scan.batch / groups;
    if (scan.batch % groups != 0 || batch > MostDenseBatch(variant.tensor_cores)) continue;
    for (int64_t scans = 1; scans <= most_scans; ++scans) {
      if (scan.directions * groups % scans != 0) continue;
      for (int resident = 1; resident <= std::min<int64_t>(2, scans); ++resident) {
        DenseShare share{groups, batch, scans, scan.directions * groups / scans, resident};
        share.multiprocessors = int64_t{gpu.multiprocessors} * resident / scans;
        share.shared_bytes = (gpu.shared_bytes + kReservedShared) / resident - kReservedShared;
        if (share.multiprocessors == 0) continue;
        KeepFaster(PlanDenseShare(variant, scan, share), &best);
      }
    }
  }
  return best;
}

std::string DoesNotFit(const ScanForm& scan, const Gpu& gpu) {
  const std::string hidden = std::to_string(scan.hidden);
  return std::to_string(scan.products) + " x " + std::to_string(scan.states) + " x " + hidden +
         " x " + hidden + " weights in " + NameOf(scan.weight_dtype) + " and a batch of " +
         std::to_string(scan.batch) + " don't fit the registers and shared memory of " +
         std::to_string(gpu.multiprocessors) + " multiprocessors";
}

}  // namespace

ScanChoice PlanScan(const ScanForm& form, const Gpu& gpu, const std::string& wanted) {
  ScanChoice choice;
  choice.most_batch = MostDenseBatch(IsNarrow(form.state_dtype)) * *std::rbegin(kBatchParts);
  choice.loop_microseconds = LoopMicroseconds(form);
  for (const ScanVariant& variant : kScanVariants) {
    const bool by_default =
        !variant.barrier && form.sparse == (variant.weights != ScanWeights::kDense);
    if (wanted.empty() ? !by_default : wanted != variant.name) continue;
    std::string reason = ReasonAgainst(variant, form);
    if (reason.empty()) {
      const bool pairs = variant.weights == ScanWeights::kPairs;
      std::optional<ScanPlan> plan =
          pairs ? PlanPairs(variant, form, gpu, !wanted.empty()) : PlanDense(variant, form, gpu);
      if (!plan && pairs) {
        reason =
            "its matrix is laid out for another batch, dtype or GPU, or does not fit: "
            "recurrent.pack it for what one device gets";
      } else if (!plan) {
        reason = DoesNotFit(form, gpu);
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
