// The CPU kernel of attention: a task has up to 128 queries of a head. Compiled once for each
// instruction set, as the other kernels are.
#pragma once

#include "attention/softmax_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

template <typename T>
class AttentionTask {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;
  static constexpr int64_t kMost = kMostFeatures<Acc>;
  static constexpr int kRowsPerTile = 2;  // of the next cell's, fetched for a tile of this one

 public:
  JAXSPARSE_INLINE AttentionTask(const AttentionProblem& p, const HeadTasks& tasks, int64_t task)
      : scale_(static_cast<Acc>(p.scale)) {
    const int64_t heads = p.groups * p.per_group, head = tasks.Head(task) % heads;
    const int64_t entry = tasks.Head(task) / heads, group = head / p.per_group;
    query_ = {p.query, p.batch, entry, head, heads, p.queries, p.head_size};
    key_ = {p.key, p.batch, entry, group, p.groups, p.keys, p.head_size};
    value_ = {p.value, p.batch, entry, group, p.groups, p.keys, p.value_size};
    out_ = {p.out, p.batch, entry, head, heads, p.queries, p.value_size};
    lse_ = p.lse.At<float>(p.batch, entry) + head * p.queries;
    mask_ = {p.mask, p.batch, entry, group, head % p.per_group};
    rows_ = tasks.Rows(task, mask_, p.queries);
  }

  // More features of values than sums are kept of take a pass for each part of them.
  JAXSPARSE_INLINE void Run() {
    int64_t feature = 0;
    do {
      Sum(feature);
      for (int down = 0; down < kCellsOfTile; ++down) Write(down, feature);
      feature += kMost;
    } while (feature < value_.size);
  }

 private:
  // What is kept of 64 queries.
  struct Block {
    RunningSoftmax<Acc> softmax;
    StagedColumns<T> query;
    alignas(64) Acc sums[kCell * kMost];  // of weighted values
  };

  JAXSPARSE_INLINE void Sum(int64_t feature) {
    const int64_t size = Between(0, value_.size - feature, kMost);
    const int64_t padded = CeilDivide(size, kLanes) * kLanes;
    for (int down = 0; down < kCellsOfTile; ++down) {
      blocks_[down].softmax.Start();
      for (int64_t r = 0; r < rows_.counts[down]; ++r) {
        for (int64_t f = 0; f < padded; ++f) blocks_[down].sums[r * kMost + f] = 0;
      }
    }
    VisitRows(
        mask_, rows_, key_.count,
        [&](const DenseCell& cell) { return AddCell(cell, feature, padded); },
        [&](int down, int64_t row, const int32_t* columns, int count) {
          AddPositions(down, row, columns, count, feature, size);
        });
  }

  // A weight of 0 must not meet a value that is not finite.
  [[gnu::noinline]] bool AddCell(const DenseCell& cell, int64_t feature, int64_t padded) {
    staged_values_.Stage(value_, cell.first, cell.columns, feature);
    if (cell.bits != nullptr && !staged_values_.IsFinite(cell.columns, padded)) return false;
    Block& block = blocks_[cell.down];
    const int64_t count = rows_.counts[cell.down];
    UpcomingRows keys(key_, cell.next, kCell), values(value_, cell.next, kCell);
    const auto fetch = [&] {
      keys.Fetch(kRowsPerTile);
      values.Fetch(kRowsPerTile);
    };
    for (int64_t i = 0; i < cell.columns * kCell; ++i) weights_[i] = 0;
    for (int64_t f = 0; f < key_.size; f += kMost) {
      block.query.Stage(query_, rows_.FirstRow(cell.down), count, f);
      staged_keys_.Stage(key_, cell.first, cell.columns, f);
      AddScores(staged_keys_.data, staged_keys_.stride, cell.columns, block.query.data,
                Between(0, key_.size - f, kMost), cell.Columns(), fetch, weights_);
    }
    alignas(64) Acc factors[kCell];
    block.softmax.TakeCell(cell.columns, cell.Columns(), scale_, weights_, factors);
    for (int64_t r = 0; r < count; ++r) {
      if (factors[r] == 1) continue;
      for (int64_t f = 0; f < padded; f += kLanes) {
        Acc* sums = block.sums + r * kMost + f;
        Store<kLanes, Acc>(Load<kLanes>(sums) * factors[r], sums);
      }
    }
    AddWeighted(weights_, count, staged_values_.data, staged_values_.stride, cell.columns, padded,
                cell.Rows(), fetch, block.sums);
    return true;
  }

  [[gnu::noinline]] void AddPositions(int down, int64_t row, const int32_t* columns, int count,
                                      int64_t feature, int64_t size) {
    Block& block = blocks_[down];
    alignas(64) Acc weights[kCell];
    for (int i = 0; i < count; ++i) UpcomingRows(value_, columns[i], 1).Fetch(1);
    Dots(query_.Row(rows_.FirstRow(down) + row), key_, columns, count, weights);
    const Acc factor = block.softmax.TakeRow(row, count, scale_, weights);
    AddRows(weights, value_, columns, count, feature, size, factor, block.sums + row * kMost);
  }

  JAXSPARSE_INLINE void Write(int down, int64_t feature) {
    const Block& block = blocks_[down];
    const int64_t size = Between(0, value_.size - feature, kMost), first = rows_.FirstRow(down);
    UpcomingRows(out_, first, kCell).Fetch(kCell);
    for (int64_t r = 0; r < rows_.counts[down]; ++r) {
      const Acc inverse = block.softmax.Inverse(r);
      T* out = out_.Row(first + r) + feature;
      for (int64_t f = 0; f < size; f += kLanes) {
        StoreSome<kLanes, Acc>(Load<kLanes>(block.sums + r * kMost + f) * inverse, size - f,
                               out + f);
      }
      lse_[first + r] = static_cast<float>(block.softmax.LogSum(r));
    }
  }

  const Acc scale_;
  HeadRows<const T> query_, key_, value_;
  HeadRows<T> out_;
  float* lse_;
  HeadMask mask_;
  TaskRowsOfTiles rows_;
  Block blocks_[kCellsOfTile];
  StagedRows<T, Factor::kLeft> staged_keys_;
  StagedRows<T, Factor::kRight> staged_values_;
  alignas(64) Acc weights_[kCell * kCell];  // of 64 rows side by side
};

template <typename T>
void Attention(const AttentionProblem& problem, Workers& workers) {
  const HeadTasks tasks(problem.mask, problem.batch.count * problem.groups * problem.per_group,
                        workers);
  ParallelFor(workers, tasks.count(),
              [&](int64_t task) { AttentionTask<T>(problem, tasks, task).Run(); });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
