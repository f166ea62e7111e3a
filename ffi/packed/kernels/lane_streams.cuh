// Streams of lanes (packed/problem.h): how a warp brings those of a piece to shared memory, and
// reads fragments of 16 x 16 places from there.
//
// Rows of words pass through a ring. Word w of lane l stands l-th in row w, so each lane reads its
// own bank and no two wait for one another; which words are stored, a lane knows from its masks
// alone. Four fragments may read on behind the end of the ring, where copies of its first rows
// stand, so that places are brought back into it once for them.
#pragma once

#include "cuda/device.cuh"
#include "packed/kernels/lane_streams.h"

namespace jaxsparse {

// What is stored of a piece, in memory. Whatever its arrays say, nothing is outside of them.
struct PackedPiece {
  const unsigned char* words;
  const uint32_t* masks;
  // x: rows that all streams are through with when it begins, y: that are read when it ends.
  const Words2* panels;
  uint32_t rows;  // of words
  uint32_t panel_count;

  PackedPiece() = default;
  __device__ PackedPiece(const PackedProblem& p, int64_t piece)
      : PackedPiece(p, piece, static_cast<uint32_t>(PackedPanels(p.k, p.parts))) {}
  // Where it is known how many panels the piece has.
  __device__ PackedPiece(const PackedProblem& p, int64_t piece, uint32_t panel_count)
      : panel_count(panel_count) {
    const int32_t* starts = static_cast<const int32_t*>(p.starts.data) + piece;
    const uint32_t begin = RowBounds::Clamp(starts[0], p.words);
    const uint32_t end = RowBounds::Clamp(starts[1], p.words);
    rows = end > begin ? end - begin : 0;
    words = static_cast<const unsigned char*>(p.values.data) +
            static_cast<int64_t>(begin) * kPackedRowBytes;
    const int64_t panel = piece * panel_count;
    masks = static_cast<const uint32_t*>(p.masks.data) +
            panel * (kPackedPanelMasks / (p.cell == 1 ? 1 : 2)) * kWarp;
    panels = static_cast<const Words2*>(p.panels.data) + panel;
  }
  // Has what a thread reads first of one be on its way.
  __device__ static void Prefetch(const PackedProblem& p, int64_t piece, uint32_t panel_count) {
    jaxsparse::Prefetch(static_cast<const int32_t*>(p.starts.data) + piece);
    if (panel_count == 0) return;
    jaxsparse::Prefetch(static_cast<const Words2*>(p.panels.data) + piece * panel_count);
  }
};

// What `panels` says, panel by panel: lanes hold those of 32 panels, and the next ones are on their
// way.
class PackedPanelRows {
  const PackedPiece& piece_;
  Words2 now_, next_;

  __device__ Words2 Load(uint32_t first) const {
    const uint32_t at = first + threadIdx.x % kWarp;
    return at < piece_.panel_count ? piece_.panels[at] : Words2{};
  }

 public:
  __device__ explicit PackedPanelRows(const PackedPiece& piece)
      : piece_(piece), now_(Load(0)), next_(Load(kWarp)) {}

  // Of each panel in turn, by all lanes.
  __device__ __forceinline__ Words2 At(uint32_t panel) {
    const uint32_t lane = panel % kWarp;
    if (lane == 0 && panel > 0) {
      now_ = next_;
      next_ = Load(panel + kWarp);
    }
    return {__shfl_sync(kAllLanes, now_.x, lane), __shfl_sync(kAllLanes, now_.y, lane)};
  }
};

// Rows of a piece from one on, of which one thread asks for bulk copies to a ring of so many.
template <int kRingRows>
class PackedBulkRows {
  uint32_t begin_, place_, first_, rest_, behind_, again_;

 public:
  // Up to `end`, but no more than there are, nor than the ring has room for. The first one is
  // number `at` of all that pass through the ring.
  __device__ __forceinline__ PackedBulkRows(const PackedPiece& piece, uint32_t begin, uint32_t end,
                                            uint32_t at)
      : begin_(begin), place_(at % kRingRows) {
    const uint32_t most = begin + kRingRows;
    end = end < piece.rows ? end : piece.rows;
    end = end < begin ? begin : end < most ? end : most;
    const uint32_t count = end - begin, place = place_;
    const uint32_t room = kRingRows - place;
    first_ = count < room ? count : room;
    rest_ = count - first_;  // from the beginning of the ring on
    // Copies of rows at the beginning: of the rest behind the first ones, without a copy more.
    behind_ = rest_ < kPackedMirroredRows ? rest_ : kPackedMirroredRows;
    const uint32_t mirrored = place < kPackedMirroredRows ? kPackedMirroredRows - place : 0;
    again_ = first_ < mirrored ? first_ : mirrored;
  }

  __device__ __forceinline__ uint32_t End() const { return begin_ + first_ + rest_; }
  __device__ __forceinline__ uint32_t Bytes() const {
    return (first_ + rest_ + behind_ + again_) * kPackedRowBytes;
  }
  __device__ __forceinline__ void Copy(const PackedPiece& piece, uint32_t ring,
                                       uint64_t* barrier) const {
    const auto copy = [barrier](uint32_t to, const unsigned char* rows, uint32_t count) {
      if (count > 0) BulkCopy(&SharedAt<char>(to), rows, count * kPackedRowBytes, barrier);
    };
    const unsigned char* from = piece.words + static_cast<int64_t>(begin_) * kPackedRowBytes;
    const uint32_t to = ring + place_ * kPackedRowBytes;
    copy(to, from, first_ + behind_);
    copy(ring, from + first_ * kPackedRowBytes, rest_);
    copy(to + kRingRows * kPackedRowBytes, from, again_);
  }
};

// The words and masks of a warp's piece on their way to shared memory, asked for in turns: turn 0
// asks for what the first panels read, turn t + 1 for what there is room for when panel t begins.
// Methods are called by all lanes.
template <int kCell, bool kBulk>
class PackedArrivals {
  static constexpr int kRingBytes = kPackedRingRows * kPackedRowBytes;
  static constexpr int kMasksBytes = PackedMasksBytes(kCell);
  const PackedPiece& piece_;
  uint32_t ring_, masks_;
  uint64_t* barriers_;
  uint32_t asked_ = 0;              // rows
  uint32_t turn_ = 0, waited_ = 0;  // turns that have begun, and that have ended

  // By lanes of 16 bytes each, four rows at once.
  __device__ __forceinline__ void CopyRows(uint32_t end) {
    constexpr int kAtOnce = 4;
    static_assert(kPackedRingRows % kAtOnce == 0 && kPackedMirroredRows % kAtOnce == 0);
    const uint32_t lane = threadIdx.x % kWarp;
    for (; asked_ < piece_.rows && asked_ + kAtOnce <= end; asked_ += kAtOnce) {
      if (asked_ + lane / 8 >= piece_.rows) continue;
      const uint32_t place = asked_ % kPackedRingRows;
      const uint32_t to = ring_ + place * kPackedRowBytes + lane * 16;
      const unsigned char* from =
          piece_.words + static_cast<int64_t>(asked_) * kPackedRowBytes + lane * 16;
      AsyncCopy(to, from);
      if (place < kPackedMirroredRows) AsyncCopy(to + kRingBytes, from);
    }
  }
  __device__ __forceinline__ void CopyMasks(uint32_t panel, int stage) const {
    const uint32_t lane = threadIdx.x % kWarp;
    if (lane < kMasksBytes / 16) {
      AsyncCopy(masks_ + stage * kMasksBytes + lane * 16,
                reinterpret_cast<const unsigned char*>(piece_.masks) +
                    static_cast<int64_t>(panel) * kMasksBytes + lane * 16);
    }
  }

  __device__ __forceinline__ void AskInBulk(uint32_t end, uint32_t first_panel, int panels,
                                            int stage) {
    const PackedBulkRows<kPackedRingRows> rows(piece_, asked_, end, asked_);
    if (threadIdx.x % kWarp == 0) {
      uint64_t* barrier = barriers_ + turn_ % kPackedTurns;
      ArriveAndExpect(barrier, rows.Bytes() + panels * kMasksBytes);
      rows.Copy(piece_, ring_, barrier);
      if (panels > 0) {
        BulkCopy(&SharedAt<char>(masks_ + stage * kMasksBytes),
                 reinterpret_cast<const unsigned char*>(piece_.masks) +
                     static_cast<int64_t>(first_panel) * kMasksBytes,
                 panels * kMasksBytes, barrier);
      }
    }
    asked_ = rows.End();
  }

 public:
  __device__ PackedArrivals(const PackedPiece& piece, uint32_t ring, uint32_t masks,
                            uint64_t* barriers)
      : piece_(piece), ring_(ring), masks_(masks), barriers_(barriers) {
    if constexpr (kBulk) {
      if (threadIdx.x % kWarp == 0) {
        for (int turn = 0; turn < kPackedTurns; ++turn) InitBarrier(barriers_ + turn, 1);
        FenceShared();
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ uint32_t asked() const { return asked_; }

  // Begins a turn: asks for as many rows as there is room for if all streams are through with
  // `free` of them, and for the masks of some panels, into their stages.
  __device__ __forceinline__ void Ask(uint32_t free, uint32_t first_panel, int panels, int stage) {
    const uint32_t left = first_panel < piece_.panel_count ? piece_.panel_count - first_panel : 0;
    panels = left < static_cast<uint32_t>(panels) ? static_cast<int>(left) : panels;
    if constexpr (kBulk) {
      AskInBulk(free + kPackedRingRows, first_panel, panels, stage);
    } else {
      for (int i = 0; i < panels; ++i) CopyMasks(first_panel + i, stage + i);
      CopyRows(free + kPackedRingRows);
      CommitCopies();
    }
    ++turn_;
  }

  // Waits for all turns but so many of the latest.
  template <int kPending>
  __device__ __forceinline__ void WaitForTurns() {
    if constexpr (kBulk) {
#pragma unroll 1
      for (; waited_ + kPending < turn_; ++waited_) {
        WaitForPhase(barriers_ + waited_ % kPackedTurns, waited_ / kPackedTurns % 2);
      }
    } else {
      WaitForCopyGroups<kPending>();
      __syncwarp();
    }
  }

  __device__ __forceinline__ uint32_t Mask(int stage, int step) const {
    return SharedAt<const uint32_t>(masks_ + stage * kMasksBytes + step * kPackedRowBytes +
                                    threadIdx.x % kWarp * 4);
  }
};

// Where a lane is in a stream, as an address in a ring.
template <int kRingRows>
struct PackedPlace {
  static constexpr uint32_t kBytes = kRingRows * kPackedRowBytes;
  uint32_t at;

  // Back into the ring, which begins there for the lane. The copy of its first row stands for that
  // row, so that a row is in front of wherever the lane is.
  __device__ __forceinline__ void Wrap(uint32_t begin) {
    if (at > begin + kBytes) at -= kBytes;
  }
  // Row 0 is entered at its copy behind the ring, because reads may be one row in front.
  __device__ __forceinline__ void Begin(uint32_t row, uint32_t begin) {
    at = begin + (row == 0 ? kBytes : row * kPackedRowBytes);
  }
  // No stream is more than kPackedDrift rows behind the longest, which has `rows`.
  __device__ __forceinline__ void PadTo(uint32_t rows, uint32_t begin) {
    constexpr uint32_t kMost = kPackedDrift * kPackedRowBytes;
    const uint32_t behind = (rows * kPackedRowBytes + 2 * kBytes - (at - begin)) % kBytes;
    at += (behind > kMost ? behind : kMost) - kMost;
  }
};

// A lane's streams of a piece, which begin at a row of the ring. Fragments() makes the next ones,
// from the first one on of a step that has that mask, as mma.m16n8k16 takes them: some at once,
// four between two calls of Wrap().
//
// If a number is stored, it stands where the lane is before its bit is counted, and one row in
// front of where the lane is after that. So one addition, between two numbers, serves both. Bits
// that are neighbours in `mask` become predicates together, by one instruction, because loops ask
// for them in that order.
template <int kCell, int kRingRows = kPackedRingRows>
struct LaneStreams;

template <int kRingRows>
struct LaneStreams<1, kRingRows> {
  uint32_t begin;  // of the ring, for the lane
  PackedPlace<kRingRows> first, second;

  __device__ explicit LaneStreams(uint32_t ring) : begin(ring + threadIdx.x % kWarp * 4) {
    Begin(0);
  }

  __device__ __forceinline__ void Begin(uint32_t row) {
    first.Begin(row, begin);
    second.Begin(row, begin + 2);
  }
  __device__ __forceinline__ void Wrap() {
    first.Wrap(begin);
    second.Wrap(begin + 2);
  }
  __device__ __forceinline__ void PadTo(uint32_t rows) {
    first.PadTo(rows, begin);
    second.PadTo(rows, begin + 2);
  }

  // Bit h of byte 2 j + e tells whether number e of pair j of half h of fragments is stored.
  template <int kCount>
  __device__ __forceinline__ void Fragments(uint32_t mask, int fragment, uint32_t (&a)[kCount][4]) {
    constexpr int kHalves = 2 * kCount;
    uint32_t at[2][kHalves + 1];  // of each stream, in front of each half
    mask >>= 2 * fragment;
    at[0][0] = first.at, at[1][0] = second.at;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      // Each constant takes an instruction: upper bits share those of the lower ones.
      const uint32_t stored = mask >> h / 4 * 4 & 0x01010101u << h % 4;
      const uint32_t row = kPackedRowBytes >> h % 4;
      at[0][h + 1] = AddProductsOfBytes(stored, 0x00010001u * row, at[0][h]);
      at[1][h + 1] = AddProductsOfBytes(stored, 0x01000100u * row, at[1][h]);
    }
    first.at = at[0][kHalves], second.at = at[1][kHalves];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        a[h / 2][h % 2 * 2 + j] = LoadSharedOrZero<uint16_t>(at[0][h + j] - j * kPackedRowBytes,
                                                             mask & 1u << (16 * j + h));
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const uint32_t number = SharedAt<const uint16_t>(at[1][h + j] - j * kPackedRowBytes);
        SetHighHalfIf(mask & 1u << (16 * j + 8 + h), number, &a[h / 2][h % 2 * 2 + j]);
      }
    }
  }
};

template <int kRingRows>
struct LaneStreams<2, kRingRows> {
  uint32_t begin;
  PackedPlace<kRingRows> pairs;

  __device__ explicit LaneStreams(uint32_t ring) : begin(ring + threadIdx.x % kWarp * 4) {
    Begin(0);
  }

  __device__ __forceinline__ void Begin(uint32_t row) { pairs.Begin(row, begin); }
  __device__ __forceinline__ void Wrap() { pairs.Wrap(begin); }
  __device__ __forceinline__ void PadTo(uint32_t rows) { pairs.PadTo(rows, begin); }

  // Bit f of byte q tells whether register q of fragment f is stored.
  template <int kCount>
  __device__ __forceinline__ void Fragments(uint32_t mask, int fragment, uint32_t (&a)[kCount][4]) {
    uint32_t at[2 * kCount + 1];  // in front of each two registers
    mask >>= fragment;
    at[0] = pairs.at;
#pragma unroll
    for (int f = 0; f < kCount; ++f) {
      const uint32_t stored = mask & 0x01010101u << f, row = kPackedRowBytes >> f;
      at[2 * f + 1] = AddProductsOfBytes(stored, 0x00000101u * row, at[2 * f]);
      at[2 * f + 2] = AddProductsOfBytes(stored, 0x01010101u * row, at[2 * f]);
    }
    pairs.at = at[2 * kCount];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int f = 0; f < kCount; ++f) {
        a[f][q] = LoadSharedOrZero<uint32_t>(at[2 * f + (q + 1) / 2] - q % 2 * kPackedRowBytes,
                                             mask & 1u << (8 * q + f));
      }
    }
  }
};

}  // namespace jaxsparse
