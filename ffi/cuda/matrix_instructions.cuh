// Products of matrices on tensor cores, of a warp and of a warpgroup, and what a warpgroup needs
// for them. A host that emulates a GPU replaces this header.
#pragma once

#include "types.h"

namespace jaxsparse {

// d += a b on tensor cores: a 16 x 16, b 16 x 8, each lane's part as mma.m16n8k16 assigns it.
__device__ __forceinline__ void MultiplyAddBfloats(float (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void MultiplyAddHalves(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same, but a 16 x 8, b 8 x 8, as mma.m16n8k8 assigns them.
__device__ __forceinline__ void MultiplyAddBfloats(float (&d)[4], const uint32_t (&a)[2],
                                                   uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}
__device__ __forceinline__ void MultiplyAddHalves(float (&d)[4], const uint32_t (&a)[2],
                                                  uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Four matrices of 8 x 8 numbers of 16 bits. A lane names one row of one of them, 16 bytes of
// shared memory: lanes 0 to 7 those of the first. It receives two neighbours of row lane / 4 of
// each.
__device__ __forceinline__ void LoadMatrices(uint32_t (&to)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same, but a lane receives two neighbours of column lane / 4.
__device__ __forceinline__ void LoadTransposedMatrices(uint32_t (&to)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The transpose of a matrix of 8 x 8 numbers of 16 bits, of which each lane has two neighbours of
// row lane / 4.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Has a warpgroup take registers that others of its block have given up, or give some up: so many
// each thread has from there on, a multiple of 8.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000)
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void GiveUpRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
#else
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {}
template <int kCount>
__device__ __forceinline__ void GiveUpRegisters() {}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A matrix in shared memory as tensor cores of a warpgroup read it. Its lines of `kWidth` numbers
// of 16 bits, 16, 32 or 64, lie one behind the other, in chunks of 16 bytes: the order of a line's
// chunks is that of cuda/tensor_cores.cuh. The first eight lines are at a multiple of as many
// bytes as they have. Where lines are longer than what a product takes of them, `address` is that
// of the first number.
template <int kWidth>
__device__ __forceinline__ uint64_t SharedMatrix(uint32_t address) {
  constexpr uint64_t kOrder = kWidth == 64 ? 1 : kWidth == 32 ? 2 : 3;
  constexpr uint64_t kEightLines = 8 * kWidth * 2;
  return kOrder << 62 | (kEightLines >> 4) << 32 | uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}

// The matrix so many bytes, a multiple of 16, behind another one.
__device__ __forceinline__ uint64_t Behind(uint64_t matrix, int bytes) {
  return matrix + (bytes >> 4);
}

// d += a b on the tensor cores of a warpgroup, which are four warps: a is 64 x 16, each warp's
// lanes having 16 rows as mma.m16n8k16 assigns them, so that rows of d are; b is in shared
// memory. Its lines are columns of the product or, transposed, of the inner dimension. The product
// is there, and `a` may be changed, once the warpgroup has waited.
//
// Without kAdd it is d = a b: sums that are cleared before take other registers than those they
// had, which there are not where many are in use, and all products wait for one another then.
template <bool kTransposed, bool kAdd = true>
__device__ __forceinline__ void MultiplyAddBfloats(float (&d)[16], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
      "%7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, %22, 1, 1, %21;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed), "n"(kAdd));
}
template <bool kTransposed, bool kAdd = true>
__device__ __forceinline__ void MultiplyAddBfloats(float (&d)[32], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
      "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, %38, 1, 1, %37;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed), "n"(kAdd));
}
template <bool kTransposed>
__device__ __forceinline__ void MultiplyAddHalves(float (&d)[16], const uint32_t (&a)[4],
                                                  uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, %21;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
}
template <bool kTransposed>
__device__ __forceinline__ void MultiplyAddHalves(float (&d)[32], const uint32_t (&a)[4],
                                                  uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
      "%25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
}

// The same of 8 and of 16 columns, which take as long as 32 do.
template <bool kTransposed>
__device__ __forceinline__ void MultiplyAddBfloats(float (&d)[4], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, %8, 1, 1, 1, %9;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
}
template <bool kTransposed>
__device__ __forceinline__ void MultiplyAddHalves(float (&d)[4], const uint32_t (&a)[4],
                                                  uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, %8, 1, 1, 1, %9;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
}
template <bool kTransposed>
__device__ __forceinline__ void MultiplyAddBfloats(float (&d)[8], const uint32_t (&a)[4],
                                                   uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, 1, 1, 1, %13;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
}
template <bool kTransposed>
__device__ __forceinline__ void MultiplyAddHalves(float (&d)[8], const uint32_t (&a)[4],
                                                  uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, 1, 1, 1, %13;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
}

// Around products: before the first one, with `d` and all registers of `a` as they are to be read,
// and until the last one is there.
template <int kBlocks, int kCount>
__device__ __forceinline__ void KeepInRegisters(float (&d)[kBlocks][kCount]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[b][i])::"memory");
  }
}
template <int kBlocks, int kCount>
__device__ __forceinline__ void BeginProducts(float (&d)[kBlocks][kCount]) {
  KeepInRegisters(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int kBlocks, int kCount>
__device__ __forceinline__ void WaitForProducts(float (&d)[kBlocks][kCount]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  KeepInRegisters(d);
}

#else

template <int kWidth>
__device__ __forceinline__ uint64_t SharedMatrix(uint32_t) {
  asm volatile("trap;");
  return 0;
}
__device__ __forceinline__ uint64_t Behind(uint64_t matrix, int) { return matrix; }
template <bool kTransposed, bool kAdd = true, int kCount>
__device__ __forceinline__ void MultiplyAddBfloats(float (&)[kCount], const uint32_t (&)[4],
                                                   uint64_t) {
  asm volatile("trap;");
}
template <bool kTransposed, int kCount>
__device__ __forceinline__ void MultiplyAddHalves(float (&)[kCount], const uint32_t (&)[4],
                                                  uint64_t) {
  asm volatile("trap;");
}
template <int kBlocks, int kCount>
__device__ __forceinline__ void BeginProducts(float (&)[kBlocks][kCount]) {
  asm volatile("trap;");
}
template <int kBlocks, int kCount>
__device__ __forceinline__ void WaitForProducts(float (&)[kBlocks][kCount]) {
  asm volatile("trap;");
}

#endif

}  // namespace jaxsparse
