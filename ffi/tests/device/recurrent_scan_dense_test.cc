// Recurrent scans with dense weights, whose blocks run at once on an emulated GPU.
#include "device/recurrent_scan_operands.h"
// The steps come first.
#include "recurrent/kernels/dense.cu"
// The kernel comes first.
#include "device/recurrent_scan_matrices.h"

namespace jaxsparse {

alignas(16) __shared__ Words4 shared[2048];

namespace {

struct DenseOptions {
  int units, warps, pointwise_warps, register_chunks;
  int directions = 1, groups = 1, scans = 1;  // of a call and of a launch
  bool barrier = false, prefetch = false;
  unsigned most_delay = 0;
  int loads_ahead = 0;
};

// What recurrent/kernels/dense.cc and jaxsparse/recurrent/engine.py print.
// `kBatch`: of a part.
template <typename Step, typename S, typename W, int kHidden, int kBatch, DenseOptions kOptions>
struct DensePlan {
  using State = S;
  using Weight = W;
  using Arrays = ArraysOf<Step>;
  static constexpr DenseSizes kSizes{DenseConfig{.products = Step::kProducts,
                                                 .state_parts = Step::kStates,
                                                 .state_bytes = sizeof(S),
                                                 .hidden = kHidden,
                                                 .batch = kBatch,
                                                 .units = kOptions.units,
                                                 .warps = kOptions.warps,
                                                 .pointwise_warps = kOptions.pointwise_warps,
                                                 .tensor_cores = sizeof(S) == 2,
                                                 .register_chunks = kOptions.register_chunks,
                                                 .loads_ahead = kOptions.loads_ahead,
                                                 .batch_tile = std::min(kBatch, 4)}};
  static constexpr int kScans = kOptions.scans, kBlocks = kSizes.blocks;
  static constexpr int kLayers = 1;
  static constexpr int kGroups = kOptions.groups;
  static constexpr int kDirections = kOptions.directions;
  static constexpr int kLaunches = (kDirections * kGroups + kScans - 1) / kScans;
  static constexpr bool kBarrier = kOptions.barrier, kPrefetch = kOptions.prefetch;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
  static constexpr int64_t kStepBytes = kSizes.slot * int64_t{sizeof(S)};
};

template <typename Step, typename S, typename W, int kHidden, int kBatch, DenseOptions kOptions>
void Test(const Case& c) {
  TestPlan<Step, DensePlan<Step, S, W, kHidden, kBatch, kOptions>>(c, shared);
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  {  // FMA, with weights in shared memory as well, of unaligned arrays
    constexpr auto Lstm = Test<LstmStep, float, float, 70, 3, DenseOptions{20, 2, 1, 1}>;
    Lstm({.steps = 3});
    Lstm({.steps = 2, .lead = 1, .has_nan = true, .backwards = true, .transposed = true});
    Lstm({.steps = 2, .missing = 2});
  }
  {  // two scans side by side, the blocks of each of which meet at a barrier
    constexpr auto Gru =
        Test<GruStep, float, bfloat16, 10, 5, DenseOptions{4, 1, 2, 1, 2, 1, 2, true}>;
    Gru({});
    Gru({.steps = 1, .lead = 3});
    Gru({.missing = 0});
  }
  {  // tensor cores, with more than one tile of the batch
    constexpr auto Adjoint = Test<AdjointStep, bfloat16, bfloat16, 37, 9,
                                  DenseOptions{16, 2, 2, 1, 1, 1, 1, false, true}>;
    Adjoint({.steps = 6, .lead = 1, .has_nan = true, .transposed = true});
    Adjoint({.steps = 2, .backwards = true, .missing = 1});
  }
  {  // tensor cores that multiply while more is on its way, of one chunk at a time and of two
    constexpr DenseOptions kOne{.units = 16,
                                .warps = 1,
                                .pointwise_warps = 2,
                                .register_chunks = 1,
                                .most_delay = 1000,
                                .loads_ahead = 2};
    constexpr auto One = Test<AdjointStep, bfloat16, bfloat16, 45, 9, kOne>;
    One({.steps = 5, .lead = 1, .has_nan = true});
    One({.steps = 3, .transposed = true, .missing = 2});
    constexpr DenseOptions kTwo{
        .units = 32, .warps = 1, .pointwise_warps = 2, .groups = 2, .scans = 2, .loads_ahead = 4};
    constexpr auto Two = Test<AdjointStep, float16, float16, 70, 4, kTwo>;
    Two({.steps = 3, .backwards = true, .transposed = true});
    Two({.steps = 2, .missing = 0});
  }
  {  // threads that take four units of a batch entry together, in arrays that are aligned or not
    constexpr DenseOptions kOptions{
        .units = 16, .warps = 2, .pointwise_warps = 2, .register_chunks = 1, .prefetch = true};
    constexpr auto Adjoint = Test<AdjointStep, bfloat16, bfloat16, 40, 15, kOptions>;
    static_assert(DensePlan<AdjointStep, bfloat16, bfloat16, 40, 15, kOptions>::kSizes.near == 4);
    Adjoint({.steps = 5, .has_nan = true});
    Adjoint({.steps = 3, .lead = 1, .missing = 1});
    constexpr DenseOptions kLstm{
        .units = 16, .warps = 1, .pointwise_warps = 1, .register_chunks = 1, .loads_ahead = 1};
    constexpr auto Lstm = Test<LstmStep, float16, float16, 44, 6, kLstm>;
    static_assert(DensePlan<LstmStep, float16, float16, 44, 6, kLstm>::kSizes.near == 4);
    Lstm({.steps = 3, .transposed = true});
    Lstm({.steps = 3, .lead = 3, .backwards = true});
  }
  {  // two parts of a batch with warps that are held up
    constexpr auto Gru = Test<GruStep, float16, float16, 40, 3,
                              DenseOptions{16, 1, 1, 1, 1, 2, 2, false, false, 5000}>;
    Gru({.steps = 7});
    Gru({.steps = 3, .has_nan = true, .backwards = true});
  }
  {  // heads of one block each, of which the second launch has fewer
    constexpr auto Heads =
        Test<LstmStep, bfloat16, bfloat16, 16, 2, DenseOptions{16, 1, 1, 1, 9, 2, 10}>;
    Heads({.steps = 3, .lead = 1, .has_nan = true, .transposed = true});
  }
  {  // more scans of a launch than a word has bits
    constexpr auto Heads = Test<RnnStep, float, float, 5, 1, DenseOptions{4, 1, 1, 1, 35, 1, 35}>;
    Heads({.steps = 2});
    Heads({.steps = 2, .backwards = true, .missing = 67});
  }
  std::puts("all results agree");
}
