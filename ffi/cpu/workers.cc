#include "cpu/workers.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

namespace jaxsparse {
namespace {

// Lives until the last helper lets go of it, which may be after the call has returned.
struct Job {
  void (*task)(void*, int64_t);
  void* context;
  int64_t tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  void Work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      task(context, i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

}  // namespace

int64_t XlaWorkers::count() const { return std::max<int64_t>(1, pool_.num_threads()); }

void XlaWorkers::Run(int64_t tasks, void (*task)(void*, int64_t), void* context) {
  const int64_t helpers = std::min(count(), tasks) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < tasks; ++i) task(context, i);
    return;
  }
  auto job = std::make_shared<Job>();
  job->task = task;
  job->context = context;
  job->tasks = tasks;
  for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([job] { job->Work(); });
  // The caller works too, so a pool whose threads all wait here can't deadlock: it waits only for
  // tasks that a running helper has taken.
  job->Work();
  while (job->done.load(std::memory_order_acquire) < tasks) Yield();
}

void XlaWorkers::Yield() { std::this_thread::yield(); }

}  // namespace jaxsparse
