#include "nvrtc/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace jaxsparse {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, which is looked for once; null if it has none.
Encode DriversEncode() {
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    constexpr unsigned kSince = 12000;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSince,
                                         cudaEnableDefault, &result) != cudaSuccess) {
      cudaGetLastError();  // leave no error behind for the next caller on this thread
    }
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  return encode;
}

// The swizzle that orders 16-byte chunks as SwizzledTile does.
CUtensorMapSwizzle SwizzleOf(cuuint32_t width) {
  return width == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
         : width == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
         : width == 16 ? CU_TENSOR_MAP_SWIZZLE_32B
                       : CU_TENSOR_MAP_SWIZZLE_NONE;
}

// Boxes of an array of kRank dimensions; strides in bytes, of all dimensions but the innermost.
template <cuuint32_t kRank>
std::string EncodeBoxes(const void* data, const cuuint64_t (&sizes)[kRank],
                        const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
                        TensorMap* map) {
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
  const Encode encode = DriversEncode();
  if (encode == nullptr) return "the driver has no tensor maps";
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult result = encode(
      reinterpret_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_UINT16, kRank,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      SwizzleOf(box[0]), CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? "" : "a tensor map: error " + std::to_string(result);
}

}  // namespace

std::string EncodeTensorMap(const MatricesOfHalves& matrices, TensorMap* map,
                            const TileOfHalves& tile) {
  // A single row has no neighbour, but its stride must be a valid stride, a multiple of 16 bytes.
  const bool is_single = matrices.count == 1 && matrices.lines == 1;
  const int64_t width = is_single ? CeilDivide(matrices.width, 8) * 8 : matrices.width;
  const auto row_bytes = static_cast<cuuint64_t>(width) * 2;
  const auto lines = static_cast<cuuint64_t>(matrices.lines);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrices.width), lines,
                              static_cast<cuuint64_t>(matrices.count)};
  const cuuint64_t strides[] = {row_bytes, row_bytes * lines};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(tile.width),
                            static_cast<cuuint32_t>(tile.lines), 1};
  return EncodeBoxes<3>(matrices.data, sizes, strides, box, map);
}

std::string EncodeTensorMap(const ArrayOfHalves& array, int lines, TensorMap* map) {
  cuuint64_t sizes[4], strides[3];
  for (int d = 0; d < 4; ++d) sizes[d] = static_cast<cuuint64_t>(array.sizes[d]);
  for (int d = 0; d < 3; ++d) strides[d] = static_cast<cuuint64_t>(array.strides[d]) * 2;
  const cuuint32_t box[] = {kTileSize, 1, static_cast<cuuint32_t>(lines), 1};
  return EncodeBoxes<4>(array.data, sizes, strides, box, map);
}

}  // namespace jaxsparse
