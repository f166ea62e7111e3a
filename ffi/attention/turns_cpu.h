// How tasks that add to the same rows take turns, so that sums have one order whatever threads
// there are. Compiled once for each instruction set, as the kernels are.
#pragma once

#include "attention/heads_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// The turns of one of several tasks in a row, which all take the same steps, or leave some out: in
// each step a task comes behind those before it in the row.
class Turns {
 public:
  // The steps that tasks have behind them: this one's, and those of `before` others in front of it,
  // `stride` apart.
  JAXSPARSE_INLINE Turns(int64_t* passed, int64_t stride, int64_t before, Workers& workers)
      : passed_(passed), stride_(stride), unfinished_(before), workers_(workers) {}

  // Steps must rise. Returns when it is this task's turn in that step.
  JAXSPARSE_INLINE void Begin(int64_t step) {
    if (step <= last_) return;
    last_ = step;
    __atomic_store_n(passed_, step, __ATOMIC_RELEASE);
    int64_t unfinished = 0;
    for (int64_t i = unfinished_; i > 0; --i) {
      const int64_t passed = WaitFor(i, step);
      if (passed != kAll && unfinished == 0) unfinished = i;
    }
    unfinished_ = unfinished;
  }

  JAXSPARSE_INLINE void End() { __atomic_store_n(passed_, kAll, __ATOMIC_RELEASE); }

 private:
  static constexpr int64_t kAll = INT64_MAX;

  // Until the i-th task in front of this one has that step behind it. A thread runs it, as tasks
  // begin in their order.
  JAXSPARSE_INLINE int64_t WaitFor(int64_t i, int64_t step) {
    for (;; workers_.Yield()) {
      const int64_t passed = __atomic_load_n(passed_ - i * stride_, __ATOMIC_ACQUIRE);
      if (passed > step) return passed;
    }
  }

  int64_t* const passed_;
  const int64_t stride_;
  int64_t unfinished_;  // no more tasks than so many are in front of this one and not done
  int64_t last_ = -1;
  Workers& workers_;
};

// Calls f(task, its turns among those of its head) for all tasks, in their order.
template <typename F>
JAXSPARSE_INLINE void ParallelInTurns(Workers& workers, const HeadTasks& tasks, F&& f) {
  constexpr int64_t kAtOnce = 1024;  // few enough for the stack, and many for the threads there are
  int64_t passed[kAtOnce];
  for (int64_t first = 0; first < tasks.count(); first += kAtOnce) {
    const int64_t count = Between(0, tasks.count() - first, kAtOnce);
    for (int64_t i = 0; i < count; ++i) passed[i] = 0;
    int64_t next = 0;
    ParallelFor(workers, count, [&](int64_t) {
      // Threads may take indices in any order. Tasks that wait for others must not.
      const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      const int64_t before = Between(0, tasks.Place(first + i), i / tasks.heads());
      Turns turns(passed + i, tasks.heads(), before, workers);
      f(first + i, turns);
    });
  }
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
