// Plans of waves (wave.cu).
#include "recurrent/kernels/wave.h"

#include <algorithm>
#include <iterator>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"

namespace jaxsparse {
namespace {

std::string ExpressionOf(const WaveMatrix& m) {
  return ConfigExpression("WaveMatrix", {Field("products", m.products), Field("states", m.states),
                                         Field("register_chunks", m.register_chunks)});
}
std::string ExpressionOf(const WaveSkip& s) {
  return ConfigExpression("WaveSkip", {Field("product", s.product), Field("state", s.state)});
}
std::string ExpressionOf(const WaveMean& m) {
  return ConfigExpression("WaveMean", {Field("product", m.product), Field("state", m.state),
                                       Field("squared", m.squared)});
}

// Each layer and part of the batch has so many multiprocessors.
struct WaveShare {
  int64_t groups = 1;
  int64_t batch = 1;  // of a part
  int64_t multiprocessors = 1;
};

constexpr int64_t kMostParts = 4;  // of a batch: more were measured in single scans only

// The own weights come first: what is read from shared memory while the own state is on its way
// costs less.
void KeepInRegisters(int registers, WaveConfig* config) {
  const WaveSizes sizes(*config);
  int left = std::max(0, registers - sizes.other_registers);
  config->own.register_chunks = std::min(sizes.own.loads, left / sizes.own.chunk_registers);
  left -= config->own.register_chunks * sizes.own.chunk_registers;
  config->below.register_chunks = std::min(sizes.below.loads, left / sizes.below.chunk_registers);
}

// Registers of a thread with so many items, each with what a step reads a step ahead. A word of a
// skip is that of two units.
int PointwiseRegisters(const WaveForm& form, const DenseBlock& block) {
  const int64_t values = form.inputs + 2 + 2 * form.state_parts + form.outputs;
  const int64_t skip = form.skip.product < 0 ? 0 : (block.items + 1) / 2;
  const int64_t registers = 56 + block.products + block.items * values + skip;
  return static_cast<int>(std::max<int64_t>(56, RoundUp(registers, 8)));
}

// Pointwise threads need fewer registers than product threads: these get the rest.
void DistributeRegisters(const WaveForm& form, WaveConfig* config) {
  constexpr int kPointwiseWarps = 4;
  DenseConfig& block = config->block;
  const int equal =
      std::min(EqualRegisters(block.warps + block.pointwise_warps, 1), kMostThreadRegisters);
  KeepInRegisters(equal, config);
  if (WaveSizes(*config).shared_bytes == WaveSizes(*config).weights_at || block.warps % 4 != 0) {
    return;
  }
  DenseConfig redistributed = block;
  redistributed.pointwise_warps = kPointwiseWarps;
  const int all =
      EqualRegisters(block.warps + kPointwiseWarps, 1) * (block.warps + kPointwiseWarps);
  const int few = PointwiseRegisters(form, DenseBlock(redistributed));
  const int many =
      std::min((all - kPointwiseWarps * few) / block.warps / 8 * 8, kMostThreadRegisters);
  if (many <= equal) return;
  block.pointwise_warps = kPointwiseWarps;
  block.product_registers = many;
  block.pointwise_registers = few;
  KeepInRegisters(many, config);
}

double Products(const WaveSizes& sizes, const WaveColumns& matrix) {
  return Double(int64_t{2} * matrix.loads * matrix.row_tiles * sizes.batch_tiles * sizes.warps) /
         kClocks;
}
double FromShared(const WaveColumns& matrix) { return Double(matrix.shared_bytes) / 128 / kClocks; }

// Fitted to 13 plans of LSTMs of 512 and 1024 units, their adjoints and RNNs of 1152 units on an
// H200, to within 5 %. What is read from shared memory for the layer below is hidden behind the
// exchange, but it holds up the threads that publish the state.
double WaveMicroseconds(const WaveSizes& sizes, int registers) {
  // KB that every block receives in a step.
  const double received = Double(int64_t{sizes.exchange_batch} * sizes.state_bytes) *
                          (sizes.own.columns + sizes.below.columns + sizes.means.columns) / 1e3;
  const double sums = Double(int64_t{4} * sizes.partials) / 128 / kClocks;
  const int waits = (sizes.own.loads + sizes.own.ahead - 1) / sizes.own.ahead;
  return 0.72 + 0.009 * received + 2.9 * Products(sizes, sizes.own) + 1.32 * FromShared(sizes.own) +
         0.785 * FromShared(sizes.below) + 1.43 * sums +
         0.025 * (sizes.own.loads + sizes.means.loads) * sizes.batch_tiles + 0.6 * (waits - 1) +
         0.1 * std::max(0, sizes.other_registers - registers);
}

std::optional<ScanPlan> PlanWaveBlock(const ScanVariant& variant, const WaveForm& form,
                                      const Gpu& gpu, const WaveShare& share, int64_t units,
                                      int warps, int loads_ahead) {
  WaveConfig config = WaveConfigOf(form, share.batch, units);
  DenseConfig& block = config.block;
  block.warps = warps;
  const auto item_warps =
      static_cast<int>(CeilDivide(units * DenseBlock(block).batch_slots, kWarp));
  block.pointwise_warps = std::min(item_warps, 4);
  if (WaveSizes(config).has_idle_warps || !WaveSizes(config).has_whole_tiles) return std::nullopt;
  const int registers =
      std::min(EqualRegisters(warps + block.pointwise_warps, 1), kMostThreadRegisters);
  if (loads_ahead != 0) {
    // Only where registers don't hold all states that would be on their way.
    if (WaveSizes(config).other_registers <= registers) return std::nullopt;
    block.loads_ahead = loads_ahead;
    if (WaveSizes(config).all_ahead) return std::nullopt;
  }
  DistributeRegisters(form, &config);
  const WaveSizes sizes(config);
  if (sizes.blocks > share.multiprocessors || sizes.shared_bytes > gpu.shared_bytes) {
    return std::nullopt;
  }
  ScanPlan plan = PlanOfWave(variant, form, sizes, block, "WaveSizes", ExpressionOf(config),
                             share.groups, share.groups, WaveMicroseconds(sizes, registers));
  const int64_t kept = sizes.own.register_chunks * sizes.own.chunk_registers +
                       sizes.below.register_chunks * sizes.below.chunk_registers;
  const int64_t all =
      sizes.own.loads * sizes.own.chunk_registers + sizes.below.loads * sizes.below.chunk_registers;
  plan.in_registers = Double(kept) / Double(all);
  return plan;
}

std::optional<ScanPlan> PlanWaveShare(const ScanVariant& variant, const WaveForm& form,
                                      const Gpu& gpu, const WaveShare& share) {
  const int64_t part = RoundUp(form.hidden, 16 / SizeOf(form.state_dtype));
  const int products = MatrixProducts({form.own_products}, {form.below_products});
  const int all = (1 << products) - 1;
  // Products of one matrix only take tiles of rows of their own.
  const int64_t multiple = form.own_products == all && form.below_products == all ? 8 : 16;
  const int64_t first = RoundUp(CeilDivide(part, share.multiprocessors), multiple);
  for (int64_t units = first; units < first + 4 * multiple; units += multiple) {
    const int64_t rows = products * units;
    if (rows < 16 && units < part) continue;  // a tensor core would multiply by rows of zeros
    if (Double(rows) * Double(form.state_parts) * Double(part) > kMostBlockWeights) continue;
    std::optional<ScanPlan> best;
    for (int warps = 1; warps <= 16; ++warps) {
      for (const int loads_ahead : {0, 8, 4}) {
        KeepFaster(PlanWaveBlock(variant, form, gpu, share, units, warps, loads_ahead), &best);
      }
    }
    if (best) return best;
  }
  return std::nullopt;
}

}  // namespace

WaveConfig WaveConfigOf(const WaveForm& form, int64_t batch, int64_t units) {
  WaveConfig config;
  config.own = {form.own_products, form.own_states};
  config.below = {form.below_products, form.below_states};
  config.skip = form.skip;
  std::copy(std::begin(form.means), std::end(form.means), config.means);
  config.scales = form.scales;
  config.block = DenseConfigOf(form, batch, units);
  config.block.products = MatrixProducts(config.own, config.below);
  config.block.tensor_cores = true;
  return config;
}

std::string ExpressionOf(const WaveConfig& c) {
  std::string means;
  for (const WaveMean& mean : c.means) means += (means.empty() ? "" : ", ") + ExpressionOf(mean);
  return ConfigExpression(
      "WaveConfig", {Field("block", ExpressionOf(c.block)), Field("own", ExpressionOf(c.own)),
                     Field("below", ExpressionOf(c.below)), Field("skip", ExpressionOf(c.skip)),
                     Field("means", "{" + means + "}"), Field("scales", c.scales)});
}

std::optional<ScanPlan> PlanWaveLayers(const ScanVariant& variant, const WaveForm& form,
                                       const Gpu& gpu) {
  std::optional<ScanPlan> best;
  for (const int64_t groups : kBatchParts) {
    WaveShare share{groups, form.batch / groups};
    if (groups > kMostParts) break;
    if (form.batch % groups != 0 || share.batch > MostDenseBatch(true)) continue;
    share.multiprocessors = gpu.multiprocessors / (form.layers * groups);
    if (share.multiprocessors == 0) continue;
    KeepFaster(PlanWaveShare(variant, form, gpu, share), &best);
  }
  return best;
}

}  // namespace jaxsparse
