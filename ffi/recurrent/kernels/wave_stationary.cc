// Plans of waves whose weights are the stationary operand of warpgroups (wave_stationary.cuh).
#include "recurrent/kernels/wave_stationary.h"

#include <algorithm>
#include <iterator>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"

namespace jaxsparse {
namespace {

constexpr int64_t kMostRows = 256;   // of a block's weights
constexpr int kLeastRegisters = 56;  // of a pointwise thread
constexpr double kLatency = 0.55;    // microseconds from publishing a state to its first bytes
constexpr double kOfCache = 42;      // KB a microsecond that the L2 cache sends a multiprocessor

std::string ExpressionOf(const WaveStationaryConfig& c) {
  return ConfigExpression("WaveStationaryConfig", {Field("wave", jaxsparse::ExpressionOf(c.wave)),
                                                   Field("portions", c.portions)});
}

// How a part of the batch is shared out: the parts that the columns are split into, and so on. An
// LSTM of 4 x 512 units and 64 batch entries took 3.4 us a step on an H200 with 1 or 2 portions,
// and 4.2 with 4.
struct StationaryKind {
  int parts, portions;
};

constexpr StationaryKind kKinds[] = {{1, 1}, {1, 2}, {2, 1}};

// There it took 3.7 us and more with 4, whose threads have twice the items, and with those of 1 or
// 2 no registers are left to them.
constexpr int kPointwiseWarps = 8;

// Groups of units that a warp takes side by side. There a pass that keeps arrays for a derivative
// took 4.9 us a step with 1 of them, 4.2 with 2, 4.1 with 4.
constexpr int kGroupsBeside[] = {4, 2, 1};

// Of one matrix, in microseconds: clock cycles of 64 rows by 16 columns by 32 entries, which were
// measured on an H100 as 20 where the rows are in registers and 25 where they lie in shared memory.
double Products(const WaveStationarySizes& sizes, const StationaryColumns& matrix, double cycles) {
  const int64_t products = int64_t{matrix.steps} * sizes.parts * sizes.row_tiles_of_warpgroups;
  return Double(products) * cycles * (sizes.batch > 32 ? 1.75 : 1.0) / kClocks;
}

// Fitted to 15 plans of LSTMs of 4 x 256 and 4 x 512 units on an H200, to within 15 %.
double StationaryMicroseconds(const WaveStationarySizes& sizes) {
  const double column = Double(int64_t{sizes.batch} * sizes.state_bytes) / 1e3;  // KB
  const double own = column * sizes.own.columns, below = column * sizes.below.columns;
  const double own_product = Products(sizes, sizes.own, 20);
  const double below_product = Products(sizes, sizes.below, 25);
  const double looks = own / 128 / kClocks * 1e3;
  const double sums = 2.0 * 4 * sizes.partials / 128 / kClocks;
  const double cells = 0.45 + 0.05 * sizes.items;
  const double comes = own / kOfCache + looks;
  // What of the products is left when all of the state has come.
  const double behind = std::max(own_product / sizes.portions, own_product - comes);
  const double path = kLatency + comes + behind + 0.4 * (sizes.portions - 1) + sums + cells;
  return std::max(path, (own + below) / kOfCache + below_product + 0.15);
}

std::optional<ScanPlan> PlanBlock(const ScanVariant& variant, const WaveForm& form, const Gpu& gpu,
                                  int64_t groups, int64_t at_a_time, int64_t units,
                                  const StationaryKind& kind) {
  WaveStationaryConfig config{.wave = WaveConfigOf(form, form.batch / groups, units),
                              .portions = kind.portions};
  DenseConfig& block = config.wave.block;
  block.column_parts = kind.parts;
  block.warps = static_cast<int>(block.products * units / 64) * 4 * kind.parts;
  block.pointwise_warps = kPointwiseWarps;
  block.groups_beside =
      *std::find_if(std::begin(kGroupsBeside), std::end(kGroupsBeside) - 1, [&](int beside) {
        DenseConfig wanted = block;
        wanted.groups_beside = beside;
        return DenseBlock(wanted).has_whole_groups;
      });
  const int warps = block.warps + block.pointwise_warps;
  if (warps > 32) return std::nullopt;
  const int equal = EqualRegisters(warps, 1), all = equal * warps;
  const WaveStationarySizes before(config);
  const auto needed = static_cast<int>(RoundUp(before.own_registers + before.other_registers, 8));
  // Pointwise warps can only give some up.
  const int few = RegistersBesideWarpgroups(form, before);
  const int left = (all - block.warps * needed) / block.pointwise_warps / 8 * 8;
  block.pointwise_registers = std::min({few, left, equal, kMostThreadRegisters});
  block.product_registers =
      std::min((all - block.pointwise_warps * block.pointwise_registers) / block.warps / 8 * 8,
               kMostThreadRegisters);
  const WaveStationarySizes sizes(config);
  if (!sizes.has_whole_tiles || !sizes.has_whole_portions || !sizes.has_few_words ||
      sizes.exchange_batch != sizes.batch || block.product_registers < needed ||
      block.pointwise_registers < kLeastRegisters ||
      sizes.blocks > gpu.multiprocessors / (form.layers * at_a_time) ||
      sizes.shared_bytes > gpu.shared_bytes) {
    return std::nullopt;
  }
  const double microseconds =
      StationaryMicroseconds(sizes) + 0.04 * (few - block.pointwise_registers);
  ScanPlan plan = PlanOfWave(variant, form, sizes, block, "WaveStationarySizes",
                             ExpressionOf(config), groups, at_a_time, microseconds);
  plan.in_registers = Double(sizes.own.columns) / Double(sizes.own.columns + sizes.below.columns);
  return plan;
}

}  // namespace

std::optional<ScanPlan> PlanStationaryWave(const ScanVariant& variant, const WaveForm& form,
                                           const Gpu& gpu) {
  std::optional<ScanPlan> best;
  const int products = MatrixProducts({form.own_products}, {form.below_products});
  for (const int64_t rows : {kStationaryRows, 2 * kStationaryRows}) {
    if (form.batch % rows != 0) continue;
    const int64_t groups = form.batch / rows;
    for (int64_t at_a_time = 1; at_a_time <= groups; ++at_a_time) {
      const int64_t multiprocessors = gpu.multiprocessors / (form.layers * at_a_time);
      if (multiprocessors == 0) break;
      if (groups % at_a_time != 0) continue;
      const int64_t first = RoundUp(CeilDivide(form.hidden, multiprocessors), 8);
      for (int64_t units = first; units * products <= kMostRows; units += 8) {
        if (units * products % 64 != 0) continue;  // whole tiles of rows
        for (const StationaryKind& kind : kKinds) {
          KeepFaster(PlanBlock(variant, form, gpu, groups, at_a_time, units, kind), &best);
        }
      }
    }
  }
  return best;
}

}  // namespace jaxsparse
