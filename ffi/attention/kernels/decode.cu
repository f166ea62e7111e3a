// Attention of few queries to many keys, as in decoding. Rows are the queries of all heads of a
// group, up to 16 in an item of work; the keys of a head are shared out among blocks.
//
// All tiles of all items form a line, of which each block has an equal part (decode_line.cuh). So
// all multiprocessors have the same to read, whatever the lengths of sequences are, and all blocks
// run at once. An item that lies in the parts of several blocks is put together by a second kernel
// (decode_merge.cu), in the order of its parts: results repeat bitwise.
//
// A warp takes slices of 16 keys. It has them and their values copied to stages of its own, some
// slices ahead, and waits for nothing but these copies: warps meet where an item ends. Products are
// those of a warp: 16 rows by 16 keys, then 16 rows by the values' numbers. Each warp has sums of
// its own, with a softmax of its own.
//
// Scores that are not stored are replaced, so that NaN in a key stays with those that see it.
// Values of keys that no row sees are cleared. Where some rows may see what others do not, a row
// whose sums are not finite though that of its probabilities is, is computed once more, key by key
// (exact_rows.cuh).
//
// Floors: bytes of keys and values, each read once where a group's rows are one item: 64 KB for a
// tile with sizes of 128, of which a multiprocessor of an H200 gets 18 bytes a clock: 3,600 clocks.
// For them 256 products of a warp (about 500 clocks of tensor cores), 64 KB through shared memory
// twice (1,000 clocks), 128 wide copies, and about 1,000 other instructions of warps, four a clock.
// Each multiprocessor has 130 KB or more of copies under way all the time.
#include "attention/kernels/decode_line.cuh"
#include "attention/kernels/exact_rows.cuh"
#include "attention/kernels/products.cuh"

namespace jaxsparse {

struct DecodeControl {
  DecodeSearch search;
  DecodeItem item;
  MaskRow mask;  // the block's tiles of the item
  float shifts[kDecodeSlices][kDecodeRows], totals[kDecodeSlices][kDecodeRows];
  uint32_t mixed[kDecodeSlices];
};

template <typename T, AttentionDecodeConfig kConfig>
class AttentionDecoder {
  static constexpr int kHeadSize = kConfig.head_size, kValueSize = kConfig.value_size;
  static constexpr int kWarps = kConfig.warps, kStages = kConfig.stages;
  static constexpr int kOfTile = kDecodeSlices / kWarps;  // slices of a tile that a warp takes
  static constexpr int kScores = kDecodeKeys / 2;         // of a lane
  static constexpr int kColumns = kValueSize / 8;         // products by values

  const AttentionDecodeProblem& p_;
  DecodeControl& control_;
  unsigned char* own_;  // the warp's stages
  int warp_, lane_;

  // The operands of the block's item.
  struct Operands {
    const T *key, *value;  // of its head; position 0 of the sequence or of the pool
    const int32_t* pages;  // of its sequence
    const uint32_t* entries;
    const int32_t* bits_at;
    uint32_t key_step, value_step, positions;
  };

  // A slice as a warp meets it.
  struct Slice {
    uint32_t number, entry;  // of its tile
    uint32_t of_tile;        // which of its slices it is
    MaskCell cell;

    __device__ __forceinline__ int Across() const {
      return static_cast<int>(of_tile) * kDecodeKeys / kMaskCell;
    }
  };

  __device__ __forceinline__ Slice SliceAt(const Operands& of, uint32_t step) const {
    Slice slice;
    slice.number = step / kOfTile;
    slice.entry = of.entries[slice.number];
    slice.of_tile = step % kOfTile * kWarps + warp_;
    slice.cell = MaskCellOf(slice.entry, 0, slice.Across());
    return slice;
  }

  // Where a key of the sequence lies, in its positions or in those of the pool.
  __device__ __forceinline__ uint32_t PositionOf(const Operands& of, uint32_t key) const {
    if (p_.pages.size == 0) return key;
    const auto size = static_cast<uint32_t>(p_.pages.size);
    const uint32_t page = key / size, inside = key - page * size;
    const auto number = static_cast<uint32_t>(of.pages[Within(page, p_.pages.of_sequence)]);
    return Within(number, p_.pages.count) * size + inside;
  }

  // Has kSize numbers of 16 positions copied to lines of shared memory. Positions behind the last
  // one are taken for it: they are not stored.
  template <int kSize, int kLineBytes>
  __device__ __forceinline__ void CopyLines(uint32_t to, const T* from, uint32_t step,
                                            uint32_t first, uint32_t positions) const {
    constexpr int kVector = 8, kOfLine = kSize / kVector, kCount = kDecodeKeys * kOfLine / kWarp;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t at = i * kWarp + lane_, line = at / kOfLine, chunk = at % kOfLine;
      const uint32_t position = Within(first + line, positions);
      AsyncCopy(to + line * kLineBytes + chunk * 16,
                from + MultiplyWide(position, step) + chunk * kVector);
    }
  }

  __device__ __forceinline__ uint32_t StageAt(uint32_t stage) const {
    return AddressOfShared(own_) + stage * kConfig.StageBytes();
  }

  // Begins the copies of a slice of `steps`; of none behind the last one.
  __device__ __forceinline__ void Copy(const Operands& of, uint32_t step, uint32_t steps,
                                       uint32_t stage) const {
    if (step < steps) {
      const Slice slice = SliceAt(of, step);
      if (slice.cell != MaskCell::kEmpty) {
        const uint32_t key =
            control_.mask.ColumnOf(slice.entry) * kMaskTile + slice.of_tile * kDecodeKeys;
        const uint32_t first = PositionOf(of, key), to = StageAt(stage);
        CopyLines<kHeadSize, kConfig.KeyLineBytes()>(to, of.key, of.key_step, first, of.positions);
        CopyLines<kValueSize, kConfig.ValueLineBytes()>(to + kConfig.ValuesAt(), of.value,
                                                        of.value_step, first, of.positions);
      }
    }
    CommitCopies();
  }

  // The bits of this lane's scores in a partial cell.
  __device__ __forceinline__ uint32_t BitsOf(const Operands& of, const Slice& slice,
                                             const uint32_t (&queries)[2]) const {
    const uint32_t partial = CountPartialCells(slice.entry), cells = control_.mask.cells;
    if (partial > cells) return 0;
    const uint32_t* words = control_.mask.WordsAt(of.bits_at[slice.number], partial) +
                            CountPartialCells(slice.entry, 0, slice.Across()) * kMaskCellWords;
    uint32_t bits = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t t = queries[row];
      const uint32_t word = words[t / 16 * 32 + t % 8 * 4 + lane_ % 4];
      const uint32_t shift = slice.of_tile * kDecodeKeys % kMaskCell / 2 + t / 8 % 2 * 2;
      bits |= (word >> shift & 0x33) << 2 * row;
    }
    return bits;
  }

  // The slice's keys that some row sees, by all lanes' bits.
  __device__ __forceinline__ uint32_t SeenKeys(uint32_t bits) const {
    const uint32_t columns = bits | bits >> 2;  // 0, 1, 8 and 9 behind twice lane_ % 4
    uint32_t seen = (columns & 3) << lane_ % 4 * 2 | (columns >> 4 & 3) << (8 + lane_ % 4 * 2);
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      seen |= __shfl_xor_sync(kAllLanes, seen, distance);
    }
    return seen;
  }

  // Has values of keys that no row sees be 0, as their probabilities are: they may be NaN.
  __device__ __forceinline__ void ClearValues(uint32_t stage, uint32_t seen) const {
    const uint32_t values = StageAt(stage) + kConfig.ValuesAt();
#pragma unroll 1
    for (uint32_t unseen = ~seen & ((1u << kDecodeKeys) - 1); unseen != 0; unseen &= unseen - 1) {
      const int line = __ffs(static_cast<int>(unseen)) - 1;
      if (lane_ < kValueSize / 8) {
        StoreShared(values + line * kConfig.ValueLineBytes() + lane_ * 16, Words4{});
      }
    }
    __syncwarp();
  }

  struct Sums {
    float numbers[kColumns][4] = {};
    bool mixed = false;  // whether some rows saw keys that others did not
  };

  __device__ __forceinline__ void Attend(const Operands& of, uint32_t stage, const Slice& slice,
                                         const uint32_t (&rows)[kHeadSize / 16][4],
                                         const uint32_t (&queries)[2], OnlineSoftmax& softmax,
                                         Sums& sums) const {
    if (slice.cell == MaskCell::kEmpty) return;
    uint32_t bits = 0xff;
    if (slice.cell != MaskCell::kFull) {
      bits = BitsOf(of, slice, queries);
      const uint32_t seen = SeenKeys(bits);
      if (seen == 0) return;
      ClearValues(stage, seen);
      sums.mixed = true;
    }
    const unsigned char* keys = own_ + stage * kConfig.StageBytes();
    const unsigned char* values = keys + kConfig.ValuesAt();
    const int matrix = lane_ / 8, line = lane_ % 8;
    keys += (matrix / 2 * 8 + line) * kConfig.KeyLineBytes() + matrix % 2 * 16;
    values += (matrix % 2 * 8 + line) * kConfig.ValueLineBytes() + matrix / 2 * 16;
    float products[2][4] = {};
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
      uint32_t b[4];
      LoadMatrices(b, keys + k * 32);
      MultiplyAdd(T(), products[0], rows[k], b[0], b[1]);
      MultiplyAdd(T(), products[1], rows[k], b[2], b[3]);
    }
    float scores[kScores], factors[2];
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = (bits >> i & 1) != 0 ? products[i / 4][i % 4] : kNoScore;
    }
    if (softmax.Exponentiate(scores, factors)) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums.numbers[i][j] *= factors[RowOfNumber(j)];
      }
    }
    uint32_t probabilities[1][4];
    RowsOfProduct<T>(scores, probabilities);
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      uint32_t b[4];
      LoadTransposedMatrices(b, values + i * 16);
      MultiplyAdd(T(), sums.numbers[i], probabilities[0], b[0], b[1]);
      MultiplyAdd(T(), sums.numbers[i + 1], probabilities[0], b[2], b[3]);
    }
  }

  // Leaves the warp's sums where its stages were.
  __device__ __forceinline__ void Leave(const OnlineSoftmax& softmax, const Sums& sums) const {
    float* to = reinterpret_cast<float*>(own_);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int at = row * 8 + lane_ / 4;
      const float total = softmax.Total(row);
      if (lane_ % 4 == 0) {
        control_.totals[warp_][at] = total;
        control_.shifts[warp_][at] = softmax.Shift(row);
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        Vector<float, 2> pair;
        pair.elements[0] = sums.numbers[i][2 * row];
        pair.elements[1] = sums.numbers[i][2 * row + 1];
        *reinterpret_cast<Vector<float, 2>*>(to + at * kConfig.SumsPitch() + i * 8 +
                                             lane_ % 4 * 2) = pair;
      }
    }
    if (lane_ == 0) control_.mixed[warp_] = sums.mixed;
  }

  // Puts together what warps have left of a row, in their order. A lane has numbers kWarp apart.
  struct RowSums {
    float numbers[kValueSize / kWarp] = {};
    float shift = kNoScore, total = 0;
  };
  __device__ __forceinline__ RowSums SumsOf(uint32_t row) const {
    RowSums sums;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sums.shift = fmaxf(sums.shift, control_.shifts[warp][row]);
    }
    const float shift = sums.shift == kNoScore ? 0.0f : sums.shift;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float factor = ApproximateExp2(control_.shifts[warp][row] - shift);
      sums.total += factor * control_.totals[warp][row];
      const auto* from =
          reinterpret_cast<const float*>(own_ + (warp - warp_) * kConfig.WarpBytes()) +
          row * kConfig.SumsPitch() + lane_;
#pragma unroll
      for (int i = 0; i < kValueSize / kWarp; ++i) sums.numbers[i] += factor * from[i * kWarp];
    }
    return sums;
  }

  // The same key by key, of the block's tiles.
  __device__ __forceinline__ RowSums ExactSumsOf(const Operands& of,
                                                 const DecodeItem::Row& row) const {
    HeadOperands<T> operands;
    operands.query = control_.item.template NumbersOf<const T>(p_, p_.query, row, kHeadSize);
    operands.key = of.key;
    operands.value = of.value;
    operands.key_step = of.key_step;
    operands.value_step = of.value_step;
    operands.keys = static_cast<uint32_t>(p_.keys);
    operands.head_size = kHeadSize;
    operands.value_size = kValueSize;
    operands.scale = static_cast<float>(p_.scale) * kLog2OfE<float>;
    RowSums sums;
    float lse;
    ComputeRow(
        control_.mask, row.query, operands, [&](uint32_t key) { return PositionOf(of, key); },
        sums.numbers, lse);
    sums.shift = lse == kNoScore ? kNoScore : lse * kLog2OfE<float>;
    sums.total = lse == kNoScore ? 0 : 1;
    return sums;
  }

  __device__ __forceinline__ bool IsWrong(const RowSums& sums) const {
    float not_finite = 0;  // NaN, if a sum is not
#pragma unroll
    for (int i = 0; i < kValueSize / kWarp; ++i) not_finite += sums.numbers[i] * 0.0f;
    return __any_sync(kAllLanes, !(not_finite == 0)) && sums.total - sums.total == 0;
  }

  // Writes the item's rows, or a part of them where other blocks have tiles of the item.
  __device__ __forceinline__ void Write(const Operands& of, const DecodePart* part) const {
    bool mixed = false;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) mixed |= control_.mixed[warp] != 0;
#pragma unroll 1
    for (uint32_t at = warp_; at < control_.item.rows; at += kWarps) {
      const DecodeItem::Row row = control_.item.RowAt(p_, at);
      RowSums sums = SumsOf(at);
      if (mixed && IsWrong(sums)) sums = ExactSumsOf(of, row);
      if (part != nullptr) {
#pragma unroll
        for (int i = 0; i < kValueSize / kWarp; ++i) {
          part->Sum(at, i * kWarp + lane_) = sums.numbers[i];
        }
        if (lane_ == 0) {
          part->Shift(at) = sums.shift;
          part->Total(at) = sums.total;
        }
        continue;
      }
      const float factor = sums.total == 0 ? 0.0f : 1.0f / sums.total;
      T* to = control_.item.template NumbersOf<T>(p_, p_.out, row, kValueSize);
#pragma unroll
      for (int i = 0; i < kValueSize / kWarp; ++i) {
        FromAccumulator(sums.numbers[i] * factor, &to[i * kWarp + lane_]);
      }
      if (lane_ == 0) *control_.item.LseOf(p_, row) = LogOfSums(sums.shift, sums.total);
    }
  }

  // Works on `tiles` tiles of the item that control has, which all warps know.
  __device__ __forceinline__ void Run(uint32_t tiles, const DecodePart* part) const {
    const DecodeItem& item = control_.item;
    Operands of;
    of.key = item.place.template At<const T>(p_.batch, p_.key) + item.group * kHeadSize;
    of.value = item.place.template At<const T>(p_.batch, p_.value) + item.group * kValueSize;
    of.pages = nullptr;
    of.positions = static_cast<uint32_t>(p_.keys);
    if (p_.pages.size != 0) {
      of.pages = item.place.template At<const int32_t>(p_.batch, p_.pages.numbers);
      of.positions = static_cast<uint32_t>(p_.pages.count * p_.pages.size);
    }
    of.entries = control_.mask.entries;
    of.bits_at = control_.mask.bits_at;
    of.key_step = static_cast<uint32_t>(p_.groups) * kHeadSize;
    of.value_step = static_cast<uint32_t>(p_.groups) * kValueSize;
    const uint32_t steps = tiles * kOfTile;
#pragma unroll 1
    for (uint32_t step = 0; step < kStages; ++step) Copy(of, step, steps, step);

    uint32_t rows[kHeadSize / 16][4], queries[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DecodeItem::Row row = item.RowAt(p_, half * 8 + lane_ / 4);
      queries[half] = row.query;
      const T* from = item.template NumbersOf<const T>(p_, p_.query, row, kHeadSize);
#pragma unroll
      for (int k = 0; k < kHeadSize / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          rows[k][2 * i + half] =
              *reinterpret_cast<const uint32_t*>(from + k * 16 + i * 8 + lane_ % 4 * 2);
        }
      }
    }
    OnlineSoftmax softmax(static_cast<float>(p_.scale) * kLog2OfE<float>);
    Sums sums;
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
      const Slice slice = SliceAt(of, step);
      WaitForCopyGroups<kStages - 1>();
      __syncwarp();  // those of all lanes
      Attend(of, stage, slice, rows, queries, softmax, sums);
      __syncwarp();  // all have read it
      Copy(of, step + kStages, steps, stage);
      if (++stage == kStages) stage = 0;
    }
    WaitForCopyGroups<0>();
    __syncwarp();
    Leave(softmax, sums);
    __syncthreads();
    Write(of, part);
  }

 public:
  __device__ __forceinline__ AttentionDecoder(const AttentionDecodeProblem& p,
                                              DecodeControl& control, unsigned char* stages)
      : p_(p), control_(control), warp_(threadIdx.x / kWarp), lane_(threadIdx.x % kWarp) {
    own_ = stages + warp_ * kConfig.WarpBytes();
  }

  // Works on the block's part of the line.
  __device__ __forceinline__ void Run() const {
    const DecodeLine<kWarps> line(p_, control_.search);
    const uint32_t all = line.Tiles();
    const uint32_t begin = BeginOfBlock(all, p_.blocks, blockIdx.x);
    const uint32_t end = BeginOfBlock(all, p_.blocks, blockIdx.x + 1);
    if (begin == end) return;
    DecodePlace at = line.Find(begin);
#pragma unroll 1
    for (uint32_t tile = begin; tile < end;) {
      const uint32_t of_item = at.tiles - at.tile;
      const uint32_t tiles = of_item < end - tile ? of_item : end - tile;
      __syncthreads();  // all are done with what control has
      if (threadIdx.x == 0) {
        control_.item.Set(p_, at.list, at.item);
        MaskRow& mask = control_.mask;
        mask.Set(p_.mask, p_.batch, control_.item.place, control_.item.own, 0);
        mask.entries += at.tile;
        mask.bits_at += at.tile;
        mask.count = tiles;
      }
      __syncthreads();
      const DecodePart part(p_, blockIdx.x, tile != begin);
      Run(tiles, tiles == at.tiles ? nullptr : &part);
      tile += tiles;
      if (tile < end) at.ToNextItem(p_);
    }
  }
};

template <typename T, AttentionDecodeConfig kConfig>
__global__ void __launch_bounds__(kConfig.warps* kWarp)
    AttentionDecode(const __grid_constant__ AttentionDecodeProblem p) {
  extern __shared__ __align__(1024) unsigned char decode_shared[];
  static_assert(sizeof(DecodeControl) <= kDecodeControlBytes);
  AttentionDecoder<T, kConfig>(p, *reinterpret_cast<DecodeControl*>(decode_shared),
                               decode_shared + kDecodeControlBytes)
      .Run();
}

}  // namespace jaxsparse
