// ffi/cuda/instructions.cuh on an emulated GPU.
#pragma once

#include <cstring>

#include "cuda/preparation.h"
#include "cuda/tensor_map.h"
#include "emulated/concurrent_blocks.h"
#include "emulated/gpu.h"
#include "types.h"

namespace jaxsparse {

constexpr int kAllThreads = 0;

template <int kThreads>
void ArriveAt(int barrier) {
  emulated::Block& block = *emulated::Block::current;
  block.Meet(block.Barrier(barrier), kThreads, false);
}
template <int kThreads>
void WaitAt(int barrier) {
  emulated::Block& block = *emulated::Block::current;
  emulated::Block::some_met |= kThreads < block.Threads();
  block.Meet(block.Barrier(barrier), kThreads);
}

// Counted from a place in the memory that holds the emulated GPU's shared memory.
alignas(1024) inline __shared__ char start_of_shared;
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

template <typename T>
void StoreSharedIf(bool condition, uint32_t address, T x) {
  if (condition) SharedAt<T>(address) = x;
}

inline void LoadSharedIf(bool condition, uint32_t address, float* to) {
  if (condition) *to = SharedAt<float>(address);
}

template <typename T>
uint32_t LoadSharedOrZero(uint32_t address, uint32_t condition) {
  return condition != 0 ? SharedAt<T>(address) : 0;
}

// Where so many words lie, whose address an instruction wants to be a multiple of their size.
template <int kWords>
uint32_t* WordsAt(uint32_t address) {
  uint32_t* words = &SharedAt<uint32_t>(address);
  if (reinterpret_cast<uintptr_t>(words) % (4 * kWords) != 0) {
    emulated::Block::Fail("misaligned access to shared memory");
  }
  return words;
}
template <int kWords>
void LoadShared(uint32_t address, uint32_t (&to)[kWords]) {
  const uint32_t* words = WordsAt<kWords>(address);
  for (int i = 0; i < kWords; ++i) to[i] = words[i];
}
inline void StoreShared(uint32_t address, float x) { *WordsAt<1>(address) = __float_as_uint(x); }
inline void StoreShared(uint32_t address, uint32_t x, uint32_t y) {
  uint32_t* words = WordsAt<2>(address);
  words[0] = x, words[1] = y;
}
inline void StoreShared(uint32_t address, const Words4& x) {
  uint32_t* words = WordsAt<4>(address);
  words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}

inline uint32_t FetchAndAdd(uint32_t* shared, uint32_t x) {
  const uint32_t before = *shared;
  *shared += x;
  return before;
}

inline uint32_t FetchAndAddOfGpu(uint32_t* global, uint32_t x) { return FetchAndAdd(global, x); }

template <typename T>
void KeepInRegister(T&) {}

// One kernel runs after the other, unless a launch has a prologue.
inline void LetNextKernelBegin() {}
inline void WaitForPrologue() { emulated::Block::current->WaitForPrologue(); }

inline void InitBarrier(uint64_t* barrier, uint32_t arrivals) {
  emulated::Block::current->InitCounter(barrier, arrivals);
}
inline void FenceShared() {}
// Reads, so that it shows what is out of bounds.
inline void Prefetch(const void* from) {
  static_cast<void>(*static_cast<const volatile char*>(from));
}
inline void PrefetchToL2(const void* from) { Prefetch(from); }
inline void PrefetchToL2(const void* from, uint32_t bytes) {
  if ((reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0) {
    emulated::Block::Fail("misaligned prefetch");
  }
  for (uint32_t at = 0; at < bytes; ++at) Prefetch(static_cast<const char*>(from) + at);
}

inline uint32_t LoadOnce(const uint32_t* from) { return *from; }
template <int kWords>
void LoadOnce(const uint32_t* from, uint32_t (&to)[kWords]) {
  if (reinterpret_cast<uintptr_t>(from) % (4 * kWords) != 0) {
    emulated::Block::Fail("misaligned load");
  }
  for (int i = 0; i < kWords; ++i) to[i] = from[i];
}

// A thread that loads in this way or looks at a clock may poll: the others get a turn.
inline uint32_t LoadRelaxed(const uint32_t* from) {
  emulated::Block::current->Yield();
  return *static_cast<const volatile uint32_t*>(from);
}
inline Words4 LoadRelaxed(const Words4* from) {
  emulated::Block::current->Yield();
  return *from;
}
inline void LoadRelaxedIf(bool condition, const Words4* from, Words4* to) {
  if (condition) *to = LoadRelaxed(from);
}
inline void StoreGlobal(Words4* to, const Words4& x) { *to = x; }
inline void StoreRelaxed(uint32_t* to, uint32_t x) { *to = x; }
template <int kCount>
void StoreRelaxed(uint32_t* to, const uint32_t (&x)[kCount]) {
  static_assert(kCount <= 4);
  if (reinterpret_cast<uintptr_t>(to) % sizeof(x) != 0) emulated::Block::Fail("misaligned store");
  std::copy(x, x + kCount, to);
}
inline void LoadAtOnceIf(bool condition, const Words4* from, Words4* to) {
  LoadRelaxedIf(condition, from, to);
}
inline void StoreAtOnce(Words4* to, const Words4& x) { *to = x; }
inline void SetFlagOfHost(uint32_t* to) { *to = 1; }
inline void AddRelaxed(uint32_t* to, uint32_t x) { *to += x; }
inline void AddRelaxed(float* to, float x) { *to += x; }
inline void FenceOfGpu() {}
// A cycle, and a nanosecond, is a turn of some thread.
inline int64_t clock() {
  emulated::Block::current->Yield();
  return static_cast<int64_t>(emulated::Block::turns);
}
inline uint64_t GlobalTimer() { return emulated::Block::turns; }
inline void Sleep(uint32_t) { emulated::Block::current->Yield(); }

// The last thread to arrive lets those that wait go first: if it reads what they overwrite, that
// shows.
inline void Arrive(uint64_t* barrier) {
  emulated::Block& block = *emulated::Block::current;
  if (block.Count(barrier, 1, 0)) block.Yield();
}
// What is copied comes when the thread arrives; until then there is rubbish, of bytes that are no
// numbers unless a test wants others.
inline int rubbish = 0xff;
template <int kBytes>
void PostponeCopy(uint32_t shared, const void* from, bool exists) {
  void* to = &SharedAt<char>(shared);
  for (const uint64_t place : {reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from)}) {
    if (place % kBytes != 0) emulated::Block::Fail("misaligned copy");
  }
  std::memset(to, rubbish, kBytes);
  emulated::Block::current->Postpone([=] {
    if (exists) std::memcpy(to, from, kBytes);
    else std::memset(to, 0, kBytes);
  });
}
inline void AsyncCopy(uint32_t shared, const void* from) { PostponeCopy<16>(shared, from, true); }
template <int kBytes = 16>
void AsyncCopyOrZero(uint32_t shared, const void* from, bool exists) {
  PostponeCopy<kBytes>(shared, from, exists);
}
inline void WaitForCopies() { emulated::Block::current->DoPostponed(); }
inline void ArriveWhenCopied(uint64_t* barrier) {
  emulated::Block::current->DoPostponed();
  Arrive(barrier);
}
inline void CommitCopies() { emulated::Block::current->CommitPostponed(); }
template <int kPending>
void WaitForCopyGroups() {
  emulated::Block::current->DoGroups(kPending);
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
  int tile_lines = kTileSize, tile_width = kTileSize;
};
inline void TensorCopy(void* shared, const TensorMap& map, int column, int line, int matrix,
                       uint64_t* barrier) {
  EmulatedTensorMap m;
  static_assert(sizeof(m) <= sizeof(map));
  std::memcpy(&m, &map, sizeof(m));
  // Chunks change places by the bits of a place that say which 128 bytes it is in.
  constexpr int kChunk = 16, kLine = 128;
  const int row_bytes = m.tile_width * 2, chunks = row_bytes / kChunk;
  if (reinterpret_cast<uint64_t>(shared) % (8 * row_bytes) != 0 ||
      (m.lines > 1 && m.width * 2 % kChunk != 0) ||
      reinterpret_cast<uint64_t>(m.data) % kChunk != 0) {
    emulated::Block::Fail("misaligned tensor copy");
  }
  for (int l = 0; l < m.tile_lines; ++l) {
    for (int c = 0; c < m.tile_width; ++c) {
      const bool exists = column + c < m.width && line + l < m.lines && matrix < m.count;
      const int64_t from = (matrix * m.lines + line + l) * m.width + column + c;
      const uint16_t bits = exists ? m.data[from] : 0;
      const int at = l * row_bytes;
      const int to = at + (c * 2 ^ at / kLine % chunks * kChunk);
      std::memcpy(static_cast<char*>(shared) + to, &bits, sizeof(bits));
    }
  }
  emulated::Block::current->Count(barrier, 0, -int64_t{m.tile_lines} * row_bytes);
}
// Of four dimensions, in boxes of so many lines.
struct EmulatedArrayMap {
  const uint16_t* data;
  int64_t sizes[4], strides[3];
  int lines;
};
inline void TensorCopy(void* shared, const TensorMap& map, const int (&at)[4], uint64_t* barrier) {
  EmulatedArrayMap m;
  static_assert(sizeof(m) <= sizeof(map));
  std::memcpy(&m, &map, sizeof(m));
  constexpr int kRowBytes = kTileSize * 2, kChunk = 16, kRepeat = 8 * kRowBytes;
  bool aligned = reinterpret_cast<uint64_t>(shared) % kRepeat == 0 &&
                 reinterpret_cast<uint64_t>(m.data) % kChunk == 0;
  for (const int64_t stride : m.strides) aligned = aligned && stride * 2 % kChunk == 0;
  if (!aligned) emulated::Block::Fail("misaligned tensor copy");
  for (int l = 0; l < m.lines; ++l) {
    for (int c = 0; c < kTileSize; ++c) {
      const int64_t place[] = {at[0] + c, at[1], at[2] + l, at[3]};
      bool exists = true;
      int64_t from = place[0];
      for (int d = 0; d < 4; ++d) {
        exists = exists && place[d] >= 0 && place[d] < m.sizes[d];
        if (d > 0) from += place[d] * m.strides[d - 1];
      }
      const uint16_t bits = exists ? m.data[from] : 0;
      const int to = l * kRowBytes + (c * 2 ^ l % 8 * kChunk);
      std::memcpy(static_cast<char*>(shared) + to, &bits, sizeof(bits));
    }
  }
  emulated::Block::current->Count(barrier, 0, -int64_t{m.lines} * kRowBytes);
}

// The upper bits of an address say which block of the cluster has the memory.
constexpr int kOffsetBits = 24;
inline void ClusterBarrier() { emulated::ConcurrentBlocks::current->MeetCluster(); }
inline void FenceInitsOfBarriers() {}
inline uint32_t AddressOfRank(uint32_t address, uint32_t rank) {
  return (address & ((1u << kOffsetBits) - 1)) | (rank + 1) << kOffsetBits;
}
// Where it lies in the own block, by its signed offset.
inline char* OwnPlaceOf(uint32_t address) {
  constexpr int kUnused = 32 - kOffsetBits;
  return StartOfShared() + (static_cast<int32_t>(address << kUnused) >> kUnused);
}
inline void LoadOfRank(uint32_t from, uint32_t (&to)[4]) {
  char* own = OwnPlaceOf(from);
  if (reinterpret_cast<uintptr_t>(own) % sizeof(to) != 0) {
    emulated::Block::Fail("misaligned load from a block of the cluster");
  }
  const uint32_t rank = (from >> kOffsetBits) - 1;
  const char* there = emulated::ConcurrentBlocks::current->OfRank(rank, own, sizeof(to));
  std::memcpy(to, there, sizeof(to));
}
template <int kWords>
void StoreAsync(uint32_t to, const uint32_t (&x)[kWords], uint32_t barrier) {
  const auto own = OwnPlaceOf;
  const uint32_t rank = (to >> kOffsetBits) - 1;
  if (rank != (barrier >> kOffsetBits) - 1) emulated::Block::Fail("a barrier of another block");
  if (reinterpret_cast<uintptr_t>(own(to)) % sizeof(x) != 0) {
    emulated::Block::Fail("misaligned store to a block of the cluster");
  }
  emulated::ConcurrentBlocks& blocks = *emulated::ConcurrentBlocks::current;
  std::memcpy(blocks.OfRank(rank, own(to), sizeof(x)), x, sizeof(x));
  blocks.BlockOfRank(rank).Count(own(barrier), 0, -int64_t{sizeof(x)});
}
inline bool TryWaitOfCluster(uint64_t* barrier, uint32_t odd) {
  emulated::Block& block = *emulated::Block::current;
  block.Yield();
  return block.IsPhaseOver(barrier, odd);
}

}  // namespace jaxsparse
