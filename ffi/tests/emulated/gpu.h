// A GPU on a host: the threads of a block are fibers that take turns where they wait for one
// another. Blocks run one after another, unless a launch has them run at once
// (concurrent_blocks.h). It finds wrong results, reads
// and writes out of bounds (with AddressSanitizer, shared memory included) and barriers that not
// all come to; it does not find races.
//
// What makes threads wait is never inlined: kernels call it in hundreds of places, and each copy,
// with its sanitizers, would be compiled.
#pragma once

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "emulated/intrinsics.h"

namespace emulated {

struct Dimension {
  unsigned x = 1;
};

constexpr int kWarpLanes = 32;

// Where threads wait for one another, and what they leave there.
struct Meeting {
  int expected = 0, arrived = 0;
  uint64_t turn = 0;
};

// Runs `run` on a stack of its own; `run` never returns, but leaves and is resumed.
class Fiber {
 public:
  explicit Fiber(void (*run)())
      : run_(run), stack_(std::make_unique_for_overwrite<char[]>(kStack)) {
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack_.get();
    start_.uc_stack.ss_size = kStack;
    makecontext(&start_, &Fiber::Start, 0);
  }
  Fiber(const Fiber&) = delete;  // its context points into itself

  // From the host, until the fiber leaves.
  [[gnu::noinline]] void Resume() {
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack_.get(), kStack);
    resumed_ = this;
    Switch(host_, here_);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
  }
  // From the fiber, until the host resumes it.
  [[gnu::noinline]] void Leave() {
    __sanitizer_start_switch_fiber(&fake_, host_stack_, host_size_);
    Switch(here_, host_);
    __sanitizer_finish_switch_fiber(fake_, &host_stack_, &host_size_);
  }

 private:
  static constexpr size_t kStack = 64 << 10;
  using Registers = void* [5];

  static void Start() {
    Fiber& fiber = *resumed_;
    __sanitizer_finish_switch_fiber(nullptr, &fiber.host_stack_, &fiber.host_size_);
    fiber.run_();
  }
  // swapcontext would do, but makes a system call each time; here only the first switch to a fiber
  // does. AddressSanitizer would clear the stack's shadow before the jump.
  [[gnu::noinline, gnu::no_sanitize_address]] void Switch(Registers& from, Registers& to) {
    if (__builtin_setjmp(from) != 0) return;
    if (started_) __builtin_longjmp(to, 1);
    started_ = true;
    setcontext(&start_);
    std::abort();  // it returns only if it fails
  }

  static Fiber* resumed_;
  void (*run_)();
  std::unique_ptr<char[]> stack_;
  ucontext_t start_{};
  Registers here_, host_;
  bool started_ = false;
  void* fake_ = nullptr;
  const void* host_stack_ = nullptr;
  size_t host_size_ = 0;
};

inline Fiber* Fiber::resumed_ = nullptr;

class Block {
 public:
  static Block* current;
  static uint64_t turns;     // that threads of all blocks had
  static uint64_t progress;  // counts what may end a thread's wait
  static bool some_met;      // at a named barrier, without the block's other threads
  Dimension thread;

  // `number`: of the blocks that run at once, each of which has fibers of its own.
  Block(int threads, const std::function<void()>& kernel, int number = 0)
      : kernel_(kernel),
        threads_(threads),
        warps_(threads / kWarpLanes),
        running_(threads_.size()),
        first_fiber_(threads_.size() * number) {
    while (fibers_.size() < first_fiber_ + threads_.size()) fibers_.emplace_back(&RunThreads);
  }

  // Lets each thread run that doesn't wait, until it does. Whether the block goes on.
  bool RunOnce() {
    current = this;
    for (size_t i = 0; i < threads_.size(); ++i) {
      const Thread& next = threads_[i];
      const Meeting* at = next.waits_at;
      if (next.done || (at != nullptr && at->turn == next.turn)) continue;
      thread.x = static_cast<unsigned>(i);
      ++turns;
      fibers_[first_fiber_ + i].Resume();
      running_ -= next.done;
    }
    current = nullptr;
    return running_ > 0;
  }
  void Run() {
    for (uint64_t before = progress; RunOnce(); before = progress) FailIfStuck(before);
  }
  static void FailIfStuck(uint64_t progress_before) {
    if (progress == progress_before) Fail("every thread waits: some never come to a barrier");
  }

  int Threads() const { return static_cast<int>(threads_.size()); }
  int Lane() const { return static_cast<int>(thread.x % kWarpLanes); }
  Meeting& Barrier(int which) { return barriers_.at(which); }

  // Meets `expected` threads; the last one to come calls `complete` before any goes on.
  template <typename Complete>
  void Meet(Meeting& meeting, int expected, bool waits, Complete complete) {
    if (meeting.arrived == 0) meeting.expected = expected;
    if (meeting.expected != expected) Fail("threads expect different numbers at a barrier");
    const uint64_t turn = meeting.turn;
    if (++meeting.arrived == expected) {
      complete();
      meeting.arrived = 0;
      ++meeting.turn;
      ++progress;
    }
    if (waits && meeting.turn == turn) Wait(meeting);
  }
  void Meet(Meeting& meeting, int expected, bool waits = true) {
    Meet(meeting, expected, waits, [] {});
  }

  // Barriers in shared memory, which count arrivals and bytes.
  void InitCounter(const void* at, uint32_t arrivals) {
    counters_[at] = {{}, arrivals, arrivals, 0};
  }
  // Whether that ends the barrier's phase.
  [[gnu::noinline]] bool Count(const void* at, uint32_t arrivals, int64_t bytes) {
    Counter& counter = CounterAt(at);
    if (counter.missing < arrivals) Fail("more arrivals than a barrier expects");
    counter.missing -= arrivals;
    counter.bytes += bytes;
    if (counter.missing > 0 || counter.bytes != 0) return false;
    counter.missing = counter.expected;
    ++counter.phase.turn;
    ++progress;
    return true;
  }
  [[gnu::noinline]] void WaitForPhase(const void* at, uint32_t odd) {
    const Counter& counter = CounterAt(at);
    while (counter.phase.turn % 2 == odd) Wait(counter.phase);
  }

  // What threads of all blocks wait for that wait for the kernel in front of theirs, or null.
  static Meeting* prologue;
  [[gnu::noinline]] void WaitForPrologue() {
    waits_for_prologue_ = true;
    if (prologue != nullptr && prologue->turn == 0) Wait(*prologue);
  }
  bool waits_for_prologue() const { return waits_for_prologue_; }

  bool IsPhaseOver(const void* at, uint32_t odd) { return CounterAt(at).phase.turn % 2 != odd; }

  // Lets the other threads run once.
  void Yield() {
    threads_[thread.x].waits_at = nullptr;
    ++progress;
    Leave();
  }

  // What a thread has started and is done later.
  [[gnu::noinline]] void Postpone(std::function<void()> act) {
    threads_[thread.x].postponed.push_back(std::move(act));
  }
  // Makes a group of what the thread has started since it made the last one.
  [[gnu::noinline]] void CommitPostponed() {
    Thread& own = threads_[thread.x];
    own.groups.push_back(own.postponed.size());
  }
  [[gnu::noinline]] void DoPostponed() {
    Thread& own = threads_[thread.x];
    const std::vector<std::function<void()>> acts = std::move(own.postponed);
    own.postponed.clear();
    own.groups.clear();
    for (const auto& act : acts) act();
  }
  // All groups but so many of the latest.
  [[gnu::noinline]] void DoGroups(size_t pending) {
    Thread& own = threads_[thread.x];
    if (own.groups.size() <= pending) return;
    const auto done = static_cast<std::ptrdiff_t>(own.groups.size() - pending);
    const size_t count = own.groups[done - 1];
    own.groups.erase(own.groups.begin(), own.groups.begin() + done);
    for (size_t& end : own.groups) end -= count;
    const auto end = own.postponed.begin() + static_cast<std::ptrdiff_t>(count);
    const std::vector<std::function<void()>> acts(own.postponed.begin(), end);
    own.postponed.erase(own.postponed.begin(), end);
    for (const auto& act : acts) act();
  }

  // Every lane of a warp hands something in; `exchange` fills what each takes once all have.
  template <typename Given, typename Taken, typename Exchange>
  [[gnu::noinline]] Taken Collect(const Given& given, Exchange exchange) {
    Warp& warp = warps_[thread.x / kWarpLanes];
    Taken taken{};
    warp.given[Lane()] = &given;
    warp.taken[Lane()] = &taken;
    Meet(warp.meeting, kWarpLanes, true, [&] {
      exchange(
          [&](int lane) -> const Given& { return *static_cast<const Given*>(warp.given[lane]); },
          [&](int lane) -> Taken& { return *static_cast<Taken*>(warp.taken[lane]); });
    });
    return taken;
  }

  [[noreturn]] static void Fail(const char* what) {
    std::fprintf(stderr, "emulated GPU: %s\n", what);
    std::abort();
  }

 private:
  struct Thread {
    const Meeting* waits_at = nullptr;
    uint64_t turn = 0;
    bool done = false;
    std::vector<std::function<void()>> postponed;
    std::vector<size_t> groups;  // where each of them ends
  };
  struct Counter {
    Meeting phase;
    uint32_t expected = 0, missing = 0;  // arrivals
    int64_t bytes = 0;                   // expected, less those that came
  };
  Counter& CounterAt(const void* at) {
    const auto found = counters_.find(at);
    if (found == counters_.end()) Fail("a barrier in shared memory is used before it is made");
    return found->second;
  }
  struct Warp {
    Meeting meeting;
    std::array<const void*, kWarpLanes> given;
    std::array<void*, kWarpLanes> taken;
  };

  // A thread of one block after another: starting a fiber takes longer than resuming it.
  static void RunThreads() {
    for (;;) {
      current->kernel_();
      current->threads_[current->thread.x].done = true;
      ++progress;
      current->Leave();
    }
  }
  // Until the next turn there: only then it is resumed.
  [[gnu::noinline]] void Wait(const Meeting& meeting) {
    Thread& waiting = threads_[thread.x];
    waiting.waits_at = &meeting;
    waiting.turn = meeting.turn;
    Leave();
  }
  void Leave() { fibers_[first_fiber_ + thread.x].Leave(); }

  static std::deque<Fiber> fibers_;  // of all blocks
  const std::function<void()>& kernel_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  size_t running_, first_fiber_;
  std::array<Meeting, 16> barriers_;
  std::map<const void*, Counter> counters_;
  bool waits_for_prologue_ = false;
};

inline Block* Block::current = nullptr;
inline uint64_t Block::turns = 0, Block::progress = 0;
inline bool Block::some_met = false;
inline Meeting* Block::prologue = nullptr;
inline std::deque<Fiber> Block::fibers_;
inline Dimension block_index, grid, block;

// Runs a kernel's blocks, the first one last if `backwards`.
inline void Launch(int blocks, int threads, const std::function<void()>& kernel,
                   bool backwards = false) {
  grid.x = static_cast<unsigned>(blocks);
  block.x = static_cast<unsigned>(threads);
  for (unsigned i = 0; i < grid.x; ++i) {
    block_index.x = backwards ? grid.x - 1 - i : i;
    Block(threads, kernel).Run();
  }
}

}  // namespace emulated

#define threadIdx (emulated::Block::current->thread)
#define blockIdx emulated::block_index
#define gridDim emulated::grid
#define blockDim emulated::block

[[gnu::noinline]] inline void __syncthreads() {
  emulated::Block& b = *emulated::Block::current;
  b.Meet(b.Barrier(0), b.Threads());
}
[[gnu::noinline]] inline void __syncwarp() {
  emulated::Block::current->Collect<int, int>(0, [](auto, auto) {});
}
[[gnu::noinline]] inline unsigned __ballot_sync(unsigned, bool predicate) {
  return emulated::Block::current->Collect<bool, unsigned>(predicate, [](auto given, auto taken) {
    unsigned all = 0;
    for (int lane = 0; lane < emulated::kWarpLanes; ++lane) all |= unsigned(given(lane)) << lane;
    for (int lane = 0; lane < emulated::kWarpLanes; ++lane) taken(lane) = all;
  });
}
namespace emulated {
template <typename T>
struct Shuffled {
  T x;
  int from;
};
template <typename T>
[[gnu::noinline]] T Shuffle(T x, int from) {
  return Block::current->Collect<Shuffled<T>, T>({x, from}, [](auto given, auto taken) {
    for (int lane = 0; lane < kWarpLanes; ++lane) taken(lane) = given(given(lane).from).x;
  });
}
inline int Lane() { return Block::current->Lane(); }
}  // namespace emulated
template <typename T>
T __shfl_sync(unsigned, T x, int from, int width = emulated::kWarpLanes) {
  return emulated::Shuffle(x, emulated::Lane() / width * width + from);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulated::Shuffle(x, emulated::Lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int distance) {
  const int lane = emulated::Lane();
  return emulated::Shuffle(x, lane < distance ? lane : lane - distance);
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int distance) {
  const int lane = emulated::Lane();
  return emulated::Shuffle(x, lane + distance < emulated::kWarpLanes ? lane + distance : lane);
}
inline bool __any_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline bool __all_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, !predicate) == 0;
}
inline int __reduce_max_sync(unsigned mask, int x) {
  for (int distance = 1; distance < 32; distance *= 2) {
    x = std::max(x, __shfl_xor_sync(mask, x, distance));
  }
  return x;
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
  for (int distance = 1; distance < 32; distance *= 2) x |= __shfl_xor_sync(mask, x, distance);
  return x;
}
inline unsigned __match_any_sync(unsigned mask, int x) {
  unsigned alike = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (__shfl_sync(mask, x, lane) == x) alike |= 1u << lane;
  }
  return alike;
}
// Of threads that take turns.
template <typename T>
void atomicAdd(T* to, T x) {
  *to += x;
}
template <typename T>
void atomicOr(T* to, T x) {
  *to |= x;
}
template <typename T>
void atomicMin(T* to, T x) {
  if (x < *to) *to = x;
}
