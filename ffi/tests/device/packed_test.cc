// Products by packed matrices on tensor cores of single warps of an emulated GPU, and the packer.
#include "device/packed_operands.h"
#include "packed/kernels/packed_mma.cu"
#include "packed/kernels/packed_prologue.cu"
#include "packed/kernels/packed_unpack.cu"

namespace jaxsparse {

alignas(128) unsigned char packed_stages[232448], unpack_stages[232448];

namespace {

template <typename T, typename Out, PackedMmaConfig kMma>
struct Mma {
  static constexpr PackedMmaConfig kConfig = kMma;
  static constexpr int kParts = 1;

  static void Run(PackedProblem p, bool backwards) {
    static_assert(kMma.SharedBytes() <= sizeof(packed_stages));
    std::memset(packed_stages, rubbish, sizeof(packed_stages));
    const int64_t bytes = PackedWorkspaceBytes(p, kMma.TileRows(), kMma.columns);
    const auto workspace = SpaceFor(bytes);
    p.workspace = {reinterpret_cast<char*>(workspace.get()), bytes};
    if (p.parts > 1) {
      const auto threads = static_cast<int>(CeilDivide(PackedCountsBytes(p) / 16, 32) * 32);
      emulated::Launch(1, threads, [&] { PackedPrologue(p); });
    }
    const auto blocks = static_cast<int>(PackedTiles(p, kMma.TileRows(), kMma.columns) * p.parts);
    emulated::Launch(blocks, kMma.warps * kWarp, [&] { PackedMma<T, Out, kMma>(p); }, backwards);
  }

  static void Unpack(const PackedProblem& p) {
    constexpr PackedUnpackConfig kUnpack{
        .numbers = kMma.numbers, .cell = kMma.cell, .warps = kMma.warps, .bulk = kMma.bulk};
    static_assert(kUnpack.SharedBytes() <= sizeof(unpack_stages));
    std::memset(unpack_stages, rubbish, sizeof(unpack_stages));
    const auto blocks = static_cast<int>(CeilDivide(PackedStrips(p) * p.parts, kUnpack.warps));
    emulated::Launch(blocks, kUnpack.warps * kWarp, [&] { PackedUnpack<T, kUnpack>(p); });
  }
};

template <typename T, typename Out, PackedMmaConfig kMma>
void TestMma() {
  TestSizes<T, Out, Mma<T, Out, kMma>>();
}

// The packer reads and writes nothing out of bounds, whatever a pattern says.
void TestDamagedPatterns() {
  constexpr int kRows = 20, kColumns = 700, kTurns = 300;
  int packed = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    std::vector<int32_t> offsets{0}, columns, order(kRows);
    std::iota(order.begin(), order.end(), 0);
    for (int row = 0; row < kRows; ++row) {
      for (int column = generator() % 9; column < kColumns; column += 1 + generator() % 90) {
        columns.push_back(column);
      }
      offsets.push_back(static_cast<int32_t>(columns.size()));
    }
    std::vector<int32_t>* const arrays[] = {&offsets, &columns, &order};
    const int32_t wild[] = {
        -1, 0, 7, kRows, kColumns, 1 << 30, std::numeric_limits<int32_t>::min()};
    for (uint32_t i = generator() % 3; i > 0; --i) {
      std::vector<int32_t>& spoilt = *arrays[generator() % 3];
      spoilt[generator() % spoilt.size()] = wild[generator() % 7];
    }
    const PackedPattern pattern{offsets.data(), columns.data(),
                                order.data(),   kRows,
                                kColumns,       static_cast<int64_t>(columns.size())};
    PackedStreams streams;
    GapArrays gaps;
    PackedForm form{.cell = 1 + turn % 2, .parts = 1 + turn % 3};
    if (turn % 4 == 2) form.numbers_of_word = 4;
    const std::string error = PackStreams(pattern, form, &streams);
    if (PackGaps(pattern, form.parts, &gaps) != error) Fail("pack_gaps", turn, 0, 0, 0);
    packed += error.empty();
  }
  if (packed < kTurns / 4 || packed > kTurns / 2) Fail("packed patterns", 0, 0, packed, kTurns / 3);
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestDamagedPatterns();
  rubbish = 0x47;  // a number: after what is none, a block adds its sums up anew, from memory
  TestMma<bfloat16, bfloat16, {.cell = 1, .columns = 8, .warps = 2}>();
  TestMma<bfloat16, float, {.cell = 2, .columns = 8, .warps = 4, .x_on_left = true}>();
  TestMma<float16, float16, {.cell = 2, .columns = 16, .warps = 2, .stages = 2, .bulk = true}>();
  TestMma<float16, float, {.columns = 16, .warps = 2, .x_on_left = true, .bulk = true}>();
  TestMma<bfloat16, bfloat16, {.numbers = PackedNumbers::kInt8, .warps = 2, .bulk = true}>();
  TestMma<float16, float, {.numbers = PackedNumbers::kE4M3, .warps = 2, .x_on_left = true}>();
  TestMma<bfloat16, float, {.numbers = PackedNumbers::kE4M3, .columns = 16, .warps = 2}>();
  std::puts("all results agree");
}
