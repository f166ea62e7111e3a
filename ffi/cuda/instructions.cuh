// Memory, barriers and clocks, as far as C++ has no name for their instructions. A host that
// emulates a GPU replaces this header.
#pragma once

#include "cuda/sm90_instructions.cuh"
#include "types.h"

namespace jaxsparse {

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

// Shared memory at an address of 32 bits (AddressOfShared).
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

// Loads from there if `condition` is true, without a branch.
__device__ __forceinline__ void LoadSharedIf(bool condition, uint32_t address, float* to) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; @p ld.shared.f32 %0, [%2]; }"
               : "+f"(*to)
               : "r"(static_cast<int>(condition)), "r"(address));
}
// What stands there if `condition` is not 0, or 0: a bit of a word is a condition as it is.
template <typename T>
__device__ __forceinline__ uint32_t LoadSharedOrZero(uint32_t address, uint32_t condition) {
  uint32_t x;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.b32 %0, 0; @p ld.shared.u%3 %0, [%1]; }"
               : "=&r"(x)
               : "r"(address), "r"(condition), "n"(8 * sizeof(T)));
  return x;
}

// Wide accesses to shared memory, at multiples of their size. Loads stay in their order between
// barriers.
__device__ __forceinline__ void LoadShared(uint32_t address, uint32_t (&to)[1]) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[0]) : "r"(address));
}
__device__ __forceinline__ void LoadShared(uint32_t address, uint32_t (&to)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address));
}
__device__ __forceinline__ void LoadShared(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
__device__ __forceinline__ void StoreShared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t address, const Words4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// Has a number, or an address in memory, computed here, and not again where it is used.
template <typename T>
__device__ __forceinline__ void KeepInRegister(T& x) {
  asm volatile("" : "+r"(x)::"memory");
}
__device__ __forceinline__ void KeepInRegister(int64_t& x) { asm volatile("" : "+l"(x)::"memory"); }
__device__ __forceinline__ void KeepInRegister(uint64_t& x) {
  asm volatile("" : "+l"(x)::"memory");
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

// The same in global memory. What a block has written before, threads of all blocks see that add to
// the number later.
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

// Have the L1 or the L2 cache fetch what a load will want.
__device__ __forceinline__ void Prefetch(const void* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(from)));
}
__device__ __forceinline__ void PrefetchToL2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// What no thread reads again: caches need not keep it. Nothing writes it while the kernel runs.
__device__ __forceinline__ uint32_t LoadOnce(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];"
               : "=r"(x)
               : "l"(__cvta_generic_to_global(from)));
  return x;
}
__device__ __forceinline__ void LoadOnce(const uint32_t* from, uint32_t (&to)[2]) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "l"(__cvta_generic_to_global(from)));
}
__device__ __forceinline__ void LoadOnce(const uint32_t* from, uint32_t (&to)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(__cvta_generic_to_global(from)));
}

// 16 bytes of global memory by one store, which compilers may take apart where numbers were
// computed by branches.
__device__ __forceinline__ void StoreGlobal(Words4* to, const Words4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Global memory as blocks of a running launch see one another's words: an access of each word, in
// no order with others unless a fence makes one.
__device__ __forceinline__ uint32_t LoadRelaxed(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ Words4 LoadRelaxed(const Words4* from) {
  Words4 x;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
// Loads if `condition` is true, without a branch: behind one the compiler would expect diverged
// lanes at every shuffle that follows.
__device__ __forceinline__ void LoadRelaxedIf(bool condition, const Words4* from, Words4* to) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, "
      "[%4]; }"
      : "+r"(to->x), "+r"(to->y), "+r"(to->z), "+r"(to->w)
      : "l"(from), "r"(static_cast<uint32_t>(condition))
      : "memory");
}
__device__ __forceinline__ void StoreRelaxed(uint32_t* to, uint32_t x) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void StoreRelaxed(uint32_t* to, const uint32_t (&x)[1]) {
  StoreRelaxed(to, x[0]);
}
__device__ __forceinline__ void StoreRelaxed(uint32_t* to, const uint32_t (&x)[2]) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x[0]), "r"(x[1])
               : "memory");
}
__device__ __forceinline__ void StoreRelaxed(uint32_t* to, const uint32_t (&x)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
// 16 bytes at once: a load sees all that one such store has written, or nothing of it. The memory
// model promises that of each word of a vector alone.
__device__ __forceinline__ void LoadAtOnceIf(bool condition, const Words4* from, Words4* to) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 low, high; .reg .b128 x;\n"
      "mov.b64 low, {%0, %1}; mov.b64 high, {%2, %3}; mov.b128 x, {low, high};\n"
      "setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.b128 x, [%4];\n"
      "mov.b128 {low, high}, x; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
      : "+r"(to->x), "+r"(to->y), "+r"(to->z), "+r"(to->w)
      : "l"(from), "r"(static_cast<uint32_t>(condition))
      : "memory");
}
__device__ __forceinline__ void StoreAtOnce(Words4* to, const Words4& x) {
  asm volatile(
      "{ .reg .b64 low, high; .reg .b128 x;\n"
      "mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4}; mov.b128 x, {low, high};\n"
      "st.relaxed.gpu.global.b128 [%0], x; }" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}
// Sets a flag in the memory of the host to 1.
__device__ __forceinline__ void SetFlagOfHost(uint32_t* to) {
  asm volatile("st.relaxed.sys.global.b32 [%0], 1;" ::"l"(to) : "memory");
}
__device__ __forceinline__ void AddRelaxed(uint32_t* to, uint32_t x) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void AddRelaxed(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
// Between what the thread, and those that met it at a barrier before, have accessed and what
// comes later.
__device__ __forceinline__ void FenceOfGpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Nanoseconds, the same for all blocks.
__device__ __forceinline__ uint64_t GlobalTimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Other warps have the multiprocessor meanwhile, which one that reads a clock in a loop does not
// leave to them. It lasts up to twice as long.
__device__ __forceinline__ void Sleep(uint32_t nanoseconds) {
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

// Copies 16 bytes from memory to shared memory, without waiting; both are aligned to them.
__device__ __forceinline__ void AsyncCopy(uint32_t shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
// The same of 4, 8 or 16 bytes where there is something to copy; else zeros, and `from` is not
// read.
template <int kBytes = 16>
__device__ __forceinline__ void AsyncCopyOrZero(uint32_t shared, const void* from, bool exists) {
  const int bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 16) {  // the only ones that pass by L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared),
                 "l"(__cvta_generic_to_global(from)), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}
// Waits for all that the thread has copied by these; other threads see it behind a barrier.
__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Makes a group of the copies that the thread has begun since it made the last one, and waits for
// all groups but the latest ones.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitForCopyGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxsparse
