// ffi/cuda/warpgroup_instructions.cuh on an emulated GPU.
#pragma once

#include "cuda/matrix_instructions.cuh"

namespace jaxsparse {

inline uint64_t SharedMatrixOfBlocks(uint32_t address, int block_bytes) {
  if (block_bytes % 1024 != 0) emulated::Block::Fail("misaligned blocks of a matrix");
  return SharedMatrix<64>(address) | static_cast<uint64_t>(block_bytes / 16) << kBlockChunksAt;
}

inline uint64_t SharedMatrixOfChunks(uint32_t address, int chunk_bytes) {
  if (chunk_bytes % 128 != 0 || address % 16 != 0) {
    emulated::Block::Fail("misaligned chunks of a matrix");
  }
  return SharedMatrix<kWidthOfChunks>(address) | static_cast<uint64_t>(chunk_bytes / 16)
                                                     << kBlockChunksAt;
}

// Done when the warpgroup waits, and not before; a warp does its own 16 rows.
template <bool kAdd, int kCount, typename ToFloat>
void EmulateSharedMma(float (&d)[kCount], uint64_t a, uint64_t b, ToFloat number) {
  if (static_cast<uint32_t>(a) % 16 != 0 || static_cast<uint32_t>(b) % 16 != 0) {
    emulated::Block::Fail("misaligned matrix");
  }
  const int first_row = static_cast<int>(threadIdx.x) / kWarp % 4 * 16;
  float* const own = d;
  emulated::Block::current->Postpone([=] {
    emulated::Block::current->Collect<float*, int>(own, [&](auto given, auto) {
      float columns[kCount * 2][16], rows[16][16];
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < kCount * 2; ++column) {
          columns[column][k] = number(NumberOf(b, column, k));
        }
        for (int row = 0; row < 16; ++row) rows[row][k] = number(NumberOf(a, first_row + row, k));
      }
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int i = 0; i < kCount; ++i) {
          float& sum = given(lane)[i];
          const auto& column = columns[i / 4 * 8 + lane % 4 * 2 + i % 2];
          sum = CutOff(AddProducts(kAdd ? sum : 0, rows[lane / 4 + i / 2 % 2 * 8], column));
        }
      }
    });
  });
}
template <bool kAdd, int kCount>
void MultiplySharedBfloats(float (&d)[kCount], uint64_t a, uint64_t b) {
  EmulateSharedMma<kAdd>(d, a, b, FloatOfBfloat);
}
template <bool kAdd, int kCount>
void MultiplySharedHalves(float (&d)[kCount], uint64_t a, uint64_t b) {
  EmulateSharedMma<kAdd>(d, a, b, FloatOfHalf);
}

inline void FenceProducts() {}
inline void CommitProducts() { emulated::Block::current->CommitPostponed(); }
template <int kPending>
void WaitForGroups() {
  emulated::Block::current->DoGroups(kPending);
}
template <int kCount>
void KeepInRegisters(float (&)[kCount]) {}

}  // namespace jaxsparse
