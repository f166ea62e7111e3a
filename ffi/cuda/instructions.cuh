// Instructions that C++ has no name for. A host that emulates a GPU replaces this header.
#pragma once

#include "types.h"

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

// The whole product. In C++ it is one of 64 bits as soon as the compiler widens a factor in front
// of a loop, with an instruction more.
__device__ __forceinline__ uint64_t MultiplyWide(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// The lesser of two unsigned numbers of 16 bits, in each half of a word.
__device__ __forceinline__ uint32_t MinOfHalves(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t least;
  asm("min.u16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
#else
  const uint32_t low_a = a & 0xffff, low_b = b & 0xffff, high_a = a - low_a, high_b = b - low_b;
  return (low_a < low_b ? low_a : low_b) | (high_a < high_b ? high_a : high_b);
#endif
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
// each.
__device__ __forceinline__ void LoadMatrices(uint32_t (&to)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
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

// Stores there if `condition` is true, without a branch, whatever else depends on it.
__device__ __forceinline__ void StoreSharedIf(bool condition, uint32_t address, uint16_t x) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.u16 [%1], %2; }" ::"r"(
                   static_cast<int>(condition)),
               "r"(address), "h"(x)
               : "memory");
}
__device__ __forceinline__ void StoreSharedIf(bool condition, uint32_t address, float x) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.f32 [%1], %2; }" ::"r"(
                   static_cast<int>(condition)),
               "r"(address), "f"(x)
               : "memory");
}

// Has a number, or an address in memory, computed here, and not again where it is used.
template <typename T>
__device__ __forceinline__ void KeepInRegister(T& x) {
  asm volatile("" : "+r"(x)::"memory");
}
template <typename T>
__device__ __forceinline__ void KeepInRegister(const T*& x) {
  uint64_t address = __cvta_generic_to_global(x);
  asm volatile("" : "+l"(address)::"memory");
  x = static_cast<const T*>(__cvta_global_to_generic(address));
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

// The same in memory: what the block wrote, behind a barrier, others see who add later.
__device__ __forceinline__ uint32_t FetchAndAddOfGpu(uint32_t* global, uint32_t x) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(global)), "r"(x)
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

// What a kernel says that prepares something for the next one: that its blocks may take the place
// of the kernel's, once all of these have begun. The next one waits until the kernel is done, and
// sees all it wrote then; of each of its blocks some thread has to.
__device__ __forceinline__ void LetNextKernelBegin() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void WaitForKernelBefore() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Makes what the thread has written to shared memory known to bulk copies and to the tensor cores
// of warpgroups.
__device__ __forceinline__ void FenceShared() {
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
// Copies a tile of a matrix as its map says, from this column and line of this matrix on.
__device__ __forceinline__ void TensorCopy(void* shared, const TensorMap& map, int column, int line,
                                           int matrix, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(AddressOfShared(shared)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(line), "r"(matrix),
      "r"(AddressOfShared(barrier))
      : "memory");
}

#else

// Earlier architectures have none of these: kernels that use them compile, and stop.
__device__ __forceinline__ void LetNextKernelBegin() { asm volatile("trap;"); }
__device__ __forceinline__ void WaitForKernelBefore() { asm volatile("trap;"); }
__device__ __forceinline__ void FenceShared() { asm volatile("trap;"); }
__device__ __forceinline__ void Arrive(uint64_t*) { asm volatile("trap;"); }
__device__ __forceinline__ void ArriveWhenCopied(uint64_t*) { asm volatile("trap;"); }
__device__ __forceinline__ void ArriveAndExpect(uint64_t*, uint32_t) { asm volatile("trap;"); }
__device__ __forceinline__ void WaitForPhase(uint64_t*, uint32_t) { asm volatile("trap;"); }
__device__ __forceinline__ void BulkCopy(void*, const void*, uint32_t, uint64_t*) {
  asm volatile("trap;");
}
__device__ __forceinline__ void TensorCopy(void*, const TensorMap&, int, int, int, uint64_t*) {
  asm volatile("trap;");
}

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
// lanes having 16 rows as mma.m16n8k16 deals them, so that rows of d are dealt; b is in shared
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

// Has a warpgroup take registers that others of its block have given up, or give some up: so many
// each thread has from there on, a multiple of 8.
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void GiveUpRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
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
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {}
template <int kCount>
__device__ __forceinline__ void GiveUpRegisters() {}
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
