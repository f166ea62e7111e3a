// The tiled kernel of the sampled dense-dense product on the host: how it is configured, which
// problems it fits, its predicted time, its instance and its launch.
#include "sddmm/kernels/tiled.h"

#include <cmath>

#include "nvrtc/expression.h"
#include "sddmm/sddmm_cuda.h"

namespace jaxsparse {
namespace {

// What the kernel gains by; a variant does without one, to measure what it brings.
enum class Technique {
  kNone,
  kWideLoads,  // a lane owns neighbouring columns of y, and loads them at once
  kBalance,    // warps own equally many entries, whatever rows they are of
};

int ElementBytes(const SddmmProblem& p) { return static_cast<int>(SizeOf(p.dtype)); }

// Warps, if none shared entries.
int64_t WarpsOf(const SddmmProblem& p, int chunks) {
  return p.batch.count * CeilDivide(p.pattern.nse, chunks * kWarp);
}

// Warps that a GPU runs at once.
int64_t ResidentWarps(const SddmmProblem& p, const SddmmTiledConfig& config) {
  return int64_t{p.gpu.multiprocessors} * config.BlocksPerSm(ElementBytes(p)) *
         (kSddmmTiledThreads / kWarp);
}

// As few chunks for a warp as let all run at once, or one after another if they would be too many:
// half or twice as many take up to 35 % more time. Where there is room for more warps, they share
// entries until each of a group is loaded at once; then more lanes take an entry, a long row's.
// Where they load their own long rows of x, a fifth of the warps may wait for others to end: 8 to
// 24 % less time than half as many warps take. It is more where rows are short, or x is shared.
// Parts of a row are about as long as one another, lest the last one be mostly empty.
SddmmTiledConfig ConfigFor(const SddmmProblem& p, Technique without, bool own_rows) {
  constexpr int kManyLanes = 8, kManyRegisters = 16, kMostChunks = 32;
  const int bytes = ElementBytes(p);
  SddmmTiledConfig config{.own_rows = own_rows};
  while (without != Technique::kWideLoads && config.vector * bytes < 16 &&
         p.d % (config.vector * 2) == 0) {
    config.vector *= 2;
  }
  const int registers_of_vector = config.Registers(bytes);
  const auto take_lanes = [&](int lanes) {
    const int64_t vectors = CeilDivide(p.d, int64_t{lanes} * config.vector);
    const int64_t parts = CeilDivide(vectors, kManyRegisters / registers_of_vector);
    config.lanes = lanes;
    config.vectors = parts > 0 ? static_cast<int>(CeilDivide(vectors, parts)) : 1;
  };
  int lanes = 1;
  while (lanes * config.vector < p.d && lanes < kManyLanes) lanes *= 2;
  take_lanes(lanes);
  const int64_t at_once = ResidentWarps(p, config);
  const bool may_wait = own_rows && config.Registers(bytes) > kManyRegisters / 2;
  const int64_t most = may_wait ? at_once + at_once / 4 : at_once, warps = WarpsOf(p, 1);
  if (warps > most) {
    const int64_t times = CeilDivide(WarpsOf(p, kMostChunks), at_once);
    config.chunks = static_cast<int>(CeilDivide(warps, at_once * times));
  }
  const auto has_room = [&] { return warps * config.sharing * 2 <= most; };
  while (config.EntriesOfGroup() > config.EntriesInFlight(bytes) && has_room()) {
    config.sharing *= 2;
  }
  while (config.PartSize() < p.d && config.lanes < kWarp && has_room()) {
    take_lanes(config.lanes * 2);
    config.sharing *= 2;
  }
  config.whole = p.d == config.PartSize();
  config.scaled = p.scale_by.data != nullptr;
  config.balanced = without != Technique::kBalance;
  config.batched = p.batch.rank > 0;
  return config;
}

struct CostModel {
  double launch_us;
  // Clocks of a multiprocessor for 32 entries of one row, and for each load of a lane.
  double pass_clocks, load_clocks, load_clocks_per_byte;
  double own_rows_loads;      // loads with those of rows of x, to loads of y alone
  double passes_of_row;       // that the ends of a row take more, if x is shared
  double load_latency_us;     // of what a lane loads at once, if x is shared
  double conversion;          // time with 16-bit numbers to time with others
  double occupancy_exponent;  // throughput rises with this power of the share of resident warps
  double l2_bytes_per_clock;  // of a multiprocessor
};

// Fitted to 237 measurements in float32, with x shared and not, of 64 x 576 to 4096 x 4096, d 32 to
// 3136, and of graphs of 100,000 nodes: half of them are within 5 %, nine in ten within 16 %; it is
// far too low where some rows are much shorter than others and x is shared. Then to 12 in 16 bits,
// whose numbers are converted. What narrower loads take follows from the variant that has no
// others.
constexpr CostModel kCostModel{.launch_us = 2.3,
                               .pass_clocks = 11.5,
                               .load_clocks = 1.4,
                               .load_clocks_per_byte = 0.425,
                               .own_rows_loads = 1.57,
                               .passes_of_row = 0.9,
                               .load_latency_us = 0.21,
                               .conversion = 1.5,
                               .occupancy_exponent = 0.3,
                               .l2_bytes_per_clock = 31};

// Microseconds: from clocks of a multiprocessor for 32 entries of a row or fewer, which are more
// where it runs fewer warps than it could, or for what it loads of y from L2 once; and those in
// which a warp waits for its first 32 entries.
double TimeOf(const SddmmProblem& p, const SddmmTiledConfig& config) {
  if (p.batch.count * p.pattern.nse == 0) return kCostModel.launch_us;
  const auto bytes = static_cast<double>(SizeOf(p.dtype));
  const double convert = bytes == 2 ? kCostModel.conversion : 1;
  const int64_t parts = CeilDivide(p.d, config.PartSize());  // of a row
  const double loads =
      static_cast<double>(parts * config.lanes * config.vectors) *
      (kCostModel.load_clocks + kCostModel.load_clocks_per_byte * bytes * config.vector) *
      (config.own_rows ? kCostModel.own_rows_loads : 1);
  const int64_t nse = p.pattern.nse, rows = p.pattern.rows < nse ? p.pattern.rows : nse;
  const double chunks = static_cast<double>(nse) / kWarp;
  const double passes =
      chunks + (config.own_rows ? 0 : kCostModel.passes_of_row * static_cast<double>(rows));
  const auto batch = static_cast<double>(p.batch.count);
  const double full = static_cast<double>(WarpsOf(p, config.chunks) * config.sharing) /
                      static_cast<double>(ResidentWarps(p, config));
  const double compute = batch * passes * (kCostModel.pass_clocks + loads) * convert /
                         p.gpu.multiprocessors /
                         (full < 1 ? std::pow(full, kCostModel.occupancy_exponent) : 1);
  const double columns = batch * static_cast<double>(p.pattern.columns);
  const double entries = batch * static_cast<double>(nse) / p.gpu.multiprocessors;
  const double rows_of_y = columns * (1 - std::exp(-entries / columns));  // expected, of them all
  const double l2 = rows_of_y * static_cast<double>(p.d) * bytes / kCostModel.l2_bytes_per_clock;
  const int64_t waits =
      parts * CeilDivide(config.EntriesOfGroup(), config.EntriesInFlight(ElementBytes(p)));
  return kCostModel.launch_us + (compute > l2 ? compute : l2) / kClocksOfMicrosecond +
         (config.own_rows
              ? 0
              : kCostModel.load_latency_us * static_cast<double>(waits) * passes / chunks);
}

// Whether entries load their own rows of x is what takes less time with all techniques, so that a
// variant without one differs in that alone.
SddmmTiledConfig ConfigFor(const SddmmProblem& p, Technique without) {
  const SddmmTiledConfig shared = ConfigFor(p, Technique::kNone, false);
  const SddmmTiledConfig own = ConfigFor(p, Technique::kNone, true);
  const bool own_rows = TimeOf(p, own) < TimeOf(p, shared);
  if (without != Technique::kNone) return ConfigFor(p, without, own_rows);
  return own_rows ? own : shared;
}

// Places of 32 bits, of lanes too.
bool Fits(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.d * SizeOf(p.dtype) < kMost && p.pattern.nse < kMost && p.pattern.columns < kMost &&
         p.pattern.rows < kMost && p.batch.count < kMost / (p.pattern.nse + kWarp);
}

double Cost(const SddmmProblem& p) { return TimeOf(p, ConfigFor(p, Technique::kNone)); }

template <Technique kWithout>
KernelSource Source(const SddmmProblem& p) {
  const SddmmTiledConfig config = ConfigFor(p, kWithout);
  const std::string text = ConfigExpression(
      "SddmmTiledConfig", {Field("lanes", config.lanes), Field("vector", config.vector),
                           Field("vectors", config.vectors), Field("chunks", config.chunks),
                           Field("sharing", config.sharing), Field("own_rows", config.own_rows),
                           Field("whole", config.whole), Field("scaled", config.scaled),
                           Field("balanced", config.balanced), Field("batched", config.batched)});
  return {"sddmm/kernels/tiled.cu",
          KernelExpression("SddmmTiled", {TypeName(p.dtype), TypeName(p.out_dtype),
                                          TypeName(p.pattern.index_type), text})};
}

template <Technique kWithout>
LaunchShape Shape(const SddmmProblem& p) {
  const SddmmTiledConfig config = ConfigFor(p, kWithout);
  const int64_t warps = WarpsOf(p, config.chunks) * config.sharing;
  return {CeilDivide(warps, kSddmmTiledThreads / kWarp), kSddmmTiledThreads};
}

// A row of the table, for the kernel with all techniques or without one.
template <Technique kWithout>
constexpr CudaVariant<SddmmProblem> RowOf(const char* name, double (*cost)(const SddmmProblem&)) {
  return {name, Fits, cost, Source<kWithout>, Shape<kWithout>};
}

}  // namespace

extern constinit const CudaVariant<SddmmProblem> kSddmmTiledEntries =
    RowOf<Technique::kNone>("tiled_entries", Cost);
extern constinit const CudaVariant<SddmmProblem> kSddmmTiledEntriesScalar =
    RowOf<Technique::kWideLoads>("tiled_entries_scalar", kByName);
extern constinit const CudaVariant<SddmmProblem> kSddmmTiledEntriesUnbalanced =
    RowOf<Technique::kBalance>("tiled_entries_unbalanced", kByName);

}  // namespace jaxsparse
