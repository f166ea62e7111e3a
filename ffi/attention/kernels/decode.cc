// Attention with few queries on the host: which problems its kernels fit, their predicted time,
// configuration and launch.
#include "attention/kernels/decode.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "attention/attention_cuda.h"
#include "attention/kernels/tensor_maps.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

KeyPages PagesOf(const AttentionProblem&) { return {}; }
KeyPages PagesOf(const PagedAttentionProblem& p) { return p.pages; }

// With so many warps, and as many stages as shared memory has room for.
AttentionDecodeConfig ConfigOf(const AttentionOperands& p, int warps) {
  constexpr int64_t kMostStages = 6;
  AttentionDecodeConfig config{static_cast<int>(p.head_size), static_cast<int>(p.value_size), warps,
                               /*stages=*/1};
  const int64_t room = (p.gpu.shared_bytes - kDecodeControlBytes) / (warps * config.WarpBytes());
  config.stages = static_cast<int>(std::min(kMostStages, room));
  return config;
}

constexpr int kLeastStages = 2;

// A block has a multiprocessor to itself. It has half as many warps where heads are large.
AttentionDecodeConfig BestConfig(const AttentionOperands& p) {
  const AttentionDecodeConfig config = ConfigOf(p, kDecodeSlices);
  return config.stages >= kLeastStages ? config : ConfigOf(p, kDecodeSlices / 2);
}

// The most tiles that the line can have.
int64_t LineOf(const AttentionOperands& p) {
  return DecodeLists(p) * DecodeItemsOfList(p) * p.mask.capacity;
}

int64_t BlocksOf(const AttentionOperands& p) {
  const int64_t running = p.gpu.multiprocessors;
  const int64_t room = p.workspace.bytes / DecodeWorkspaceBytes(p, 1);
  return std::max<int64_t>(std::min({running, room, LineOf(p)}), 1);
}

template <typename Problem>
std::string Launch(const Problem& p, const CudaLaunch& launch) {
  AttentionDecodeProblem decode;
  static_cast<AttentionProblem&>(decode) = p;
  decode.pages = PagesOf(p);
  decode.blocks = static_cast<uint32_t>(BlocksOf(p));
  decode.lists = static_cast<uint32_t>(DecodeLists(p));
  decode.items_of_list = static_cast<uint32_t>(DecodeItemsOfList(p));
  decode.heads_of_list = static_cast<uint32_t>(DecodeHeadsOfList(p));
  return launch.With(&decode);
}

KernelSource Source(const AttentionOperands& p, const AttentionDecodeConfig& config) {
  return {"attention/kernels/decode.cu",
          KernelExpression(
              "AttentionDecode",
              {TypeName(p.dtype),
               ConfigExpression(
                   "AttentionDecodeConfig",
                   {Field("head_size", config.head_size), Field("value_size", config.value_size),
                    Field("warps", config.warps), Field("stages", config.stages)})})};
}
KernelSource MergeSource(const AttentionOperands& p) {
  return {"attention/kernels/decode_merge.cu",
          KernelExpression("AttentionDecodeMerge",
                           {TypeName(p.dtype), std::to_string(kDecodeMergeWarps)})};
}

// As many queries as a row of cells has, whose tiles are one list.
bool HasFewQueries(const AttentionOperands& p) {
  return 0 < p.queries && p.queries <= kDecodeMostQueries;
}

int64_t WorkspaceBytes(const AttentionOperands& p) {
  if (!p.has_mask || p.scores.Exist() || SizeOf(p.dtype) != 2 || !HasFewQueries(p)) return 0;
  return DecodeWorkspaceBytes(p, kDecodeMostMultiprocessors);
}

bool IsSized(int64_t size, int64_t step) { return 0 < size && size <= 256 && size % step == 0; }

constexpr int64_t kMost = int64_t{1} << 30;

bool FitPages(const AttentionProblem&) { return true; }
bool FitPages(const PagedAttentionProblem& p) {
  return p.pages.count > 0 && p.pages.size > 0 && p.pages.size % kMaskCell == 0 &&
         p.pages.size < kMost && p.pages.count < kMost / p.pages.size;
}

// A scale of other signs would turn what is largest among scores; tiles of the line, positions and
// cells have numbers of 32 bits.
bool Fits(const AttentionOperands& p) {
  const bool aligned =
      IsAlignedForCopies(p.query) && IsAlignedForCopies(p.key) && IsAlignedForCopies(p.value);
  const int64_t heads = p.groups * p.per_group;
  if (!p.has_mask || p.scores.Exist() || SizeOf(p.dtype) != 2 || !HasFewQueries(p)) return false;
  if (heads == 0 || p.batch.count == 0) return false;
  const int64_t items = DecodeLists(p) * DecodeItemsOfList(p);
  return aligned && IsSized(p.head_size, 16) && IsSized(p.value_size, kWarp) &&
         std::isnormal(static_cast<float>(p.scale)) && p.scale > 0 &&
         p.gpu.compute_capability >= 80 && 0 < p.keys && p.keys < kMost &&
         heads * p.queries < kMost && p.batch.count < kMost && p.mask.cells < kMost &&
         items < kMost && p.mask.capacity < kMost / items && BestConfig(p).stages >= kLeastStages &&
         DecodeWorkspaceBytes(p, 1) <= p.workspace.bytes;
}

struct CostModel {
  double launch_us;
  double bytes_per_clock;  // that a multiprocessor gets
  double row_of_part_us;   // of one item's parts, which follow each other
};

// Fitted to 10 times on an H200, from 29 us to 2 ms; the largest error is 8 %.
constexpr CostModel kCostModel{.launch_us = 18.7, .bytes_per_clock = 18, .row_of_part_us = 0.108};

double Cost(const AttentionOperands& p) {
  const auto tiles = static_cast<double>(LineOf(p));
  const auto items = static_cast<double>(DecodeLists(p) * DecodeItemsOfList(p));
  const double blocks = std::max(1.0, std::min(tiles, static_cast<double>(p.gpu.multiprocessors)));
  const auto of_tile =
      static_cast<double>(kMaskTile * (p.head_size + p.value_size) * SizeOf(p.dtype));
  const double clocks = tiles * of_tile / kCostModel.bytes_per_clock;
  const double parts = std::max(1.0, blocks / items);
  return kCostModel.launch_us + clocks / blocks / kClocksOfMicrosecond +
         kCostModel.row_of_part_us * parts * static_cast<double>(DecodeRowsOfPart(p));
}

// The kernel that reads keys and values, which is launched first.
template <typename Problem>
constexpr CudaKernel<Problem> kParts{[](const Problem& p) { return Source(p, BestConfig(p)); },
                                     [](const Problem& p) {
                                       const AttentionDecodeConfig config = BestConfig(p);
                                       return LaunchShape{BlocksOf(p), config.warps * kWarp,
                                                          config.SharedBytes()};
                                     },
                                     Launch<Problem>};

template <typename Problem>
constexpr CudaVariant<Problem> kVariant{
    "decode",
    [](const Problem& p) { return Fits(p) && FitPages(p); },
    [](const Problem& p) { return Cost(p); },
    [](const Problem& p) { return MergeSource(p); },
    [](const Problem& p) { return LaunchShape{BlocksOf(p), kDecodeMergeWarps * kWarp}; },
    &kParts<Problem>,
    Launch<Problem>,
    [](const Problem& p, bool) { return WorkspaceBytes(p); }};

}  // namespace

extern constinit const CudaVariant<AttentionProblem> kAttentionDecode = kVariant<AttentionProblem>;
extern constinit const CudaVariant<PagedAttentionProblem> kPagedAttentionDecode =
    kVariant<PagedAttentionProblem>;

}  // namespace jaxsparse
