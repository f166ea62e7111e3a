// Launches whose blocks run at once, since they wait for one another: in one pass after another all
// threads of all blocks get a turn. Tests of such kernels define EMULATED_CONCURRENT_BLOCKS: their
// shared memory is thread-local memory of the program, of which each block has a copy that is
// brought to its place when the block's threads run. What a block stores to another one's shared
// memory goes to that copy.
#pragma once

#include <link.h>
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "emulated/gpu.h"

namespace emulated {

struct ConcurrentLaunch {
  int blocks = 1;
  int threads = kWarpLanes;
  int cluster = 1;         // blocks
  int missing = -1;        // a block that never runs
  bool backwards = false;  // the last block has the first turn
  // What the kernel in front does, on the host: when all threads wait for it, or for others that
  // do. Each block has to wait.
  std::function<void()> prologue = nullptr;
};

class ConcurrentBlocks {
 public:
  static ConcurrentBlocks* current;

  ConcurrentBlocks(const ConcurrentLaunch& launch, const std::function<void()>& kernel)
      : launch_(launch), clusters_(launch.blocks / launch.cluster) {
    for (int i = 0; i < launch.blocks; ++i) {
      blocks_.emplace_back(launch.threads, kernel, i);
      // NaN, and places that are outside, which nothing must read.
      copies_.emplace_back(SharedMemory().size(), static_cast<char>(0xff));
    }
  }

  void Run() {
    current = this;
    Block::prologue = launch_.prologue == nullptr ? nullptr : &prologue_;
    for (bool running = true; running;) {
      const uint64_t before = Block::progress;
      running = false;
      for (int i = 0; i < launch_.blocks; ++i) {
        const int number = launch_.backwards ? launch_.blocks - 1 - i : i;
        if (number == launch_.missing) continue;
        block_index.x = static_cast<unsigned>(number);
        Exchange(copies_[number]);
        running |= blocks_[number].RunOnce();
        Exchange(copies_[number]);
      }
      if (running && Block::progress == before && launch_.prologue != nullptr &&
          prologue_.turn == 0) {
        launch_.prologue();
        ++prologue_.turn;
      } else if (running) {
        Block::FailIfStuck(before);
      }
    }
    for (int i = 0; i < launch_.blocks && launch_.prologue != nullptr; ++i) {
      if (i != launch_.missing && !blocks_[i].waits_for_prologue()) {
        Block::Fail("a block is done before the kernel in front may be");
      }
    }
    Block::prologue = nullptr;
    current = nullptr;
  }

  void MeetCluster() {
    Meeting& meeting = clusters_[block_index.x / launch_.cluster];
    Block::current->Meet(meeting, launch_.threads * launch_.cluster);
  }
  Block& BlockOfRank(unsigned rank) { return blocks_[NumberOf(rank)]; }
  // Where the block of that rank of the cluster has what lies at `own` in the one that runs.
  char* OfRank(unsigned rank, char* own, size_t size) {
    if (__asan_region_is_poisoned(own, size) != nullptr) Block::Fail("out of shared memory");
    const unsigned number = NumberOf(rank);
    if (number == block_index.x) return own;
    return copies_[number].data() + (own - SharedMemory().data());
  }

 private:
  unsigned NumberOf(unsigned rank) const {
    if (rank >= static_cast<unsigned>(launch_.cluster)) Block::Fail("a cluster has no such block");
    return block_index.x / launch_.cluster * launch_.cluster + rank;
  }

  // All thread-local memory of the program, which has no other.
  static std::span<char> SharedMemory() {
    static const std::span<char> memory = [] {
      std::span<char> found;
      dl_iterate_phdr(
          [](dl_phdr_info* program, size_t, void* to) {
            for (int i = 0; i < program->dlpi_phnum; ++i) {
              if (program->dlpi_phdr[i].p_type != PT_TLS) continue;
              *static_cast<std::span<char>*>(to) = {static_cast<char*>(program->dlpi_tls_data),
                                                    program->dlpi_phdr[i].p_memsz};
            }
            return 1;  // the program itself comes first
          },
          &found);
      return found;
    }();
    return memory;
  }
  static void Exchange(std::vector<char>& copy) {
    Exchange(SharedMemory().data(), copy.data(), copy.size());
  }
  // Without AddressSanitizer, as tests poison what a kernel must not touch. By words, as it is done
  // at every turn of a block: byte by byte, most of the time would go there.
  [[gnu::no_sanitize_address]] static void Exchange(char* left, char* right, size_t size) {
    struct Words {
      uint64_t words[2];
    };
    size_t i = 0;
    for (; i + sizeof(Words) <= size; i += sizeof(Words)) ExchangeAt<Words>(left + i, right + i);
    for (; i < size; ++i) ExchangeAt<char>(left + i, right + i);
  }
  template <typename Unit>
  [[gnu::no_sanitize_address]] static void ExchangeAt(char* left, char* right) {
    Unit of_left, of_right;
    __builtin_memcpy(&of_left, left, sizeof(Unit));
    __builtin_memcpy(&of_right, right, sizeof(Unit));
    __builtin_memcpy(left, &of_right, sizeof(Unit));
    __builtin_memcpy(right, &of_left, sizeof(Unit));
  }

  const ConcurrentLaunch launch_;
  std::deque<Block> blocks_;
  std::vector<Meeting> clusters_;
  Meeting prologue_;
  std::vector<std::vector<char>> copies_;
};

inline ConcurrentBlocks* ConcurrentBlocks::current = nullptr;

// Runs a kernel whose dynamic shared memory is the first `shared_bytes` of `shared`.
inline void Launch(const ConcurrentLaunch& launch, std::span<char> shared, int shared_bytes,
                   const std::function<void()>& kernel) {
  grid.x = static_cast<unsigned>(launch.blocks);
  block.x = static_cast<unsigned>(launch.threads);
  if (static_cast<size_t>(shared_bytes) > shared.size()) Block::Fail("too much shared memory");
  const auto rest = shared.subspan(static_cast<size_t>(shared_bytes));
  __asan_poison_memory_region(rest.data(), rest.size());
  ConcurrentBlocks(launch, kernel).Run();
  __asan_unpoison_memory_region(rest.data(), rest.size());
}

}  // namespace emulated
