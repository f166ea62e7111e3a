// The CPU kernel of attention's tangents: a task has up to 128 queries of a head. Compiled once for
// each instruction set, as the other kernels are.
//
// Floors, with n stored positions of a head: n (3 head_size + 2 value_size) multiply-adds, five
// products, and n exponentials; operands and their tangents are read once, as in attention itself.
#pragma once

#include "attention/softmax_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

template <typename T>
class TangentTask {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;
  using Lanes = Vector<Acc, kLanes>;
  static constexpr int64_t kMost = kMostFeatures<Acc>;

 public:
  JAXSPARSE_INLINE TangentTask(const AttentionTangentProblem& p, const HeadTasks& tasks,
                               int64_t task)
      : scale_(static_cast<Acc>(p.scale)) {
    const int64_t heads = p.groups * p.per_group, head = tasks.Head(task);
    const int64_t entry = tasks.Entry(task), group = head / p.per_group;
    query_ = {p.query, p.batch, entry, head, heads, p.queries, p.head_size};
    d_query_ = {p.d_query, p.batch, entry, head, heads, p.queries, p.head_size};
    key_ = {p.key, p.batch, entry, group, p.groups, p.keys, p.head_size};
    d_key_ = {p.d_key, p.batch, entry, group, p.groups, p.keys, p.head_size};
    value_ = {p.value, p.batch, entry, group, p.groups, p.keys, p.value_size};
    d_value_ = {p.d_value, p.batch, entry, group, p.groups, p.keys, p.value_size};
    weighted_ = {p.weighted, p.batch, entry, head, heads, p.queries, p.value_size};
    lse_ = p.lse.At<const Acc>(p.batch, entry) + head * p.queries;
    sums_ = p.sums.At<Acc>(p.batch, entry) + head * p.queries;
    mask_ = {p.mask, p.batch, entry, group, head % p.per_group};
    rows_ = tasks.Rows(task, mask_, p.queries);
  }

  // More features of values than sums are kept of take a pass for each part of them.
  JAXSPARSE_INLINE void Run() {
    int64_t feature = 0;
    do {
      for (int down = 0; down < kCellsOfTile; ++down) Start(down, feature);
      VisitCells(mask_, rows_, key_.count, [&](const Cell& cell, const Cell& next) {
        Upcoming upcoming{{key_, d_key_, cell, next}, {value_, d_value_, cell, next}};
        if (!cell.IsDense() || !AddCell(cell, feature, &upcoming)) {
          AddPositions(cell, feature, &upcoming);
        }
        upcoming.keys.FetchAll();
        upcoming.values.FetchAll();
      });
      for (int down = 0; down < kCellsOfTile; ++down) Write(down, feature);
      feature += kMost;
    } while (feature < value_.size);
  }

 private:
  // What is kept of 64 queries.
  struct Block {
    StagedRows<T> query, d_query;
    StagedColumns<T> query_columns, d_query_columns;
    alignas(64) Acc lse[kCell], sums[kCell];
    alignas(64) Acc weighted[kCell * kMost];
  };

  struct Upcoming {
    UpcomingCell keys, values;
  };

  JAXSPARSE_INLINE void Start(int down, int64_t feature) {
    Block& block = blocks_[down];
    const int64_t first = rows_.FirstRow(down), count = rows_.counts[down];
    UpcomingCell(query_, d_query_, first, LowBits(count)).FetchAll();
    for (int64_t r = 0; r < kCell; ++r) {
      block.lse[r] = r < count ? TakenFromScores(lse_[first + r]) : 0;
      block.sums[r] = 0;
    }
    for (int64_t r = 0; r < count; ++r) {
      Acc* weighted = block.weighted + r * kMost;
      for (int64_t f = 0; f < PaddedPart<Acc>(value_.size, feature); ++f) weighted[f] = 0;
    }
  }

  JAXSPARSE_INLINE void StageValues(const Cell& cell, int64_t feature) {
    staged_values_.Stage(value_, cell.first, feature, cell.used_columns);
    staged_d_values_.Stage(d_value_, cell.first, feature, cell.used_columns);
  }

  // A weight of 0 must not meet a factor that is not finite: then nothing is added.
  JAXSPARSE_INLINE bool AddCell(const Cell& cell, int64_t feature, Upcoming* upcoming) {
    const int64_t padded = PaddedPart<Acc>(value_.size, feature);
    StageValues(cell, feature);
    if (!cell.is_full) {
      if (!staged_values_.IsFinite(cell.columns)) return false;
      if (!staged_d_values_.IsFinite(cell.columns)) return false;
    }
    Block& block = blocks_[cell.down];
    const int64_t count = rows_.counts[cell.down], first = rows_.FirstRow(cell.down);
    int64_t f = 0;
    do {
      const int64_t size = PartOf<Acc>(key_.size, f);
      block.query_columns.Stage(query_, first, f, count);
      block.d_query_columns.Stage(d_query_, first, f, count);
      staged_keys_.StageLeft(key_, cell.first, f, cell.used_columns);
      staged_d_keys_.StageLeft(d_key_, cell.first, f, cell.used_columns);
      const auto take = [&](const StagedRows<T>& keys, const StagedColumns<T>& columns, bool adds,
                            Acc* to) {
        AddScores<Acc>(keys.data, keys.stride, cell.columns, columns.data, size, cell.Columns(),
                       &upcoming->keys, adds, to);
      };
      take(staged_keys_, block.query_columns, f > 0, scores_);
      take(staged_keys_, block.d_query_columns, f > 0, tangents_);
      take(staged_d_keys_, block.query_columns, true, tangents_);
      f += kMost;
    } while (f < key_.size);
    WeighCell(cell, &block);
    const auto add = [&](const Acc* weights, const StagedRows<T>& values) {
      AddWeighted<LeftFactor::kByColumns>(weights, count, values.data, values.stride, cell.columns,
                                          padded, cell.Rows(), &upcoming->values, block.weighted,
                                          kMost);
    };
    add(tangents_, staged_values_);
    add(scores_, staged_d_values_);
    return true;
  }

  // Scores become weights, and their tangents are multiplied by these.
  JAXSPARSE_INLINE void WeighCell(const Cell& cell, Block* block) {
    for (int at = 0; at < kCell; at += kLanes) {
      const Lanes lse = Load<kLanes>(block->lse + at);
      Lanes sum = Load<kLanes>(block->sums + at);
      for (int j = 0; j < cell.columns; ++j) {
        Acc* score = scores_ + j * kCell + at;
        Acc* tangent = tangents_ + j * kCell + at;
        Lanes p = Exp<kLanes>(Load<kLanes>(score) * scale_ - lse);
        Lanes product = p * scale_ * Load<kLanes>(tangent);
        if (!cell.is_full) {
          const auto is_stored = LanesOf<kLanes, Acc>(cell.column_bits[j] >> at);
          p = is_stored ? p : Lanes{};
          product = is_stored ? product : Lanes{};
        }
        Store<kLanes, Acc>(p, score);
        Store<kLanes, Acc>(product, tangent);
        sum += product;
      }
      Store<kLanes, Acc>(sum, block->sums + at);
    }
  }

  JAXSPARSE_INLINE void AddPositions(const Cell& cell, int64_t feature, Upcoming* upcoming) {
    Block& block = blocks_[cell.down];
    const Positions positions(cell.row_bits);
    const int64_t first = rows_.FirstRow(cell.down);
    for (int i = 0; i < positions.count(); i += kLanes) {
      Store<kLanes, Acc>(Lanes{}, scores_ + i);
      Store<kLanes, Acc>(Lanes{}, tangents_ + i);
    }
    for (int64_t f = 0; f < key_.size; f += kMost) {
      const int64_t size = PaddedPart<Acc>(key_.size, f);
      block.query.Stage(query_, first, f, cell.used_rows);
      block.d_query.Stage(d_query_, first, f, cell.used_rows);
      staged_keys_.Stage(key_, cell.first, f, cell.used_columns);
      staged_d_keys_.Stage(d_key_, cell.first, f, cell.used_columns);
      const auto add = [&](const StagedRows<T>& queries, const StagedRows<T>& keys, Acc* to) {
        AddDots<Acc>(positions, queries.data, queries.stride, keys.data, keys.stride, size,
                     &upcoming->keys, to);
      };
      add(block.query, staged_keys_, scores_);
      add(block.d_query, staged_keys_, tangents_);
      add(block.query, staged_d_keys_, tangents_);
    }
    WeighPositions(positions, &block);
    StageValues(cell, feature);
    const auto add = [&](const Acc* weights, const StagedRows<T>& values) {
      AddRows<Acc>(positions, weights, values.data, values.stride,
                   PaddedPart<Acc>(value_.size, feature), cell.used_rows, nullptr, block.weighted,
                   kMost);
    };
    add(tangents_, staged_values_);
    add(scores_, staged_d_values_);
  }

  JAXSPARSE_INLINE void WeighPositions(const Positions& positions, Block* block) {
    for (int i = 0; i < positions.count(); ++i) {
      scores_[i] = scores_[i] * scale_ - block->lse[positions.rows[i]];
    }
    for (int i = 0; i < positions.count(); i += kLanes) {
      const Lanes p = Exp<kLanes>(Load<kLanes>(scores_ + i));
      Store<kLanes, Acc>(p, scores_ + i);
      Store<kLanes, Acc>(p * scale_ * Load<kLanes>(tangents_ + i), tangents_ + i);
    }
    for (int i = 0; i < positions.count(); ++i) block->sums[positions.rows[i]] += tangents_[i];
  }

  JAXSPARSE_INLINE void Write(int down, int64_t feature) {
    const Block& block = blocks_[down];
    const int64_t size = PartOf<Acc>(value_.size, feature), first = rows_.FirstRow(down);
    UpcomingRows(weighted_, first, LowBits(rows_.counts[down])).Fetch(kCell);
    for (int64_t r = 0; r < rows_.counts[down]; ++r) {
      for (int64_t f = 0; f < size; f += kLanes) {
        StoreSome<kLanes, Acc>(Load<kLanes>(block.weighted + r * kMost + f), size - f,
                               weighted_.Row(first + r) + feature + f);
      }
      sums_[first + r] = block.sums[r];
    }
  }

  const Acc scale_;
  HeadRows<const T> query_, key_, value_, d_query_, d_key_, d_value_;
  HeadRows<Acc> weighted_;
  const Acc* lse_;
  Acc* sums_;
  HeadMask mask_;
  TaskRowsOfTiles rows_;
  Block blocks_[kCellsOfTile];
  StagedRows<T> staged_keys_, staged_d_keys_, staged_values_, staged_d_values_;
  // Of a cell's columns, of 64 rows each, or of positions: scores and their tangents, then weights
  // and products of weights and tangents.
  alignas(64) Acc scores_[kCell * kCell], tangents_[kCell * kCell];
};

template <typename T>
void AttentionTangent(const AttentionTangentProblem& problem, Workers& workers) {
  const HeadTasks tasks(problem.mask, problem.batch.count, problem.groups * problem.per_group,
                        workers);
  ParallelFor(workers, tasks.count(),
              [&](int64_t task) { TangentTask<T>(problem, tasks, task).Run(); });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
