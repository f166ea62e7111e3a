// Plans of recurrent scans whose blocks hold their units' weights for all steps (resident.cu). The
// model of the time of a step comes from measurements on an H200 (docs/persistent_scans.md).
#include "recurrent/kernels/resident.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "recurrent/kernel_plans.h"
#include "recurrent/problem.h"

namespace jaxsparse {
namespace {

// What is tried (ResidentConfig). Of plans that are predicted alike the first one is taken.
constexpr int kUnitGroups[] = {2, 1, 4};
constexpr int kStepsAhead[] = {4, 2, 1};
constexpr int kBlocks[] = {1, 4, 16};
// Batch entries of a block: more would spill registers.
constexpr int64_t kMostRows = 32;
// Inputs asked for in the step that needs them have to come while it multiplies.
constexpr int kLeastRowsOfOneStep = 8;
constexpr int64_t kMostWarps = 32;
// What has been measured to be faster than other kernels, and is chosen for that: blocks with all
// of their weights in registers, and otherwise batches that others take in several launches, or
// don't.
constexpr int64_t kLeastSharedBatch = 512;

std::string ExpressionOf(const ResidentConfig& c) {
  return ConfigExpression(
      "ResidentConfig",
      {Field("products", c.products), Field("state_parts", c.state_parts),
       Field("state_bytes", c.state_bytes), Field("hidden", c.hidden), Field("batch", c.batch),
       Field("unit_groups", c.unit_groups), Field("steps_ahead", c.steps_ahead),
       Field("blocks", c.blocks), Field("register_chunks", c.register_chunks),
       Field("resident", c.resident)});
}

// One of the ways to make the scans, and what is predicted for it.
struct Candidate {
  ResidentConfig config;
  ScanLaunches launches;
  double microseconds = 0;  // of a step of all scans
};

// Fitted to some 15 plans on an H200, to within a quarter. Clock cycles of what the warps of a
// multiprocessor do one after the other.
double StepMicroseconds(const ScanForm& scan, const ResidentSizes& sizes) {
  const int64_t warps = int64_t{sizes.warps} * sizes.resident;
  const double of_quarter = Double((warps + 3) / 4);
  const double loads = Double(4 * warps * sizes.chunks * sizes.batch_tiles);
  const double weights = Double(int64_t{sizes.shared_weights} * sizes.resident) / 8;
  const double products = 8 * of_quarter * 2 * sizes.chunks * sizes.tiles;
  const double in_turn = 35.0 * 2 * sizes.chunks / sizes.chains;
  // The more cells a lane has, the less the compiler overlaps their latencies.
  const double cell = 90 + 10 * Double(scan.inputs + scan.outputs + scan.state_parts);
  const double pointwise = of_quarter * sizes.cells * cell * (1 + 0.05 * (sizes.cells - 1));
  const double cycles = 400 + loads + weights + std::max(products, in_turn) + pointwise;
  const double received = 16e-3 * sizes.exchange_slot;  // KB
  const double exchange = sizes.blocks > 1 ? 0.4 + 0.02 * received : 0.0;
  return exchange + cycles / kClocks;
}

// What a lane takes beside weights that stay. Two neighbours' inputs of 16 bits lie in a register,
// and where no step asks for the next one's, they come when the operands of products are gone. An
// adjoint, which has several states, has some of 32 bits, and more to compute.
int64_t OtherRegisters(const ScanForm& scan, const ResidentSizes& sizes) {
  const bool pairs = sizes.near > 1 && scan.state_parts == 1;
  const int64_t inputs = pairs ? CeilDivide(scan.inputs, 2) : scan.inputs;
  const int64_t kept = scan.state_parts + (sizes.blocks > 1 ? 1 : scan.outputs);
  const int64_t cells = sizes.cells * (sizes.steps_ahead * inputs + kept + 2);
  const int64_t operands = sizes.operand_registers;
  const bool in_turn = pairs && sizes.blocks > 1 && sizes.steps_ahead == 1;
  return sizes.other_registers + (in_turn ? std::max(operands, cells) : operands + cells);
}

// Keeps in registers as many chunks as they hold; false if that is too much for a block.
bool DistributeWeights(const ScanForm& scan, const Gpu& gpu, ResidentConfig* config) {
  const ResidentSizes all(*config);
  if (all.warps > kMostWarps || (all.blocks - 1) * all.block_units >= scan.hidden) return false;
  const int64_t registers =
      std::min<int64_t>(65536 / (all.threads * all.resident) / 8 * 8, kMostThreadRegisters);
  config->register_chunks = 0;
  const int64_t others = OtherRegisters(scan, ResidentSizes(*config));
  if (others > registers) return false;
  const int64_t of_chunk = int64_t{8} * all.row_tiles;
  config->register_chunks =
      static_cast<int>(std::min<int64_t>(all.chunks, (registers - others) / of_chunk));
  const int64_t shared = (gpu.shared_bytes + kReservedShared) / all.resident - kReservedShared;
  return ResidentSizes(*config).shared_bytes <= shared;
}

void KeepFasterCandidate(const ScanForm& scan, const Gpu& gpu, bool by_name, ResidentConfig config,
                         std::optional<Candidate>* best) {
  if (!DistributeWeights(scan, gpu, &config)) return;
  const ResidentSizes sizes(config);
  const bool is_measured =
      sizes.blocks > 1 ? scan.batch >= kLeastSharedBatch : sizes.register_part == sizes.chunks;
  if (!is_measured && !by_name) return;
  Candidate candidate;
  candidate.config = config;
  candidate.launches = {
      .directions = scan.directions,
      .groups = scan.batch / config.batch,
      .exchange_bytes = ExchangeBytes(scan.length, int64_t{sizes.exchange_slot} * 16)};
  ScanLaunches& launches = candidate.launches;
  launches.scans =
      std::min<int64_t>({launches.All(), kMaxScansOfLaunch,
                         int64_t{gpu.multiprocessors} * sizes.resident / sizes.blocks});
  if (launches.scans == 0) return;
  candidate.microseconds = StepMicroseconds(scan, sizes) * Double(launches.Count());
  if (!*best || candidate.microseconds < (*best)->microseconds) *best = candidate;
}

ScanPlan PlanOf(const ScanVariant& variant, const ScanForm& scan, const Candidate& candidate) {
  const ResidentSizes sizes(candidate.config);
  ScanPlan plan = PlanOfSizes(variant, "resident.cu", sizes, "ResidentSizes",
                              ExpressionOf(candidate.config), candidate.launches);
  if (sizes.blocks > 1) {
    plan.poll_delay = 700;
    plan.poll_delay_increase = 8;
    plan.poll_delay_decrease = 2;
  }
  plan.microseconds = candidate.microseconds;
  plan.in_registers = static_cast<double>(sizes.register_part) / sizes.chunks;
  plan.resident = sizes.resident;
  plan.total_microseconds = TotalMicroseconds(plan, scan);
  return plan;
}

}  // namespace

std::optional<ScanPlan> PlanResident(const ScanVariant& variant, const ScanForm& scan,
                                     const Gpu& gpu, bool by_name) {
  constexpr int64_t kMostUnits = 512, kMostParts = 16, kMostSteps = 1 << 30;
  std::optional<Candidate> best;
  if (scan.hidden > kMostUnits || scan.products > kMostParts || scan.state_parts > kMostParts ||
      scan.length > kMostSteps) {
    return std::nullopt;
  }
  for (int64_t rows = 1; rows <= std::min(kMostRows, scan.batch); ++rows) {
    if (scan.batch % rows != 0) continue;
    for (const int unit_groups : kUnitGroups) {
      for (const int blocks : kBlocks) {
        for (const int resident : {1, 2}) {
          if (resident > blocks) continue;
          for (const int steps_ahead : kStepsAhead) {
            if (steps_ahead == 1 && rows < kLeastRowsOfOneStep) continue;
            if (steps_ahead > 2 && blocks > 1) continue;  // such steps take long enough
            ResidentConfig config;
            config.products = static_cast<int>(scan.products);
            config.state_parts = static_cast<int>(scan.state_parts);
            config.state_bytes = static_cast<int>(SizeOf(scan.state_dtype));
            config.hidden = static_cast<int>(scan.hidden);
            config.batch = static_cast<int>(rows);
            config.unit_groups = unit_groups;
            config.steps_ahead = steps_ahead;
            config.blocks = blocks;
            config.resident = resident;
            KeepFasterCandidate(scan, gpu, by_name, config, &best);
          }
        }
      }
    }
  }
  if (!best) return std::nullopt;
  return PlanOf(variant, scan, *best);
}

}  // namespace jaxsparse
