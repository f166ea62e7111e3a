// Plans of waves whose weights are the stationary operand of warpgroups (wave_stationary.cuh).
#include "recurrent/kernels/wave_stationary.h"

#include <algorithm>

#include "recurrent/kernel_plans.h"

namespace jaxsparse {
namespace {

constexpr int64_t kMostGroups = 4;  // parts of a batch
constexpr int64_t kRows[] = {32, 64};
constexpr int kPointwiseWarps = 4;

// Of one matrix, in microseconds: clock cycles of 64 rows by 16 columns by 32 entries, which were
// measured on an H100 as 20 where the rows are in registers and 25 where they lie in shared memory.
double Products(const WaveStationarySizes& sizes, const StationaryColumns& matrix, double cycles) {
  const int64_t products = int64_t{matrix.steps} * sizes.parts * sizes.row_tiles_of_warpgroups;
  return Double(products) * cycles * (sizes.batch > 32 ? 1.75 : 1.0) / kClocks;
}

// A model that no kernel was measured for: of the exchange as in wave_wgmma.cc.
double StationaryMicroseconds(const WaveStationarySizes& sizes, int registers) {
  const double column = Double(int64_t{sizes.batch} * sizes.state_bytes) / 1e3;  // KB
  const double own = column * sizes.own.columns, below = column * sizes.below.columns;
  const double own_product = Products(sizes, sizes.own, 20);
  const double below_product = Products(sizes, sizes.below, 25);
  const double looks = own / 128 / kClocks * 1e3;
  const double sums = 2.0 * 4 * sizes.partials / 128 / kClocks;
  const double exchange = 0.55 + 0.007 * own + 0.004 * below + looks;
  const double meanwhile = below_product + (own + below) / 42 - own_product;
  return std::max(exchange, meanwhile) + own_product + sums + 0.4 +
         0.1 * std::max(0, sizes.own_registers + sizes.other_registers - registers);
}

// Registers of a thread with so many items, each with what a step reads a step ahead.
int PointwiseRegisters(const WaveForm& form, const DenseBlock& block) {
  const int64_t inputs = block.near > 1 ? (form.inputs + 1) / 2 : form.inputs;
  const int64_t item = inputs + 2 + 2 * form.state_parts + form.outputs;
  const int64_t registers = 40 + form.products + block.items * item;
  return static_cast<int>(std::max<int64_t>(56, RoundUp(registers, 8)));
}

std::optional<ScanPlan> PlanBlock(const ScanVariant& variant, const WaveForm& form, const Gpu& gpu,
                                  int64_t groups, int64_t units, int parts) {
  WaveConfig config = WaveConfigOf(form, form.batch / groups, units);
  DenseConfig& block = config.block;
  block.column_parts = parts;
  block.warps = static_cast<int>(block.products * units / 64) * 4 * parts;
  block.pointwise_warps = kPointwiseWarps;
  const int warps = block.warps + block.pointwise_warps;
  if (warps > 32) return std::nullopt;
  const int equal = EqualRegisters(warps, 1), all = equal * warps;
  // Pointwise warps can only give some up.
  const int few = PointwiseRegisters(form, DenseBlock(block));
  block.pointwise_registers = std::min({few, equal, kMostThreadRegisters});
  block.product_registers =
      std::min((all - block.pointwise_warps * block.pointwise_registers) / block.warps / 8 * 8,
               kMostThreadRegisters);
  const WaveStationarySizes sizes(config);
  if (!sizes.has_whole_tiles || sizes.exchange_batch != sizes.batch ||
      sizes.own_registers + sizes.other_registers > block.product_registers ||
      sizes.blocks > gpu.multiprocessors / (form.layers * groups) ||
      sizes.shared_bytes > gpu.shared_bytes) {
    return std::nullopt;
  }
  const double microseconds = StationaryMicroseconds(sizes, block.product_registers) +
                              0.05 * (few - block.pointwise_registers);
  ScanPlan plan = PlanOfWave(variant, form, sizes, block, "WaveStationarySizes",
                             ExpressionOf(config), groups, microseconds);
  plan.in_registers = Double(sizes.own.columns) / Double(sizes.own.columns + sizes.below.columns);
  return plan;
}

}  // namespace

std::optional<ScanPlan> PlanStationaryWave(const ScanVariant& variant, const WaveForm& form,
                                           const Gpu& gpu) {
  std::optional<ScanPlan> best;
  const int products = MatrixProducts({form.own_products}, {form.below_products});
  for (int64_t groups = 1; groups <= kMostGroups; groups *= 2) {
    for (const int64_t rows : kRows) {
      const int64_t multiprocessors = gpu.multiprocessors / (form.layers * groups);
      if (rows * groups != form.batch || multiprocessors == 0) continue;
      const int64_t first = RoundUp(CeilDivide(form.hidden, multiprocessors), 8);
      for (int64_t units = first; units * products <= 256; units += 8) {
        if (units * products % 64 != 0) continue;  // whole tiles of rows
        for (const int parts : {1, 2}) {
          KeepFaster(PlanBlock(variant, form, gpu, groups, units, parts), &best);
        }
      }
    }
  }
  return best;
}

}  // namespace jaxsparse
