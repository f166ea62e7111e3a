// Work sharing for CPU kernels, free of XLA's headers so that kernels compile fast.
#pragma once

#include "types.h"

namespace jaxsparse {

class Workers {
 public:
  // Threads that may run at once, the caller included.
  virtual int64_t count() const = 0;
  // Runs task(context, i) for every i in [0, tasks) and returns when all are done.
  virtual void Run(int64_t tasks, void (*task)(void* context, int64_t index), void* context) = 0;
  // Lets another thread run in place of this one, which waits for it.
  virtual void Yield() = 0;

 protected:
  ~Workers() = default;
};

template <typename F>
JAXSPARSE_INLINE void ParallelFor(Workers& workers, int64_t tasks, F&& f) {
  workers.Run(tasks, [](void* context, int64_t index) { (*static_cast<F*>(context))(index); }, &f);
}

// Multiply-adds below which a second thread costs more than it brings.
constexpr int64_t kMinWorkPerTask = 1 << 15;

// How the rows of every batch entry are cut into tasks of about equal numbers of stored entries.
// Cuts lie between rows, so results never depend on the number of threads.
struct RowTasks {
  const Pattern& pattern;
  const Batch& batch;
  int64_t per_entry;  // tasks for one batch entry

  // `work`: multiply-adds for one stored entry. `per_thread`: tasks wanted for each thread; many
  // balance well, few repeat less of what each task sets up.
  JAXSPARSE_INLINE RowTasks(const Pattern& pattern, const Batch& batch, int64_t work,
                            Workers& workers, int64_t per_thread = 16)
      : pattern(pattern), batch(batch) {
    const int64_t total = (pattern.nse + pattern.rows) * (work + 4) * batch.count;
    const int64_t wanted = workers.count() == 1 ? 1 : workers.count() * per_thread;
    int64_t tasks = total / kMinWorkPerTask;
    tasks = tasks < 1 ? 1 : tasks > wanted ? wanted : tasks;
    per_entry = (tasks + batch.count - 1) / (batch.count > 0 ? batch.count : 1);
    if (per_entry > pattern.rows) per_entry = pattern.rows > 0 ? pattern.rows : 1;
  }

  JAXSPARSE_INLINE int64_t count() const { return per_entry * batch.count; }
  JAXSPARSE_INLINE int64_t BatchEntry(int64_t task) const { return task / per_entry; }

  // The first row of task `part` of a batch entry: the least one with that share of entries and
  // rows before it.
  JAXSPARSE_INLINE int64_t FirstRow(const int32_t* row_offsets, int64_t part) const {
    if (part == per_entry) return pattern.rows;
    const int64_t share = (row_offsets[pattern.rows] + pattern.rows) * part / per_entry;
    int64_t low = 0, high = pattern.rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (row_offsets[middle] + middle < share) low = middle + 1;
      else high = middle;
    }
    return low;
  }
};

}  // namespace jaxsparse
