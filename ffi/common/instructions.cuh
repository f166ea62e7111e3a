// Instructions that C++ has no name for. A host that emulates a GPU replaces this header.
#pragma once

#include "common/types.h"

namespace jaxsparse {

__device__ __forceinline__ float FloatOfHalf(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}
__device__ __forceinline__ uint16_t HalfOfFloat(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ uint16_t BfloatOfFloat(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
// Two of them in a word, the first one in its lower half.
__device__ __forceinline__ uint32_t BfloatsOfFloats(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// d += a b on tensor cores: a 16 x 16, b 16 x 8, each lane's part as mma.m16n8k16 deals it.
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

// Four matrices of 8 x 8 numbers of 16 bits. A lane names one row of one of them, 16 bytes of
// shared memory: lanes 0 to 7 those of the first. It receives two neighbours of row lane / 4 of
// each, or, transposed, of column lane / 4.
__device__ __forceinline__ void LoadMatrices(uint32_t (&to)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&to)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Barriers of a block whose warps have different roles and meet from different places of the code:
// these are not `aligned`, as __syncthreads() is, which promises that all come to the same place.
constexpr int kAllThreads = 0;  // the barrier at which only all of a block's threads meet

template <int kThreads>
__device__ __forceinline__ void ArriveAt(int barrier) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void WaitAt(int barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Shared memory by addresses of 32 bits, with which an access takes half the arithmetic.
__device__ __forceinline__ uint32_t AddressOfShared(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
template <typename T>
__device__ __forceinline__ T& SharedAt(uint32_t address) {
  return *static_cast<T*>(__cvta_shared_to_generic(address));
}

// Adds to a number in shared memory and returns what it was before. It orders nothing else.
__device__ __forceinline__ uint32_t FetchAndAdd(uint32_t* shared, uint32_t x) {
  const uint32_t address = AddressOfShared(shared);
  uint32_t before;
  asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address), "r"(x)
               : "memory");
  return before;
}

// Barriers in shared memory that count arrivals and bytes of bulk copies. Each completion ends a
// phase, the first one of which is phase 0; phases are told apart by whether they are odd.
__device__ __forceinline__ void InitBarrier(uint64_t* barrier, uint32_t arrivals) {
  const uint32_t address = AddressOfShared(barrier);
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}

// Has a cache fetch what a load will want.
__device__ __forceinline__ void Prefetch(const void* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// Copies 16 bytes from memory to shared memory, without waiting; both are aligned to them.
__device__ __forceinline__ void AsyncCopy(uint32_t shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Makes barriers known to bulk copies.
__device__ __forceinline__ void FenceBarriers() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  const uint32_t address = AddressOfShared(barrier);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
// Arrives once what the thread has copied by AsyncCopy is there.
__device__ __forceinline__ void ArriveWhenCopied(uint64_t* barrier) {
  const uint32_t address = AddressOfShared(barrier);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address) : "memory");
}
// Arrives, and has the phase last until so many bytes have come.
__device__ __forceinline__ void ArriveAndExpect(uint64_t* barrier, uint32_t bytes) {
  const uint32_t address = AddressOfShared(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void WaitForPhase(uint64_t* barrier, uint32_t odd) {
  const uint32_t address = AddressOfShared(barrier);
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(address), "r"(odd)
        : "memory");
  }
}
// Copies from memory to shared memory, without waiting. Addresses and size are multiples of 16.
__device__ __forceinline__ void BulkCopy(void* shared, const void* from, uint32_t bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(AddressOfShared(shared)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(AddressOfShared(barrier))
      : "memory");
}

#else

// Earlier architectures have no bulk copies: kernels that use them compile, and stop.
__device__ __forceinline__ void FenceBarriers() { asm volatile("trap;"); }
__device__ __forceinline__ void Arrive(uint64_t*) { asm volatile("trap;"); }
__device__ __forceinline__ void ArriveWhenCopied(uint64_t*) { asm volatile("trap;"); }
__device__ __forceinline__ void ArriveAndExpect(uint64_t*, uint32_t) { asm volatile("trap;"); }
__device__ __forceinline__ void WaitForPhase(uint64_t*, uint32_t) { asm volatile("trap;"); }
__device__ __forceinline__ void BulkCopy(void*, const void*, uint32_t, uint64_t*) {
  asm volatile("trap;");
}

#endif

}  // namespace jaxsparse
