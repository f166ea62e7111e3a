// Instructions of compute capability 9.0: bulk copies, barriers that count them, clusters, and
// kernels that begin before the one in front is done. A host that emulates a GPU replaces this
// header with cuda/instructions.cuh, which includes it.
#pragma once

#include "types.h"

namespace jaxsparse {

struct TensorMap;  // cuda/tensor_map.h

// Shared memory by addresses of 32 bits, with which an access takes half the arithmetic.
__device__ __forceinline__ uint32_t AddressOfShared(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What a kernel says that prepares something for the next one: that its blocks may take the place
// of the kernel's, once all of these have begun. The next one waits until the kernel is done, and
// sees all it wrote then; of each of its blocks some thread has to.
__device__ __forceinline__ void LetNextKernelBegin() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void WaitForPrologue() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Has the L2 cache fetch so many bytes. Address and size are multiples of 16.
__device__ __forceinline__ void PrefetchToL2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
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
// The same of an array of four dimensions, the innermost first.
__device__ __forceinline__ void TensorCopy(void* shared, const TensorMap& map, const int (&at)[4],
                                           uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(AddressOfShared(shared)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
      "r"(AddressOfShared(barrier))
      : "memory");
}

// Blocks of a cluster, which reach one another's shared memory. All their threads meet here, and
// what each has written before is seen by all behind it.
__device__ __forceinline__ void ClusterBarrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// Makes barriers in shared memory that the thread has made known to the cluster, behind a
// ClusterBarrier.
__device__ __forceinline__ void FenceInitsOfBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Where the block of that rank has what lies at an address of the own shared memory.
__device__ __forceinline__ uint32_t AddressOfRank(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Loads from shared memory of a cluster's block.
__device__ __forceinline__ void LoadOfRank(uint32_t from, uint32_t (&to)[4]) {
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
// Stores to shared memory of a cluster's block without waiting. A barrier there counts the bytes
// when they have come.
__device__ __forceinline__ void StoreAsync(uint32_t to, const uint32_t (&x)[1], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(x[0]), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void StoreAsync(uint32_t to, const uint32_t (&x)[2], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "r"(x[0]), "r"(x[1]), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void StoreAsync(uint32_t to, const uint32_t (&x)[4], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
      : "memory");
}
// Whether the phase is over; it may wait for a while. What blocks of the cluster have stored there
// for it is seen then.
__device__ __forceinline__ bool TryWaitOfCluster(uint64_t* barrier, uint32_t odd) {
  const uint32_t address = AddressOfShared(barrier);
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(address), "r"(odd)
      : "memory");
  return done != 0;
}

#else

// On earlier architectures kernels run one after the other. They have nothing of what follows:
// kernels that use it compile, and stop.
__device__ __forceinline__ void LetNextKernelBegin() {}
__device__ __forceinline__ void WaitForPrologue() {}
__device__ __forceinline__ void PrefetchToL2(const void*, uint32_t) {}
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
__device__ __forceinline__ void TensorCopy(void*, const TensorMap&, const int (&)[4], uint64_t*) {
  asm volatile("trap;");
}
__device__ __forceinline__ void ClusterBarrier() { asm volatile("trap;"); }
__device__ __forceinline__ void FenceInitsOfBarriers() { asm volatile("trap;"); }
__device__ __forceinline__ uint32_t AddressOfRank(uint32_t address, uint32_t) {
  asm volatile("trap;");
  return address;
}
__device__ __forceinline__ void LoadOfRank(uint32_t, uint32_t (&)[4]) { asm volatile("trap;"); }
template <int kCount>
__device__ __forceinline__ void StoreAsync(uint32_t, const uint32_t (&)[kCount], uint32_t) {
  asm volatile("trap;");
}
__device__ __forceinline__ bool TryWaitOfCluster(uint64_t*, uint32_t) {
  asm volatile("trap;");
  return true;
}

#endif

}  // namespace jaxsparse
