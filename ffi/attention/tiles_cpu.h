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

 public:
  JAXSPARSE_INLINE AttentionTask(const AttentionProblem& p, const HeadTasks& tasks, int64_t task)
      : scale_(static_cast<Acc>(p.scale)) {
    const int64_t heads = p.groups * p.per_group, head = tasks.Head(task);
    const int64_t entry = tasks.Entry(task), group = head / p.per_group;
    query_ = {p.query, p.batch, entry, head, heads, p.queries, p.head_size};
    key_ = {p.key, p.batch, entry, group, p.groups, p.keys, p.head_size};
    value_ = {p.value, p.batch, entry, group, p.groups, p.keys, p.value_size};
    out_ = {p.out, p.batch, entry, head, heads, p.queries, p.value_size};
    lse_ = p.lse.At<Acc>(p.batch, entry) + head * p.queries;
    mask_ = {p.mask, p.batch, entry, group, head % p.per_group};
    rows_ = tasks.Rows(task, mask_, p.queries);
  }

  // More features of values than sums are kept of take a pass for each part of them.
  JAXSPARSE_INLINE void Run() {
    for (int down = 0; down < kCellsOfTile; ++down) {
      UpcomingRows(query_, rows_.FirstRow(down), LowBits(rows_.counts[down])).Fetch(kCell);
    }
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
    StagedRows<T> query;
    StagedColumns<T> query_columns;
    alignas(64) Acc sums[kCell * kMost];  // of weighted values
  };

  JAXSPARSE_INLINE void Sum(int64_t feature) {
    for (int down = 0; down < kCellsOfTile; ++down) {
      blocks_[down].softmax.Start();
      for (int64_t r = 0; r < rows_.counts[down]; ++r) {
        Acc* sums = blocks_[down].sums + r * kMost;
        for (int64_t f = 0; f < PaddedPart<Acc>(value_.size, feature); ++f) sums[f] = 0;
      }
    }
    VisitCells(mask_, rows_, key_.count, [&](const Cell& cell, const Cell& next) {
      UpcomingCell upcoming(key_, value_, cell, next);
      if (next.stored == 0) FetchResults();
      if (!cell.IsDense() || !AddCell(cell, feature, &upcoming)) {
        AddPositions(cell, feature, &upcoming);
      }
      upcoming.FetchAll();
    });
  }

  // A weight of 0 must not meet a value that is not finite: then nothing is added.
  JAXSPARSE_INLINE bool AddCell(const Cell& cell, int64_t feature, UpcomingCell* upcoming) {
    const int64_t padded = PaddedPart<Acc>(value_.size, feature);
    staged_values_.Stage(value_, cell.first, feature, cell.used_columns);
    if (!cell.is_full && !staged_values_.IsFinite(cell.columns)) return false;
    Block& block = blocks_[cell.down];
    const int64_t count = rows_.counts[cell.down];
    int64_t f = 0;
    do {
      block.query_columns.Stage(query_, rows_.FirstRow(cell.down), f, count);
      staged_keys_.StageLeft(key_, cell.first, f, cell.used_columns);
      AddScores<Acc>(staged_keys_.data, staged_keys_.stride, cell.columns, block.query_columns.data,
                     PartOf<Acc>(key_.size, f), cell.Columns(), upcoming, f > 0, weights_);
      f += kMost;
    } while (f < key_.size);
    alignas(64) Acc factors[kCell];
    block.softmax.TakeCell(cell.columns, cell.Columns(), scale_, weights_, factors);
    for (int64_t r = 0; r < count; ++r) {
      if (factors[r] == 1) continue;
      for (int64_t f = 0; f < padded; f += kLanes) {
        Acc* sums = block.sums + r * kMost + f;
        Store<kLanes, Acc>(Load<kLanes>(sums) * factors[r], sums);
      }
    }
    AddWeighted<LeftFactor::kByColumns>(weights_, count, staged_values_.data, staged_values_.stride,
                                        cell.columns, padded, cell.Rows(), upcoming, block.sums,
                                        kMost);
    return true;
  }

  JAXSPARSE_INLINE void AddPositions(const Cell& cell, int64_t feature, UpcomingCell* upcoming) {
    Block& block = blocks_[cell.down];
    const Positions positions(cell.row_bits);
    for (int i = 0; i < positions.count(); i += kLanes) {
      Store<kLanes, Acc>(Vector<Acc, kLanes>{}, weights_ + i);
    }
    for (int64_t f = 0; f < key_.size; f += kMost) {
      block.query.Stage(query_, rows_.FirstRow(cell.down), f, cell.used_rows);
      staged_keys_.Stage(key_, cell.first, f, cell.used_columns);
      AddDots<Acc>(positions, block.query.data, block.query.stride, staged_keys_.data,
                   staged_keys_.stride, PaddedPart<Acc>(key_.size, f), upcoming, weights_);
    }
    alignas(64) Acc factors[kCell] = {};
    block.softmax.TakePositions(positions, cell.used_rows, scale_, weights_, factors);
    staged_values_.Stage(value_, cell.first, feature, cell.used_columns);
    AddRows<Acc>(positions, weights_, staged_values_.data, staged_values_.stride,
                 PaddedPart<Acc>(value_.size, feature), cell.used_rows, factors, block.sums, kMost);
  }

  // While the last cell is worked on.
  JAXSPARSE_INLINE void FetchResults() const {
    for (int down = 0; down < kCellsOfTile; ++down) {
      UpcomingRows(out_, rows_.FirstRow(down), LowBits(rows_.counts[down])).Fetch(kCell);
    }
  }

  JAXSPARSE_INLINE void Write(int down, int64_t feature) {
    const Block& block = blocks_[down];
    const int64_t size = PartOf<Acc>(value_.size, feature), first = rows_.FirstRow(down);
    for (int64_t r = 0; r < rows_.counts[down]; ++r) {
      const Acc inverse = block.softmax.Inverse(r);
      T* out = out_.Row(first + r) + feature;
      for (int64_t f = 0; f < size; f += kLanes) {
        StoreSome<kLanes, Acc>(Load<kLanes>(block.sums + r * kMost + f) * inverse, size - f,
                               out + f);
      }
      lse_[first + r] = block.softmax.LogSum(r);
    }
  }

  const Acc scale_;
  HeadRows<const T> query_, key_, value_;
  HeadRows<T> out_;
  Acc* lse_;
  HeadMask mask_;
  TaskRowsOfTiles rows_;
  Block blocks_[kCellsOfTile];
  StagedRows<T> staged_keys_, staged_values_;
  alignas(64) Acc weights_[kCell * kCell];  // of a cell's columns, of 64 rows each, or of positions
};

template <typename T>
void Attention(const AttentionProblem& problem, Workers& workers) {
  const HeadTasks tasks(problem.mask, problem.batch.count, problem.groups * problem.per_group,
                        workers);
  ParallelFor(workers, tasks.count(),
              [&](int64_t task) { AttentionTask<T>(problem, tasks, task).Run(); });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
