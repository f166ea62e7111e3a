// The prologue of cotangents by the rows of a pattern (attention/kernels/csr_cotangent.cu), which
// begins meanwhile.
//
// An entry of a row of keys reads two numbers of its query. Side by side they are one access to one
// sector. Bytes: those of lse and ct_sums, read and written once.
#include "attention/kernels/csr_pass.cuh"

namespace jaxsparse {

template <typename Acc>
__global__ void __launch_bounds__(kCsrThreads)
    AttentionCsrPrologue(const __grid_constant__ AttentionCsrCotangentProblem p) {
  static __shared__ BatchPlace place;
  LetNextKernelBegin();
  const auto blocks = static_cast<uint32_t>(gridDim.x / p.batch.count);  // of a batch entry
  const uint32_t entry = blockIdx.x / blocks;
  if (threadIdx.x == 0) place.Set(p.batch, entry);
  __syncthreads();
  const int64_t rows = p.groups * p.per_group * p.queries;
  const Acc* lse = place.At<const Acc>(p.batch, p.lse);
  const Acc* ct_sums = place.At<const Acc>(p.batch, p.ct_sums);
  CsrQuery<Acc>* to = static_cast<CsrQuery<Acc>*>(p.queries_in_pairs) + entry * rows;
  const int64_t thread = int64_t{blockIdx.x % blocks} * kCsrThreads + threadIdx.x;
  for (int64_t i = thread; i < rows; i += int64_t{blocks} * kCsrThreads) {
    to[i] = {Log2Of(lse[i]), ct_sums[i]};
  }
  if (entry > 0) return;
  for (int64_t i = thread; i < p.counters; i += int64_t{blocks} * kCsrThreads) {
    p.of_queries.done[i] = 0;
  }
}

}  // namespace jaxsparse
