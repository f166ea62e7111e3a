// The CPU kernel of attention's cotangents: of up to 128 keys, or as many queries, of a head.
// Compiled once for each instruction set, as the other kernels are.
#pragma once

#include "attention/softmax_cpu.h"
#include "attention/turns_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// Cotangents of the rows of the owner's mask, and where accumulators can be added to the result,
// what keys bring to those of queries as well, in turns: else scores are computed anew for these.
// Rows have factors `a`, of the scores (queries or keys), and `b`, of the weights' cotangents
// (cotangents of the result, or values); columns have the other two.
template <typename T, Owner kOwner>
class CotangentTask {
  using Acc = typename Accumulator<T>::type;
  using Problem = AttentionCotangentProblem;
  static constexpr int kLanes = kMaxLanes<Acc>;
  using Lanes = Vector<Acc, kLanes>;
  static constexpr int64_t kMost = kMostFeatures<Acc>;
  static constexpr bool kByKeys = kOwner == Owner::kKeys;
  static constexpr bool kAddsToQueries = kByKeys && std::is_same_v<T, Acc>;

 public:
  // `head`: of keys or of queries.
  JAXSPARSE_INLINE CotangentTask(const Problem& p, int64_t entry, int64_t head,
                                 const TaskRowsOfTiles& rows, Turns* turns = nullptr)
      : problem_(p),
        scale_(static_cast<Acc>(p.scale)),
        entry_(entry),
        group_(kByKeys ? head : head / p.per_group),
        first_of_group_(kByKeys ? 0 : head % p.per_group),
        rows_(rows),
        turns_(turns) {
    if constexpr (kByKeys) {
      results_[0] = {p.ct_key, p.batch, entry, head, p.groups, p.keys, p.head_size};
      results_[1] = {p.ct_value, p.batch, entry, head, p.groups, p.keys, p.value_size};
    } else {
      const int64_t heads = p.groups * p.per_group;
      results_[0] = {p.ct_query, p.batch, entry, head, heads, p.queries, p.head_size};
    }
  }

  // More features than sums are kept of take a pass for each part of them.
  JAXSPARSE_INLINE void Run() {
    int64_t feature = 0;
    do {
      for (int down = 0; down < kCellsOfTile; ++down) {
        for (int i = 0; i < kResults; ++i) Clear(down, i, feature);
      }
      const int64_t heads = kByKeys ? problem_.per_group : 1;
      for (int64_t i = 0; i < heads; ++i) SumHead(first_of_group_ + i, feature);
      for (int down = 0; down < kCellsOfTile; ++down) {
        for (int i = 0; i < kResults; ++i) Write(down, i, feature);
      }
      feature += kMost;
    } while (feature < results_[0].size || feature < results_[kResults - 1].size);
  }

 private:
  static constexpr int kResults = kByKeys ? 2 : 1;  // of factors a, b

  // What is kept of 64 rows.
  struct Block {
    StagedRows<T> a, b;
    StagedColumns<T> a_columns, b_columns;
    alignas(64) Acc lse[kCell], ct_sums[kCell];  // of queries
    alignas(64) Acc sums[kResults][kCell * kMost];
    bool is_a_finite;
  };

  JAXSPARSE_INLINE HeadMask MaskOf(int64_t of_group) const {
    const MaskTiles& mask = kByKeys ? problem_.transposed_mask : problem_.mask;
    return {mask, problem_.batch, entry_, group_, of_group};
  }

  // The terms of one query head.
  JAXSPARSE_INLINE void SumHead(int64_t of_group, int64_t feature) {
    const Problem& p = problem_;
    const int64_t heads = p.groups * p.per_group, head = group_ * p.per_group + of_group;
    const HeadRows<const T> query{p.query, p.batch, entry_, head, heads, p.queries, p.head_size};
    const HeadRows<const T> ct_out{p.ct_out, p.batch, entry_, head, heads, p.queries, p.value_size};
    const HeadRows<const T> key{p.key, p.batch, entry_, group_, p.groups, p.keys, p.head_size};
    const HeadRows<const T> value{p.value, p.batch, entry_, group_, p.groups, p.keys, p.value_size};
    lse_ = p.lse.At<const Acc>(p.batch, entry_) + head * p.queries;
    ct_sums_ = p.ct_sums.At<const Acc>(p.batch, entry_) + head * p.queries;
    own_a_ = kByKeys ? key : query;
    own_b_ = kByKeys ? value : ct_out;
    other_a_ = kByKeys ? query : key;
    other_b_ = kByKeys ? ct_out : value;
    for (int down = 0; down < kCellsOfTile; ++down) StageOwn(down, feature);
    if constexpr (kAddsToQueries) {
      ct_query_ = {p.ct_query, p.batch, entry_, head, heads, p.queries, p.head_size};
    }
    const int64_t columns = kByKeys ? p.queries : p.keys;
    VisitCells(MaskOf(of_group), rows_, columns, [&](const Cell& cell, const Cell& next) {
      UpcomingCell upcoming(other_a_, other_b_, cell, next);
      if constexpr (kAddsToQueries) {
        UpcomingRows(ct_query_, cell.first, cell.used_columns).Fetch(kCell);
      }
      if (next.stored == 0) FetchResults();
      if (!cell.IsDense() || !AddCell(cell, feature, &upcoming)) {
        AddPositions(cell, feature, &upcoming);
      }
      upcoming.FetchAll();
    });
    if constexpr (kAddsToQueries) first_turn_ += p.transposed_mask.columns;
  }

  JAXSPARSE_INLINE void StageOwn(int down, int64_t feature) {
    Block& block = blocks_[down];
    const int64_t first = rows_.FirstRow(down), count = rows_.counts[down];
    UpcomingCell(own_a_, own_b_, first, LowBits(count)).FetchAll();
    if constexpr (kAddsToQueries) {
      block.a.Stage(own_a_, first, feature, LowBits(count));
      block.is_a_finite = block.a.IsFinite(count);
    }
    for (int64_t r = 0; r < kCell && !kByKeys; ++r) {
      block.lse[r] = r < count ? TakenFromScores(lse_[first + r]) : 0;
      block.ct_sums[r] = r < count ? Acc(ct_sums_[first + r]) : 0;
    }
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
      if (!staged_a_.IsFinite(cell.columns)) return false;
      if (kByKeys && !staged_b_.IsFinite(cell.columns)) return false;
      if (kAddsToQueries && !blocks_[cell.down].is_a_finite) return false;
    }
    Block& block = blocks_[cell.down];
    const int64_t count = rows_.counts[cell.down], first = rows_.FirstRow(cell.down);
    int64_t f = 0;
    do {
      block.a_columns.Stage(own_a_, first, f, count);
      staged_a_.Stage(other_a_, cell.first, f, cell.used_columns);
      AddScores<Acc>(staged_a_.data, staged_a_.stride, cell.columns, block.a_columns.data,
                     PartOf<Acc>(own_a_.size, f), cell.Columns(), upcoming, f > 0, scores_);
      f += kMost;
    } while (f < own_a_.size);
    f = 0;
    do {
      block.b_columns.Stage(own_b_, first, f, count);
      if (kByKeys) staged_b_.Stage(other_b_, cell.first, f, cell.used_columns);
      else staged_b_.StageLeft(other_b_, cell.first, f, cell.used_columns);
      AddScores<Acc>(staged_b_.data, staged_b_.stride, cell.columns, block.b_columns.data,
                     PartOf<Acc>(own_b_.size, f), cell.Columns(), upcoming, f > 0, cotangents_);
      f += kMost;
    } while (f < own_b_.size);
    WeighCell(cell, block);
    StageOthers(cell, feature);
    AddWeighted<LeftFactor::kByColumns>(cotangents_, count, staged_a_.data, staged_a_.stride,
                                        cell.columns, size_a, cell.Rows(), upcoming, block.sums[0],
                                        kMost);
    if constexpr (kByKeys) {
      AddWeighted<LeftFactor::kByColumns>(scores_, count, staged_b_.data, staged_b_.stride,
                                          cell.columns, size_b, cell.Rows(), upcoming,
                                          block.sums[1], kMost);
    }
    if constexpr (kAddsToQueries) {
      block.a.Stage(own_a_, first, feature, LowBits(count));
      AddToQueries(cell, feature, [&](Acc* sums, int64_t stride) {
        AddWeighted<LeftFactor::kByRows>(cotangents_, cell.columns, block.a.data, block.a.stride,
                                         count, size_a, cell.Columns(), upcoming, sums, stride);
      });
    }
    return true;
  }

  // Calls add(sums of the cell's columns, their stride) where they lie, or for a copy of them if
  // vectors would reach into the next row.
  template <typename F>
  JAXSPARSE_INLINE void AddToQueries(const Cell& cell, int64_t feature, F&& add) {
    turns_->Begin(first_turn_ + cell.first / kMaskTile);
    const int64_t size = PartOf<Acc>(ct_query_.size, feature);
    T* first = ct_query_.Row(cell.first) + feature;
    if (size % kLanes == 0) return add(first, ct_query_.stride);
    for (int64_t j = 0; j < cell.columns; ++j) {
      for (int64_t f = 0; f < size; f += kLanes) {
        Store<kLanes, Acc>(LoadSome<kLanes>(first + j * ct_query_.stride + f, size - f),
                           query_sums_ + j * kMost + f);
      }
    }
    add(query_sums_, kMost);
    for (int64_t j = 0; j < cell.columns; ++j) {
      for (int64_t f = 0; f < size; f += kLanes) {
        StoreSome<kLanes, Acc>(Load<kLanes>(query_sums_ + j * kMost + f), size - f,
                               first + j * ct_query_.stride + f);
      }
    }
  }

  // Scores become weights, and what their cotangents lack of those of scores is added.
  JAXSPARSE_INLINE void WeighCell(const Cell& cell, const Block& block) {
    for (int j = 0; j < cell.columns; ++j) {
      const Lanes lse = Broadcast<kLanes>(kByKeys ? TakenFromScores(lse_[cell.first + j]) : Acc(0));
      const Lanes ct_sum = Broadcast<kLanes>(kByKeys ? Acc(ct_sums_[cell.first + j]) : Acc(0));
      for (int at = 0; at < kCell; at += kLanes) {
        Acc* score = scores_ + j * kCell + at;
        Acc* cotangent = cotangents_ + j * kCell + at;
        Lanes p = Exp<kLanes>(Load<kLanes>(score) * scale_ -
                              (kByKeys ? lse : Load<kLanes>(block.lse + at)));
        Lanes ct =
            p * scale_ *
            (Load<kLanes>(cotangent) + (kByKeys ? ct_sum : Load<kLanes>(block.ct_sums + at)));
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
    const Positions positions(cell.row_bits);
    const int64_t first = rows_.FirstRow(cell.down);
    for (int i = 0; i < positions.count(); i += kLanes) {
      Store<kLanes, Acc>(Lanes{}, scores_ + i);
      Store<kLanes, Acc>(Lanes{}, cotangents_ + i);
    }
    for (int64_t f = 0; f < own_a_.size; f += kMost) {
      block.a.Stage(own_a_, first, f, cell.used_rows);
      staged_a_.Stage(other_a_, cell.first, f, cell.used_columns);
      AddDots<Acc>(positions, block.a.data, block.a.stride, staged_a_.data, staged_a_.stride,
                   PaddedPart<Acc>(own_a_.size, f), upcoming, scores_);
    }
    for (int64_t f = 0; f < own_b_.size; f += kMost) {
      block.b.Stage(own_b_, first, f, cell.used_rows);
      staged_b_.Stage(other_b_, cell.first, f, cell.used_columns);
      AddDots<Acc>(positions, block.b.data, block.b.stride, staged_b_.data, staged_b_.stride,
                   PaddedPart<Acc>(own_b_.size, f), upcoming, cotangents_);
    }
    WeighPositions(cell, positions, block);
    StageOthers(cell, feature);
    AddRows<Acc>(positions, cotangents_, staged_a_.data, staged_a_.stride,
                 PaddedPart<Acc>(own_a_.size, feature), cell.used_rows, nullptr, block.sums[0],
                 kMost);
    if constexpr (kByKeys) {
      AddRows<Acc>(positions, scores_, staged_b_.data, staged_b_.stride,
                   PaddedPart<Acc>(own_b_.size, feature), cell.used_rows, nullptr, block.sums[1],
                   kMost);
    }
    if constexpr (kAddsToQueries) AddPositionsToQueries(cell, positions, feature);
  }

  // Column by column.
  JAXSPARSE_INLINE void AddPositionsToQueries(const Cell& cell, const Positions& positions,
                                              int64_t feature) {
    Block& block = blocks_[cell.down];
    block.a.Stage(own_a_, rows_.FirstRow(cell.down), feature, cell.used_rows);
    Positions by_columns;
    positions.SortByColumns(cotangents_, &by_columns, scores_);
    AddToQueries(cell, feature, [&](Acc* sums, int64_t stride) {
      AddRows<Acc>(by_columns, scores_, block.a.data, block.a.stride,
                   PaddedPart<Acc>(own_a_.size, feature), cell.used_columns, nullptr, sums, stride);
    });
  }

  JAXSPARSE_INLINE void WeighPositions(const Cell& cell, const Positions& positions,
                                       const Block& block) {
    for (int r = 0; r < kCell; ++r) {
      for (int i = positions.begins[r]; i < positions.begins[r + 1]; ++i) {
        const int64_t column = cell.first + positions.columns[i];
        scores_[i] = scores_[i] * scale_ - (kByKeys ? TakenFromScores(lse_[column]) : block.lse[r]);
        cotangents_[i] += kByKeys ? Acc(ct_sums_[column]) : block.ct_sums[r];
      }
    }
    for (int i = 0; i < positions.count(); i += kLanes) {
      const Lanes p = Exp<kLanes>(Load<kLanes>(scores_ + i));
      Store<kLanes, Acc>(p, scores_ + i);
      Store<kLanes, Acc>(p * scale_ * Load<kLanes>(cotangents_ + i), cotangents_ + i);
    }
  }

  JAXSPARSE_INLINE void Clear(int down, int result, int64_t feature) {
    const int64_t size = PaddedPart<Acc>(results_[result].size, feature);
    for (int64_t r = 0; r < rows_.counts[down]; ++r) {
      Acc* sums = blocks_[down].sums[result] + r * kMost;
      for (int64_t f = 0; f < size; ++f) sums[f] = 0;
    }
  }

  // While the last cell is worked on.
  JAXSPARSE_INLINE void FetchResults() const {
    for (int down = 0; down < kCellsOfTile; ++down) {
      for (const HeadRows<T>& rows : results_) {
        UpcomingRows(rows, rows_.FirstRow(down), LowBits(rows_.counts[down])).Fetch(kCell);
      }
    }
  }

  JAXSPARSE_INLINE void Write(int down, int result, int64_t feature) const {
    const HeadRows<T>& rows = results_[result];
    const int64_t size = PartOf<Acc>(rows.size, feature), first = rows_.FirstRow(down);
    for (int64_t r = 0; r < rows_.counts[down]; ++r) {
      for (int64_t f = 0; f < size; f += kLanes) {
        StoreSome<kLanes, Acc>(Load<kLanes>(blocks_[down].sums[result] + r * kMost + f), size - f,
                               rows.Row(first + r) + feature + f);
      }
    }
  }

  const Problem& problem_;
  const Acc scale_;
  const int64_t entry_, group_, first_of_group_;
  const TaskRowsOfTiles rows_;
  Turns* const turns_;      // in which it adds to the cotangents of a tile's queries, if it does
  int64_t first_turn_ = 0;  // of those with the query head
  HeadRows<T> results_[kResults], ct_query_;
  HeadRows<const T> own_a_, own_b_, other_a_, other_b_;
  const Acc* lse_ = nullptr;      // of the query head
  const Acc* ct_sums_ = nullptr;  // of the query head
  Block blocks_[kCellsOfTile];
  StagedRows<T> staged_a_, staged_b_;
  alignas(64) Acc scores_[kCell * kCell], cotangents_[kCell * kCell];
  alignas(64) Acc query_sums_[kAddsToQueries ? kCell * kMost : 1];
};

// Seven products: scores and their cotangents twice, for keys and for queries. Tasks of keys first,
// which take longest.
template <typename T>
JAXSPARSE_INLINE void ComputeTwice(const AttentionCotangentProblem& p, Workers& workers) {
  const int64_t entries = p.batch.count;
  const HeadTasks keys(p.transposed_mask, entries, p.groups, workers);
  const HeadTasks queries(p.mask, entries, p.groups * p.per_group, workers);
  ParallelFor(workers, keys.count() + queries.count(), [&](int64_t task) {
    if (task < keys.count()) {
      const int64_t entry = keys.Entry(task), group = keys.Head(task);
      const HeadMask mask(p.transposed_mask, p.batch, entry, group, 0);
      CotangentTask<T, Owner::kKeys>(p, entry, group, keys.Rows(task, mask, p.keys)).Run();
    } else {
      task -= keys.count();
      const int64_t entry = queries.Entry(task), head = queries.Head(task);
      const HeadMask mask(p.mask, p.batch, entry, head / p.per_group, head % p.per_group);
      CotangentTask<T, Owner::kQueries>(p, entry, head, queries.Rows(task, mask, p.queries)).Run();
    }
  });
}

// Five products. Tasks of keys add to the cotangents of a tile's queries in turns: all of them can
// run, and a sum has its terms in the same order whatever threads there are.
template <typename T>
JAXSPARSE_INLINE void ComputeInTurns(const AttentionCotangentProblem& p, Workers& workers) {
  const int64_t of_query = p.groups * p.per_group * p.head_size;
  ParallelFor(workers, p.batch.count * p.mask.rows, [&](int64_t task) {
    const int64_t first = task % p.mask.rows * kMaskTile;
    T* rows = p.ct_query.At<T>(p.batch, task / p.mask.rows) + first * of_query;
    const int64_t count = Between(0, p.queries - first, kMaskTile) * of_query;
    for (int64_t i = 0; i < count; ++i) rows[i] = 0;
  });
  const HeadTasks keys(p.transposed_mask, p.batch.count, p.groups, workers);
  ParallelInTurns(workers, keys, [&](int64_t task, Turns& turns) {
    const int64_t entry = keys.Entry(task), group = keys.Head(task);
    const HeadMask mask(p.transposed_mask, p.batch, entry, group, 0);
    CotangentTask<T, Owner::kKeys>(p, entry, group, keys.Rows(task, mask, p.keys), &turns).Run();
    turns.End();
  });
}

template <typename T>
void AttentionCotangent(const AttentionCotangentProblem& problem, Workers& workers) {
  if constexpr (std::is_same_v<T, typename Accumulator<T>::type>) {
    ComputeInTurns<T>(problem, workers);
  } else {
    ComputeTwice<T>(problem, workers);
  }
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
