// Tests of scans with dense weights.
#pragma once

#include "device/recurrent_scan_operands.h"

namespace jaxsparse {

// Dense matrices of all directions, by rows or by columns, that begin `lead` elements behind an
// aligned place.
template <typename W>
class DenseMatrices {
 public:
  DenseMatrices(int64_t directions, int64_t rows, int64_t columns, bool transposed, int64_t lead)
      : size_(rows * columns),
        columns_(columns),
        row_stride_(transposed ? 1 : columns),
        column_stride_(transposed ? rows : 1),
        lead_(lead),
        weights_(SmallWeights<W>(lead + directions * rows * columns, columns)) {}

  // Row by row. A kernel rounds them to the states' type, if that has 16 bits.
  std::vector<double> Rows() const {
    std::vector<double> rows;
    for (int64_t i = 0; i < std::ssize(weights_) - lead_; ++i) {
      const int64_t row = i % size_ / columns_;
      const int64_t at = i / size_ * size_ + row * row_stride_ + i % columns_ * column_stride_;
      rows.push_back(ToAccumulator(weights_[lead_ + at]));
    }
    return rows;
  }

  void Give(RecurrentScanProblem* p) const {
    p->weights = weights_.data() + lead_;
    p->weights_size = size_;
    p->weight_row_stride = row_stride_;
    p->weight_column_stride = column_stride_;
  }

 private:
  const int64_t size_, columns_, row_stride_, column_stride_, lead_;
  const std::vector<W> weights_;
};

struct Case {
  int64_t steps = 5;
  int64_t lead = 0;
  bool has_nan = false, backwards = false, transposed = false;
  int missing = -1;  // a block
  int64_t unit_stride = 1;
};

// Plan: as the kernel wants it, with kDirections of the call and kStepBytes of an exchange buffer.
// `shared`: the memory of a block.
template <typename Step, typename Plan, size_t kWords>
void TestPlan(const Case& c, Words4 (&shared)[kWords]) {
  constexpr int kHidden = Plan::kSizes.hidden;
  const DenseMatrices<typename Plan::Weight> matrices(
      Plan::kDirections, Step::kProducts * kHidden, Step::kStates * kHidden, c.transposed, c.lead);
  const ScanSize size{.steps = c.steps,
                      .batch = Plan::kGroups * Plan::kSizes.batch,
                      .directions = Plan::kDirections,
                      .parts = Plan::kGroups,
                      .scans = Plan::kScans,
                      .lead = c.lead,
                      .has_nan = c.has_nan,
                      .unit_stride = c.unit_stride};
  ScanTest<Step, typename Plan::State, kHidden> test(size, matrices.Rows(),
                                                     c.steps * Plan::kStepBytes);
  for (int64_t launch = 0; launch < test.Launches(); ++launch) {
    RecurrentScanProblem p = test.Problem(launch);
    matrices.Give(&p);
    if (c.missing >= 0) p.wait_limits.limit_ns = 1000;
    emulated::Launch({.blocks = static_cast<int>(test.ScansOf(launch)) * Plan::kBlocks,
                      .threads = Plan::kSizes.threads,
                      .missing = c.missing,
                      .backwards = c.backwards},
                     {reinterpret_cast<char*>(shared), sizeof(shared)}, Plan::kSizes.shared_bytes,
                     [&] { RecurrentScan<Step, Plan>(p); });
  }
  c.missing >= 0 ? test.CheckTimedOut(c.missing / Plan::kBlocks) : test.Check();
}

}  // namespace jaxsparse
