// Products on tensor cores by matrices that are packed by gaps, on an emulated GPU.
#define EMULATED_CONCURRENT_BLOCKS
#include "packed/kernels/packed_gaps_mma.cu"

#include "device/packed_operands.h"

namespace jaxsparse {

alignas(128) __shared__ unsigned char packed_gaps_mma[232448];

namespace {

// What tests know of a configuration.
struct Form {
  PackedNumbers numbers;
  bool x_on_left;
  static constexpr int cell = 0;
};

// Of so many parts times options' ones, by so many teams in a block.
template <typename T, typename Out, PackedGapsMmaConfig kGaps, int kTeams, int kBlocks>
struct Gaps {
  static constexpr Form kConfig{kGaps.numbers, kGaps.x_on_left};
  // Where neither a team nor a cluster has all parts, a warp takes those of a strip one after
  // another.
  static constexpr int kAtOnce = kGaps.team * kGaps.cluster;
  static constexpr int kParts = kAtOnce == 1 && kGaps.columns == 16 ? 2 : kAtOnce;

  static void Run(const PackedProblem& p, bool backwards) {
    const int64_t bytes = kGaps.SharedBytes(GapRangeColumns(p.k, p.parts));
    const bool in_turns = p.parts > kAtOnce || bytes > int64_t{sizeof(packed_gaps_mma)};
    if (in_turns) RunBy<1, 1>(p, backwards);
    else RunBy<kGaps.team, kGaps.cluster>(p, backwards);
  }
  template <int kTeam, int kCluster>
  static void RunBy(const PackedProblem& p, bool backwards) {
    constexpr PackedGapsMmaConfig kShares{.numbers = kGaps.numbers,
                                          .columns = kGaps.columns,
                                          .team = kTeam,
                                          .cluster = kCluster,
                                          .x_on_left = kGaps.x_on_left};
    const int64_t bytes = kShares.SharedBytes(GapRangeColumns(p.k, p.parts));
    if (bytes > int64_t{sizeof(packed_gaps_mma)}) Fail("shared memory", 0, 0, 0, 0);
    std::memset(packed_gaps_mma, rubbish, sizeof(packed_gaps_mma));
    const auto groups = kBlocks * static_cast<int>(CeilDivide(p.n, kGaps.columns));
    const PackedGapsProblem problem(p, kGaps.columns, kTeam * kCluster, groups);
    emulated::Launch({.blocks = groups * kCluster,
                      .threads = kTeams * kTeam * kWarp,
                      .cluster = kCluster,
                      .backwards = backwards},
                     {reinterpret_cast<char*>(packed_gaps_mma), sizeof(packed_gaps_mma)},
                     static_cast<int>(bytes), [&] { PackedGapsMma<T, Out, kShares>(problem); });
  }
};

template <typename T, typename Out, PackedGapsMmaConfig kGaps, int kTeams, int kBlocks>
void TestGaps() {
  TestSizes<T, Out, Gaps<T, Out, kGaps, kTeams, kBlocks>>();
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  rubbish = 0x47;
  TestGaps<bfloat16, bfloat16, {.columns = 8}, 4, 3>();
  TestGaps<bfloat16, float, {.columns = 16, .team = 2}, 2, 5>();
  TestGaps<float16, float16, {.columns = 8, .team = 4, .x_on_left = true}, 2, 2>();
  TestGaps<float16, float, {.columns = 16, .x_on_left = true}, 3, 1>();
  TestGaps<bfloat16, bfloat16, {.columns = 16, .cluster = 2}, 2, 3>();
  TestGaps<float16, float16, {.columns = 8, .cluster = 3, .x_on_left = true}, 3, 2>();
  constexpr auto kInt8 = PackedNumbers::kInt8, kE4M3 = PackedNumbers::kE4M3;
  TestGaps<bfloat16, bfloat16, {.numbers = kInt8, .columns = 8, .team = 2}, 2, 3>();
  TestGaps<float16, float, {.numbers = kInt8, .columns = 16, .x_on_left = true}, 3, 2>();
  TestGaps<float16, float16, {.numbers = kE4M3, .columns = 8}, 4, 2>();
  TestGaps<bfloat16, float, {.numbers = kE4M3, .columns = 16, .team = 2}, 2, 2>();
  std::puts("all results agree");
}
