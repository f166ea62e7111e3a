// Attention by the rows of a pattern (attention/problem.h): any type, any sizes of heads.
//
// For each entry and head a row of keys and a row of values is gathered. Bytes, of which the L2
// cache gives about 7.2 TB/s on an H200: entries * heads * (head_size + value_size) * size. Of
// memory: operands and results once, as long as keys and values of one head have room in the cache.
// Operations: head_size + value_size multiply-adds for each entry and head, 2 conversions for each
// in 16 bits; in all about 13 instructions of a warp for an entry of two vectors of 64 numbers in
// 16 bits, of 33 for which there is time at the floor.
//
// A group of lanes has a row of a head, and each of them an access of up to 16 bytes to each
// vector. Some entries at once: their products are summed by exchanges that leave each lane with
// the score of one entry, and an online softmax takes them. Nothing is kept of an entry.
#include "attention/kernels/csr_pass.cuh"

namespace jaxsparse {

template <typename T, typename Index, AttentionCsrConfig kConfig>
class CsrAttention {
  using Acc = Accumulator<T>;
  using Heads = LaneRows<T, kConfig.head_vector, kConfig.head_vectors, kConfig.HeadLanes(),
                         kConfig.whole_heads>;
  using Values =
      LaneRows<T, kConfig.value_vector, kConfig.value_vectors, kConfig.lanes, kConfig.whole_values>;

 public:
  __device__ __forceinline__ CsrAttention(const AttentionCsrProblem& p, const BatchPlace& place,
                                          int64_t head, int64_t group, const CsrRows<Index>& rows)
      : rows_(rows),
        scale_(static_cast<Acc>(p.log2_scale)),
        query_(place.At<T>(p.batch, p.query) + head * p.head_size,
               p.groups * p.per_group * p.head_size, p.head_size),
        key_(place.At<T>(p.batch, p.key) + group * p.head_size, p.groups * p.head_size,
             p.head_size),
        value_(place.At<T>(p.batch, p.value) + group * p.value_size, p.groups * p.value_size,
               p.value_size),
        out_(place.At<T>(p.batch, p.out) + head * p.value_size,
             p.groups * p.per_group * p.value_size, p.value_size),
        lse_(place.At<Acc>(p.batch, p.lse) + head * p.queries) {}

  __device__ __forceinline__ void Take(const CsrPieces<kConfig, Index>& pieces,
                                       const CsrPiece& piece) {
    Start();
    typename Heads::Sums query;
    query_.Load(piece.row, query);
    ForEachStep<kConfig>(rows_, piece, [&](uint32_t column) { AddStep(query, column); });
    total_ = SumOverLanes(total_, kConfig.step);
    const bool is_shared = pieces.IsShared(piece);
    if (is_shared) Share();
    const bool writes = !is_shared || threadIdx.x % kWarp < kConfig.lanes;
    if (piece.is_part) {
      Acc* sums = pieces.template SumsOf<Acc>(piece);
      if (writes) StorePart(sums);
      Start();
      const auto add = [&](const Acc* part) { AddPart(part); };
      if (!pieces.template AddAllIfLast<Acc>(piece, add)) return;
    }
    if (writes && piece.exists) Write(piece.row);
  }

 private:
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

  __device__ __forceinline__ void AddStep(const typename Heads::Sums& query, uint32_t own_column) {
    typename Heads::Packed keys[kConfig.HeadsAtOnce()];
    typename Values::Packed values[kConfig.step];
    LoadStep<kConfig>(key_, value_, own_column, keys, values);
    Acc score;
    if constexpr (kConfig.own_scores) {
      score = PartOfDot(query, keys[0]);
    } else {
      Acc parts[kConfig.step];
#pragma unroll
      for (int u = 0; u < kConfig.step; ++u) parts[u] = PartOfDot(query, keys[u]);
      score = SumOfOwnEntry<kConfig>(parts);
    }
    score = own_column != kNoEntry ? score * scale_ : Lowest();
    Acc most = most_;  // without NaN, which reaches the sum
    most = score > most ? score : most;
#pragma unroll
    for (int distance = 1; distance < kConfig.step; distance *= 2) {
      const Acc other = __shfl_xor_sync(kAllLanes, most, distance);
      most = other > most ? other : most;
    }
    Raise(most);
    const Acc weight = Exp2(score - Shift(most));
    total_ += weight;
#pragma unroll
    for (int u = 0; u < kConfig.step; ++u) {
      AddMultiple(OfEntry<kConfig>(weight, u), values[u], sums_);
    }
  }

  // The sums of all groups, of which each has a part of a row.
  __device__ __forceinline__ void Share() {
    Acc most = most_;
#pragma unroll
    for (int distance = kConfig.lanes; distance < kWarp; distance *= 2) {
      const Acc other = __shfl_xor_sync(kAllLanes, most, distance);
      most = other > most ? other : most;
    }
    Raise(most);
    total_ = SumOverGroups<kConfig.lanes>(total_);
    ForEachSum(sums_, [](Acc x) { return SumOverGroups<kConfig.lanes>(x); });
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
    if (threadIdx.x % kConfig.lanes != 0) return;
    lse_[row] = total_ == 0 ? Lowest() : (most_ + log2(total_)) * kLn2<Acc>;
  }

  const CsrRows<Index>& rows_;
  Acc scale_, most_, total_;  // of a lane's own entries, until they are summed up
  typename Values::Sums sums_;
  Heads query_, key_;
  Values value_, out_;
  Acc* lse_;
};

template <typename T, typename Index, AttentionCsrConfig kConfig>
__global__ void __launch_bounds__(kCsrThreads)
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
  pieces.ForEach(blockIdx.x % p.pass.blocks * kWarps + threadIdx.x / kWarp, p.pass.blocks * kWarps,
                 [&](const CsrPiece& piece) { attention.Take(pieces, piece); });
}

}  // namespace jaxsparse
