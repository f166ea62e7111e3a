// Products by packed matrices on tensor cores of warpgroups of an emulated GPU.
#define EMULATED_CONCURRENT_BLOCKS
#include "packed/kernels/packed_wgmma.cu"

#include "device/packed_operands.h"

namespace jaxsparse {

alignas(1024) __shared__ unsigned char packed_shared[232448];

namespace {

template <typename T, typename Out, PackedWgmmaConfig kWgmma>
struct Wgmma {
  static constexpr PackedWgmmaConfig kConfig = kWgmma;
  static constexpr int kParts = kWgmma.ranges;

  static void Run(const PackedProblem& problem, bool backwards) {
    PackedWgmmaProblem p{problem};
    if (CopiesTiles(p, kWgmma)) {
      const EmulatedTensorMap map{.data = static_cast<const uint16_t*>(p.x.data),
                                  .count = 1,
                                  .lines = kWgmma.x_on_left ? p.n : p.k,
                                  .width = kWgmma.x_on_left ? p.k : p.n,
                                  .tile_lines = kWgmma.XLines(),
                                  .tile_width = kWgmma.XWidth()};
      std::memcpy(&p.tiles_of_x, &map, sizeof(map));
    }
    const int cluster = static_cast<int>(p.parts) / kWgmma.ranges;
    int64_t tiles = PackedTiles(p, kWgmma.TileRows(), kWgmma.columns);
    // So that blocks make several tiles.
    if (cluster == 1 && kWgmma.MakesMoreTiles() && tiles > 2) tiles = 2;
    emulated::Launch({.blocks = static_cast<int>(tiles * cluster),
                      .threads = kWgmma.Threads(),
                      .cluster = cluster,
                      .backwards = backwards},
                     {reinterpret_cast<char*>(packed_shared), sizeof(packed_shared)},
                     kWgmma.SharedBytes(), [&] { PackedWgmma<T, Out, kWgmma>(p); });
  }
};

template <typename T, typename Out, PackedWgmmaConfig kWgmma>
void TestWgmma() {
  TestSizes<T, Out, Wgmma<T, Out, kWgmma>>();
}

// Of more rows than two blocks have in one tile each.
template <typename T, typename Out, PackedWgmmaConfig kWgmma>
void TestTiles() {
  constexpr auto test = Test<T, Out, Wgmma<T, Out, kWgmma>>;
  test({400, 520, 30, 0.2}, {.bias = true});
  test({400, 520, 32, 0.5}, {.odd = Odd::kStriped});
  test({400, 520, 32, 0.2}, {.odd = Odd::kBadX});
  test({400, 520, 24, 0.3}, {.odd = Odd::kDamaged});
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestWgmma<bfloat16, float, {.cell = 1, .columns = 8, .ranges = 4}>();
  TestWgmma<float16, float16, {.cell = 2, .columns = 8, .ranges = 2, .x_on_left = true}>();
  TestWgmma<bfloat16, bfloat16, {.cell = 2, .columns = 16, .ranges = 4}>();
  TestWgmma<float16, float, {.cell = 1, .columns = 64, .ranges = 2}>();
  TestWgmma<bfloat16, float, {.cell = 2, .columns = 32, .x_on_left = true}>();
  TestTiles<bfloat16, bfloat16, {.cell = 2, .columns = 32, .ranges = 2}>();
  TestTiles<float16, float, {.cell = 1, .columns = 32, .ranges = 2, .x_on_left = true}>();
  TestWgmma<bfloat16, float, {.numbers = PackedNumbers::kE4M3, .columns = 8, .ranges = 4}>();
  TestWgmma<float16, float16,
            {.numbers = PackedNumbers::kInt8, .columns = 64, .ranges = 2, .x_on_left = true}>();
  std::puts("all results agree");
}
