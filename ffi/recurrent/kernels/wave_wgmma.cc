// Plans of waves whose products are those of warpgroups (wave_wgmma.cuh).
#include "recurrent/kernels/wave_wgmma.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"

namespace jaxsparse {
namespace {

constexpr int64_t kMostParts = 4;   // of a batch
constexpr int64_t kMostRows = 128;  // of a part

std::string ExpressionOf(const WaveWgmmaConfig& c) {
  return ConfigExpression("WaveWgmmaConfig", {Field("wave", jaxsparse::ExpressionOf(c.wave)),
                                              Field("asks_ahead", c.asks_ahead)});
}

// What a block's warps are: parts of the columns, and pointwise warps.
struct WgmmaKind {
  int parts, pointwise_warps;
  bool asks_ahead;
  int loads_ahead;
};

// Of one matrix: each product takes as long as 16 columns for 32 at least.
double Products(const WaveWgmmaSizes& sizes, const WgmmaColumns& matrix) {
  const int64_t of_tile = int64_t{2} * matrix.loads * sizes.parts * sizes.row_parts;
  return Double(of_tile) * std::max(17.0, 0.53 * matrix.lines) / kClocks;
}

double WgmmaMicroseconds(const WaveWgmmaSizes& sizes, int64_t scans, int product_registers) {
  const double column = Double(int64_t{sizes.exchange_batch} * sizes.state_bytes) / 1e3;  // KB
  const double own = column * sizes.own.columns, below = column * sizes.below.columns;
  const double sent = 0.1 * Double(scans) * sizes.blocks * (own + below) / 5.5e3;
  const double exchange = 0.55 + 0.007 * own + 0.004 * below + sent;
  const double sums = 2.0 * 4 * sizes.partials / 128 / kClocks;
  const double meanwhile = Products(sizes, sizes.below) + (sizes.asks_ahead ? 0.15 : 0.7);
  const double portions =
      Double(sizes.own.loads - sizes.own.ahead + sizes.below.loads - sizes.below.ahead) /
      sizes.own.ahead;
  return std::max(exchange, meanwhile) + Products(sizes, sizes.own) + sums + 0.3 + 0.3 * portions +
         0.1 * std::max(0, sizes.other_registers - product_registers);
}

std::optional<ScanPlan> PlanBlock(const ScanVariant& variant, const WaveForm& form, const Gpu& gpu,
                                  int64_t groups, int64_t units, const WgmmaKind& kind) {
  WaveWgmmaConfig config{.wave = WaveConfigOf(form, form.batch / groups, units),
                         .asks_ahead = kind.asks_ahead};
  DenseConfig& block = config.wave.block;
  block.warpgroups = true;
  block.loads_ahead = kind.loads_ahead;
  block.warps = 4 * kind.parts * DenseBlock(block).row_parts;
  block.pointwise_warps = kind.pointwise_warps;
  const int warps = block.warps + block.pointwise_warps;
  if (warps > 32) return std::nullopt;
  const int equal = EqualRegisters(warps, 1), all = equal * warps;
  // Pointwise warps can only give some up.
  const int few = RegistersBesideWarpgroups(form, DenseBlock(block));
  block.pointwise_registers = std::min({few, equal, kMostThreadRegisters});
  block.product_registers =
      std::min((all - block.pointwise_warps * block.pointwise_registers) / block.warps / 8 * 8,
               kMostThreadRegisters);
  const WaveWgmmaSizes sizes(config);
  if (block.product_registers < 64 || sizes.has_idle_warps || !sizes.has_whole_tiles ||
      sizes.blocks > gpu.multiprocessors / (form.layers * groups) ||
      sizes.shared_bytes > gpu.shared_bytes) {
    return std::nullopt;
  }
  const double microseconds =
      WgmmaMicroseconds(sizes, form.layers * groups, block.product_registers) +
      0.05 * (few - block.pointwise_registers);
  return PlanOfWave(variant, form, sizes, block, "WaveWgmmaSizes", ExpressionOf(config), groups,
                    groups, microseconds);
}

}  // namespace

int RegistersBesideWarpgroups(const WaveForm& form, const DenseBlock& block) {
  const int64_t inputs = block.near > 1 ? (form.inputs + 1) / 2 : form.inputs;
  const int64_t item = inputs + 2 + 2 * form.state_parts + form.outputs;
  const int64_t registers = 40 + form.products + block.items * item;
  return static_cast<int>(std::max<int64_t>(56, RoundUp(registers, 8)));
}

std::optional<ScanPlan> PlanWaveByWarpgroups(const ScanVariant& variant, const WaveForm& form,
                                             const Gpu& gpu) {
  constexpr int64_t kMultiple = 8;  // of units
  std::optional<ScanPlan> best;
  for (int64_t groups = 1; groups <= kMostParts; groups *= 2) {
    if (form.batch % groups != 0 || form.batch / groups > kMostRows) continue;
    const int64_t multiprocessors = gpu.multiprocessors / (form.layers * groups);
    if (multiprocessors == 0) continue;
    const int64_t first = RoundUp(CeilDivide(form.hidden, multiprocessors), kMultiple);
    // Sums of a warpgroup have at most 128 columns.
    const int products = MatrixProducts({form.own_products}, {form.below_products});
    for (int64_t units = first; units * products <= 128 && units < first + 4 * kMultiple;
         units += kMultiple) {
      for (const int parts : {1, 2, 4}) {
        for (const int pointwise_warps : {4, 8}) {
          for (const bool asks_ahead : {true, false}) {
            for (const int loads_ahead : {0, 8, 4}) {
              KeepFaster(PlanBlock(variant, form, gpu, groups, units,
                                   {parts, pointwise_warps, asks_ahead, loads_ahead}),
                         &best);
            }
          }
        }
      }
    }
  }
  return best;
}

}  // namespace jaxsparse
