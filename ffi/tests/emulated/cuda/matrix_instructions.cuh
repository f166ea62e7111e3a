// ffi/cuda/matrix_instructions.cuh on an emulated GPU.
#pragma once

#include <array>
#include <cmath>
#include <cstring>

#include "cuda/arithmetic_instructions.cuh"
#include "cuda/instructions.cuh"
#include "emulated/gpu.h"

namespace jaxsparse {

struct MmaOperands {
  uint32_t a[4], b[2];
  float d[4];
};
struct MmaResult {
  float d[4];
};

// Rounds towards zero, as tensor cores do when they add; what is too large becomes infinite.
inline float CutOff(double x) {
  const float nearest = static_cast<float>(x);
  return std::fabs(nearest) > std::fabs(x) && std::isfinite(nearest) ? std::nextafter(nearest, 0.0f)
                                                                     : nearest;
}

// Without sanitizers, with which tests on tensor cores would take a quarter longer: the loop stays
// within its two arrays.
[[gnu::noinline, gnu::no_sanitize("address", "undefined")]] inline double AddProducts(
    double sum, const float (&row)[16], const float (&column)[16]) {
  for (int k = 0; k < 16; ++k) sum += double(row[k]) * column[k];
  return sum;
}

template <typename ToFloat>
void EmulateMma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, ToFloat number) {
  const MmaOperands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  const MmaResult result =
      emulated::Block::current->Collect<MmaOperands, MmaResult>(mine, [&](auto given, auto taken) {
        float rows[16][16], columns[8][16];
        for (int lane = 0; lane < kWarp; ++lane) {
          for (int word = 0; word < 4; ++word) {
            for (int half = 0; half < 2; ++half) {
              const int row = lane / 4 + word % 2 * 8, k = lane % 4 * 2 + half + word / 2 * 8;
              rows[row][k] = number(static_cast<uint16_t>(given(lane).a[word] >> 16 * half));
            }
          }
          for (int word = 0; word < 2; ++word) {
            for (int half = 0; half < 2; ++half) {
              columns[lane / 4][lane % 4 * 2 + half + word * 8] =
                  number(static_cast<uint16_t>(given(lane).b[word] >> 16 * half));
            }
          }
        }
        for (int lane = 0; lane < kWarp; ++lane) {
          for (int i = 0; i < 4; ++i) {
            const double sum = AddProducts(given(lane).d[i], rows[lane / 4 + i / 2 * 8],
                                           columns[lane % 4 * 2 + i % 2]);
            taken(lane).d[i] = CutOff(sum);
          }
        }
      });
  for (int i = 0; i < 4; ++i) d[i] = result.d[i];
}
inline void MultiplyAddBfloats(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  EmulateMma(d, a, b0, b1, FloatOfBfloat);
}
inline void MultiplyAddHalves(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  EmulateMma(d, a, b0, b1, FloatOfHalf);
}
// The lower half of the inner dimension, without what would meet a NaN of the upper one.
inline void MultiplyAddBfloats(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  EmulateMma(d, {a[0], a[1], 0, 0}, b, 0, FloatOfBfloat);
}
inline void MultiplyAddHalves(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  EmulateMma(d, {a[0], a[1], 0, 0}, b, 0, FloatOfHalf);
}

struct FourWords {
  uint32_t words[4];
};

template <bool kTransposed>
void EmulateLoadMatrices(uint32_t (&to)[4], const void* row) {
  const FourWords result =
      emulated::Block::current->Collect<const void*, FourWords>(row, [&](auto given, auto taken) {
        for (int matrix = 0; matrix < 4; ++matrix) {
          uint16_t numbers[8][8];
          for (int r = 0; r < 8; ++r) {
            const void* from = given(matrix * 8 + r);
            if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
              emulated::Block::Fail("misaligned row");
            std::memcpy(numbers[r], from, 16);
          }
          for (int lane = 0; lane < kWarp; ++lane) {
            const int i = lane / 4, j = lane % 4 * 2;
            const uint32_t low = kTransposed ? numbers[j][i] : numbers[i][j];
            const uint32_t high = kTransposed ? numbers[j + 1][i] : numbers[i][j + 1];
            taken(lane).words[matrix] = low | high << 16;
          }
        }
      });
  for (int i = 0; i < 4; ++i) to[i] = result.words[i];
}
inline void LoadMatrices(uint32_t (&to)[4], const void* row) {
  EmulateLoadMatrices<false>(to, row);
}
inline void LoadTransposedMatrices(uint32_t (&to)[4], const void* row) {
  EmulateLoadMatrices<true>(to, row);
}

inline uint32_t TransposeMatrix(uint32_t pair) {
  return emulated::Block::current->Collect<uint32_t, uint32_t>(pair, [](auto given, auto taken) {
    const auto number = [&](int row, int column) {
      return given(row * 4 + column / 2) >> 16 * (column % 2) & 0xffff;
    };
    for (int lane = 0; lane < kWarp; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      taken(lane) = number(column, row) | number(column + 1, row) << 16;
    }
  });
}

template <int kWidth>
uint64_t SharedMatrix(uint32_t address) {
  return uint64_t{kWidth} << 32 | address;
}
inline uint64_t Behind(uint64_t matrix, int bytes) {
  if (bytes % 16 != 0) emulated::Block::Fail("misaligned matrix");
  return (matrix & ~uint64_t{0xffffffff}) | static_cast<uint32_t>(matrix + bytes);
}
// The bytes between blocks of longer lines stand above the width, in chunks (SharedMatrixOfBlocks).
constexpr int kBlockChunksAt = 48;
// What stands for the width where all lines' chunks lie so many bytes apart (SharedMatrixOfChunks).
constexpr int kWidthOfChunks = 8;
// Line `line` of a SharedMatrix, and there number `at`. Chunks change places by their addresses.
inline uint16_t NumberOf(uint64_t matrix, int line, int at) {
  const auto width = static_cast<uint32_t>(matrix >> 32 & 0xffff);
  const auto block_bytes = static_cast<uint32_t>(matrix >> kBlockChunksAt) * 16;
  if (width == kWidthOfChunks) {
    return SharedAt<uint16_t>(static_cast<uint32_t>(matrix) + at / 8 * block_bytes + line * 16 +
                              at % 8 * 2);
  }
  const uint32_t place = block_bytes == 0 ? at * 2 : at / width * block_bytes + at % width * 2;
  uint32_t address = static_cast<uint32_t>(matrix) + line * width * 2 + place;
  address ^= (address >> 7 & (width / 8 - 1)) << 4;
  return SharedAt<uint16_t>(address);
}

// Done when the warpgroup waits, and not before; a warp does its own 16 rows.
template <bool kTransposed, int kCount, typename ToFloat>
void EmulateWarpgroupMma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, ToFloat number) {
  constexpr int kColumns = kCount * 2;
  static_assert(kColumns % 8 == 0);
  struct OfLane {
    std::array<uint32_t, 4> a;
    float* d;
  };
  const OfLane own{{a[0], a[1], a[2], a[3]}, d};
  if (static_cast<uint32_t>(b) % 16 != 0) emulated::Block::Fail("misaligned matrix");
  emulated::Block::current->Postpone([=] {
    emulated::Block::current->Collect<OfLane, int>(own, [&](auto given, auto) {
      float columns[kColumns][16];
      for (int column = 0; column < kColumns; ++column) {
        for (int k = 0; k < 16; ++k) {
          columns[column][k] =
              number(kTransposed ? NumberOf(b, k, column) : NumberOf(b, column, k));
        }
      }
      float rows[16][16];
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int word = 0; word < 4; ++word) {
          for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + word % 2 * 8, k = lane % 4 * 2 + half + word / 2 * 8;
            rows[row][k] = number(static_cast<uint16_t>(given(lane).a[word] >> 16 * half));
          }
        }
      }
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int i = 0; i < kCount; ++i) {
          float& sum = given(lane).d[i];
          const auto& column = columns[i / 4 * 8 + lane % 4 * 2 + i % 2];
          sum = CutOff(AddProducts(sum, rows[lane / 4 + i / 2 % 2 * 8], column));
        }
      }
    });
  });
}
template <bool kTransposed, bool kAdd = true, int kCount>
void MultiplyAddBfloats(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (!kAdd) {
    emulated::Block::current->Postpone([&d] {
      for (float& sum : d) sum = 0;
    });
  }
  EmulateWarpgroupMma<kTransposed>(d, a, b, FloatOfBfloat);
}
template <bool kTransposed, int kCount>
void MultiplyAddHalves(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
  EmulateWarpgroupMma<kTransposed>(d, a, b, FloatOfHalf);
}
template <int kCount>
void TakeRegisters() {}
template <int kCount>
void GiveUpRegisters() {}
template <int kBlocks, int kCount>
void BeginProducts(float (&)[kBlocks][kCount]) {}
template <int kBlocks, int kCount>
void WaitForProducts(float (&)[kBlocks][kCount]) {
  emulated::Block::current->DoPostponed();
}

}  // namespace jaxsparse
