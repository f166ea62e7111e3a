// The kernel of cotangents of queries on the host: its instances and its launch.
#include "attention/kernels/rows.h"

#include <cuda_runtime_api.h>

#include <string>

#include "attention/kernels/cotangent_launch.h"
#include "attention/kernels/score_source.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

AttentionRowsConfig ConfigOf(const AttentionCotangentProblem& p) {
  return {static_cast<int>(p.head_size)};
}

KernelSource Source(const AttentionCotangentProblem& p) {
  return WithScores(
      p.scores, "attention/kernels/rows.cu", "AttentionCotangentOfRows", TypeName(p.dtype),
      ConfigExpression("AttentionRowsConfig", {Field("head_size", ConfigOf(p).head_size)}));
}

LaunchShape Shape(const AttentionCotangentProblem& p) {
  return ShapeOf(p, RowItemsOf(p), ConfigOf(p).SharedBytes());
}

std::string Launch(const AttentionCotangentProblem& p, const CudaLaunch& launch) {
  const ScopedDevice scoped(launch.device);
  const cudaError_t status = cudaMemsetAsync(p.workspace.data, 0, kCotangentWorkspaceBytes,
                                             static_cast<cudaStream_t>(launch.stream));
  if (status != cudaSuccess) return cudaGetErrorString(status);
  const std::string reason = ClearWholeCotangents(p, launch);
  if (!reason.empty()) return reason;
  return LaunchCotangent(p, launch, RowItemsOf(p), kMaskCell, kMaskTile);
}

}  // namespace

std::string ClearWholeCotangents(const AttentionCotangentProblem& p, const CudaLaunch& launch) {
  const ScopedDevice scoped(launch.device);
  const int64_t scores = p.batch.count * p.groups * p.per_group * p.queries * p.keys;
  for (int i = 0; i < p.scores.gradients; ++i) {
    if (p.scores.sums[i] != ScoreSums::kNone) continue;
    const cudaError_t status =
        cudaMemsetAsync(p.scores.ct_values[i].data, 0, static_cast<size_t>(scores) * sizeof(float),
                        static_cast<cudaStream_t>(launch.stream));
    if (status != cudaSuccess) return cudaGetErrorString(status);
  }
  return "";
}

extern constinit const CudaKernel<AttentionCotangentProblem> kAttentionCotangentOfRows = {
    Source, Shape, Launch};

}  // namespace jaxsparse
