// Results of kernels of attention that go forward, of operands that are checked.
#pragma once

#include "device/attention_operands.h"

namespace jaxsparse {

// `Problem` is what a kernel takes.
template <typename T, int kHeadSize, int kValueSize, typename Problem, typename Scoring = NoScoring>
class AttentionResults {
 public:
  AttentionResults(const AttentionSize& size, const AttentionOptions& options)
      : operands(size, options),
        out(static_cast<size_t>(size.batch * size.queries * operands.Heads() * kValueSize)),
        lse(static_cast<size_t>(size.batch * size.queries * operands.Heads())) {
    operands.WriteTo(&p);
    const int64_t rows = size.queries * operands.Heads();
    p.out = Of(out, 0, rows * kValueSize);
    p.lse = Of(lse, 0, rows);
  }

  void Clear() {
    std::fill(out.begin(), out.end(), FromFloat<T>(NAN));
    std::fill(lse.begin(), lse.end(), NAN);
  }
  void Check() const { operands.Check(out, lse); }
  // Whether one more run gives the same bits.
  template <typename Run>
  void CheckRepeats(const Run& run) {
    jaxsparse::CheckRepeats("lse", lse, [&] { jaxsparse::CheckRepeats("attention", out, run); });
  }

  AttentionTest<T, kHeadSize, kValueSize, Scoring> operands;
  Problem p;
  std::vector<T> out;
  std::vector<float> lse;
};

}  // namespace jaxsparse
