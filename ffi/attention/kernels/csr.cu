// Attention by the rows of a pattern (attention/problem.h): any type, any sizes of heads.
//
// For each entry and head a row of keys and a row of values is gathered. Bytes, of which the L2
// cache gives about 7.2 TB/s on an H200: entries * heads * (head_size + value_size) * size. Of
// memory: operands and results once, as long as keys and values of one head have room in the cache.
// Operations: head_size + value_size multiply-adds for each entry and head. On tensor cores they
// take about 10 instructions of a warp for an entry of two vectors of 64 numbers, of 33 for which
// there is time at the floor; without, 13, as numbers of 16 bits are converted.
//
// On tensor cores (csr_products.cuh) vectors of 16 entries at once are copied to shared memory,
// while those before are multiplied or other warps multiply theirs: so enough bytes are on their
// way, whatever registers there are. Otherwise a group of lanes has a row of a head, and each of
// them an access of up to 16 bytes to each vector. Some entries at once: their products are summed
// by exchanges that leave each lane with the score of one entry, and an online softmax takes them.
// Nothing is kept of an entry.
#include "attention/kernels/csr_pass.cuh"
#include "attention/kernels/csr_products.cuh"

namespace jaxsparse {

template <typename T, typename Index, AttentionCsrConfig kConfig>
class CsrAttention {
  using Acc = Accumulator<T>;
  using Heads = LaneRows<T, kConfig.head_vector, kConfig.head_vectors, kConfig.HeadLanes(),
                         kConfig.whole_heads>;
  using Values =
      LaneRows<T, kConfig.value_vector, kConfig.value_vectors, kConfig.lanes, kConfig.whole_values>;
  using Lanes = CsrLanes<kConfig>;
  using Pieces = CsrPieces<kConfig, Index>;
  using TiledHeads = CsrTiledRows<T, kConfig.head_vectors, Lanes>;
  using TiledValues = CsrTiledRows<T, kConfig.value_vectors, Lanes>;

 public:
  __device__ __forceinline__ CsrAttention(const AttentionCsrProblem& p, const BatchPlace& place,
                                          int64_t head, int64_t group, const CsrRows<Index>& rows)
      : rows_(rows),
        scale_(static_cast<Acc>(p.log2_scale)),
        query_{place.At<T>(p.batch, p.query) + head * p.head_size,
               p.groups * p.per_group * p.head_size, p.head_size},
        key_{place.At<T>(p.batch, p.key) + group * p.head_size, p.groups * p.head_size,
             p.head_size},
        value_matrix_{place.At<T>(p.batch, p.value) + group * p.value_size, p.groups * p.value_size,
                      p.value_size},
        value_(value_matrix_, Lanes::Part()),
        out_({place.At<T>(p.batch, p.out) + head * p.value_size,
              p.groups * p.per_group * p.value_size, p.value_size},
             Lanes::Part()),
        lse_(place.At<Acc>(p.batch, p.lse) + head * p.queries) {}

  // All pieces of a warp, one of as many.
  __device__ __forceinline__ void Run(const Pieces& pieces, uint32_t warp, uint32_t warps) {
    CsrLeftovers spoiled;  // by tensor cores
    if constexpr (kConfig.on_tensor_cores) {
      const uint32_t tiles = TilesOfWarp<kConfig>();
      pieces.ForEach(warp, warps, [&](const CsrPiece& piece, uint32_t number) {
        AddTiles(piece, tiles);
        if (__any_sync(kAllLanes, !AreFinite(sums_))) return spoiled.Add(number);
        Finish(pieces, piece);
        return true;
      });
      if (spoiled.IsEmpty()) return;
    }
    // Behind that loop, and not in it, where it would take registers.
    pieces.ForEach(warp, warps, [&](const CsrPiece& piece, uint32_t number) {
      if (kConfig.on_tensor_cores && !spoiled.Has(number)) return true;
      AddVectors(piece);
      Finish(pieces, piece);
      return true;
    });
  }

 private:
  __device__ __forceinline__ void Finish(const Pieces& pieces, const CsrPiece& piece) {
    total_ = Lanes::OverEntries(total_, Sum());
    const bool is_shared = pieces.IsShared(piece);
    if (is_shared) Share();
    const bool writes = !is_shared || Lanes::Group() == 0;
    if (piece.is_part) {
      Acc* sums = pieces.template SumsOf<Acc>(piece);
      if (writes) StorePart(sums);
      Start();
      const auto add = [&](const Acc* part) { AddPart(part); };
      if (!pieces.template AddAllIfLast<Acc>(piece, add)) return;
    }
    if (writes && piece.exists) Write(piece.row);
  }

  static constexpr __device__ Acc Lowest() { return -Acc(kInfinity); }
  // What scores are taken relative to. Without any that is not -infinity there is no difference.
  static __device__ __forceinline__ Acc Shift(Acc most) { return most == Lowest() ? Acc(0) : most; }

  __device__ __forceinline__ void Start() {
    most_ = Lowest();
    total_ = 0;
    ForEachSum(sums_, [](Acc) { return Acc(0); });
  }

  // What was summed up is from now on relative to a score that is no less.
  __device__ __forceinline__ void Raise(Acc most) {
    const Acc factor = Exp2(most_ - Shift(most));
    most_ = most;
    total_ *= factor;
    ForEachSum(sums_, [&](Acc x) { return x * factor; });
  }

  // Sums up a piece's entries, on tensor cores. `tiles`: the warp's shared memory.
  __device__ __forceinline__ void AddTiles(const CsrPiece& piece, uint32_t tiles) {
    Start();
    const TiledValues values(value_matrix_);
    const auto add = [&](uint32_t own_column, uint32_t tile, Acc score) {
      const CsrWeights weights = WeightsOf<T>(Lanes(), AddWeight(own_column, score));
      TiledValues::AddWeighted(weights, tile, sums_);
    };
    if constexpr (kConfig.own_scores) {
      const Heads keys(key_, Lanes::Part());
      typename Heads::Sums query;
      Heads(query_, Lanes::Part()).Load(piece.row, query);
      struct Key {
        typename Heads::Packed packed;
      };
      ForEachStagedStep<kConfig, Key>(
          rows_, piece, tiles,
          [&](uint32_t own_column, uint32_t tile) {
            Key key = {};
            if (own_column != kNoEntry) keys.Load(own_column, key.packed);
            values.Copy(own_column, tile);
            return key;
          },
          [&](uint32_t own_column, uint32_t tile, const Key& key) {
            add(own_column, tile, PartOfDot(query, key.packed));
          });
    } else {
      const TiledHeads keys(key_);
      const typename TiledHeads::Operand query = TiledHeads(query_).LoadOperand(piece.row);
      struct Nothing {};
      ForEachStagedStep<kConfig, Nothing>(
          rows_, piece, tiles,
          [&](uint32_t own_column, uint32_t tile) {
            keys.Copy(own_column, tile);
            values.Copy(own_column, tile + kConfig.HeadTileBytes());
            return Nothing();
          },
          [&](uint32_t own_column, uint32_t tile, const Nothing&) {
            const Acc score = TiledHeads::OfOwnEntry(query, tile);
            add(own_column, tile + kConfig.HeadTileBytes(), score);
          });
    }
  }

  // The same without tensor cores, whatever numbers there are.
  __device__ __forceinline__ void AddVectors(const CsrPiece& piece) {
    Start();
    const Heads keys(key_, Lanes::Part());
    typename Heads::Sums query;
    Heads(query_, Lanes::Part()).Load(piece.row, query);
    ForEachStep<kConfig>(rows_, piece,
                         [&](uint32_t own_column) { AddStep(keys, query, own_column); });
  }

  __device__ __forceinline__ void AddStep(const Heads& key, const typename Heads::Sums& query,
                                          uint32_t own_column) {
    typename Heads::Packed keys[kConfig.HeadsAtOnce()];
    typename Values::Packed values[kConfig.step];
    LoadStep<kConfig>(key, value_, own_column, keys, values);
    Acc score;
    if constexpr (kConfig.own_scores) {
      score = PartOfDot(query, keys[0]);
    } else {
      Acc parts[kConfig.step];
#pragma unroll
      for (int u = 0; u < kConfig.step; ++u) parts[u] = PartOfDot(query, keys[u]);
      score = Lanes::SumOfOwnEntry(parts);
    }
    const Acc weight = AddWeight(own_column, score);
#pragma unroll
    for (int u = 0; u < kConfig.step; ++u) {
      AddMultiple(Lanes::OfEntry(weight, u), values[u], sums_);
    }
  }

  // The weight of a lane's own entry, which is in the total from there on.
  __device__ __forceinline__ Acc AddWeight(uint32_t own_column, Acc score) {
    score = own_column != kNoEntry ? score * scale_ : Lowest();
    // Without NaN, which reaches the sum.
    const Acc most = Lanes::OverEntries(Greater()(most_, score), Greater());
    Raise(most);
    const Acc weight = Exp2(score - Shift(most));
    total_ += weight;
    return weight;
  }

  // The sums of all groups, of which each has a part of a row.
  __device__ __forceinline__ void Share() {
    Raise(Lanes::OverGroups(most_, Greater()));
    total_ = Lanes::OverGroups(total_, Sum());
    ForEachSum(sums_, [](Acc x) { return Lanes::OverGroups(x, Sum()); });
  }

  // Of a part: its sums, then what they are relative to, and their total.
  __device__ __forceinline__ void StorePart(Acc* part) const {
    value_.StoreSums(sums_, part);
    if (threadIdx.x % kWarp != 0) return;
    part[value_.size()] = most_;
    part[value_.size() + 1] = total_;
  }
  __device__ __forceinline__ void AddPart(const Acc* part) {
    const Acc most = part[value_.size()];
    Raise(most > most_ ? most : most_);
    const Acc factor = Exp2(most - Shift(most_));
    total_ += factor * part[value_.size() + 1];
    value_.AddSums(part, factor, sums_);
  }

  __device__ __forceinline__ void Write(uint32_t row) {
    const Acc inverse = total_ == 0 ? Acc(0) : Acc(1) / total_;
    ForEachSum(sums_, [&](Acc x) { return x * inverse; });
    out_.Store(row, sums_);
    if (!Lanes::IsFirst()) return;
    lse_[row] = total_ == 0 ? Lowest() : (most_ + log2(total_)) * kLn2<Acc>;
  }

  const CsrRows<Index>& rows_;
  Acc scale_, most_, total_;  // of a lane's own entries, until they are summed up
  typename Values::Sums sums_;
  CsrMatrix<T> query_, key_, value_matrix_;
  Values value_, out_;
  Acc* lse_;
};

template <typename T, typename Index, AttentionCsrConfig kConfig>
__global__ void __launch_bounds__(kCsrThreads, kConfig.on_tensor_cores ? kConfig.blocks : 0)
    AttentionCsr(const __grid_constant__ AttentionCsrProblem p) {
  static __shared__ BatchPlace place;
  const auto of_group = static_cast<uint32_t>(p.per_group);
  const uint32_t heads = static_cast<uint32_t>(p.groups) * of_group;
  const uint32_t number = blockIdx.x / p.pass.blocks;  // of the head, among those of all entries
  if (threadIdx.x == 0) place.Set(p.batch, number / heads);
  __syncthreads();
  const uint32_t head = number % heads, group = head / of_group;
  const CsrRows<Index> rows(p.pattern, p.batch, place, p.pattern.Own(group, head % of_group));
  CsrAttention<T, Index, kConfig> attention(p, place, head, group, rows);
  const CsrPieces<kConfig, Index> pieces(rows, p.pass, number);
  constexpr uint32_t kWarps = kCsrThreads / kWarp;
  attention.Run(pieces, blockIdx.x % p.pass.blocks * kWarps + threadIdx.x / kWarp,
                p.pass.blocks * kWarps);
}

}  // namespace jaxsparse
