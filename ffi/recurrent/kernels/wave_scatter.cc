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
// As compiled: of a tile's sums with their products, and of all that a pointwise warp does with
// what it receives at a time.
constexpr double kTileInstructions = 90, kPortionInstructions = 900;

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

// A model that was not fitted: the terms are those of wave_scatter.cuh.
double ScatterMicroseconds(const WaveScatterSizes& sizes) {
  const double received =
      Double(int64_t{16} * sizes.unit_tiles * sizes.quarters * sizes.blocks * 8) /
      kMailboxBytes;  // from one layer
  const int waits = static_cast<int>(
      CeilDivide(int64_t{sizes.rounds} * sizes.mailbox_loads, sizes.mailbox_ahead));
  const double own = SendMicroseconds(sizes, sizes.own),
               above = SendMicroseconds(sizes, sizes.below);
  const double in_the_way = 0.8 + own + received + 0.3 * (waits - 1) + 0.2 * sizes.rounds;
  // Instructions of a quarter of the multiprocessor.
  const int64_t tiles = int64_t{sizes.own.loads + sizes.below.loads} * sizes.warps * sizes.pairs;
  const double issued =
      (kTileInstructions * Double(tiles) + kPortionInstructions * Double(sizes.portions)) / 4 /
      kClocks;
  return std::max({in_the_way, own + above + 0.3, 2 * received + 0.6 * waits, issued});
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
  // Pointwise warps can only give some up.
  const int few = PointwiseRegisters(form, WaveScatterSizes(config));
  block.pointwise_registers = std::min({few, equal, kMostThreadRegisters});
  block.product_registers = std::min(
      (equal * warps - block.pointwise_warps * block.pointwise_registers) / block.warps / 8 * 8,
      kMostThreadRegisters);
  KeepInRegisters(block.product_registers, &config);
  const WaveScatterSizes sizes(config);
  if (block.product_registers < sizes.other_registers ||
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
  plan.poll_delay = kPollDelay;
  plan.poll_delay_increase = 8;
  plan.poll_delay_decrease = 2;
  plan.microseconds =
      ScatterMicroseconds(sizes) + 0.05 * std::max(0, few - block.pointwise_registers);
  plan.total_microseconds =
      TotalMicroseconds(plan, form) + Double(form.layers - 1) * plan.microseconds;
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
