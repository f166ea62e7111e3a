// Cotangents of keys and values by tiles of keys: a block owns 128 keys of a key head and walks the
// rows of the transposed mask. For a cell of 64 keys and 64 queries a consumer warpgroup computes
//
//   s^T = key query^T,  dp^T = value ct_out^T           (both operands in shared memory)
//   p = exp2(log2_scale s - lse log2(e)) where stored, 0 elsewhere;  ds = p (dp + ct_sums)
//   ct_value += p^T ct_out,  ct_key += ds^T query       (p and ds from registers)
//
// Where there is a function of scores (scores.cuh), p is of what it makes of them, and ds is
// multiplied by its derivative, as soon as both are known; dropout multiplies dp, and p on its way
// to the product with ct_out.
//
// for all query heads of the group, so that what is added up stays in the registers of one
// warpgroup, in a fixed order: there are no atomic additions, and results repeat bitwise. Products
// are asynchronous. While one of a warpgroup is computed, it computes exponentials or cotangents of
// scores, and so does the other warpgroup.
//
// What is added to columns of both s^T and dp^T, of lse and of ct_sums, one more step of these
// products adds (column_terms.cuh).
//
// Producer warps (keys_producers.cuh) have tiles of query and ct_out copied into a pipeline of
// stages, with the words of partial cells, and write lse and ct_sums there themselves, since these
// need not be aligned. Another one takes items of work, and has keys and values of the next one
// copied as soon as a warpgroup is done with those that it has.
//
// A zero of p times a NaN of a query that a key does not see would be NaN. So an item with partial
// cells computes rows that are not finite once more, entry by entry.
//
// Floors, for a listed cell of 64 x 64 and heads of 128: 4 * 64 * 64 * 128 multiply-adds of tensor
// cores, 1,024 clocks of a multiprocessor, which does 2,048 in a clock, and 64 for what is added to
// columns; for causal attention with 12,288 positions and 8 heads that are 700 us at 1,755 MHz.
// Through shared memory pass 2 * 32 KiB for the products of operands that lie there, 2 * 4 for what
// is added, 2 * 16 for the others, and 16 as tiles are copied: 960 clocks at 128 bytes a clock.
// From the L2 cache come 33 KiB for two cells. From memory come query, key, value, ct_out, lse,
// ct_sums and the words of cells, and go ct_key and ct_value, once each.
#include "attention/kernels/cotangent_scores.cuh"
#include "attention/kernels/keys_producers.cuh"
#include "attention/kernels/tile_sums.cuh"

namespace jaxsparse {

// One of the consumer warpgroups.
template <typename T, AttentionKeysConfig kConfig, typename Scoring>
class KeysConsumer {
  using Control = KeysControl<kConfig, Scoring::kExists>;
  static constexpr int kSize = kConfig.head_size, kBlockBytes = kMaskCell * 64 * 2;
  const AttentionCotangentTiles& p_;
  Control& control_;
  int group_;
  uint32_t shared_, keys_;  // where its keys lie
  typename Control::State at_;
  bool masked_;  // the item has had a partial cell
  float ct_value_[kSize / 2], ct_key_[kSize / 2];

  __device__ __forceinline__ void Empty(uint32_t stage) { control_.StageAt({stage}).Emptied(); }
  // The stage of the step before, once products that read it are done.
  __device__ __forceinline__ void EmptyBefore(bool is_first) {
    if (!is_first) Empty((at_.stage + kConfig.kStages - 1) % kConfig.kStages);
  }

  // This thread's word of a partial cell.
  __device__ __forceinline__ uint32_t WordOf(uint32_t side) const {
    const uint32_t words = side + kConfig.kWordsAt + group_ * kMaskCellWords * 4;
    return SharedAt<const uint32_t>(words + threadIdx.x % kWarpgroup * 4);
  }

  __device__ __forceinline__ void AddTerms(float (&product)[kKeysStepRows / 2],
                                           uint32_t terms) const {
    if constexpr (Control::kHasTerms) {
      ColumnTerms::Add(product, shared_ + kConfig.OnesAt(), terms);
    }
  }

  // Adds a cell to the sums. The last product is not waited for.
  __device__ __forceinline__ void AddCell(const CotangentItem& item, bool is_partial,
                                          bool is_first) {
    constexpr int kTileBytes = kConfig.TileBytes(), kSteps = kKeysStepRows / kInnerOfProduct;
    // In a way that tells a compiler that all lanes agree, as about cells below.
    const uint32_t stage = __shfl_sync(kAllLanes, at_.stage, 0);
    const uint32_t query = shared_ + kConfig.StagesAt() + stage * kConfig.StageBytes();
    const uint32_t ct_out = query + kTileBytes;
    const uint32_t side = shared_ + kConfig.SideAt() + stage * kConfig.kSideBytes;
    const uint32_t numbers = side + threadIdx.x % 4 * 8;  // unless these are terms
    float scores[kKeysStepRows / 2], ct_scores[kKeysStepRows / 2];
    FenceProducts();
    MultiplyTiles<T, kSize, kBlockBytes, kBlockBytes>(scores, keys_, query);
    AddTerms(scores, side);
    CommitProducts();
    WaitForGroups<1>();
    EmptyBefore(is_first);
    // Numbers that are loaded for each score take the registers of the other product, which waits.
    constexpr bool kWaits = LoadsOfEachScore<typename Scoring::Function>();
    const auto multiply_values = [&] {
      FenceProducts();
      MultiplyTiles<T, kSize, kBlockBytes, kBlockBytes>(
          ct_scores, keys_ + kCotangentGroups * kTileBytes, ct_out);
      AddTerms(ct_scores, side + kConfig.kTermsBytes);
      CommitProducts();
    };
    uint32_t word = kAllLanes;
    if constexpr (!kWaits) multiply_values();
    if (is_partial) word = WordOf(side);
    WaitForGroups<kWaits ? 0 : 1>();
    KeepInRegisters(scores);
    uint32_t kept = kAllLanes;  // bits of this thread's probabilities that are not dropped
    const CellScores<Scoring> head(p_, control_.places, at_.stage, item, group_);
    uint32_t rows[kSteps][4];
    if constexpr (Scoring::kExists) {
#pragma unroll
      for (int column = 0; column < kKeysStepRows; column += 8) {
        const Vector<float, 2> shifts = SharedAt<const Vector<float, 2>>(numbers + column * 4);
        float probabilities[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = column / 2 + i;
          float power = scores[n] * p_.log2_scale, slope = 1;
          if constexpr (Scoring::Function::kExists)
            power = head.Of(n, scores[n], &slope) * kLog2OfE<float>;
          const bool stored = (word & (1u << n)) != 0;
          probabilities[i] = stored ? ApproximateExp2(power + shifts.elements[i % 2]) : 0.0f;
          scores[n] = stored ? probabilities[i] * slope : 0.0f;
        }
        head.KeepOrDrop(column, kept, probabilities);
        rows[column / 16][column / 8 % 2 * 2] = PairOf(T(), probabilities[0], probabilities[1]);
        rows[column / 16][column / 8 % 2 * 2 + 1] = PairOf(T(), probabilities[2], probabilities[3]);
      }
    } else {
#pragma unroll
      for (float& score : scores) score = ApproximateExp2(score * p_.log2_scale);
      if (is_partial) ApplyMaskWord<0>(word, 0.0f, scores);
      RowsOfProduct<T>(scores, rows);
    }
    if constexpr (kWaits) multiply_values();
    FenceProducts();
    MultiplyRows<T, kBlockBytes>(ct_value_, rows, ct_out);
    CommitProducts();
    WaitForGroups<1>();
    KeepInRegisters(ct_scores);
    if constexpr (Scoring::kExists) {
#pragma unroll
      for (int column = 0; column < kKeysStepRows; column += 8) {
        const Vector<float, 2> sums =
            SharedAt<const Vector<float, 2>>(numbers + (kKeysStepRows + column) * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = column / 2 + i;
          float ct_score = ct_scores[n];
          if constexpr (Scoring::kDrops) {
            ct_score = (kept & (1u << n)) != 0 ? ct_score * head.KeptScale() : 0.0f;
          }
          scores[n] *= ct_score + sums.elements[i % 2];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKeysStepRows / 2; ++i) scores[i] *= ct_scores[i];
    }
    uint32_t ct_rows[kSteps][4];
    RowsOfProduct<T>(scores, ct_rows);
    FenceProducts();
    MultiplyRows<T, kBlockBytes>(ct_key_, ct_rows, query);
    CommitProducts();
  }

  __device__ __forceinline__ void AddCells(const CotangentItem& item) {
    masked_ = false;
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
      control_.StageAt(at_).WaitUntilFull();
      const uint32_t cells = __shfl_sync(kAllLanes, control_.steps[at_.stage], 0);
      const uint32_t cell = cells >> 2 * group_ & 3;
      if (cell != 0) {
        const bool is_partial = cell == static_cast<uint32_t>(MaskCell::kPartial);
        masked_ |= is_partial;
        AddCell(item, is_partial, is_first);
      } else {
        WaitForGroups<0>();
        EmptyBefore(is_first);
      }
      if (cells == 0) break;
      at_.Advance();
    }
    Empty(at_.stage);
    at_.Advance();
  }

  __device__ __forceinline__ void WriteResults(const CotangentItem& item) {
    const int64_t stride = p_.groups * kSize;
    const int64_t first = item.row * kMaskTile + group_ * kMaskCell;
    const int64_t at = first * stride + item.head * kSize;
    const int64_t left = p_.keys - first;
    const int rows = left < kMaskCell ? static_cast<int>(left) : kMaskCell;
    T* ct_value = item.place.At<T>(p_.batch, p_.ct_value) + at;
    T* ct_key = item.place.At<T>(p_.batch, p_.ct_key) + at;
    uint32_t not_finite = StoreRows(ct_value_, KeptScale(item), ct_value, stride, rows);
    not_finite |= StoreRows(ct_key_, static_cast<float>(p_.scale), ct_key, stride, rows);
    if (!masked_) return;
    __syncwarp();
#pragma unroll 1
    for (; not_finite != 0; not_finite &= not_finite - 1) {
      const int row = threadIdx.x % kWarpgroup / kWarp * 16 + __ffs(not_finite) - 1;
      WriteKeyByEntries<T, kSize, kSize, true, true, Scoring>(p_, item.place, item.head, item.row,
                                                              static_cast<uint32_t>(first + row));
    }
  }

  // By what sums of probabilities that are kept are multiplied: the same for all heads.
  __device__ __forceinline__ float KeptScale(const CotangentItem& item) const {
    if constexpr (!Scoring::kDrops) return 1.0f;
    HeadScores<Scoring> head(p_);
    head.Set(item.place, 0);
    return head.KeptScale();
  }

 public:
  __device__ KeysConsumer(const AttentionCotangentTiles& p, Control& control, uint32_t shared)
      : p_(p),
        control_(control),
        group_(WarpgroupOfBlock()),
        shared_(shared),
        keys_(shared + group_ * kConfig.TileBytes()) {}

  __device__ __forceinline__ void Run() {
#pragma unroll 1
    for (uint32_t number = 0;; ++number) {
      WaitForPhase(&control_.keys_full[group_], number & 1);
      const CotangentItem& item = control_.items.slots[number % kItemSlots];
      if (item.row == kNoItem) return;
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) ct_value_[i] = ct_key_[i] = 0;
      AddCells(item);
      Arrive(&control_.keys_empty[group_]);
      WaitForGroups<0>();
      KeepInRegisters(ct_value_);
      KeepInRegisters(ct_key_);
      WriteResults(item);
    }
  }
};

template <typename T, AttentionKeysConfig kConfig, typename Scoring = NoScoring>
__global__ void __launch_bounds__(kCotangentThreads, 1)
    AttentionCotangentOfKeys(const __grid_constant__ AttentionCotangentTiles p) {
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  using Control = KeysControl<kConfig, Scoring::kExists>;
  static_assert(sizeof(Control) <= kCotangentControlBytes);
  Control& control = *reinterpret_cast<Control*>(attention_shared + kConfig.ControlAt());
  constexpr int kConsumerWarps = kWarpgroup / kWarp;  // of a warpgroup
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < kConfig.kStages; ++stage) {
      control.StageAt({stage}).Init(kWarp + 1, kCotangentGroups * kWarpgroup);
    }
    control.items.Init();
    for (int group = 0; group < kCotangentGroups; ++group) {
      InitBarrier(&control.keys_full[group], 1);
      InitBarrier(&control.keys_empty[group], kWarpgroup);
    }
    FenceShared();
  }
  if constexpr (Control::kHasTerms) {
    if (WarpOfBlock() == kCotangentThreads / kWarp - 1) PrepareTerms<kConfig>(attention_shared);
  }
  __syncthreads();
  if (threadIdx.x < kCotangentGroups * kWarpgroup) {
    TakeRegisters<kCotangentConsumerRegisters>();
    KeysConsumer<T, kConfig, Scoring>(p, control, AddressOfShared(attention_shared)).Run();
    using Function = typename Scoring::Function;
    if constexpr (CountTileSums<Function>() > 0) {
      WaitForPrologue();
      TilesAdder<kCotangentGroups * kWarpgroup>(p, attention_shared).template Run<Function>();
    }
  } else {
    GiveUpRegisters<kCotangentProducerRegisters>();
    const int warp = WarpOfBlock() - kCotangentGroups * kConsumerWarps;
    if (warp < kKeysStepWarps) {
      KeysSteps<T, kConfig, Control>(p, control, attention_shared, warp).Run();
    } else if (warp == kKeysStepWarps && threadIdx.x % kWarp == 0) {
      CopyKeys<kConfig>(p, control, attention_shared);
      WaitForPrologue();  // so that what follows this kernel finds that one done, too
    }
  }
}

}  // namespace jaxsparse
