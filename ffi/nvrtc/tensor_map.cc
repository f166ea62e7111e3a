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

}  // namespace

std::string EncodeTensorMap(const MatricesOfHalves& matrices, TensorMap* map) {
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
  const Encode encode = DriversEncode();
  if (encode == nullptr) return "the driver has no tensor maps";
  constexpr cuuint32_t kRank = 3;
  const auto row_bytes = static_cast<cuuint64_t>(matrices.width) * 2;
  const cuuint64_t sizes[kRank] = {static_cast<cuuint64_t>(matrices.width),
                                   static_cast<cuuint64_t>(matrices.lines),
                                   static_cast<cuuint64_t>(matrices.count)};
  const cuuint64_t strides[kRank - 1] = {row_bytes,
                                         row_bytes * static_cast<cuuint64_t>(matrices.lines)};
  const cuuint32_t tile[kRank] = {kTileSize, kTileSize, 1};
  const cuuint32_t steps[kRank] = {1, 1, 1};
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_UINT16, kRank,
             const_cast<void*>(matrices.data), sizes, strides, tile, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? "" : "a tensor map: error " + std::to_string(result);
}

}  // namespace jaxsparse
