// ffi/cuda/instructions.cuh on an emulated GPU.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "cuda/preparation.h"
#include "emulated/gpu.h"
#include "types.h"

namespace jaxsparse {

inline float FloatOfHalf(uint16_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}
inline uint16_t HalfOfFloat(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline float FloatOfBfloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
inline uint16_t BfloatOfFloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>(std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t BfloatsOfFloats(float low, float high) {
  return BfloatOfFloat(low) | static_cast<uint32_t>(BfloatOfFloat(high)) << 16;
}
inline uint64_t MultiplyWide(uint32_t a, uint32_t b) { return uint64_t{a} * b; }
inline uint32_t MinOfHalves(uint32_t a, uint32_t b) {
  const uint32_t low = std::min(a & 0xffff, b & 0xffff), high = std::min(a >> 16, b >> 16);
  return low | high << 16;
}

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

template <typename ToFloat>
void EmulateMma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, ToFloat number) {
  const MmaOperands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  const MmaResult result =
      emulated::Block::current->Collect<MmaOperands, MmaResult>(mine, [&](auto given, auto taken) {
        double of_a[16][16], of_b[16][8];
        for (int lane = 0; lane < kWarp; ++lane) {
          for (int word = 0; word < 4; ++word) {
            for (int half = 0; half < 2; ++half) {
              const int row = lane / 4 + word % 2 * 8, k = lane % 4 * 2 + half + word / 2 * 8;
              of_a[row][k] = number(static_cast<uint16_t>(given(lane).a[word] >> 16 * half));
            }
          }
          for (int word = 0; word < 2; ++word) {
            for (int half = 0; half < 2; ++half) {
              of_b[lane % 4 * 2 + half + word * 8][lane / 4] =
                  number(static_cast<uint16_t>(given(lane).b[word] >> 16 * half));
            }
          }
        }
        for (int lane = 0; lane < kWarp; ++lane) {
          for (int i = 0; i < 4; ++i) {
            double sum = given(lane).d[i];
            for (int k = 0; k < 16; ++k) {
              sum += of_a[lane / 4 + i / 2 * 8][k] * of_b[k][lane % 4 * 2 + i % 2];
            }
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

struct FourWords {
  uint32_t words[4];
};

inline void LoadMatrices(uint32_t (&to)[4], const void* row) {
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
            const uint32_t low = numbers[i][j], high = numbers[i][j + 1];
            taken(lane).words[matrix] = low | high << 16;
          }
        }
      });
  for (int i = 0; i < 4; ++i) to[i] = result.words[i];
}
constexpr int kAllThreads = 0;

template <int kThreads>
void ArriveAt(int barrier) {
  emulated::Block& block = *emulated::Block::current;
  block.Meet(block.Barrier(barrier), kThreads, false);
}
template <int kThreads>
void WaitAt(int barrier) {
  emulated::Block& block = *emulated::Block::current;
  block.Meet(block.Barrier(barrier), kThreads);
}

// Counted from a place in the program, of which an emulated GPU's shared memory is part.
alignas(1024) inline char start_of_shared;
// A compiler that knew which object lies there would take all accesses for ones to that.
inline char* StartOfShared() {
  char* start = &start_of_shared;
  asm("" : "+r"(start));
  return start;
}
inline uint32_t AddressOfShared(const void* shared) {
  return static_cast<uint32_t>(static_cast<const char*>(shared) - StartOfShared());
}
template <typename T>
T& SharedAt(uint32_t address) {
  return *reinterpret_cast<T*>(StartOfShared() + static_cast<int32_t>(address));
}

template <int kWidth>
uint64_t SharedMatrix(uint32_t address) {
  return uint64_t{kWidth} << 32 | address;
}
inline uint64_t Behind(uint64_t matrix, int bytes) {
  if (bytes % 16 != 0) emulated::Block::Fail("misaligned matrix");
  return (matrix & ~uint64_t{0xffffffff}) | static_cast<uint32_t>(matrix + bytes);
}
// Line `line` of a SharedMatrix, and there number `at`. Chunks change places by their addresses.
inline uint16_t NumberOf(uint64_t matrix, int line, int at) {
  const auto width = static_cast<uint32_t>(matrix >> 32);
  uint32_t address = static_cast<uint32_t>(matrix) + line * width * 2 + at * 2;
  address ^= (address >> 7 & (width / 8 - 1)) << 4;
  return SharedAt<uint16_t>(address);
}

// Without sanitizers, with which tests on tensor cores would take a quarter longer: the loop stays
// within its two arrays.
[[gnu::noinline, gnu::no_sanitize("address", "undefined")]] inline double AddProducts(
    double sum, const float (&row)[16], const float (&column)[16]) {
  for (int k = 0; k < 16; ++k) sum += double(row[k]) * column[k];
  return sum;
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

template <typename T>
void StoreSharedIf(bool condition, uint32_t address, T x) {
  if (condition) SharedAt<T>(address) = x;
}

inline uint32_t FetchAndAdd(uint32_t* shared, uint32_t x) {
  const uint32_t before = *shared;
  *shared += x;
  return before;
}

inline uint32_t FetchAndAddOfGpu(uint32_t* global, uint32_t x) { return FetchAndAdd(global, x); }

template <typename T>
void KeepInRegister(T&) {}

// One kernel runs after the other.
inline void LetNextKernelBegin() {}
inline void WaitForKernelBefore() {}

inline void InitBarrier(uint64_t* barrier, uint32_t arrivals) {
  emulated::Block::current->InitCounter(barrier, arrivals);
}
inline void FenceShared() {}
// Reads, so that it shows what is out of bounds.
inline void Prefetch(const void* from) {
  static_cast<void>(*static_cast<const volatile char*>(from));
}
inline void Arrive(uint64_t* barrier) { emulated::Block::current->Count(barrier, 1, 0); }
// What is copied comes when the thread arrives; until then there is rubbish.
inline void AsyncCopy(uint32_t shared, const void* from) {
  constexpr int kBytes = 16;
  void* to = &SharedAt<char>(shared);
  for (const uint64_t place : {reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from)}) {
    if (place % kBytes != 0) emulated::Block::Fail("misaligned copy");
  }
  std::memset(to, 0xff, kBytes);
  emulated::Block::current->Postpone([=] { std::memcpy(to, from, kBytes); });
}
inline void ArriveWhenCopied(uint64_t* barrier) {
  emulated::Block::current->DoPostponed();
  Arrive(barrier);
}
inline void ArriveAndExpect(uint64_t* barrier, uint32_t bytes) {
  constexpr uint32_t kMostBytes = (1 << 20) - 1;
  if (bytes > kMostBytes) emulated::Block::Fail("a barrier can't count so many bytes");
  emulated::Block::current->Count(barrier, 1, bytes);
}
inline void WaitForPhase(uint64_t* barrier, uint32_t odd) {
  emulated::Block::current->WaitForPhase(barrier, odd);
}
// At once, so that a copy to where another thread still reads shows.
inline void BulkCopy(void* shared, const void* from, uint32_t bytes, uint64_t* barrier) {
  for (const uint64_t number :
       {reinterpret_cast<uint64_t>(shared), reinterpret_cast<uint64_t>(from), uint64_t{bytes}}) {
    if (number % 16 != 0) emulated::Block::Fail("misaligned bulk copy");
  }
  if (bytes == 0) emulated::Block::Fail("empty bulk copy");
  std::memcpy(shared, from, bytes);
  emulated::Block::current->Count(barrier, 0, -static_cast<int64_t>(bytes));
}

// What a test writes to a TensorMap.
struct EmulatedTensorMap {
  const uint16_t* data;
  int64_t count, lines, width;
};
inline void TensorCopy(void* shared, const TensorMap& map, int column, int line, int matrix,
                       uint64_t* barrier) {
  EmulatedTensorMap m;
  static_assert(sizeof(m) <= sizeof(map));
  std::memcpy(&m, &map, sizeof(m));
  constexpr int kRowBytes = kTileSize * 2, kChunk = 16, kRepeat = 8 * kRowBytes;
  if (reinterpret_cast<uint64_t>(shared) % kRepeat != 0 || m.width * 2 % kChunk != 0 ||
      reinterpret_cast<uint64_t>(m.data) % kChunk != 0) {
    emulated::Block::Fail("misaligned tensor copy");
  }
  for (int l = 0; l < kTileSize; ++l) {
    for (int c = 0; c < kTileSize; ++c) {
      const bool exists = column + c < m.width && line + l < m.lines && matrix < m.count;
      const int64_t from = (matrix * m.lines + line + l) * m.width + column + c;
      const uint16_t bits = exists ? m.data[from] : 0;
      const int to = l * kRowBytes + (c * 2 ^ l % 8 * kChunk);
      std::memcpy(static_cast<char*>(shared) + to, &bits, sizeof(bits));
    }
  }
  emulated::Block::current->Count(barrier, 0, -int64_t{kTileSize * kRowBytes});
}

}  // namespace jaxsparse
