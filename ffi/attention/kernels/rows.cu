// Cotangents of queries by rows of tiles: a block owns 128 queries of a head and walks the tiles
// that the mask lists for them. For a tile of 128 x 128 each of two consumer warpgroups computes,
// for its 64 queries,
//
//   s = query key^T,  dp = ct_out value^T               (both operands in shared memory)
//   p = exp2(log2_scale s - lse log2(e)) where stored, 0 elsewhere;  ds = p (dp + ct_sums)
//   ct_query += ds key                                  (ds from registers)
//
// Where there is a function of scores (scores.cuh), p is of what it makes of them, and ds is
// multiplied by its derivative; dropout multiplies dp. Cotangents of operands of the function are
// sums of p dp times its derivative by them, over rows, or these products themselves: nothing is
// added across blocks. Of sums over columns or distances it has what each tile adds
// (tile_sums.cuh).
//
// Scores and probabilities are computed once more than by the kernel of keys (keys.cu), since sums
// over keys and sums over queries belong to different blocks: so there are no atomic additions, and
// results repeat bitwise.
//
// A producer thread has tiles of key and value copied into a pipeline of stages, with the words of
// partial cells. Values of a stage are done with long before its keys; the next keys, which are
// wanted first, take their place. A producer warp takes items of work and has queries, ct_out, lse
// and ct_sums of the next one copied as soon as a warpgroup is done with those that it has.
//
// A zero of ds times a NaN of a key that a query does not see would be NaN. So an item with partial
// cells computes rows that are not finite once more, entry by entry.
//
// Floors, for a tile of 128 x 128 with cells that are listed, and heads of 128: 3 * 128^3
// multiply-adds of tensor cores, 3,072 clocks of a multiprocessor, which does 2,048 in a clock; for
// causal attention with 12,288 positions and 8 heads that are 495 us at 1,755 MHz. Through shared
// memory pass 2 * 96 KiB for the products of operands that lie there, 2 * 32 for the others, and 64
// as tiles are copied: 2,560 clocks at 128 bytes a clock. From the L2 cache come 64 KiB. From
// memory come query, key, value, ct_out, lse, ct_sums and the words of cells, and goes ct_query,
// once each.
#include "attention/kernels/cotangent_scores.cuh"
#include "attention/kernels/rows_producers.cuh"
#include "attention/kernels/tile_sums.cuh"

namespace jaxsparse {

// One of the consumer warpgroups.
template <typename T, AttentionRowsConfig kConfig, typename Scoring>
class RowsConsumer {
  using Control = RowsControl<kConfig>;
  static constexpr int kSize = kConfig.head_size;
  static constexpr int kRowsBlock = kMaskCell * 64 * 2, kTileBlock = kMaskTile * 64 * 2;
  const AttentionCotangentTiles& p_;
  Control& control_;
  int group_;
  uint32_t shared_, rows_;  // where its queries lie
  typename Control::State at_;
  bool masked_;  // the item has had a partial cell
  float shifts_[2], ct_sums_[2];
  float ct_query_[kSize / 2];
  // Of operands of the function of scores, those cotangents that are sums of rows, and what has
  // those that are summed over tiles.
  using Function = typename Scoring::Function;
  static constexpr int kGradients = Function::kGradients;
  static constexpr int kTileSums = CountTileSums<Function>();
  static constexpr int kCountOfSums = kTileSums > 0 ? kTileSums : 1;
  float row_sums_[kGradients > 0 ? kGradients : 1][2];
  TileSumsFiller filler_;

  // Keys are read by products alone: one lane of each warp arrives. Values are emptied by all
  // lanes, which have read the words that came for this tile.
  __device__ __forceinline__ static void EmptyKeys(const PipelineStage& stage) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) stage.Emptied();
  }

  // Which of the thread's numbers of a cell are stored.
  template <int kAcross>
  __device__ __forceinline__ uint32_t WordOf(uint32_t states) const {
    const MaskCell cell = MaskCellOf(states, group_, kAcross);
    if (cell == MaskCell::kFull) return kAllLanes;
    if (cell != MaskCell::kPartial) return 0;
    const uint32_t place =
        CountPartialCells(states, group_, kAcross) * kMaskCellWords + threadIdx.x % kWarpgroup;
    return SharedAt<const uint32_t>(shared_ + kConfig.WordsAt() + at_.stage * kConfig.kWordsBytes +
                                    place * 4);
  }

  // Makes probabilities of keys that are not stored 0.
  template <int kAcross>
  __device__ __forceinline__ void ApplyCell(uint32_t states, float (&scores)[kMaskTile / 2]) {
    if (MaskCellOf(states, group_, kAcross) == MaskCell::kFull) return;
    ApplyMaskWord<kAcross * kMaskCell / 2>(WordOf<kAcross>(states), 0.0f, scores);
  }

  // Keys of the step before, once products that read them are done.
  __device__ __forceinline__ void EmptyKeysBefore(bool is_first) {
    constexpr uint32_t kStages = Control::kStages;
    if (!is_first) EmptyKeys(control_.KeysAt({(at_.stage + kStages - 1) % kStages}));
  }

  // Adds a tile to the sums, which is entry `number` of the mask. The last product is not waited
  // for.
  __device__ __forceinline__ void AddTile(const CotangentItem& item, uint32_t states,
                                          uint32_t number, bool is_first) {
    // In a way that tells a compiler that all lanes agree, as about states below.
    const typename Control::State at = {__shfl_sync(kAllLanes, at_.stage, 0),
                                        __shfl_sync(kAllLanes, at_.phase, 0)};
    const uint32_t keys = shared_ + kConfig.KeysAt(at.stage, at.phase);
    const uint32_t values = shared_ + kConfig.ValuesAt(at.stage, at.phase);
    float scores[kMaskTile / 2], ct_scores[kMaskTile / 2];
    FenceProducts();
    MultiplyTiles<T, kSize, kRowsBlock, kTileBlock>(scores, rows_, keys);
    CommitProducts();
    WaitForGroups<1>();
    EmptyKeysBefore(is_first);
    control_.ValuesAt(at_).WaitUntilFull();
    FenceProducts();
    MultiplyTiles<T, kSize, kRowsBlock, kTileBlock>(
        ct_scores, rows_ + kCotangentGroups * kConfig.RowsBytes(), values);
    CommitProducts();
    WaitForGroups<1>();
    KeepInRegisters(scores);
    const TileScores<Scoring> head(p_, item, group_, states);
    float summed[kCountOfSums][kMaskTile / 2];
    if constexpr (kGradients > 0) {
      // All at once: what is needed of a product has no register to wait in for the other one.
      WaitForGroups<0>();
      KeepInRegisters(scores);
      KeepInRegisters(ct_scores);
      head.Drop(ct_scores);
      // Once values are emptied, words of another tile may come to where these lie.
      const uint32_t words[] = {WordOf<0>(states), WordOf<1>(states)};
      control_.ValuesAt(at_).Emptied();
      Differentiate(item, head, words, scores, ct_scores, summed);
    } else {
#pragma unroll
      for (int i = 0; i < kMaskTile / 2; ++i) {
        const float shift = shifts_[i / 2 % 2];
        if constexpr (Scoring::Function::kExists) {
          float slope;
          const float score = head.Of(i, scores[i], &slope);
          scores[i] = ApproximateExp2(score * kLog2OfE<float> + shift) * slope;
        } else {
          scores[i] = ApproximateExp2(scores[i] * p_.log2_scale + shift);
        }
      }
      ApplyCell<0>(states, scores);
      ApplyCell<1>(states, scores);
      WaitForGroups<0>();
      KeepInRegisters(ct_scores);
      control_.ValuesAt(at_).Emptied();
      head.Drop(ct_scores);
#pragma unroll
      for (int i = 0; i < kMaskTile / 2; ++i) scores[i] *= ct_scores[i] + ct_sums_[i / 2 % 2];
    }
    uint32_t rows[kMaskTile / kInnerOfProduct][4];
    RowsOfProduct<T>(scores, rows);
    FenceProducts();
    MultiplyRows<T, kTileBlock>(ct_query_, rows, keys);
    CommitProducts();
    if constexpr (kTileSums > 0) {
      FillSums(item, states, number, [&](ScoreSums sums, int i, uint32_t to) {
        if (sums == ScoreSums::kByColumn) StoreSumsOfColumns(summed[i], to);
        else StoreSumsOfDiagonals(summed[i], to);
      });
    }
  }

  // Hands over what a tile adds to each of the cotangents that are summed over tiles.
  template <typename Store>
  __device__ __forceinline__ void FillSums(const CotangentItem& item, uint32_t states,
                                           uint32_t number, Store store) {
#pragma unroll
    for (int g = 0, i = 0; g < kGradients; ++g) {
      const ScoreSums sums = Function::kSums[g];
      if (!IsSummedByTiles(sums)) continue;
      const auto place = [&] {
        return reinterpret_cast<float*>(p_.workspace.data + kCotangentWorkspaceBytes) +
               TileSumsAt(p_, g, item.head_of_all, number);
      };
      filler_.Fill(states, place, [&](uint32_t to) { store(sums, i, to); });
      ++i;
    }
  }

  // Turns products to cotangents of scores, and adds or stores those of operands. What is not
  // stored has none, whatever the function is there.
  __device__ __forceinline__ void Differentiate(const CotangentItem& item,
                                                const TileScores<Scoring>& head,
                                                const uint32_t (&words)[2],
                                                float (&scores)[kMaskTile / 2],
                                                const float (&ct_scores)[kMaskTile / 2],
                                                float (&summed)[kCountOfSums][kMaskTile / 2]) {
    float* whole[kGradients];
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      whole[g] =
          item.place.At<float>(p_.batch, p_.scores.ct_values[g]) + item.head * p_.queries * p_.keys;
    }
#pragma unroll
    for (int i = 0; i < kMaskTile / 2; ++i) {
      const int row = i / 2 % 2;
      float slope, gradients[kGradients];
      const float score = head.Of(i, scores[i], &slope, gradients);
      const bool stored = (words[i / 32] & (1u << i % 32)) != 0;
      const float p = ApproximateExp2(score * kLog2OfE<float> + shifts_[row]);
      const float ct = stored ? p * (ct_scores[i] + ct_sums_[row]) : 0.0f;
      scores[i] = stored ? ct * slope : 0.0f;
#pragma unroll
      for (int g = 0, tile_sum = 0; g < kGradients; ++g) {
        const float of_operand = stored ? ct * gradients[g] : 0.0f;
        const ScoreSums sums = Function::kSums[g];
        if (sums == ScoreSums::kByRow) row_sums_[g][row] += of_operand;
        if (sums == ScoreSums::kNone && stored) head.Store(p_, whole[g], i, of_operand);
        if (IsSummedByTiles(sums)) summed[tile_sum++][i] = of_operand;
      }
    }
  }
  // Writes sums of rows, once the item's tiles are done.
  __device__ __forceinline__ void WriteRowSums(const CotangentItem& item) const {
    const uint32_t first = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      if (Function::kSums[g] != ScoreSums::kByRow) continue;
      float* to = item.place.At<float>(p_.batch, p_.scores.ct_values[g]) + item.head * p_.queries;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = SumOverLanes(row_sums_[g][i], 4);
        const uint32_t row = item.row * kMaskTile + group_ * kMaskCell + first + i * 8;
        if (threadIdx.x % 4 == 0 && row < p_.queries) to[row] = sum;
      }
    }
  }

  __device__ __forceinline__ void AddTiles(const CotangentItem& item) {
    masked_ = false;
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
      control_.KeysAt(at_).WaitUntilFull();
      const uint32_t states = __shfl_sync(kAllLanes, control_.steps[at_.stage], 0);
      const uint32_t number = kTileSums > 0 ? control_.numbers[at_.stage] : 0;
      if ((states >> (kMaskStatesAt + 4 * group_) & 15) != 0) {
        masked_ |= (PartialCellsOf(states) >> 4 * group_ & 15) != 0;
        AddTile(item, states, number, is_first);
      } else {
        WaitForGroups<0>();
        EmptyKeysBefore(is_first);
        control_.ValuesAt(at_).WaitUntilFull();
        control_.ValuesAt(at_).Emptied();
        if constexpr (kTileSums > 0) {
          if (states != 0) FillSums(item, states, number, [](ScoreSums, int, uint32_t) {});
        }
      }
      if (states == 0) break;
      at_.Advance();
    }
    EmptyKeys(control_.KeysAt(at_));
    at_.Advance();
  }

  __device__ __forceinline__ void WriteResults(const CotangentItem& item) {
    const int64_t stride = p_.groups * p_.per_group * kSize;
    const int64_t first = item.row * kMaskTile + group_ * kMaskCell;
    const int64_t left = p_.queries - first;
    const int rows = left < kMaskCell ? static_cast<int>(left) : kMaskCell;
    T* ct_query = item.place.At<T>(p_.batch, p_.ct_query) + first * stride + item.head * kSize;
    uint32_t not_finite =
        StoreRows(ct_query_, static_cast<float>(p_.scale), ct_query, stride, rows);
    if (!masked_) return;
    __syncwarp();
#pragma unroll 1
    for (; not_finite != 0; not_finite &= not_finite - 1) {
      const int row = threadIdx.x % kWarpgroup / kWarp * 16 + __ffs(not_finite) - 1;
      WriteQueryByEntries<T, kSize, kSize, Scoring>(p_, item.place, item.head, item.row,
                                                    static_cast<uint32_t>(first + row));
    }
  }

 public:
  __device__ RowsConsumer(const AttentionCotangentTiles& p, Control& control, uint32_t shared)
      : p_(p),
        control_(control),
        group_(WarpgroupOfBlock()),
        shared_(shared),
        rows_(shared + group_ * kConfig.RowsBytes()),
        filler_(control.tile_sums, shared + kConfig.TileSumsAt()) {}

  __device__ __forceinline__ void Run() {
    const int first_row = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
    const uint32_t shifts = shared_ + kConfig.ShiftsAt() + group_ * kShiftsBytes + first_row * 4;
#pragma unroll 1
    for (uint32_t number = 0;; ++number) {
      WaitForPhase(&control_.rows_full[group_], number & 1);
      const CotangentItem& item = control_.items.slots[number % kItemSlots];
      if (item.row == kNoItem) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        shifts_[i] = SharedAt<const float>(shifts + i * 8 * 4);
        ct_sums_[i] = SharedAt<const float>(shifts + (kMaskCell + i * 8) * 4);
      }
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) ct_query_[i] = 0;
      if constexpr (kGradients > 0) {
#pragma unroll
        for (int g = 0; g < kGradients; ++g) row_sums_[g][0] = row_sums_[g][1] = 0;
      }
      AddTiles(item);
      if constexpr (kGradients > 0) WriteRowSums(item);
      WaitForGroups<0>();
      KeepInRegisters(ct_query_);
      Arrive(&control_.rows_empty[group_]);
      WriteResults(item);
    }
    if constexpr (kTileSums > 0) {
      filler_.Fill(0, [] { return static_cast<float*>(nullptr); }, [](uint32_t) {});
    }
  }
};

template <typename T, AttentionRowsConfig kConfig, typename Scoring = NoScoring>
__global__ void __launch_bounds__(kCotangentThreads, 1)
    AttentionCotangentOfRows(const __grid_constant__ AttentionCotangentTiles p) {
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  using Control = RowsControl<kConfig>;
  static_assert(sizeof(Control) <= kCotangentControlBytes);
  Control& control = *reinterpret_cast<Control*>(attention_shared + kConfig.ControlAt());
  constexpr int kConsumerWarps = kWarpgroup / kWarp;  // of a warpgroup
  constexpr bool kTileSums = CountTileSums<typename Scoring::Function>() > 0;
  LetNextKernelBegin();
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < Control::kStages; ++stage) {
      control.KeysAt({stage}).Init(1, kCotangentGroups * kConsumerWarps);
      control.ValuesAt({stage}).Init(1, kCotangentGroups * kWarpgroup);
    }
    control.items.Init();
    if constexpr (kTileSums) control.tile_sums.Init();
    for (int group = 0; group < kCotangentGroups; ++group) {
      InitBarrier(&control.rows_full[group], kWarp + 1);
      InitBarrier(&control.rows_empty[group], kWarpgroup);
    }
    FenceShared();
  }
  __syncthreads();
  if (threadIdx.x < kCotangentGroups * kWarpgroup) {
    TakeRegisters<kCotangentConsumerRegisters>();
    RowsConsumer<T, kConfig, Scoring>(p, control, AddressOfShared(attention_shared)).Run();
  } else {
    GiveUpRegisters<kCotangentProducerRegisters>();
    const int warp = WarpOfBlock() - kCotangentGroups * kConsumerWarps;
    if (warp == 0 && threadIdx.x % kWarp == 0) {
      CopyTiles<kConfig, Scoring::kExists, kTileSums>(p, control, attention_shared);
    }
    if (warp == 1) RowsOfItems<kConfig>(p, control, attention_shared).Run();
    if constexpr (kTileSums) {
      if (warp == 2) {
        AddUpTileSums<typename Scoring::Function>(
            control.tile_sums, AddressOfShared(attention_shared) + kConfig.TileSumsAt());
      }
    }
  }
}

}  // namespace jaxsparse
