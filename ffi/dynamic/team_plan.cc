#include "dynamic/team_plan.h"

#include <algorithm>
#include <span>
#include <utility>

#include "dynamic/problem.h"
#include "dynamic/team_passes.h"
#include "nvrtc/expression.h"
#include "nvrtc/kernel.h"

namespace jaxsparse {
namespace {

// Of the model below, fitted to Tree-LSTMs of 256 units on an H200: one of 1 to 256 trees of the
// Stanford Sentiment Treebank by one and two sets, in bfloat16.
constexpr double kClocks = kClocksOfMicrosecond;
constexpr double kExchange = 0.43;          // of what a block waits for, in microseconds
constexpr double kExchangeOfBlock = 0.008;  // of the team
constexpr double kExchangeOfKilobyte = 0.015;
constexpr double kClocksOfMma = 2.4;              // on a multiprocessor, of 16 x 8 x 16
constexpr double kOverheadOfFma = 1.3;            // what sums over lanes and loads of states add
constexpr double kStep = 0.2, kStepOfItem = 0.4;  // sums and the pointwise step of a tile
constexpr double kSums = 0.1;                     // what rows emit, added to their sources
constexpr double kSecondSet = 0.1;                // what a tile that waits takes longer by two sets
constexpr double kLatency = 0.4;   // of a load from the L2 cache, and those behind it
constexpr double kBesides = 0.05;  // what a tile takes that waits for nothing
// What a tile beside others costs product warps beside the products, and a set of pointwise warps;
// the latter where rows emit, too.
constexpr double kTurnOfProducts = 0.37, kTurnOfSteps = 1.17, kTurnOfEmitting = 1.9;
constexpr double kCacheBytesOfMicrosecond = 5.5e6;
// Levels of trees, as many as parse trees have. A team that has more tiles puts some between a row
// and its sources, so that fewer tiles wait for the one before them: so much less for each more.
constexpr double kLevels = 20, kFewerThatWait = 0.75;
constexpr int kMostThreadRegisters = 232;
constexpr int kLeastPointwiseRegisters = 80;  // found by compiling Tree-LSTMs and chains of LSTMs
// The same where rows emit, whose `arrays` count what is made of inputs ahead.
constexpr int kLeastEmitRegisters = 64, kMoreOfFloats = 8, kLeastSumRegisters = 48;
constexpr int kPassingRegisters = 16, kMoreWhereRowsEmit = 16;
// Tiles: where rows gather, farther children are few.
constexpr int kMostGatheringWindow = 64, kMostEmittingWindow = 128, kLeastEmittingWindow = 8;
// Of rows, whose weights may lie in registers: each of them has code of its own.
constexpr int kMostRegisterKinds = 4;
constexpr int64_t kMostBlockWeights = 1 << 25;  // far more than any block has room for

double Double(int64_t x) { return static_cast<double>(x); }
int64_t RoundUp(int64_t a, int64_t multiple) { return CeilDivide(a, multiple) * multiple; }

std::string ExpressionOf(const TeamConfig& c) {
  return ConfigExpression("TeamConfig", {Field("row_parts", c.row_parts),
                                         Field("column_parts", c.column_parts),
                                         Field("kinds", c.kinds),
                                         Field("state_bytes", c.state_bytes),
                                         Field("hidden", c.hidden),
                                         Field("units", c.units),
                                         Field("warps", c.warps),
                                         Field("pointwise_warps", c.pointwise_warps),
                                         Field("sets", c.sets),
                                         Field("carries", c.carries),
                                         Field("sum_warps", c.sum_warps),
                                         Field("beside_warps", c.beside_warps),
                                         Field("passed", c.passed),
                                         Field("window", c.window),
                                         Field("window_before", c.window_before),
                                         Field("stages", c.stages),
                                         Field("register_chunks", c.register_chunks),
                                         Field("asks_ahead", c.asks_ahead),
                                         Field("product_registers", c.product_registers),
                                         Field("pointwise_registers", c.pointwise_registers),
                                         Field("sum_registers", c.sum_registers)});
}

// Of a tile, in a block.
double ProductMicroseconds(const TeamSizes& sizes) {
  const double of_shared = Double(sizes.kind_bytes) / 128;
  if (sizes.tensor_cores) {
    const int64_t count = int64_t{2} * sizes.loads * sizes.row_tiles * sizes.warps;
    return (Double(count) * kClocksOfMma + of_shared) / kClocks;
  }
  const int64_t rows = int64_t{sizes.row_groups} * sizes.lane_rows;
  const double multiplied = Double(rows * sizes.columns * kTileRows) / 128;
  return (multiplied * kOverheadOfFma + of_shared * kTileRows / sizes.batch_tile) / kClocks;
}

}  // namespace

TeamConfig PassConfig(const GraphScanForm& form, int64_t units, const RingKind& ring, int sets) {
  TeamConfig config;
  config.row_parts = static_cast<int>(form.emits ? form.slots : form.products);
  config.column_parts = static_cast<int>(form.emits ? form.products : form.slots);
  config.kinds = static_cast<int>(form.kinds);
  config.state_bytes = static_cast<int>(SizeOf(form.dtype));
  config.hidden = static_cast<int>(form.hidden);
  config.units = static_cast<int>(units);
  config.warps = ring.warps;
  config.stages = ring.stages;
  config.asks_ahead = ring.asks_ahead;
  config.sets = sets;
  config.pointwise_warps *= sets;
  if (form.emits) {
    config.sum_warps = 4;
    config.passed = static_cast<int>(form.slots * form.carries);
  } else {
    config.carries = static_cast<int>(form.carries);
  }
  return config;
}

ThreadRegisters NeededRegisters(const GraphScanForm& form, const TeamConfig& config) {
  const TeamSizes sizes(config);
  const int64_t of_items = sizes.items * (form.arrays + form.products);
  const int64_t least_emit = kLeastEmitRegisters + (SizeOf(form.dtype) == 4 ? kMoreOfFloats : 0);
  const int64_t pointwise = form.emits ? std::max<int64_t>(least_emit, 24 + of_items)
                                       : std::max<int64_t>(kLeastPointwiseRegisters, 60 + of_items);
  // The parts of a product, values and places of each item, and where each value lies in memory.
  const int64_t of_sums =
      2 * config.warps + (28 + 4 * form.carries) * sizes.sum_items + 4 * (1 + form.carries) - 8;
  const int64_t others = form.emits ? std::max<int64_t>(kLeastSumRegisters, of_sums) : 0;
  return {0, static_cast<int>(RoundUp(pointwise, 8)), static_cast<int>(RoundUp(others, 8))};
}

ThreadRegisters DistributeRegisters(const TeamSizes& sizes, int others,
                                    const ThreadRegisters& needed) {
  const int warps = sizes.warps, pointwise_warps = sizes.pointwise_warps;
  const int equal = sizes.thread_registers;
  const bool is_even = warps % 4 == 0 && pointwise_warps % 4 == 0 && others % 4 == 0;
  if (!is_even || std::max(needed.pointwise, needed.others) >= equal) return {};
  const int all = equal * (warps + pointwise_warps + others);
  const int kept = pointwise_warps * needed.pointwise + others * needed.others;
  return {std::min((all - kept) / warps / 8 * 8, kMostThreadRegisters), needed.pointwise,
          needed.others};
}

void KeepWeights(const GraphScanForm& form, const ThreadRegisters& registers, int spare,
                 TeamConfig* config) {
  config->product_registers = registers.product;
  config->pointwise_registers = registers.pointwise;
  config->sum_registers = registers.others;
  const TeamSizes sizes(*config);
  const int product = registers.product > 0
                          ? registers.product
                          : std::min(sizes.thread_registers, kMostThreadRegisters);
  const int for_weights = product - sizes.other_registers;
  // Of all kinds.
  const int chunk_registers = sizes.kinds * sizes.chunk_registers;
  const bool all_fit = for_weights + spare >= sizes.weight_chunks * chunk_registers;
  // Those of a chunk that come from shared memory pass through some.
  const int passing =
      std::min(sizes.chunk_registers, kPassingRegisters) + (form.emits ? kMoreWhereRowsEmit : 0);
  config->register_chunks =
      all_fit ? sizes.weight_chunks
              : std::clamp((for_weights - passing) / chunk_registers, 0, sizes.weight_chunks);
  if (sizes.kinds > kMostRegisterKinds) config->register_chunks = 0;
}

int LeastWindowOf(const TeamConfig& config, const GraphScanForm& form) {
  const int least = TeamSizes(config).LeastWindow();
  return form.emits ? std::max(least, kLeastEmittingWindow) : least;
}

int WindowOf(TeamConfig config, const GraphScanForm& form, int64_t shared_bytes) {
  if (!form.emits && form.carries == 0) return 0;
  const int least = LeastWindowOf(config, form);
  config.window = form.emits ? kMostEmittingWindow : kMostGatheringWindow;
  for (; config.window >= least; config.window /= 2) {
    if (TeamSizes(config).shared_bytes <= shared_bytes) return config.window;
  }
  return 0;
}

std::string PassConstants(const TeamConfig& config, const GraphScanForm& form, int64_t teams,
                          bool barrier) {
  std::string text = "  static constexpr jaxsparse::TeamSizes kSizes{" + ExpressionOf(config);
  text += "};\n  static constexpr int kSlots = " + std::to_string(form.slots) + ";\n";
  text += "  static constexpr int kScans = " + std::to_string(teams) + ";\n";
  text += "  static constexpr int kBlocks = kSizes.blocks;\n";
  text += "  static constexpr int kLayers = 1;\n";
  text += "  static constexpr bool kBarrier = " + Literal(barrier) + ";\n";
  return text;
}

void PredictPass(const GraphScanForm& form, const TeamSizes& sizes, TeamPlan* plan) {
  // KB that each block receives for a tile.
  const double received = Double(int64_t{sizes.columns} * kTileRows * sizes.state_bytes) / 1e3;
  const double product = ProductMicroseconds(sizes);
  const double step = kStep + kStepOfItem * (sizes.items - 1);
  const double sums = form.emits ? kSums + kStepOfItem * (sizes.sum_items - 1) : 0.0;
  plan->tile_microseconds = kExchange + kExchangeOfBlock * sizes.blocks +
                            kExchangeOfKilobyte * received + product + step + sums +
                            (form.emits ? kSecondSet * (sizes.sets - 1) : 0.0);
  // Or else it begins to ask when the products before it are done.
  const double asks = sizes.asks_ahead ? 0.0 : kLatency;
  const double products = asks + product + (form.emits ? 0.0 : kTurnOfProducts);
  const double turn = form.emits ? kTurnOfEmitting : kTurnOfSteps;
  const double steps = turn * sizes.items / sizes.sets;
  plan->beside_microseconds = std::max({products, steps, sums}) + kBesides;
  const double share = Double(CeilDivide(form.tiles, plan->teams));
  // A group has a tile for each level at least.
  const double tiles = form.groups == 0 ? std::max(share, kLevels) : share;
  const double more = std::max(tiles - kLevels, 0.0);
  const double in_turn = std::max(std::min(tiles, kLevels) - kFewerThatWait * more, 0.0);
  const double by_cache =
      Double(form.tiles) * sizes.blocks * received * 1e3 / kCacheBytesOfMicrosecond;
  plan->total_microseconds =
      kStartMicroseconds +
      std::max(in_turn * plan->tile_microseconds + (tiles - in_turn) * plan->beside_microseconds,
               by_cache);
}

bool IsWorthPlanning(const GraphScanForm& form, int64_t units) {
  // Blocks whose last one has hardly any units are those of fewer units.
  const int64_t blocks = CeilDivide(form.hidden, units);
  if (units > 8 && CeilDivide(form.hidden, units - 8) == blocks) return false;
  return Double(form.kinds * form.products * form.slots) * Double(form.hidden) * Double(units) <=
         Double(kMostBlockWeights);
}

std::string ReasonAgainst(const TeamVariant& variant, const GraphScanForm& form) {
  const bool is_narrow = SizeOf(form.dtype) == 2;
  if (variant.tensor_cores && !is_narrow) return "needs 16-bit states and weights";
  if (!variant.tensor_cores && is_narrow) return "16-bit products run on tensor cores";
  if (form.emits && form.slots * kTileRows > kWarp) {
    return std::to_string(form.slots) + " children of a row are more than " +
           std::to_string(kWarp / kTileRows) + " in a gradient";
  }
  if (form.hidden % 8 != 0) return std::to_string(form.hidden) + " units are no multiple of 8";
  return "";
}

namespace {

// The plan of teams whose blocks have so many units, such a ring, and so many sets of pointwise
// warps, if they fit.
std::optional<TeamPlan> PlanOf(const TeamVariant& variant, const GraphScanForm& form,
                               const Gpu& gpu, int64_t units, const RingKind& ring, int sets) {
  TeamConfig config = PassConfig(form, units, ring, sets);
  const ThreadRegisters needed = NeededRegisters(form, config);
  KeepWeights(form, DistributeRegisters(TeamSizes(config), config.sum_warps, needed), 0, &config);
  config.window = WindowOf(config, form, gpu.shared_bytes);
  const bool has_window = !form.emits || config.window > 0;
  const TeamSizes sizes(config);
  const int64_t room = gpu.multiprocessors / sizes.blocks;
  const int64_t teams = form.groups == 0 ? room : std::min(form.groups, room);
  if (teams == 0 || !has_window || sizes.shared_bytes > gpu.shared_bytes ||
      sizes.chunks < ring.warps) {
    return std::nullopt;
  }
  TeamPlan plan;
  plan.variant = &variant;
  plan.teams = static_cast<int>(std::min<int64_t>(teams, kMaxScansOfLaunch));
  plan.constants = PassConstants(config, form, plan.teams, variant.barrier);
  plan.blocks = sizes.blocks;
  plan.threads = sizes.threads;
  plan.shared_bytes = sizes.shared_bytes;
  plan.window = sizes.window;
  const Polling polling = PollingOf(form.emits);
  plan.poll_delay = polling.delay;
  plan.poll_delay_increase = plan.poll_delay_decrease = polling.change;
  plan.in_registers = static_cast<double>(sizes.register_chunks) / sizes.weight_chunks;
  PredictPass(form, sizes, &plan);
  return plan;
}

void KeepFaster(std::optional<TeamPlan> plan, std::optional<TeamPlan>* best) {
  if (plan && (!*best || plan->total_microseconds < (*best)->total_microseconds)) {
    *best = std::move(plan);
  }
}

}  // namespace

TeamChoice PlanTeams(const GraphScanForm& form, const Gpu& gpu, const std::string& wanted) {
  TeamChoice choice;
  for (const TeamVariant& variant : kTeamVariants) {
    if (wanted.empty() ? variant.barrier : wanted != variant.name) continue;
    std::string reason = ReasonAgainst(variant, form);
    if (reason.empty()) {
      for (int64_t units = 8; units < form.hidden + 8; units += 8) {
        if (!IsWorthPlanning(form, units)) continue;
        const auto rings = form.emits ? std::span<const RingKind>(kEmittingRings) : kRings;
        for (const RingKind& ring : rings) {
          for (int sets = variant.barrier ? 1 : kMostSets; sets >= 1; --sets) {
            KeepFaster(PlanOf(variant, form, gpu, units, ring, sets), &choice.best);
          }
        }
      }
      if (!choice.best) {
        const std::string hidden = std::to_string(form.hidden);
        const std::string kinds = form.kinds > 1 ? std::to_string(form.kinds) + " x " : "";
        reason = kinds + std::to_string(form.slots) + " x " + hidden + " x " +
                 std::to_string(form.products) + " x " + hidden +
                 " weights don't fit the registers and shared memory of " +
                 std::to_string(gpu.multiprocessors) + " multiprocessors";
      }
    }
    if (!reason.empty()) {
      if (!choice.reason.empty()) choice.reason += "; ";
      choice.reason += std::string(variant.name) + ": " + reason;
    }
  }
  return choice;
}

}  // namespace jaxsparse
