// Attention over a block mask on the tensor cores of warpgroups, tile by tile: a row of 128 queries
// of a head meets the listed tiles of 128 keys. A mask costs a word for each thread and partial
// cell, whatever it stores there; tiles that are not listed cost nothing, cells that are empty
// little.
//
// A block stays on its multiprocessor and takes one item after another, a row of tiles of a head
// (tiles_schedule.cuh). Producer warps have queries, keys, values and words of partial cells copied
// to the stages of pipelines. Two consumer warpgroups have 64 queries each. For each tile one of
// them multiplies queries by keys; while the softmax of these scores is taken, the values of the
// tile before it are multiplied by their probabilities, and the other warpgroup multiplies: they
// take turns at the tensor cores. Scores and probabilities never leave registers.
//
// Items are taken from a counter: with causal masks rows of tiles differ in their work, and
// multiprocessors in their speed. The first item of each block is its own, so that no block waits
// for the counter, which a prologue kernel clears; where there are no more items than blocks there
// is none. What a block computes does not depend on which items it has, so results repeat bitwise.
//
// Scores that are not stored are replaced, so that NaN in a key stays with those that see it. But a
// probability of 0 times a value that is infinite or NaN makes sums NaN that should not be: rows
// whose sums are not finite though that of their probabilities is, and of whose tiles some have
// positions that are not stored, are computed once more, key by key (exact_rows.cuh).
//
// Where there is a function of scores (scores.cuh), it takes the place of the scale between
// products and softmax. Dropout makes probabilities 0 behind the softmax, on their way to the
// product with values: sums for lse are of all. An instance without either has nothing of this.
//
// Floors: for each listed tile and head 2 * 128 * 128 * (head_size + value_size) operations, of
// which a multiprocessor does 4,096 a clock: 2,048 clocks for sizes of 128. Beside them 16,384
// powers, 16 a clock (1,024 clocks), and about 400 instructions of 8 warps, four a clock (800).
// Tensor cores read 128 bytes a clock of shared memory: in products with keys 6 KB for each 64
// clocks, in those with values 4. From L2 come 64 KB of keys and values, 32 bytes for each clock
// of products, and at most 2 KB of words; from memory, queries, keys and values, once as long as
// heads that are worked on at once stay in L2, and go results.
#include "attention/kernels/products.cuh"
#include "attention/kernels/scores.cuh"
#include "attention/kernels/softmax.cuh"
#include "attention/kernels/tiles_results.cuh"
#include "attention/kernels/tiles_schedule.cuh"

namespace jaxsparse {

// A consumer warpgroup.
template <typename T, AttentionTilesConfig kConfig, typename Scoring>
class AttentionConsumer {
  using Control = AttentionControl<kConfig>;
  static constexpr int kHeadSize = kConfig.head_size, kValueSize = kConfig.value_size;
  static constexpr int kBlockBytes = kMaskTile * 64 * 2;  // of a tile in shared memory
  static constexpr int kScores = kMaskTile / 2, kSums = kValueSize / 2;  // of a thread
  // Probabilities that are computed beside a product of values: as many as registers hold.
  static constexpr int kEarly = kValueSize == 64 ? 48 : 32;
  static constexpr int kTurns = 1;  // the first one's named barrier; the other one's follows

  const AttentionTilesProblem& p_;
  Control& control_;
  uint32_t shared_;
  int group_, thread_, lane_;
  typename Control::Stage keys_, values_;
  HeadScores<Scoring> head_;
  uint32_t first_query_ = 0;  // of this thread, where there is scoring

  // A tile as this warpgroup meets it: its two cells, and this thread's words of them.
  struct Tile {
    MaskCell cells[2];
    uint32_t words[2];
    uint32_t first_key;  // of this thread, where there is scoring

    __device__ __forceinline__ bool IsEmpty() const {
      return !Stores(cells[0]) && !Stores(cells[1]);
    }
    __device__ __forceinline__ bool IsFull() const {
      return cells[0] == MaskCell::kFull && cells[1] == MaskCell::kFull;
    }
    __device__ __forceinline__ static bool Stores(MaskCell cell) {
      return cell == MaskCell::kFull || cell == MaskCell::kPartial;
    }
  };

  __device__ __forceinline__ void WaitForTurn() const {
    WaitAt<kAttentionConsumers>(kTurns + group_);
  }
  __device__ __forceinline__ void PassTurn() const {
    ArriveAt<kAttentionConsumers>(kTurns + 1 - group_);
  }

  // The next tile, once its keys are there.
  __device__ __forceinline__ Tile NextTile() const {
    control_.KeyAt(keys_).WaitUntilFull();
    const uint32_t entry = __shfl_sync(kAllLanes, control_.entries[keys_.stage], 0);
    const uint32_t words =
        shared_ + kConfig.WordsAt() + keys_.stage * kConfig.kWordBytes + thread_ * 4;
    Tile tile;
    tile.first_key = MaskColumnOf(entry) * kMaskTile + lane_ % 4 * 2;
#pragma unroll
    for (int across = 0; across < 2; ++across) {
      tile.cells[across] = MaskCellOf(entry, group_, across);
      tile.words[across] = SharedAt<const uint32_t>(
          words + CountPartialCells(entry, group_, across) * (kMaskCellWords * 4));
    }
    return tile;
  }

  __device__ __forceinline__ void ReleaseKeys() {
    control_.KeyAt(keys_).Emptied();
    keys_.Advance();
  }
  __device__ __forceinline__ void ReleaseValues() {
    __syncwarp();
    if (lane_ == 0) control_.ValueAt(values_).Emptied();
    values_.Advance();
  }

  // Begin products: scores, and sums of values by their probabilities.
  __device__ __forceinline__ void MultiplyKeys(uint32_t queries, float (&scores)[kScores]) const {
    const uint32_t keys = shared_ + kConfig.KeysAt() + keys_.stage * kConfig.KeyBytes();
    MultiplyTiles<T, kHeadSize, kBlockBytes, kBlockBytes>(scores, queries,
                                                          __shfl_sync(kAllLanes, keys, 0));
    CommitProducts();
  }
  __device__ __forceinline__ void MultiplyValues(const uint32_t (&rows)[kScores / 8][4],
                                                 float (&sums)[kSums]) const {
    const uint32_t values = shared_ + kConfig.ValuesAt() + values_.stage * kConfig.ValueBytes();
    MultiplyRows<T, kBlockBytes>(sums, rows, __shfl_sync(kAllLanes, values, 0));
    CommitProducts();
  }

  // The row and column of a thread's number of a tile, from its first ones on.
  __device__ __forceinline__ static constexpr int RowOf(int i) { return 8 * RowOfNumber(i); }
  __device__ __forceinline__ static constexpr int ColumnOf(int i) { return i / 4 * 8 + i % 2; }

  // Scores of products.
  __device__ __forceinline__ void ApplyFunction(const Tile& tile, float (&scores)[kScores]) const {
    if constexpr (Scoring::Function::kExists) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = head_.Of(scores[i], first_query_ + RowOf(i), tile.first_key + ColumnOf(i));
      }
    }
  }
  // Scores of products: those that are not stored are the least.
  __device__ __forceinline__ void TakeScores(const Tile& tile, float (&scores)[kScores]) const {
    ApplyFunction(tile, scores);
    ApplyMaskCell<0>(tile.cells[0], tile.words[0], kNoScore, scores);
    ApplyMaskCell<32>(tile.cells[1], tile.words[1], kNoScore, scores);
  }
  // Probabilities from kFrom on, as rows of the product with values.
  template <int kFrom, int kCount>
  __device__ __forceinline__ static void TakeRows(const float (&probabilities)[kCount],
                                                  uint32_t (&rows)[kScores / 8][4]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int pair = (kFrom + i) / 2;
      rows[pair / 4][pair % 4] = PairOf(T(), probabilities[i], probabilities[i + 1]);
    }
  }
  template <int kFrom>
  __device__ __forceinline__ static void ExponentiateToRows(const OnlineSoftmax& softmax,
                                                            const float (&scores)[kScores],
                                                            OnlineSoftmax::Totals& totals,
                                                            uint32_t (&rows)[kScores / 8][4]) {
    float probabilities[kScores - kFrom];
    softmax.template Exponentiate<kFrom>(scores, probabilities, totals);
    TakeRows<kFrom>(probabilities, rows);
  }
  __device__ __forceinline__ static void Scale(const float (&factors)[2], float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= factors[RowOfNumber(i)];
  }

  // Walks an item's tiles. Whether some of them have positions that are not stored.
  __device__ __forceinline__ bool Attend(uint32_t count, uint32_t queries, OnlineSoftmax& softmax,
                                         float (&sums)[kSums]) {
    float scores[kScores], factors[2];
    uint32_t rows[kScores / 8][4];
    bool mixed = false, lacks_shift = true;
    uint32_t left = count;
    Tile tile;
    if (left > 0) tile = NextTile();
    // One run of tiles that are not empty after another.
#pragma unroll 1
    while (left > 0) {
      if (tile.IsEmpty()) {
        WaitForTurn();
        PassTurn();
        ReleaseKeys();
        control_.ValueAt(values_).WaitUntilFull();
        ReleaseValues();
        if (--left > 0) tile = NextTile();
        continue;
      }
      WaitForTurn();
      KeepInRegisters(scores);
      FenceProducts();
      MultiplyKeys(queries, scores);
      PassTurn();
      WaitForGroups<0>();
      KeepInRegisters(scores);
      ReleaseKeys();
      mixed |= !tile.IsFull();
      TakeScores(tile, scores);
      if (softmax.Exponentiate(scores, factors)) Scale(factors, sums);
      lacks_shift = softmax.LacksShift();
      head_.DropPairs(first_query_, tile.first_key, 1.0f, scores);
      RowsOfProduct<T>(scores, rows);
      if (--left > 0) tile = NextTile();
#pragma unroll 1
      while (left > 0 && !tile.IsEmpty()) {
        WaitForTurn();
        KeepInRegisters(scores);
        KeepInRegisters(sums);
        FenceProducts();
        MultiplyKeys(queries, scores);
        control_.ValueAt(values_).WaitUntilFull();
        MultiplyValues(rows, sums);
        PassTurn();
        WaitForGroups<1>();
        KeepInRegisters(scores);
        ReleaseKeys();
        mixed |= !tile.IsFull();
        TakeScores(tile, scores);
        const uint32_t first_key = tile.first_key;
        bool rises = false;
        // Scores stay beside their probabilities, unless hashes of dropout take these registers.
        // While rows are read by the product with values, some probabilities wait.
        float early[kEarly];
        OnlineSoftmax::Totals totals;
        if constexpr (Scoring::kDrops) {
          rises = softmax.Exponentiate(scores, factors);
        } else {
          if (lacks_shift) {
            rises = softmax.Raise(scores, factors);
            lacks_shift = softmax.LacksShift();
          }
          softmax.template Exponentiate<0>(scores, early, totals);
        }
        // The compiler does not move the wait for sums across that for the next tile, in front of
        // these.
        if (--left > 0) tile = NextTile();
        WaitForGroups<0>();
        KeepInRegisters(sums);
        KeepInRegisters(scores);
        ReleaseValues();
        if (rises) Scale(factors, sums);
        if constexpr (Scoring::kDrops) {
          head_.DropPairs(first_query_, first_key, 1.0f, scores);
          RowsOfProduct<T>(scores, rows);
        } else {
          TakeRows<0>(early, rows);
          ExponentiateToRows<kEarly>(softmax, scores, totals, rows);
          if (softmax.Exceeds(totals)) {
            softmax.RaiseToMost(scores, factors);
            Scale(factors, sums);
            ExponentiateToRows<0>(softmax, scores, totals, rows);
          }
          softmax.Add(totals);
        }
      }
      control_.ValueAt(values_).WaitUntilFull();
      KeepInRegisters(sums);
      FenceProducts();
      MultiplyValues(rows, sums);
      WaitForGroups<0>();
      KeepInRegisters(sums);
      ReleaseValues();
    }
    return mixed;
  }

  // What turns scores to powers of 2.
  __device__ __forceinline__ float ScaleOfScores() const {
    return Scoring::Function::kExists ? kLog2OfE<float>
                                      : static_cast<float>(p_.scale) * kLog2OfE<float>;
  }

 public:
  __device__ __forceinline__ AttentionConsumer(const AttentionTilesProblem& p, Control& control,
                                               const unsigned char* shared)
      : p_(p),
        control_(control),
        shared_(AddressOfShared(shared)),
        group_(WarpgroupOfBlock()),
        thread_(threadIdx.x % kWarpgroup),
        lane_(threadIdx.x % kWarp),
        head_(p) {}

  // Works on the block's items until they are done.
  __device__ __forceinline__ void Run() {
    if (group_ == 1) PassTurn();  // the first turn is the other one's
    typename Control::Slot at;
#pragma unroll 1
    while (true) {
      const PipelineStage slot = control_.ItemAt(at);
      const AttentionItem& item = control_.items[at.stage];
      slot.WaitUntilFull();
      if (!item.exists) break;
      OnlineSoftmax softmax(ScaleOfScores());
      if constexpr (Scoring::kExists) {
        head_.Set(item.place, item.head);
        first_query_ = item.first_query + group_ * kMaskCell + thread_ / kWarp * 16 + lane_ / 4;
      }
      float sums[kSums] = {};
      const uint32_t queries = shared_ + at.stage * kConfig.QueryBytes() + group_ * kBlockBytes / 2;
      WaitForPhase(control_.QueryAt(at).full, at.phase);
      const bool mixed = Attend(__shfl_sync(kAllLanes, item.mask.count, 0),
                                __shfl_sync(kAllLanes, queries, 0), softmax, sums);
      const uint32_t first_row = group_ * kMaskCell + thread_ / kWarp * 16;
      TilesResults<T, kConfig, Scoring>(p_, head_, ScaleOfScores(), first_row)
          .Write(item, softmax, sums, mixed);
      slot.Emptied();
      at.Advance();
    }
    if (group_ == 0) WaitForTurn();  // so that none is left over
  }
};

template <typename T, AttentionTilesConfig kConfig, typename Scoring = NoScoring>
__global__ void __launch_bounds__(kAttentionTilesThreads, 1)
    AttentionTiles(const __grid_constant__ AttentionTilesProblem p) {
  constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  using Control = AttentionControl<kConfig>;
  static_assert(sizeof(Control) <= kAttentionControlBytes && kConfig.ControlAt() % 1024 == 0);
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  Control& control = *reinterpret_cast<Control*>(attention_shared + kConfig.ControlAt());
  if (threadIdx.x == 0) control.Init();
  __syncthreads();
  if (threadIdx.x < kAttentionConsumers) {
    TakeRegisters<kConsumerRegisters>();
    AttentionConsumer<T, kConfig, Scoring>(p, control, attention_shared).Run();
    return;
  }
  GiveUpRegisters<kProducerRegisters>();
  if (threadIdx.x % kWarp != 0) return;
  const AttentionProducers<kConfig> producers(p, control, attention_shared);
  const int warp = (threadIdx.x - kAttentionConsumers) / kWarp;
  if (warp == 0) producers.Schedule();
  if (warp == 1) producers.CopyKeys();
  if (warp == 2) producers.CopyValues();
}

}  // namespace jaxsparse
