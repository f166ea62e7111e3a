// Products by matrices that are packed by gaps, on an emulated GPU, and these written out.
#include "packed/kernels/packed_gaps.cu"

#include <set>

#include "device/packed_operands.h"
#include "packed/kernels/packed_unpack_gaps.cu"

namespace jaxsparse {

alignas(128) unsigned char packed_gaps[232448], unpack_gaps_panels[UnpackGapsConfig::kSharedBytes];

namespace {

// What tests know of a configuration.
struct Form {
  PackedNumbers numbers;
  bool x_on_left;
  static constexpr int cell = 0;
};

// Of so many parts times options' ones, by so many teams in a block.
template <typename T, typename Out, PackedGapsConfig kGaps, int kTeams, int kBlocks>
struct Gaps {
  static constexpr Form kConfig{kGaps.numbers, kGaps.x_on_left};
  static constexpr int kParts = kGaps.team;

  static void Run(PackedProblem p, bool backwards) {
    const int64_t bytes = kGaps.SharedBytes(GapRangeColumns(p.k, p.parts));
    if (bytes > static_cast<int64_t>(sizeof(packed_gaps))) Fail("shared memory", 0, 0, 0, 0);
    std::memset(packed_gaps, rubbish, sizeof(packed_gaps));
    if (kGaps.team > 1 && p.parts > kGaps.team) return RunInTurns(p, backwards);
    const auto blocks = kBlocks * static_cast<int>(CeilDivide(p.n, kGaps.columns));
    const PackedGapsProblem problem(p, kGaps.columns, kGaps.team, blocks);
    emulated::Launch(
        blocks, kTeams * kGaps.team * kWarp, [&] { PackedGaps<T, Out, kGaps>(problem); },
        backwards);
  }

  // A warp takes all parts of a strip.
  static void RunInTurns(const PackedProblem& p, bool backwards) {
    constexpr PackedGapsConfig kInTurns{
        .numbers = kGaps.numbers, .columns = kGaps.columns, .x_on_left = kGaps.x_on_left};
    const auto blocks = kBlocks * static_cast<int>(CeilDivide(p.n, kGaps.columns));
    const PackedGapsProblem problem(p, kInTurns.columns, kInTurns.team, blocks);
    emulated::Launch(
        blocks, kTeams * kWarp, [&] { PackedGaps<T, Out, kInTurns>(problem); }, backwards);
  }

  static void Unpack(const PackedProblem& p) {
    std::memset(unpack_gaps_panels, rubbish, sizeof(unpack_gaps_panels));
    const auto blocks =
        static_cast<int>(CeilDivide(GapStrips(p) * p.parts, UnpackGapsConfig::kWarps));
    emulated::Launch(blocks, UnpackGapsConfig::kWarps * kWarp,
                     [&] { PackedUnpackGaps<T, kGaps.numbers>(p); });
  }
};

template <typename T, typename Out, PackedGapsConfig kGaps, int kTeams, int kBlocks>
void TestGaps() {
  TestSizes<T, Out, Gaps<T, Out, kGaps, kTeams, kBlocks>>();
}

// By one instruction, and as GPUs that lack it convert.
void TestConversions() {
  for (uint32_t code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;  // NaN, of which none are packed
    const GapStep<PackedNumbers::kE4M3> step{{code << 8, code << 24}, 0};
    for (const int e : {1, 7}) {
      const float at_once = step.NumberAt<bfloat16, true>(e, 0);
      if (step.NumberAt<bfloat16, false>(e, 0) != at_once) Fail("e4m3", 0, e, code, 0);
    }
  }
}

// Lanes that read x at once, 128 bytes, read each unit of a row once, at whatever places.
template <int kColumns>
void TestBanks() {
  constexpr PackedGapsConfig kGaps{.columns = kColumns};
  constexpr int kUnits = kGaps.kRowBytes / kGaps.UnitBytes();
  for (int stream = 0; stream < kGapStreams; ++stream) {
    for (int first = 0; first < kWarp; first += kUnits) {
      std::set<uint32_t> units;
      for (int lane = first; lane < first + kUnits; ++lane) {
        units.insert(kGaps.UnitAt(lane, stream) / kGaps.UnitBytes());
      }
      if (units.size() != kUnits || *units.rbegin() != kUnits - 1) {
        Fail("banks", stream, first, static_cast<double>(units.size()), kUnits);
      }
    }
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  rubbish = 0x47;
  TestBanks<1>();
  TestBanks<2>();
  TestBanks<4>();
  TestBanks<8>();
  TestGaps<bfloat16, bfloat16, {.columns = 1}, 4, 3>();
  TestGaps<bfloat16, float, {.columns = 8, .team = 2}, 2, 5>();
  TestGaps<float16, float16, {.columns = 4, .x_on_left = true}, 5, 2>();
  TestGaps<float16, float, {.columns = 2, .team = 4, .x_on_left = true}, 1, 4>();
  TestGaps<bfloat16, bfloat16, {.columns = 8, .x_on_left = true}, 3, 1>();
  TestGaps<float16, float16, {.columns = 8}, 4, 2>();
  constexpr auto kInt8 = PackedNumbers::kInt8, kE4M3 = PackedNumbers::kE4M3;
  TestGaps<bfloat16, bfloat16, {.numbers = kInt8, .columns = 1, .team = 2}, 2, 3>();
  TestGaps<float16, float, {.numbers = kInt8, .columns = 8, .x_on_left = true}, 3, 2>();
  TestGaps<float16, float16, {.numbers = kE4M3, .columns = 1, .x_on_left = true}, 4, 2>();
  TestConversions();
  TestGaps<bfloat16, float, {.numbers = kE4M3, .columns = 4, .team = 2}, 2, 2>();
  std::puts("all results agree");
}
