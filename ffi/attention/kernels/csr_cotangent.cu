// The transpose of attention's derivative by the rows of a pattern (attention/problem.h), for
// queries, and by those of the transposed pattern, for keys and values:
//
//   p = exp2(log2_scale s - lse log2(e)),   ds = p (dp + ct_sums)   for s = q . k, dp = ct_out . v
//
// Some blocks have rows of queries: they gather keys and values. The others have rows of keys,
// which gather queries and cotangents of the result, of all heads of their group. Bytes, of which
// the L2 cache gives about 7.2 TB/s on an H200: entries * heads * (head_size + value_size) * size
// for queries and the same for keys, and for these a sector of 32 bytes with lse and ct_sums.
// Operations: 2 * head_size + value_size multiply-adds for each entry and head for queries, 2 *
// (head_size + value_size) for keys; on tensor cores, in bfloat16, about 9 and 12 instructions of a
// warp for an entry of two vectors of 64 numbers. Probabilities are computed twice, but nothing is
// kept of an entry, and all sums have an order.
#include "attention/kernels/csr_pass.cuh"
#include "attention/kernels/csr_products.cuh"

namespace jaxsparse {

// Whether numbers of 16 bits may be as small as in float32, as weights and their cotangents are.
template <typename T>
constexpr bool kHasRangeOfFloat = true;
template <>
constexpr bool kHasRangeOfFloat<float16> = false;

enum class CsrOwner { kQueries, kKeys };

// Rows have vectors `a`, of scores (queries or keys), and `b`, of the weights' cotangents
// (cotangents of the result, or values); columns have the other two.
template <typename T, typename Index, AttentionCsrConfig kConfig, CsrOwner kOwner>
class CsrCotangent {
  using Acc = Accumulator<T>;
  using Heads = LaneRows<T, kConfig.head_vector, kConfig.head_vectors, kConfig.HeadLanes(),
                         kConfig.whole_heads>;
  using Values =
      LaneRows<T, kConfig.value_vector, kConfig.value_vectors, kConfig.lanes, kConfig.whole_values>;
  using Lanes = CsrLanes<kConfig>;
  using TiledHeads = CsrTiledRows<T, kConfig.head_vectors, Lanes>;
  using TiledValues = CsrTiledRows<T, kConfig.value_vectors, Lanes>;
  using Pieces = CsrPieces<kConfig, Index>;
  static constexpr bool kByKeys = kOwner == CsrOwner::kKeys;
  static_assert(!kConfig.on_tensor_cores || kHasRangeOfFloat<T>);
  static constexpr int kStep = kConfig.step;

 public:
  // `of_group`: the head of the group, of queries.
  __device__ __forceinline__ CsrCotangent(const AttentionCsrCotangentProblem& p,
                                          const BatchPlace& place, uint32_t entry, uint32_t group,
                                          uint32_t of_group)
      : problem_(p),
        place_(place),
        entry_(entry),
        group_(group),
        of_group_(kByKeys ? 0 : of_group) {}

  __device__ __forceinline__ CsrRows<Index> RowsOf(uint32_t of_group) const {
    const MaskPattern& pattern = kByKeys ? problem_.transposed_pattern : problem_.pattern;
    return {pattern, problem_.batch, place_, pattern.Own(group_, of_group)};
  }

  __device__ __forceinline__ void Run(const CsrPass& pass, uint32_t head, uint32_t block) {
    const CsrRows<Index> rows = RowsOf(of_group_);
    const Pieces pieces(rows, pass, head);
    constexpr uint32_t kWarps = kCsrThreads / kWarp;
    const uint32_t warps = pass.blocks * kWarps;
    const uint32_t warp = block * kWarps + threadIdx.x / kWarp;
    CsrLeftovers spoiled;  // by tensor cores
    if constexpr (kConfig.on_tensor_cores) {
      const uint32_t tiles = TilesOfWarp<kConfig>();
      pieces.ForEach(warp, warps, [&](const CsrPiece& piece, uint32_t number) {
        AddTiles(rows, pieces, piece, tiles);
        const bool are_finite = AreFinite(a_sums_) && (!kByKeys || AreFinite(b_sums_));
        if (__any_sync(kAllLanes, !are_finite)) return spoiled.Add(number);
        Finish(pieces, piece);
        return true;
      });
      if (spoiled.IsEmpty()) return;
    }
    // Behind that loop, and not in it, where it would take registers.
    pieces.ForEach(warp, warps, [&](const CsrPiece& piece, uint32_t number) {
      if (kConfig.on_tensor_cores && !spoiled.Has(number)) return true;
      AddVectors(rows, pieces, piece);
      Finish(pieces, piece);
      return true;
    });
  }

 private:
  __device__ __forceinline__ void Finish(const Pieces& pieces, const CsrPiece& piece) {
    const bool is_shared = pieces.IsShared(piece);
    if (is_shared) {
      ForEachSum(a_sums_, [](Acc x) { return Lanes::OverGroups(x, Sum()); });
      if (kByKeys) ForEachSum(b_sums_, [](Acc x) { return Lanes::OverGroups(x, Sum()); });
    }
    const bool writes = !is_shared || Lanes::Group() == 0;
    if (piece.is_part && !AddParts(pieces, piece, writes)) return;
    if (writes && piece.exists) Write(piece.row);
  }

  // What is gathered of one head of queries.
  struct Columns {
    Heads a;
    Values b;
    const CsrQuery<Acc>* in_pairs = nullptr;
    const Acc *lse = nullptr, *ct_sums = nullptr;  // where they are no pairs
    CsrQuery<Acc> of_row = {};                     // of queries

    __device__ __forceinline__ Columns(const CsrCotangent& of, uint32_t of_group, uint32_t row)
        : a(of.HeadsOf<!kByKeys>(of_group)), b(of.ValuesOf<!kByKeys>(of_group)) {
      const AttentionCsrCotangentProblem& p = of.problem_;
      const int64_t head = of.group_ * p.per_group + of_group, first = head * p.queries;
      if constexpr (kConfig.in_pairs) {
        const int64_t before = of.entry_ * (p.groups * p.per_group * p.queries) + first;
        in_pairs = static_cast<const CsrQuery<Acc>*>(p.queries_in_pairs) + before;
      } else {
        lse = of.place_.template At<const Acc>(p.batch, p.lse) + first;
        ct_sums = of.place_.template At<const Acc>(p.batch, p.ct_sums) + first;
      }
      if (!kByKeys) of_row = QueryAt(row);
    }

    __device__ __forceinline__ CsrQuery<Acc> QueryAt(uint32_t query) const {
      if constexpr (kConfig.in_pairs) return in_pairs[query];
      return {Log2Of(lse[query]), ct_sums[query]};
    }
  };

  template <bool kKeys>
  __device__ __forceinline__ CsrMatrix<T> HeadMatrix(uint32_t of_group) const {
    return MatrixOf<kKeys>(kKeys ? problem_.key : problem_.query, of_group, problem_.head_size);
  }
  template <bool kKeys>
  __device__ __forceinline__ CsrMatrix<T> ValueMatrix(uint32_t of_group) const {
    return MatrixOf<kKeys>(kKeys ? problem_.value : problem_.ct_out, of_group, problem_.value_size);
  }
  template <bool kKeys>
  __device__ __forceinline__ Heads HeadsOf(uint32_t of_group) const {
    return {HeadMatrix<kKeys>(of_group), Lanes::Part()};
  }
  template <bool kKeys>
  __device__ __forceinline__ Values ValuesOf(uint32_t of_group) const {
    return {ValueMatrix<kKeys>(of_group), Lanes::Part()};
  }
  template <bool kKeys>
  __device__ __forceinline__ CsrMatrix<T> MatrixOf(const Array& array, uint32_t of_group,
                                                   int64_t size) const {
    const int64_t heads = kKeys ? problem_.groups : problem_.groups * problem_.per_group;
    const int64_t head = kKeys ? group_ : group_ * problem_.per_group + of_group;
    return {place_.template At<T>(problem_.batch, array) + head * size, heads * size, size};
  }

  __device__ __forceinline__ void Clear() {
    ForEachSum(a_sums_, [](Acc) { return Acc(0); });
    if (kByKeys) ForEachSum(b_sums_, [](Acc) { return Acc(0); });
  }

  // Cotangents of a lane's own entry: of its score, but for the scale, and of its value: the
  // weight.
  struct OwnEntry {
    Acc cotangent, weight;
  };
  __device__ __forceinline__ OwnEntry OwnEntryOf(uint32_t own_column, const CsrQuery<Acc>& query,
                                                 Acc score, Acc product) const {
    // What a row has that sees nothing must not meet the zeros in place of an entry.
    const Acc exponent = score * static_cast<Acc>(problem_.log2_scale) - query.log2_sum;
    const Acc weight = own_column != kNoEntry ? Exp2(exponent) : Acc(0);
    return {own_column != kNoEntry ? weight * (product + query.ct_sum) : Acc(0), weight};
  }

  // Calls add(rows, piece, columns) for the entries of a row in each head of queries.
  template <typename F>
  __device__ __forceinline__ void ForEachHead(const CsrRows<Index>& rows, const Pieces& pieces,
                                              const CsrPiece& piece, F&& add) {
    Clear();
    const uint32_t heads = kByKeys ? static_cast<uint32_t>(problem_.per_group) : 1;
#pragma unroll 1
    for (uint32_t i = 0; i < heads; ++i) {
      const uint32_t of_group = of_group_ + i;
      if (kByKeys && i > 0 && problem_.transposed_pattern.per_group > 1) {
        const CsrRows<Index> own = RowsOf(i);
        add(own, pieces.SameRowOf(own, piece), of_group);
      } else {
        add(rows, piece, of_group);
      }
    }
    if (kConfig.own_scores) ForEachSum(a_sums_, [](Acc x) { return Lanes::OverEntries(x, Sum()); });
  }

  // Sums up a piece's entries, with vectors of which lanes have a part each.
  __device__ __forceinline__ void AddVectors(const CsrRows<Index>& all, const Pieces& pieces,
                                             const CsrPiece& piece) {
    typename Heads::Sums a;
    typename Values::Sums b;
    HeadsOf<kByKeys>(of_group_).Load(piece.row, a);
    ValuesOf<kByKeys>(of_group_).Load(piece.row, b);
    ForEachHead(all, pieces, piece,
                [&](const CsrRows<Index>& rows, const CsrPiece& own, uint32_t of_group) {
                  const Columns columns(*this, of_group, piece.row);
                  ForEachStep<kConfig>(rows, own,
                                       [&](uint32_t column) { AddStep(columns, a, b, column); });
                });
  }

  __device__ __forceinline__ void AddStep(const Columns& columns, const typename Heads::Sums& own_a,
                                          const typename Values::Sums& own_b, uint32_t own_column) {
    typename Heads::Packed a[kConfig.HeadsAtOnce()];
    typename Values::Packed b[kStep];
    CsrQuery<Acc> query = columns.of_row;
    if (kByKeys && own_column != kNoEntry) query = columns.QueryAt(own_column);
    LoadStep<kConfig>(columns.a, columns.b, own_column, a, b);
    Acc score, parts[kStep];
    if constexpr (kConfig.own_scores) {
      score = PartOfDot(own_a, a[0]);
    } else {
#pragma unroll
      for (int u = 0; u < kStep; ++u) parts[u] = PartOfDot(own_a, a[u]);
      score = Lanes::SumOfOwnEntry(parts);
    }
#pragma unroll
    for (int u = 0; u < kStep; ++u) parts[u] = PartOfDot(own_b, b[u]);
    const OwnEntry own = OwnEntryOf(own_column, query, score, Lanes::SumOfOwnEntry(parts));
    if (kConfig.own_scores) AddMultiple(own.cotangent, a[0], a_sums_);
#pragma unroll
    for (int u = 0; u < kStep; ++u) {
      if constexpr (!kConfig.own_scores) {
        AddMultiple(Lanes::OfEntry(own.cotangent, u), a[u], a_sums_);
      }
      if constexpr (kByKeys) AddMultiple(Lanes::OfEntry(own.weight, u), b[u], b_sums_);
    }
  }

  // The same on tensor cores. `tiles`: the warp's shared memory.
  __device__ __forceinline__ void AddTiles(const CsrRows<Index>& all, const Pieces& pieces,
                                           const CsrPiece& piece, uint32_t tiles) {
    typename TiledHeads::Operand a;
    typename Heads::Sums short_a;
    if constexpr (kConfig.own_scores) {
      HeadsOf<kByKeys>(of_group_).Load(piece.row, short_a);
    } else {
      a = TiledHeads(HeadMatrix<kByKeys>(of_group_)).LoadOperand(piece.row);
    }
    const TiledValues row_values(ValueMatrix<kByKeys>(of_group_));
    const typename TiledValues::Operand b = row_values.LoadOperand(piece.row);
    // What a lane has of its own entry before its step.
    struct Begun {
      CsrQuery<Acc> query;
      typename Heads::Packed a;  // if it is short
    };
    ForEachHead(all, pieces, piece,
                [&](const CsrRows<Index>& rows, const CsrPiece& own_piece, uint32_t of_group) {
                  const Columns columns(*this, of_group, piece.row);
                  const TiledHeads heads(HeadMatrix<!kByKeys>(of_group));
                  const TiledValues values(ValueMatrix<!kByKeys>(of_group));
                  const auto begin = [&](uint32_t own_column, uint32_t tile) {
                    Begun begun = {columns.of_row, {}};
                    if (own_column != kNoEntry) {
                      if constexpr (kByKeys) begun.query = columns.QueryAt(own_column);
                      if constexpr (kConfig.own_scores) columns.a.Load(own_column, begun.a);
                    }
                    if constexpr (!kConfig.own_scores) heads.Copy(own_column, tile);
                    values.Copy(own_column, tile + kConfig.HeadTileBytes());
                    return begun;
                  };
                  const auto step = [&](uint32_t own_column, uint32_t tile, const Begun& begun) {
                    const uint32_t value_tile = tile + kConfig.HeadTileBytes();
                    Acc score;
                    if constexpr (kConfig.own_scores) {
                      score = PartOfDot(short_a, begun.a);
                    } else {
                      score = TiledHeads::OfOwnEntry(a, tile);
                    }
                    const Acc product = TiledValues::OfOwnEntry(b, value_tile);
                    const OwnEntry own = OwnEntryOf(own_column, begun.query, score, product);
                    if constexpr (kConfig.own_scores) {
                      AddMultiple(own.cotangent, begun.a, a_sums_);
                    } else {
                      TiledHeads::AddWeighted(WeightsOf<T>(Lanes(), own.cotangent), tile, a_sums_);
                    }
                    if constexpr (kByKeys) {
                      TiledValues::AddWeighted(WeightsOf<T>(Lanes(), own.weight), value_tile,
                                               b_sums_);
                    }
                  };
                  ForEachStagedStep<kConfig, Begun>(rows, own_piece, tiles, begin, step);
                });
  }

  // Stores the sums of a part, and adds up all of its row if it is the last one. Whether it is.
  __device__ __forceinline__ bool AddParts(const Pieces& pieces, const CsrPiece& piece,
                                           bool writes) {
    const Heads a_result = A();
    const Values b_result = B();
    Acc* sums = pieces.template SumsOf<Acc>(piece);
    if (writes) {
      a_result.StoreSums(a_sums_, sums);
      if (kByKeys) b_result.StoreSums(b_sums_, sums + problem_.head_size);
    }
    Clear();
    return pieces.template AddAllIfLast<Acc>(piece, [&](const Acc* part) {
      a_result.AddSums(part, Acc(1), a_sums_);
      if (kByKeys) b_result.AddSums(part + problem_.head_size, Acc(1), b_sums_);
    });
  }

  __device__ __forceinline__ void Write(uint32_t row) {
    const Acc scale = static_cast<Acc>(problem_.scale);
    ForEachSum(a_sums_, [&](Acc x) { return x * scale; });
    A().Store(row, a_sums_);
    if (kByKeys) B().Store(row, b_sums_);
  }
  __device__ __forceinline__ Heads A() const {
    const Array& array = kByKeys ? problem_.ct_key : problem_.ct_query;
    return {MatrixOf<kByKeys>(array, of_group_, problem_.head_size), Lanes::Part()};
  }
  // Of keys: queries have no cotangents of values.
  __device__ __forceinline__ Values B() const {
    return {MatrixOf<kByKeys>(problem_.ct_value, of_group_, problem_.value_size), Lanes::Part()};
  }

  const AttentionCsrCotangentProblem& problem_;
  const BatchPlace& place_;
  uint32_t entry_, group_, of_group_;
  typename Heads::Sums a_sums_;
  typename Values::Sums b_sums_;
};

template <typename T, typename Index, typename TransposedIndex, AttentionCsrConfig kConfig>
__global__ void __launch_bounds__(kCsrThreads, kConfig.BlocksAtOnce(sizeof(Accumulator<T>)))
    AttentionCsrCotangent(const __grid_constant__ AttentionCsrCotangentProblem p) {
  static __shared__ BatchPlace place;
  const auto per_group = static_cast<uint32_t>(p.per_group);
  const auto groups = static_cast<uint32_t>(p.groups);
  const uint32_t of_queries = p.of_queries.heads * p.of_queries.blocks;
  const bool is_of_queries = blockIdx.x < of_queries;
  const uint32_t number = is_of_queries ? blockIdx.x : blockIdx.x - of_queries;
  const CsrPass& pass = is_of_queries ? p.of_queries : p.of_keys;
  const uint32_t head = number / pass.blocks, block = number % pass.blocks;
  const uint32_t heads = is_of_queries ? groups * per_group : groups;
  const uint32_t entry = head / heads;
  if (threadIdx.x == 0) {
    place.Set(p.batch, entry);
    WaitForPrologue();
  }
  __syncthreads();
  if (is_of_queries) {
    const uint32_t own = head % heads;
    CsrCotangent<T, Index, kConfig, CsrOwner::kQueries>(p, place, entry, own / per_group,
                                                        own % per_group)
        .Run(pass, head, block);
  } else {
    CsrCotangent<T, TransposedIndex, kConfig, CsrOwner::kKeys>(p, place, entry, head % heads, 0)
        .Run(pass, head, block);
  }
}

}  // namespace jaxsparse
