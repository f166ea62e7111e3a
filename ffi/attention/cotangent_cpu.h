// The CPU kernel of attention's cotangents: a task has up to 128 queries of a head, or as many
// keys. Scores are computed anew for both, so that each result is one task's and nothing is added
// across tasks. Compiled once for each instruction set, as the other kernels are.
#pragma once

#include "attention/softmax_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

enum class Owner { kQueries, kKeys };

// The owner's rows are those of the mask. They have factors `a`, of the scores (queries or keys),
// and `b`, of the weights' cotangents (cotangents of the result, or values); its columns have the
// other two.
template <typename T, Owner kOwner>
class CotangentTask {
  using Acc = typename Accumulator<T>::type;
  using Problem = AttentionCotangentProblem;
  static constexpr int kLanes = kMaxLanes<Acc>;
  using Lanes = Vector<Acc, kLanes>;
  static constexpr int64_t kMost = kMostFeatures<Acc>;
  static constexpr bool kByKeys = kOwner == Owner::kKeys;

 public:
  JAXSPARSE_INLINE CotangentTask(const Problem& p, const HeadTasks& tasks, int64_t task)
      : problem_(p), scale_(static_cast<Acc>(p.scale)) {
    const int64_t head = tasks.Head(task);
    entry_ = tasks.Entry(task);
    group_ = kByKeys ? head : head / p.per_group;
    first_of_group_ = kByKeys ? 0 : head % p.per_group;
    const HeadMask mask = MaskOf(first_of_group_);
    rows_ = tasks.Rows(task, mask, kByKeys ? p.keys : p.queries);
  }

  // More features than sums are kept of take a pass for each part of them.
  JAXSPARSE_INLINE void Run() {
    const Problem& p = problem_;
    int64_t feature = 0;
    do {
      for (Block& block : blocks_) block.Clear();
      for (int64_t i = first_of_group_; i < (kByKeys ? p.per_group : first_of_group_ + 1); ++i) {
        SumHead(i, feature);
      }
      for (int down = 0; down < kCellsOfTile; ++down) {
        if constexpr (kByKeys) {
          Write(p.ct_key, group_, p.groups, p.head_size, scale_, blocks_[down].sums_a, down,
                feature);
          Write(p.ct_value, group_, p.groups, p.value_size, Acc(1), blocks_[down].sums_b, down,
                feature);
        } else {
          Write(p.ct_query, group_ * p.per_group + first_of_group_, p.groups * p.per_group,
                p.head_size, scale_, blocks_[down].sums_a, down, feature);
        }
      }
      feature += kMost;
    } while (feature < p.head_size || (kByKeys && feature < p.value_size));
  }

 private:
  // What is kept of 64 rows.
  struct Block {
    StagedRows<T> a, b;
    StagedColumns<T> a_columns, b_columns;
    alignas(64) Acc lse[kCell], ct_sums[kCell];  // of queries
    alignas(64) Acc sums_a[kCell * kMost], sums_b[kByKeys ? kCell * kMost : 1];

    JAXSPARSE_INLINE void Clear() {
      for (Acc& sum : sums_a) sum = 0;
      for (Acc& sum : sums_b) sum = 0;
    }
  };

  JAXSPARSE_INLINE HeadMask MaskOf(int64_t of_group) const {
    const MaskTiles& mask = kByKeys ? problem_.transposed_mask : problem_.mask;
    return {mask, problem_.batch, entry_, group_, of_group};
  }

  // Weights of a query that sees nothing are 0.
  JAXSPARSE_INLINE Acc Lse(int64_t query) const {
    return lse_[query] == -kInfinity<float> ? kInfinity<Acc> : static_cast<Acc>(lse_[query]);
  }

  // The terms of one query head.
  JAXSPARSE_INLINE void SumHead(int64_t of_group, int64_t feature) {
    const Problem& p = problem_;
    const int64_t heads = p.groups * p.per_group, head = group_ * p.per_group + of_group;
    const HeadRows<const T> query{p.query, p.batch, entry_, head, heads, p.queries, p.head_size};
    const HeadRows<const T> ct_out{p.ct_out, p.batch, entry_, head, heads, p.queries, p.value_size};
    const HeadRows<const T> key{p.key, p.batch, entry_, group_, p.groups, p.keys, p.head_size};
    const HeadRows<const T> value{p.value, p.batch, entry_, group_, p.groups, p.keys, p.value_size};
    lse_ = p.lse.At<const float>(p.batch, entry_) + head * p.queries;
    ct_sums_ = p.ct_sums.At<const float>(p.batch, entry_) + head * p.queries;
    own_a_ = kByKeys ? key : query;
    own_b_ = kByKeys ? value : ct_out;
    other_a_ = kByKeys ? query : key;
    other_b_ = kByKeys ? ct_out : value;
    for (int down = 0; down < kCellsOfTile; ++down) {
      UpcomingCell(own_a_, own_b_, rows_.FirstRow(down), LowBits(rows_.counts[down])).FetchAll();
    }
    for (int down = 0; down < kCellsOfTile && !kByKeys; ++down) {
      Block& block = blocks_[down];
      for (int64_t r = 0; r < kCell; ++r) {
        const bool is_there = r < rows_.counts[down];
        block.lse[r] = is_there ? Lse(rows_.FirstRow(down) + r) : 0;
        block.ct_sums[r] = is_there ? Acc(ct_sums_[rows_.FirstRow(down) + r]) : 0;
      }
    }
    VisitCells(MaskOf(of_group), rows_, other_a_.count, [&](const Cell& cell, const Cell& next) {
      UpcomingCell upcoming(other_a_, other_b_, cell, next);
      if (!cell.IsDense() || !AddCell(cell, feature, &upcoming)) {
        AddPositions(cell, feature, &upcoming);
      }
      upcoming.FetchAll();
    });
  }

  JAXSPARSE_INLINE void StageOthers(const Cell& cell, int64_t feature) {
    staged_a_.Stage(other_a_, cell.first, feature, cell.used_columns);
    if (kByKeys) staged_b_.Stage(other_b_, cell.first, feature, cell.used_columns);
  }

  // A weight of 0 must not meet a factor that is not finite: then nothing is added.
  JAXSPARSE_INLINE bool AddCell(const Cell& cell, int64_t feature, UpcomingCell* upcoming) {
    const int64_t size_a = PaddedPart<Acc>(own_a_.size, feature);
    const int64_t size_b = PaddedPart<Acc>(own_b_.size, feature);
    StageOthers(cell, feature);
    if (!cell.is_full) {
      if (!staged_a_.IsFinite(cell.columns, size_a)) return false;
      if (kByKeys && !staged_b_.IsFinite(cell.columns, size_b)) return false;
    }
    Block& block = blocks_[cell.down];
    const int64_t count = rows_.counts[cell.down], first = rows_.FirstRow(cell.down);
    for (int i = 0; i < cell.columns * kCell; ++i) scores_[i] = cotangents_[i] = 0;
    for (int64_t f = 0; f < own_a_.size; f += kMost) {
      block.a_columns.Stage(own_a_, first, f, count);
      staged_a_.Stage(other_a_, cell.first, f, cell.used_columns);
      AddScores<Acc>(staged_a_.data, staged_a_.stride, cell.columns, block.a_columns.data,
                     PartOf<Acc>(own_a_.size, f), cell.Columns(), upcoming, scores_);
    }
    for (int64_t f = 0; f < own_b_.size; f += kMost) {
      block.b_columns.Stage(own_b_, first, f, count);
      if (kByKeys) staged_b_.Stage(other_b_, cell.first, f, cell.used_columns);
      else staged_b_.StageLeft(other_b_, cell.first, f, cell.used_columns);
      AddScores<Acc>(staged_b_.data, staged_b_.stride, cell.columns, block.b_columns.data,
                     PartOf<Acc>(own_b_.size, f), cell.Columns(), upcoming, cotangents_);
    }
    WeighCell(cell, block);
    StageOthers(cell, feature);
    AddWeighted<Acc>(cotangents_, count, staged_a_.data, staged_a_.stride, cell.columns, size_a,
                     cell.Rows(), upcoming, block.sums_a);
    if constexpr (kByKeys) {
      AddWeighted<Acc>(scores_, count, staged_b_.data, staged_b_.stride, cell.columns, size_b,
                       cell.Rows(), upcoming, block.sums_b);
    }
    return true;
  }

  // Scores become weights, and what their cotangents lack of those of scores is added.
  JAXSPARSE_INLINE void WeighCell(const Cell& cell, const Block& block) {
    for (int j = 0; j < cell.columns; ++j) {
      const Lanes lse = Broadcast<kLanes>(kByKeys ? Lse(cell.first + j) : Acc(0));
      const Lanes ct_sum = Broadcast<kLanes>(kByKeys ? Acc(ct_sums_[cell.first + j]) : Acc(0));
      for (int at = 0; at < kCell; at += kLanes) {
        Acc* score = scores_ + j * kCell + at;
        Acc* cotangent = cotangents_ + j * kCell + at;
        Lanes p = Exp<kLanes>(Load<kLanes>(score) * scale_ -
                              (kByKeys ? lse : Load<kLanes>(block.lse + at)));
        Lanes ct = p * (Load<kLanes>(cotangent) +
                        (kByKeys ? ct_sum : Load<kLanes>(block.ct_sums + at)));
        if (!cell.is_full) {
          const auto is_stored = LanesOf<kLanes, Acc>(cell.column_bits[j] >> at);
          p = is_stored ? p : Lanes{};
          ct = is_stored ? ct : Lanes{};
        }
        Store<kLanes, Acc>(p, score);
        Store<kLanes, Acc>(ct, cotangent);
      }
    }
  }

  JAXSPARSE_INLINE void AddPositions(const Cell& cell, int64_t feature, UpcomingCell* upcoming) {
    Block& block = blocks_[cell.down];
    const Positions positions(cell);
    const int64_t first = rows_.FirstRow(cell.down);
    for (int i = 0; i < positions.count(); i += kLanes) {
      Store<kLanes, Acc>(Lanes{}, scores_ + i);
      Store<kLanes, Acc>(Lanes{}, cotangents_ + i);
    }
    for (int64_t f = 0; f < own_a_.size; f += kMost) {
      block.a.Stage(own_a_, first, f, cell.used_rows);
      staged_a_.Stage(other_a_, cell.first, f, cell.used_columns);
      AddDots<Acc>(positions, block.a.data, block.a.stride, staged_a_.data, staged_a_.stride,
                   PaddedPart<Acc>(own_a_.size, f), cell.used_rows, upcoming, scores_);
    }
    for (int64_t f = 0; f < own_b_.size; f += kMost) {
      block.b.Stage(own_b_, first, f, cell.used_rows);
      staged_b_.Stage(other_b_, cell.first, f, cell.used_columns);
      AddDots<Acc>(positions, block.b.data, block.b.stride, staged_b_.data, staged_b_.stride,
                   PaddedPart<Acc>(own_b_.size, f), cell.used_rows, upcoming, cotangents_);
    }
    WeighPositions(cell, positions, block);
    StageOthers(cell, feature);
    AddRows<Acc>(positions, cotangents_, staged_a_.data, staged_a_.stride,
                 PaddedPart<Acc>(own_a_.size, feature), cell.used_rows, nullptr, block.sums_a);
    if constexpr (kByKeys) {
      AddRows<Acc>(positions, scores_, staged_b_.data, staged_b_.stride,
                   PaddedPart<Acc>(own_b_.size, feature), cell.used_rows, nullptr, block.sums_b);
    }
  }

  JAXSPARSE_INLINE void WeighPositions(const Cell& cell, const Positions& positions,
                                       const Block& block) {
    for (int r = 0; r < kCell; ++r) {
      for (int i = positions.begins[r]; i < positions.begins[r + 1]; ++i) {
        const int64_t column = cell.first + positions.columns[i];
        scores_[i] = scores_[i] * scale_ - (kByKeys ? Lse(column) : block.lse[r]);
        cotangents_[i] += kByKeys ? Acc(ct_sums_[column]) : block.ct_sums[r];
      }
    }
    for (int i = 0; i < positions.count(); i += kLanes) {
      const Lanes p = Exp<kLanes>(Load<kLanes>(scores_ + i));
      Store<kLanes, Acc>(p, scores_ + i);
      Store<kLanes, Acc>(p * Load<kLanes>(cotangents_ + i), cotangents_ + i);
    }
  }

  JAXSPARSE_INLINE void Write(const Array& array, int64_t head, int64_t heads, int64_t size,
                              Acc factor, const Acc* sums, int down, int64_t feature) const {
    const HeadRows<T> out{array, problem_.batch, entry_,
                          head,  heads,          kByKeys ? problem_.keys : problem_.queries,
                          size};
    const int64_t part = PartOf<Acc>(size, feature), first = rows_.FirstRow(down);
    UpcomingRows(out, first, LowBits(rows_.counts[down])).Fetch(kCell);
    for (int64_t r = 0; r < rows_.counts[down]; ++r) {
      for (int64_t f = 0; f < part; f += kLanes) {
        StoreSome<kLanes, Acc>(Load<kLanes>(sums + r * kMost + f) * factor, part - f,
                               out.Row(first + r) + feature + f);
      }
    }
  }

  const Problem& problem_;
  const Acc scale_;
  int64_t entry_, group_, first_of_group_;
  TaskRowsOfTiles rows_;
  HeadRows<const T> own_a_, own_b_, other_a_, other_b_;
  const float* lse_ = nullptr;      // of the query head
  const float* ct_sums_ = nullptr;  // of the query head
  Block blocks_[kCellsOfTile];
  StagedRows<T> staged_a_, staged_b_;
  alignas(64) Acc scores_[kCell * kCell], cotangents_[kCell * kCell];
};

// Tasks of keys first, which take longest.
template <typename T>
void AttentionCotangent(const AttentionCotangentProblem& problem, Workers& workers) {
  const int64_t entries = problem.batch.count, groups = problem.groups;
  const HeadTasks keys(problem.transposed_mask, entries, groups, workers);
  const HeadTasks queries(problem.mask, entries, groups * problem.per_group, workers);
  ParallelFor(workers, keys.count() + queries.count(), [&](int64_t task) {
    if (task < keys.count()) {
      CotangentTask<T, Owner::kKeys>(problem, keys, task).Run();
    } else {
      CotangentTask<T, Owner::kQueries>(problem, queries, task - keys.count()).Run();
    }
  });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
