// CPU kernels share XLA's own threads: no pool of ours beside it.
#pragma once

#include "cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsparse {

class XlaWorkers final : public Workers {
 public:
  explicit XlaWorkers(xla::ffi::ThreadPool pool) : pool_(pool) {}
  int64_t count() const override;
  void Run(int64_t tasks, void (*task)(void* context, int64_t index), void* context) override;
  void Yield() override;

 private:
  xla::ffi::ThreadPool pool_;
};

}  // namespace jaxsparse
