// What has come to the rows of the nearest tiles, in shared memory, in a pass from rows to their
// sources. A team counts its tiles, those of all its groups; a tile has the place of that count
// modulo the window. It is free for the tile a window later as soon as its step has taken its sums,
// which leaves zeros: sums of a tile are made after its step, and in the order of tiles. So of a
// tile's group those that come less than a window later are added to here, and the others in
// memory.
//
// Of a tile (sum or carry, 4 units, row, unit of these): units beside each other, and rows beside
// each other, lie in different banks.
#pragma once

#include "cuda/device.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "dynamic/problem.h"

namespace jaxsparse {

template <typename Plan>
class SumWindow {
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kTiles = kSizes.window;
  static_assert(kTiles > 0 && (kTiles & (kTiles - 1)) == 0);
  // What is added to memory for a tile is there when the step of the set's tile before it has its
  // sums.
  static_assert(kTiles >= kSizes.LeastWindow());

 public:
  static constexpr int kValues = 1 + kSizes.passed / kSizes.row_parts;  // of a row's unit

  __device__ __forceinline__ explicit SumWindow(Words4* shared)
      : shared_(AddressOfShared(shared) + kSizes.window_at) {}

  // Whether sums of the tile with that number are added here to those of a tile of its group.
  __device__ __forceinline__ static bool IsNear(int tile, int number) {
    return number - tile < kTiles;
  }
  // Whether sums of a tile may be in memory: its group has tiles that are a window or more away.
  __device__ __forceinline__ static bool HasFar(const TeamTile& tile) {
    return tile.number < FarEnd(tile);
  }
  // The end of the tiles of a tile's group that have such sums.
  __device__ __forceinline__ static int FarEnd(const TeamTile& tile) { return tile.end - kTiles; }

  // What is the same for all units of a row: bytes. Of a tile by its count. By their numbers in the
  // script neighbouring tiles of a team, which two sets make at once, could have one place, if they
  // are of different groups.
  __device__ __forceinline__ static uint32_t PlaceOfTile(uint32_t count) {
    return count % kTiles * kSizes.tile_values * 4;
  }
  __device__ __forceinline__ static uint32_t PlaceOfRow(int row) { return row * 16; }

  // The address of a unit's values; of one of the first tile that of any is PlaceOfTile behind it.
  __device__ __forceinline__ uint32_t AddressOf(uint32_t place, int unit) const {
    const auto group = static_cast<uint32_t>(unit) / 4;
    return shared_ + (place ^ group % 4 * 32) + group * kTileRows * 16 + unit % 4 * 4;
  }

  __device__ __forceinline__ static void Load(uint32_t address, float (&values)[kValues]) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      uint32_t word[1];
      LoadShared(address + v * kDistance, word);
      values[v] = __uint_as_float(word[0]);
    }
  }
  __device__ __forceinline__ static void Store(uint32_t address, const float (&values)[kValues]) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) StoreShared(address + v * kDistance, values[v]);
  }

 private:
  static constexpr int kDistance = kSizes.units * kTileRows * 4;  // of the values of a unit

  const uint32_t shared_;
};

}  // namespace jaxsparse
