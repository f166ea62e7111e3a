// Puts items together that several blocks of attention with few queries had parts of
// (attention/kernels/decode.cu), and writes the rows of those that see nothing.
//
// A block is there for each cut of the line, and works on the item that is cut there first. Its
// floor is to read what these blocks have left: for each of them at most two parts of 16 rows.
#include "attention/kernels/decode_line.cuh"
#include "attention/kernels/softmax.cuh"

namespace jaxsparse {

template <typename T>
class DecodeMerger {
  const AttentionDecodeProblem& p_;
  DecodeItem& item_;

 public:
  __device__ __forceinline__ DecodeMerger(const AttentionDecodeProblem& p, DecodeItem& item)
      : p_(p), item_(item) {}

  // The item of the line's tiles from `begin` to `end`. `first` is the block that has its first
  // tile.
  __device__ __forceinline__ void Merge(uint32_t tiles, uint32_t begin, uint32_t end,
                                        uint32_t first) const {
    const uint32_t last = BlockOf(tiles, end - 1);
    const bool is_second = BeginOfBlock(tiles, p_.blocks, first) != begin;
    const auto size = static_cast<uint32_t>(p_.value_size);
    const auto part = [&](uint32_t block) {
      return DecodePart(p_, block, block == first && is_second);
    };
    // A line may have fewer tiles than there are blocks, of which some have no part then.
    const auto for_each_part = [&](auto function) {
#pragma unroll 4
      for (uint32_t block = first; block <= last; ++block) {
        const bool has_some = tiles >= p_.blocks || BeginOfBlock(tiles, p_.blocks, block) !=
                                                        BeginOfBlock(tiles, p_.blocks, block + 1);
        if (has_some) function(part(block));
      }
    };
#pragma unroll 1
    for (uint32_t at = threadIdx.x; at < item_.rows * size; at += blockDim.x) {
      const uint32_t row = at / size, column = at - row * size;
      float most = kNoScore, total = 0, sum = 0;
      for_each_part([&](const DecodePart& of) { most = fmaxf(most, of.Shift(row)); });
      const float shift = most == kNoScore ? 0.0f : most;
      for_each_part([&](const DecodePart& of) {
        const float factor = ApproximateExp2(of.Shift(row) - shift);
        total += factor * of.Total(row);
        sum += factor * of.Sum(row, column);
      });
      Write(row, column, total == 0 ? 0.0f : sum / total, LogOfSums(most, total));
    }
  }

  __device__ __forceinline__ void WriteNothing() const {
    const auto size = static_cast<uint32_t>(p_.value_size);
#pragma unroll 1
    for (uint32_t at = threadIdx.x; at < item_.rows * size; at += blockDim.x) {
      Write(at / size, at % size, 0, kNoScore);
    }
  }

  // The block whose part of the line has a tile.
  __device__ __forceinline__ uint32_t BlockOf(uint32_t tiles, uint32_t tile) const {
    return static_cast<uint32_t>((MultiplyWide(tile + 1, p_.blocks) - 1) / tiles);
  }

 private:
  __device__ __forceinline__ void Write(uint32_t row, uint32_t column, float number,
                                        float lse) const {
    const DecodeItem::Row at = item_.RowAt(p_, row);
    const auto size = static_cast<uint32_t>(p_.value_size);
    FromAccumulator(number, &item_.NumbersOf<T>(p_, p_.out, at, size)[column]);
    if (column == 0) *item_.LseOf(p_, at) = lse;
  }
};

template <typename T, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp)
    AttentionDecodeMerge(const __grid_constant__ AttentionDecodeProblem p) {
  static __shared__ DecodeSearch shared;
  static __shared__ DecodeItem item;
  const DecodeMerger<T> merger(p, item);
  WaitForPrologue();
  const DecodeLine<kWarps> line(p, shared);
  const uint32_t tiles = line.Tiles(), block = blockIdx.x;
  const uint32_t cut = BeginOfBlock(tiles, p.blocks, block);
  if (block > 0 && cut < tiles && cut != BeginOfBlock(tiles, p.blocks, block - 1)) {
    const DecodePlace at = line.Find(cut);
    const uint32_t begin = cut - at.tile, first = merger.BlockOf(tiles, begin);
    if (at.tile > 0 && BeginOfBlock(tiles, p.blocks, first + 1) == cut) {
      if (threadIdx.x == 0) item.Set(p, at.list, at.item);
      __syncthreads();
      merger.Merge(tiles, begin, begin + at.tiles, first);
    }
  }
#pragma unroll 1
  for (uint32_t list = block; list < p.lists; list += p.blocks) {
    if (TilesOfList(p, list) != 0) continue;
#pragma unroll 1
    for (uint32_t i = 0; i < p.items_of_list; ++i) {
      __syncthreads();
      if (threadIdx.x == 0) item.Set(p, list, i);
      __syncthreads();
      merger.WriteNothing();
    }
  }
}

}  // namespace jaxsparse
