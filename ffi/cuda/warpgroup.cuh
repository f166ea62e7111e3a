// Products of tiles on the tensor cores of a warpgroup; those of float32 as exact as in float32
// (see cuda/tensor_cores.cuh for the components that a number is split into).
//
// `a` passes through registers: from shared memory as it is, to be split, or from there in
// components, or it stays in registers. `b` lies in shared memory in components, which tensor cores
// read.
#pragma once

#include "cuda/tensor_cores.cuh"
#include "cuda/warpgroup_instructions.cuh"

namespace jaxsparse {

constexpr int kWarpgroup = 4 * kWarp;

// d += a b, or without kAdd d = a b, of matrices in shared memory whose numbers are of the first
// argument's type (MultiplySharedBfloats).
template <bool kAdd, int kCount>
__device__ __forceinline__ void MultiplyShared(bfloat16, float (&d)[kCount], uint64_t a,
                                               uint64_t b) {
  MultiplySharedBfloats<kAdd>(d, a, b);
}
template <bool kAdd, int kCount>
__device__ __forceinline__ void MultiplyShared(float16, float (&d)[kCount], uint64_t a,
                                               uint64_t b) {
  MultiplySharedHalves<kAdd>(d, a, b);
}

// Which of its block's a thread's warp is, and its warpgroup, in a way that tells a compiler that
// all lanes agree.
__device__ __forceinline__ int WarpOfBlock() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0);
}
__device__ __forceinline__ int WarpgroupOfBlock() { return WarpOfBlock() * kWarp / kWarpgroup; }

// A tile of rows of kWidth numbers as they are, with space behind each row, so that lanes that read
// eight rows find them in different banks.
template <typename T, int kRowCount, int kWidth>
struct PlainTile {
  static constexpr int kPitch = kWidth + 8;  // numbers
  static constexpr int kRowBytes = kPitch * sizeof(T);
  static constexpr int kBytes = kRowCount * kRowBytes;
};

// Components of a tile of kHeight lines of kWidth numbers, in blocks of at most 64 numbers of each
// line.
template <int kHeight, int kWidth>
struct BlockedTile {
  static constexpr int kBlockWidth = kWidth < 64 ? kWidth : 64;
  using Block = SwizzledTile<kHeight, kBlockWidth>;
  static constexpr int kBytes = kWidth / kBlockWidth * Block::kBytes;
  static_assert(kWidth % kBlockWidth == 0);

  __device__ __forceinline__ static int At(int line, int at) {
    return at / kBlockWidth * Block::kBytes + Block::At(line, at % kBlockWidth);
  }
};

// The components of 64 rows of kInner numbers in the registers of a warpgroup, placed as its tensor
// cores take them.
template <typename T, int kInner>
struct WarpgroupRows {
  static constexpr int kSteps = kInner / 16;
  uint32_t components[kComponents<T>][kSteps][4];

  // Of shared memory that each warp passes its rows through.
  static constexpr int kPartWidth = 32;
  using Part = SwizzledTile<16, kPartWidth>;
  static constexpr int kSpaceBytes = kComponents<T> * Part::kBytes;

  // From row `first` on of a row-major matrix; `space` is the warp's. Places beyond the matrix
  // are 0. By whole lines: loads of the pairs that tensor cores take had 64 KB take 6 us.
  __device__ __forceinline__ void Load(const T* matrix, int64_t height, int64_t width,
                                       int64_t first, unsigned char* space) {
    constexpr int kParts = kInner / kPartWidth;
    const int warp = threadIdx.x % kWarpgroup / kWarp, lane = threadIdx.x % kWarp;
    TileInRegisters<T, Part::kRows, kPartWidth, kWarp> parts[kParts];
    const auto load = [&](bool wide) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        parts[i].Load(matrix, height, width, first + warp * Part::kRows, i * kPartWidth, wide,
                      lane);
      }
    };
    if (parts[0].IsWide(matrix, width)) load(true);
    else load(false);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts[i].Store(space, lane);
      __syncwarp();
#pragma unroll
      for (int component = 0; component < kComponents<T>; ++component) {
#pragma unroll
        for (int at = 0; at < kPartWidth; at += 16) {
          LoadMatrices(components[component][(i * kPartWidth + at) / 16],
                       space + component * Part::kBytes + Part::At(lane % 16, at + lane / 16 * 8));
        }
      }
      __syncwarp();
    }
  }
};

// One warpgroup's part of a product: 64 rows by kColumns columns.
template <typename T, int kColumns>
struct WarpgroupProduct {
  static constexpr int kBlockColumns = kColumns < 64 ? kColumns : 64;
  static constexpr int kBlocks = kColumns / kBlockColumns;
  static constexpr int kCount = kBlockColumns / 2;  // of a lane, in a block
  float sums[kBlocks][kCount] = {};

  // Calls with (row, column, two neighbouring sums) for each pair that this lane has.
  template <typename Function>
  __device__ __forceinline__ void ForEachPair(Function function) const {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        function(thread / kWarp * 16 + i / 2 % 2 * 8 + lane / 4,
                 block * kBlockColumns + i / 4 * 8 + lane % 4 * 2, sums[block][i],
                 sums[block][i + 1]);
      }
    }
  }

  // Adds the product over kInner places of the inner dimension from `first` on, as many as
  // registers have room for. `a` is the first of 64 rows of a PlainTile<T, ..., kPitch - 8>, `b`
  // the first component of a BlockedTile: its blocks' lines are columns of the product or,
  // transposed, places of the inner dimension.
  template <int kPitch, int kInner, typename TileB, bool kTransposed>
  __device__ __forceinline__ void Add(uint32_t a, uint32_t b, int first) {
    constexpr int kSteps = kInner / 16;
    uint32_t of_a[kComponents<T>][kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      LoadRows<kPitch>(of_a, step, a + (first + step * 16) * sizeof(T));
    }
    float part[kBlocks][kCount];
    AddSteps<TileB, kTransposed, kSteps>(part, of_a, 0, b, first);
  }

  // The same of rows that lie in components there, too, one behind the other from `a` on.
  template <typename TileA, int kInner, typename TileB, bool kTransposed>
  __device__ __forceinline__ void AddComponents(const unsigned char* a, uint32_t b, int first) {
    constexpr int kSteps = kInner / 16;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    uint32_t of_a[kComponents<T>][kSteps][4];
#pragma unroll
    for (int component = 0; component < kComponents<T>; ++component) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        LoadMatrices(of_a[component][step], a + component * TileA::kBytes +
                                                TileA::At(thread / kWarp * 16 + lane % 16,
                                                          first + step * 16 + lane / 16 * 8));
      }
    }
    float part[kBlocks][kCount];
    AddSteps<TileB, kTransposed, kSteps>(part, of_a, 0, b, first);
  }

  // The same of rows that are in registers.
  template <typename TileB, bool kTransposed, int kInner>
  __device__ __forceinline__ void Add(const WarpgroupRows<T, kInner>& a, uint32_t b) {
    constexpr int kSteps = kComponents<T> > 1 ? 2 : kInner / 16;  // that are summed there
    float part[kBlocks][kCount];
#pragma unroll
    for (int k = 0; k < kInner; k += 16 * kSteps) {
      AddSteps<TileB, kTransposed, kSteps>(part, a.components, k / 16, b, k);
    }
  }

 private:
  // Adds the product over 16 * kSteps places from `k` on; those of `a` begin at its step `first`.
  template <typename TileB, bool kTransposed, int kSteps, int kStepsOfA>
  __device__ __forceinline__ void AddSteps(float (&part)[kBlocks][kCount],
                                           const uint32_t (&a)[kComponents<T>][kStepsOfA][4],
                                           int first, uint32_t b, int k) {
    static_assert(kTransposed || kBlocks == 1);
    const auto place_of = [](int from) {  // in a component
      return kTransposed
                 ? from * TileB::kBlockWidth * 2
                 : from / TileB::kBlockWidth * TileB::Block::kBytes + from % TileB::kBlockWidth * 2;
    };
    const uint64_t first_component = SharedMatrix<TileB::kBlockWidth>(b + place_of(k));
    const auto matrix_at = [&](int component, int block, int step) {
      return Behind(first_component, component * TileB::kBytes + block * TileB::Block::kBytes +
                                         (place_of(k + step * 16) - place_of(k)));
    };
    const auto add = [&](auto number, float (&to)[kBlocks][kCount], int of_a, int of_b) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const uint64_t matrix = matrix_at(of_b, block, step);
          const bool is_first =
              kComponents<T> > 1 && of_a == 0 && of_b == kComponents<T> - 1 && step == 0;
          const auto& rows = a[of_a][first + step];
          if (is_first) MultiplyAddBfloats<kTransposed, false>(to[block], rows, matrix);
          else MultiplyAdd<kTransposed>(number, to[block], rows, matrix);
        }
      }
    };
    if constexpr (kComponents<T> == 1) {
      BeginProducts(sums);
      add(T(), sums, 0, 0);
      WaitForProducts(sums);
    } else {
      // The smallest products first, as what is added is cut off.
      BeginProducts(part);
#pragma unroll
      for (int order = kComponents<T> - 1; order >= 0; --order) {
#pragma unroll
        for (int i = 0; i <= order; ++i) add(bfloat16(), part, i, order - i);
      }
      WaitForProducts(part);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[block][i] += part[block][i];
      }
    }
  }

  // This lane's part of 64 rows by 16 places.
  template <int kPitch, int kSteps>
  __device__ __forceinline__ static void LoadRows(uint32_t (&to)[kComponents<T>][kSteps][4],
                                                  int step, uint32_t a) {
    using Pair = Vector<T, 2>;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    const uint32_t from =
        a + ((thread / kWarp * 16 + lane / 4) * kPitch + lane % 4 * 2) * sizeof(T);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const Pair pair =
          SharedAt<const Pair>(from + (word % 2 * 8 * kPitch + word / 2 * 8) * sizeof(T));
      uint32_t words[kComponents<T>];
      Split(pair.elements[0], pair.elements[1], words);
#pragma unroll
      for (int component = 0; component < kComponents<T>; ++component)
        to[component][step][word] = words[component];
    }
  }
};

}  // namespace jaxsparse
