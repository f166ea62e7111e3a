// Plans of waves whose blocks send each other sums (wave_scatter.cuh).
#include "recurrent/kernels/wave_scatter.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"

namespace jaxsparse {
namespace {

constexpr int64_t kMostParts = 4;  // of a batch
constexpr int64_t kMostRows = 64;  // of a part
constexpr int kPollDelay = 1200;
// What the L2 cache gives a multiprocessor, bytes in a microsecond; clock cycles of a product of
// 16 x 16 x 8 on one of four tensor cores, and of what a warp does with the sums of a tile.
constexpr double kMailboxBytes = 42e3, kProductClocks = 9.5, kStoreClocks = 50;
// Clock cycles of a quarter of the multiprocessor: for the sums of a tile with their products, of 8
// or of 16 batch entries, and for all that a pointwise warp does with what it receives at a time.
constexpr double kTileClocks = 120, kTwoTilesClocks = 200, kPortionClocks = 1300;

// What a block's warps are, and how many loads a pointwise thread waits for together.
struct ScatterKind {
  int warps, pointwise_warps, mailbox_ahead;
};

std::string ExpressionOf(const WaveScatterConfig& c) {
  return ConfigExpression("WaveScatterConfig", {Field("wave", jaxsparse::ExpressionOf(c.wave))});
}

// Registers of a thread: for what it receives, and for what a step reads a step ahead.
int PointwiseRegisters(const WaveForm& form, const WaveScatterSizes& sizes) {
  const int64_t near = form.hidden % 2 == 0 ? 2 : 1;
  const int64_t item = CeilDivide(form.inputs, near) + 6 + form.state_parts + form.outputs;
  const int64_t at_once = std::max<int64_t>(sizes.mailbox_registers, 2 * sizes.rounds * item);
  return static_cast<int>(RoundUp(64 + at_once, 8));
}

// The own weights come first: what is read from shared memory for them is in the way.
void KeepInRegisters(int registers, WaveScatterConfig* config) {
  const WaveScatterSizes sizes(*config);
  int left = std::max(0, registers - sizes.other_registers);
  WaveConfig& wave = config->wave;
  wave.own.register_chunks = std::min(sizes.own.loads, left / sizes.own.tile_registers);
  left -= wave.own.register_chunks * sizes.own.tile_registers;
  wave.below.register_chunks = std::min(sizes.below.loads, left / sizes.below.tile_registers);
}

// Of one matrix; its weights in shared memory are read for each pair of tiles of the batch. A warp
// rounds and stores the sums of a tile while others of its quarter of the multiprocessor multiply.
double SendMicroseconds(const WaveScatterSizes& sizes, const ScatterColumns& matrix) {
  const int64_t together = CeilDivide(sizes.warps, 4);
  const double tiles = Double(matrix.loads * sizes.pairs * together);
  const double clocks = tiles * sizes.together * matrix.steps * kProductClocks +
                        tiles * kStoreClocks / Double(together);
  const double shared = Double(int64_t{matrix.shared_bytes} * sizes.pairs) / 128;
  return std::max(clocks, shared) / kClocks;
}

// Fitted to 17 plans of adjoints of LSTMs of 256, 512 and 1024 units and of GRUs of 256 and 512, of
// 1 to 64 rows, on an H200, less 0.07 ms a call: most to within 10 %, an adjoint of a GRU of 512
// units for 32 rows takes a fifth less.
double ScatterMicroseconds(const WaveScatterSizes& sizes) {
  const double received =
      Double(int64_t{16} * sizes.unit_tiles * sizes.quarters * sizes.blocks * 8) /
      kMailboxBytes;  // from one layer
  const int waits = static_cast<int>(
      CeilDivide(int64_t{sizes.rounds} * sizes.mailbox_loads, sizes.mailbox_ahead));
  const double in_the_way = 1.5 + 0.09 * sizes.rounds * sizes.mailbox_loads + 0.3 * (waits - 1);
  const int64_t loads = int64_t{sizes.own.loads + sizes.below.loads} * sizes.pairs;
  const double tile = sizes.together == 2 ? kTwoTilesClocks : kTileClocks;
  const double clocks = tile * Double(loads * sizes.warps) + kPortionClocks * sizes.portions;
  const double sent =
      SendMicroseconds(sizes, sizes.own) + SendMicroseconds(sizes, sizes.below) + 0.3;
  const double many_warps = 0.025 * std::max(0, sizes.warps + sizes.pointwise_warps - 12) +
                            0.1 * std::max(0, sizes.warps - 8);
  return std::max({in_the_way, clocks / 4 / kClocks, sent, 2 * received + 0.6 * waits}) +
         0.02 * Double(loads) + 0.12 * sizes.rounds + many_warps;
}

std::optional<ScanPlan> PlanBlock(const ScanVariant& variant, const WaveForm& form, const Gpu& gpu,
                                  int64_t groups, int64_t units, const ScatterKind& kind) {
  WaveScatterConfig config{.wave = WaveConfigOf(form, form.batch / groups, units)};
  DenseConfig& block = config.wave.block;
  block.warps = kind.warps;
  block.pointwise_warps = kind.pointwise_warps;
  block.loads_ahead = kind.mailbox_ahead;
  const int warps = block.warps + block.pointwise_warps, equal = EqualRegisters(warps, 1);
  if (warps > 32 || WaveScatterSizes(config).has_idle_warps ||
      !WaveScatterSizes(config).has_whole_tiles) {
    return std::nullopt;
  }
  const int few = PointwiseRegisters(form, WaveScatterSizes(config));
  int of_pointwise = std::min(equal, kMostThreadRegisters), of_products = of_pointwise;
  if (block.warps % 4 == 0) {  // Pointwise warps can only give some up.
    of_pointwise = std::min(few, of_pointwise);
    of_products =
        std::min((equal * warps - block.pointwise_warps * of_pointwise) / block.warps / 8 * 8,
                 kMostThreadRegisters);
    block.pointwise_registers = of_pointwise;
    block.product_registers = of_products;
  }
  KeepInRegisters(of_products, &config);
  const WaveScatterSizes sizes(config);
  if (of_products < sizes.other_registers ||
      sizes.blocks > gpu.multiprocessors / (form.layers * groups) ||
      sizes.shared_bytes > gpu.shared_bytes) {
    return std::nullopt;
  }
  const ScanLaunches launches{.groups = groups,
                              .scans = groups,
                              .layers = form.layers,
                              .exchange_bytes = RoundUp(sizes.exchange_bytes, 128)};
  ScanPlan plan = PlanOfSizes(variant, "wave_scatter.cu", sizes, "WaveScatterSizes",
                              ExpressionOf(config), launches);
  PredictWave(form, kPollDelay, ScatterMicroseconds(sizes) + 0.05 * std::max(0, few - of_pointwise),
              &plan);
  const auto registers = [](const ScatterColumns& m) { return m.register_chunks * m.steps; };
  const auto all = [](const ScatterColumns& m) { return m.loads * m.steps; };
  plan.in_registers = Double(registers(sizes.own) + registers(sizes.below)) /
                      Double(all(sizes.own) + all(sizes.below));
  return plan;
}

}  // namespace

std::optional<ScanPlan> PlanWaveOfSums(const ScanVariant& variant, const WaveForm& form,
                                       const Gpu& gpu) {
  constexpr int64_t kMultiple = 16;  // of units
  std::optional<ScanPlan> best;
  for (int64_t groups = 1; groups <= kMostParts; groups *= 2) {
    if (form.batch % groups != 0 || form.batch / groups > kMostRows) continue;
    const int64_t multiprocessors = gpu.multiprocessors / (form.layers * groups);
    if (multiprocessors == 0) continue;
    const int64_t first = RoundUp(CeilDivide(form.hidden, multiprocessors), kMultiple);
    if (Double(form.hidden) * Double(first * form.state_parts) > kMostBlockWeights) continue;
    for (int64_t units = first; units <= first + kMultiple; units += kMultiple) {
      for (const int warps : {1, 2, 4, 8, 12, 16}) {
        for (const int pointwise_warps : {4, 8, 16}) {
          for (const int mailbox_ahead : {0, 16, 8, 4}) {
            KeepFaster(PlanBlock(variant, form, gpu, groups, units,
                                 {warps, pointwise_warps, mailbox_ahead}),
                       &best);
          }
        }
      }
    }
  }
  return best;
}

}  // namespace jaxsparse
