// Plans of recurrent scans with sparse weights as pairs (sparse.cu). The model of the time of a
// step comes from measurements on an H200 (docs/performance.md).
#include "recurrent/kernels/sparse.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"
#include "recurrent/sparse_layout.h"

namespace jaxsparse {
namespace {

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
  return ConfigExpression(
      "SparseConfig",
      {Field("form", form), Field("state_bytes", c.state_bytes), Field("batch", c.batch),
       Field("shared_entries", c.shared_entries), Field("pointwise_threads", c.pointwise_threads),
       Field("index_with_value", c.index_with_value)});
}

}  // namespace

std::optional<ScanPlan> PlanPairs(const ScanVariant& variant, const ScanForm& scan, const Gpu& gpu,
                                  bool by_name) {
  const SparseForm& form = *scan.layout_form;
  const SparseShape& shape = form.shape;
  const double share = shape.cluster > 1 ? kClusterShare : 1.0;
  const auto fitting = static_cast<int64_t>(gpu.multiprocessors * share) / shape.blocks;
  const int64_t scans =
      std::clamp<int64_t>(fitting, 1, std::min<int64_t>(scan.directions, kMaxScansOfLaunch));
  SparseConfig config;
  config.form = form;
  config.state_bytes = static_cast<int>(SizeOf(scan.state_dtype));
  config.batch = PaddedBatch(static_cast<int>(scan.batch), config.state_bytes);
  const int widest = WidestPiece(scan.batch, config.state_bytes);
  if (shape.products != scan.products || shape.state_parts != scan.state_parts ||
      form.piece_bytes > widest || shape.blocks > gpu.multiprocessors) {
    return std::nullopt;
  }
  if (form.piece_bytes < widest && !by_name) {
    return std::nullopt;  // for another batch; it would do, but slowly
  }
  const int64_t items = static_cast<int64_t>(shape.units) * config.batch;
  config.pointwise_threads = static_cast<int>(std::max<int64_t>(
      kWarp, std::min<int64_t>({RoundUp(items, kWarp), kSparseBlockThreads - shape.threads, 256})));
  const int64_t threads = shape.threads + config.pointwise_threads;
  // A register holds an index, another one its value; what has no room lies in shared memory.
  config.index_with_value = IsNarrow(scan.weight_dtype) && shape.part_columns() + 64 <= 1 << 16 &&
                            scan.weight_dtype == scan.state_dtype;
  const int64_t registers =
      std::min<int64_t>(65536 / RoundUp(threads, 4 * kWarp) / 8 * 8, kMostThreadRegisters);
  const int64_t room = std::max<int64_t>(0, registers - 44 - config.batch) /
                       (config.index_with_value ? 1 : 2) / shape.lanes;
  config.shared_entries = static_cast<int>(std::max<int64_t>(0, shape.entries - room));
  const int64_t shared_slots =
      static_cast<int64_t>(config.shared_entries) * shape.lanes * shape.threads;
  if (shared_slots > kMostBlockWeights) return std::nullopt;
  const SparseSizes sizes(config);
  if (sizes.shared_bytes + kStaticSharedBytes > gpu.shared_bytes) return std::nullopt;

  // Fitted to measurements of 17 layers on an H200, to within 4 % on average.
  const double received = sizes.pieces * sizes.part_slice / 1e3;
  const int per_entry = config.state_bytes == 4 ? 5 : 9;
  const double issued = Double(static_cast<int64_t>(shape.lanes) * shape.entries * shape.threads) /
                        kWarp * per_entry * config.batch / 4 / 4 / kClocks;
  const double from_shared = Double(shared_slots * 8) / 128 / kClocks;
  const double microseconds = 0.81 + 0.0216 * received + 1.87 * issued + 2.16 * from_shared +
                              (sizes.clustered ? 0.72 : 0.0) + 0.05 * Double(scan.products - 1);
  const ScanLaunches launches{.directions = scan.directions,
                              .scans = scans,
                              .exchange_bytes = ExchangeBytes(scan.length, sizes.slot)};
  ScanPlan plan =
      PlanOfSizes(variant, "sparse.cu", sizes, "SparseSizes", ExpressionOf(config), launches);
  plan.poll_delay = 900;
  plan.poll_delay_increase = 64;
  plan.poll_delay_decrease = 2;
  plan.microseconds = microseconds * Double(plan.launches.Count());
  plan.in_registers = 1 - static_cast<double>(config.shared_entries) / shape.entries;
  plan.cluster = shape.cluster;
  plan.total_microseconds = TotalMicroseconds(plan, scan);
  return plan;
}

}  // namespace jaxsparse
