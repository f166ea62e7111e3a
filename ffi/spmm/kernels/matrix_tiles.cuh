// How producers write the sparse matrix out on its way to tensor cores (tensor_cores.cu): tiles of
// it in shared memory, and a warp's share of the stored entries, tile after tile.
#pragma once

#include "cuda/warpgroup.cuh"
#include "spmm/kernels/tensor_cores.h"

namespace jaxsparse {

constexpr int kTeamThreads = kSpmmTeamThreads;  // threads that write a tile
constexpr int kProducerWarps = kTeamThreads / kWarp, kProducerRows = kSpmmTileRows / kProducerWarps;

// A tile of the matrix: one component of 16-bit numbers. Of numbers only what is stored depends on
// conditions, for which no branch is taken: those took 1.4 times as long.
template <typename T>
struct MatrixTile {
  using OfRows = SwizzledTile<kSpmmTileRows, kSpmmTileInner>;
  static constexpr int kBytes = OfRows::kBytes, kRowBytes = kSpmmTileInner * 2;

  __device__ __forceinline__ static uint32_t PlaceOf(uint32_t tile, uint32_t row, uint32_t column) {
    return tile + row * kRowBytes + (column * 2 ^ row % 8 * 16);  // as OfRows::At
  }
  __device__ __forceinline__ static void WriteIf(bool condition, uint32_t place, uint32_t bits) {
    StoreSharedIf(condition, place, static_cast<uint16_t>(bits));
  }
};

// One of float32 as it is: consumers have more time to split it into components than producers.
template <>
struct MatrixTile<float> {
  using OfRows = PlainTile<float, kSpmmTileRows, kSpmmTileInner>;
  static constexpr int kBytes = OfRows::kBytes, kRowBytes = OfRows::kRowBytes;
  static_assert(OfRows::kPitch == kSpmmTilePitch);

  __device__ __forceinline__ static uint32_t PlaceOf(uint32_t tile, uint32_t row, uint32_t column) {
    return tile + row * kRowBytes + column * sizeof(float);
  }
  __device__ __forceinline__ static void WriteIf(bool condition, uint32_t place, uint32_t bits) {
    StoreSharedIf(condition, place, __uint_as_float(bits));
  }
};

// What a warp writes of a tile: some of its rows, anywhere, of which so many lanes have one each;
// or of a transposed one some of its columns.
constexpr int kOfRow = kWarp / kProducerRows;

template <typename T, bool kTransposed>
struct WarpsPart {
  using TileA = MatrixTile<T>;
  using Zeros = Vector<uint32_t, 4>;
  static constexpr int kOfPiece = sizeof(Zeros) / sizeof(T);

  // `line` is a row of the stored matrix, `column` one of its columns, both in the tile.
  __device__ __forceinline__ static uint32_t PlaceOf(uint32_t tile, uint32_t line,
                                                     uint32_t column) {
    return kTransposed ? TileA::PlaceOf(tile, column, line) : TileA::PlaceOf(tile, line, column);
  }
  // `line` is the lane's.
  __device__ __forceinline__ static void Clear(uint32_t tile, int line) {
    const int lane = threadIdx.x % kWarp;
    if constexpr (kTransposed) {
      const int first_line = line / kProducerRows * kProducerRows;
      constexpr int kPieces = kProducerRows / kOfPiece;
#pragma unroll
      for (int i = 0; i < kSpmmTileRows * kPieces; i += kWarp) {
        const int row = (i + lane) / kPieces, piece = (i + lane) % kPieces;
        SharedAt<Zeros>(TileA::PlaceOf(tile, row, first_line + piece * kOfPiece)) = {};
      }
    } else {
      // Of two rows in turn that are neighbours the lanes begin with pieces in other banks.
      constexpr int kPieces = kSpmmTileInner / kOfPiece;
      constexpr int kFurther = kOfRow - TileA::kRowBytes / sizeof(Zeros) % (2 * kOfRow);
      static_assert(kFurther > 0 && kFurther <= kOfRow);
      const int first = lane % kOfRow + lane / kOfRow % 2 * kFurther;
#pragma unroll
      for (int i = 0; i < kPieces; i += kOfRow) {
        const int piece = i + kOfRow < kPieces ? first + i : (first + i) % kPieces;
        SharedAt<Zeros>(TileA::PlaceOf(tile, line, piece * kOfPiece)) = {};
      }
    }
  }
};

// The entries of a warp's rows of the stored matrix in one tile after another: those across, or of
// a transposed product those down, which are of other rows each. Four lanes have a row, and hold in
// registers, from before the tile is written, up to 32 places of its entries in runs of four, which
// one load brings: what lanes load of a row costs L1 as much, however little it is. Of rows that
// have more, as many others are loaded when the tile is written, and if need be again.
//
// A warp takes as long as the longest of its rows does. So the longest rows of a tile of the result
// all go to one warp, and to another one in each step, so that no warp is always late.
template <typename T, typename Index, bool kTransposed, typename Shape>
class EntriesOfRows {
  using TileA = typename Shape::TileA;
  using Part = WarpsPart<T, kTransposed>;
  static constexpr int kRun = 4, kRuns = 2;  // of neighbouring entries; of a lane
  static constexpr int kAtOnce = kOfRow * kRun, kHeld = kRuns * kAtOnce;
  static constexpr int kLine = 128, kNever = 1 << 30;
  const T* values_;
  const Index* columns_;
  int skew_;               // how far the first column is from where runs begin
  int wide_;               // entries in front of which runs are loaded at once
  const int64_t& stored_;  // entries
  const char* lines_;      // which the lane brings nearer: of columns or of values
  int line_bytes_;         // of an entry there
  int skipped_;            // entries of other lanes' lines; all, if it has none
  int lane_;               // of a row
  uint32_t order_;         // of the tile's rows: a byte for each place in it
  int place_;              // of the lane's row in step 0
  const int32_t* starts_;  // of rows in step 0
  int stride_;             // from there to those of the next step
  int to_end_;             // from there to the end of the row
  int next_, end_;         // the step whose starts are loaded next; the one behind the last
  int ends_ = 0;           // complements among them are those of rows that are not in order

  // Neighbours as they are loaded: to take them apart is to wait for them.
  template <typename E>
  struct alignas(kRun * sizeof(E)) Run {
    static constexpr int kOfWord = sizeof(uint32_t) / sizeof(E), kBits = 32 / kOfWord;
    uint32_t words[kRun / kOfWord];

    __device__ __forceinline__ uint32_t Bits(int i) const {
      const uint32_t above = words[i / kOfWord] >> i % kOfWord * kBits;
      return kBits == 32 ? above : above & 0xffff;
    }
    __device__ __forceinline__ void SetBits(int i, uint32_t bits) {
      words[i / kOfWord] |= bits << i % kOfWord * kBits;
    }
  };

  template <typename E>
  __device__ __forceinline__ static int SkewOf(const E* array) {
    return static_cast<int>(reinterpret_cast<uint64_t>(array) / sizeof(E) % kRun);
  }

 public:
  static constexpr int kOfLane = kRuns * kRun;
  static constexpr int kAhead = 64;  // entries, whose lines are brought nearer at a time
  struct Held {
    int start, end;  // of the row's entries in the tile that is held next
    int next_row;
    int end_of_row;  // of a transposed product, in which that is another row
    int row;         // of the tile that is held, where it has these entries
    int begin, count;
    int first;  // place in them of the lane's first run, before the begin perhaps
    Run<Index> columns[kRuns];
    Run<T> values[kRuns];
  };

  // Of steps from `step` to `end`, for a warp that has places from `first_place` on in step 0;
  // `starts` are those of the tile's rows, `order` is space for a byte for each of them.
  __device__ __forceinline__ EntriesOfRows(const T* values, const Index* columns,
                                           const Pattern& stored, const int32_t* starts,
                                           int64_t tile_across, uint32_t order, int first_place,
                                           int step, int end)
      : values_(values),
        columns_(columns),
        skew_(SkewOf(columns)),
        wide_(skew_ == SkewOf(values) ? static_cast<int>(stored.nse) : 0),
        stored_(stored.nse),
        lane_(threadIdx.x % kOfRow),
        order_(order),
        place_(first_place + static_cast<int>(threadIdx.x) % kWarp / kOfRow),
        starts_(starts),
        next_(step),
        end_(end) {
    const auto across = static_cast<int>(CeilDivide(stored.columns, kTileSize));
    stride_ = (kTransposed ? across + 1 : 1) * kTileSize;
    to_end_ = (across - static_cast<int>(tile_across)) * kTileSize;
    // Or they would be computed again for each tile.
    KeepInRegister(columns_);
    KeepInRegister(values_);
    if constexpr (!kTransposed) {
      const bool of_columns = lane_ % 2 == 0;
      lines_ = of_columns ? reinterpret_cast<const char*>(columns_)
                          : reinterpret_cast<const char*>(values_);
      line_bytes_ = of_columns ? sizeof(Index) : sizeof(T);
      const int line = lane_ / 2 * kLine / line_bytes_;
      skipped_ = line < kAhead ? line : kNever;
      KeepInRegister(lines_);
      KeepInRegister(line_bytes_);
      KeepInRegister(skipped_);
    }
    KeepInRegister(skew_);
    KeepInRegister(wide_);
    KeepInRegister(lane_);
    KeepInRegister(place_);
    if constexpr (!kTransposed) {
      KeepInRegister(order_);
#pragma unroll
      for (int row = threadIdx.x % kWarp; row < kSpmmTileRows; row += kWarp) RowAt(row) = row;
      __syncwarp();
    }
  }

  // Puts rows that have about so many entries in each of the steps before others.
  __device__ __forceinline__ void PutLongRowsFirst(int first_step, int end_step) {
    static_assert(kSpmmTileRows == 2 * kWarp);
    constexpr int kEntries[] = {40, 28, 20, 14, 10, 0};
    const int lane = threadIdx.x % kWarp, steps = end_step - first_step;
    const int32_t* starts = starts_ + lane;
    int lengths[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t* of_row = starts + half * kWarp;
      // Unsigned, since starts may be any numbers.
      const auto end = static_cast<uint32_t>(of_row[end_step * kTileSize]);
      const int length = static_cast<int>(end - of_row[first_step * kTileSize]);
      lengths[half] = length > 0 ? length : 0;
    }
    const unsigned before = (1u << lane) - 1;
    unsigned placed[2] = {};
    __syncwarp();  // the order so far has been read
    int count = 0;
#pragma unroll
    for (const int least : kEntries) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool has = lengths[half] >= least * steps;
        const unsigned rows = __ballot_sync(kAllLanes, has) & ~placed[half];
        if (rows >> lane & 1) RowAt(count + __popc(rows & before)) = lane + half * kWarp;
        count += __popc(rows);
        placed[half] |= rows;
      }
    }
    __syncwarp();
  }

  // Loads where the next tile begins and ends that the team writes; behind the last one there is
  // nothing. That is not waited for before the tile is loaded.
  __device__ __forceinline__ void LoadStarts(Held& held) {
    const bool exists = next_ < end_;
    const int place = PlaceIn(next_), row = kTransposed ? place : RowAt(place);
    if constexpr (!kTransposed) held.next_row = row;
    const int start = (exists ? next_ * stride_ : 0) + row;
    held.start = starts_[start];
    held.end = starts_[exists ? start + kTileSize : start];
    if constexpr (kTransposed) held.end_of_row = starts_[start + to_end_];
    next_ += Shape::kTeams;
  }

  // Brings lines nearer of so many entries from a multiple of as many on.
  __device__ __forceinline__ void BringNearer(unsigned multiple) const {
    const unsigned from = multiple * kAhead + skipped_;
    if (from < static_cast<unsigned>(stored_)) {
      Prefetch(lines_ + static_cast<uint64_t>(from) * line_bytes_);
    }
  }

  __device__ __forceinline__ void BringFirstNearer(const Held& held) const {
    if constexpr (!kTransposed) {
      BringNearer(held.start / kAhead + 1);
      BringNearer(held.start / kAhead + 2);
    }
  }

  // Loads what the tile has, and where the one behind it begins, which `next` is to hold.
  __device__ __forceinline__ void Load(Held& held, Held& next) {
    if constexpr (!kTransposed) held.row = held.next_row;
    // Whatever starts are, entries are those of the pattern. Complements stand at ends alone, where
    // rows that are not in order have none of their entries.
    const auto stored = static_cast<int>(stored_);
    held.begin = static_cast<int>(Within(held.start, stored + int64_t{1}));
    const int end = held.end < stored ? held.end : stored;
    held.count = end > held.begin ? end - held.begin : 0;
    if constexpr (kTransposed) ends_ |= held.end_of_row;
    const int behind = held.begin + held.count;
    LoadStarts(next);
    const int before = held.begin + skew_ & kRun - 1;
    held.first = lane_ * kRun - before;
    LoadEntries(held);
    // L1 has room for few lines: whenever the row comes to others.
    if constexpr (!kTransposed) {
      if ((held.begin ^ behind) >= kAhead) BringNearer(behind / kAhead + 2);
    }
  }

  // From the lane's first run on.
  __device__ __forceinline__ void LoadEntries(Held& held) const {
    const int entry = held.begin + held.first;
    if (entry + kHeld - kAtOnce + kRun <= wide_) {
      ForEachRun([&](int run, int first) {
        if (first + held.first >= held.count || held.count == 0) return;
        LoadRun(columns_ + (entry + first), held.columns[run]);
        LoadRun(values_ + (entry + first), held.values[run]);
      });
    } else {
      ForEachRun([&](int run, int first) {
        LoadSome(columns_, held, first, held.columns[run]);
        LoadSome(values_, held, first, held.values[run]);
      });
    }
  }

  // Whether any of the warp's rows has more than so many from its lanes' first on.
  __device__ __forceinline__ bool AnyHasMore(const Held& held, int entries) const {
    return __any_sync(kAllLanes, held.count - held.first + lane_ * kRun > entries);
  }
  __device__ __forceinline__ bool HasTwoRuns(const Held& held) const {
    return AnyHasMore(held, kAtOnce);
  }

  // The lane's row of the tile that is held, which is that of `step`.
  __device__ __forceinline__ int RowOf(const Held& held, int step) const {
    return kTransposed ? PlaceIn(step) : held.row;
  }

  // Where in the tile the lane's entries belong, for which it waits until columns are there.
  __device__ __forceinline__ void Place(const Held& held, int row, bool two_runs, uint32_t tile,
                                        uint32_t (&places)[kOfLane]) const {
    ForEachRun([&](int run, int) {
      if (run > 0 && !two_runs) return;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        uint32_t& place = places[run * kRun + i];
        place = Part::PlaceOf(tile, row, held.columns[run].Bits(i) % kTileSize);
        KeepInRegister(place);
      }
    });
  }

  // Writes the entries to the tile, where all is 0 yet.
  __device__ __forceinline__ void Write(const Held& held, int row, bool two_runs, uint32_t tile,
                                        uint32_t (&places)[kOfLane]) const {
    WriteHeld(held, two_runs, places);
    if (!two_runs || !AnyHasMore(held, kHeld)) return;
    Held more = held;
#pragma unroll 1
    do {
      more.first += kHeld;
      LoadEntries(more);
      Place(more, row, true, tile, places);
      WriteHeld(more, true, places);
    } while (AnyHasMore(more, kHeld));
  }

  // Whether the columns of all rows rise that it has come to, or would have in step 0.
  __device__ __forceinline__ bool IsOrdered() const {
    return (kTransposed ? ends_ : starts_[place_ + to_end_]) >= 0;
  }

 private:
  __device__ __forceinline__ unsigned char& RowAt(int place) const {
    return SharedAt<unsigned char>(order_ + place);
  }
  // The lane's.
  __device__ __forceinline__ int PlaceIn(int step) const {
    static_assert(kSpmmTileRows == kSpmmTileInner);
    return place_ + step / Shape::kTeams * kProducerRows & kSpmmTileRows - 1;
  }

  __device__ __forceinline__ static uint32_t BitsOf(float x) { return __float_as_uint(x); }
  __device__ __forceinline__ static uint32_t BitsOf(bfloat16 x) { return x.bits; }
  __device__ __forceinline__ static uint32_t BitsOf(float16 x) { return x.bits; }
  __device__ __forceinline__ static uint32_t BitsOf(uint16_t x) { return x; }
  __device__ __forceinline__ static uint32_t BitsOf(int32_t x) { return x; }
  // Whether the row has so many entries in the tile; those before its begin are none.
  __device__ __forceinline__ static bool IsStored(const Held& held, int place) {
    return static_cast<unsigned>(place) < static_cast<unsigned>(held.count);
  }

  template <typename E>
  __device__ __forceinline__ static void LoadRun(const E* from, Run<E>& run) {
    run = *reinterpret_cast<const Run<E>*>(from);
  }
  // The same of those that the row has, one by one; `first` is the run's place behind the lane's
  // first.
  template <typename E>
  __device__ __forceinline__ static void LoadSome(const E* array, const Held& held, int first,
                                                  Run<E>& run) {
    run = {};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int place = held.first + first + i;
      if (IsStored(held, place)) run.SetBits(i, BitsOf(array[held.begin + place]));
    }
  }

  // Calls with each of a lane's runs and its place behind the lane's first.
  template <typename Function>
  __device__ __forceinline__ static void ForEachRun(Function function) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) function(run, run * kAtOnce);
  }
  __device__ __forceinline__ void WriteHeld(const Held& held, bool two_runs,
                                            const uint32_t (&places)[kOfLane]) const {
    ForEachRun([&](int run, int first) {
      if (run > 0 && !two_runs) return;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        TileA::WriteIf(IsStored(held, held.first + first + i), places[run * kRun + i],
                       held.values[run].Bits(i));
      }
    });
  }
};

}  // namespace jaxsparse
