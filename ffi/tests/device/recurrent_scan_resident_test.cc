// Recurrent scans that one block makes, or a few, on an emulated GPU.
#include "device/recurrent_scan_operands.h"
// The steps come first.
#include "recurrent/kernels/resident.cu"
// The kernel comes first.
#include "device/recurrent_scan_matrices.h"

namespace jaxsparse {

alignas(16) __shared__ Words4 shared[4096];

namespace {

struct ResidentOptions {
  int directions = 1, groups = 1, scans = 1;  // of a call and of a launch
  unsigned most_delay = 0;
  int unit_groups = 1, steps_ahead = 4;
  int blocks = 1, register_chunks = ResidentConfig::kAllChunks;
};

// What recurrent/kernels/resident.cc and jaxsparse/recurrent/engine.py print. `kBatch`: of a part.
template <typename Step, typename S, int kHidden, int kBatch, ResidentOptions kOptions>
struct ResidentPlan {
  using State = S;
  using Weight = S;
  using Arrays = ArraysOf<Step>;
  static constexpr ResidentSizes kSizes{
      ResidentConfig{.products = Step::kProducts,
                     .state_parts = Step::kStates,
                     .state_bytes = sizeof(S),
                     .hidden = kHidden,
                     .batch = kBatch,
                     .unit_groups = kOptions.unit_groups,
                     .steps_ahead = kOptions.steps_ahead,
                     .blocks = kOptions.blocks,
                     .register_chunks = kOptions.register_chunks}};
  static constexpr int kScans = kOptions.scans, kBlocks = kSizes.blocks;
  static constexpr int kLayers = 1;
  static constexpr int kGroups = kOptions.groups;
  static constexpr int kDirections = kOptions.directions;
  static constexpr int kLaunches = (kDirections * kGroups + kScans - 1) / kScans;
  static constexpr bool kBarrier = false, kPrefetch = kSizes.blocks == 3;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
  static constexpr int64_t kStepBytes = kSizes.exchange_slot * int64_t{16};
};

template <typename Step, typename S, int kHidden, int kBatch, ResidentOptions kOptions>
void Test(const Case& c) {
  TestPlan<Step, ResidentPlan<Step, S, kHidden, kBatch, kOptions>>(c, shared);
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  {  // heads, of which the second launch has fewer, and warps that are held up
    constexpr auto Lstm = Test<LstmStep, bfloat16, 24, 8, ResidentOptions{3, 2, 4, 3000}>;
    Lstm({.steps = 4});
    Lstm({.lead = 1, .has_nan = true, .backwards = true, .transposed = true});
  }
  {  // of odd sizes, with two tiles of the batch
    constexpr auto Gru = Test<GruStep, float16, 13, 11, ResidentOptions{.steps_ahead = 2}>;
    Gru({.has_nan = true});
    Gru({.steps = 1, .lead = 3});
    constexpr auto Pairs = Test<GruStep, bfloat16, 21, 6, ResidentOptions{.unit_groups = 2}>;
    Pairs({.steps = 6, .lead = 1, .has_nan = true});
  }
  {  // neighbouring units that a lane reads and writes together, or apart
    constexpr ResidentOptions kTwo{.directions = 2, .scans = 2, .unit_groups = 2};
    constexpr auto Gru = Test<GruStep, bfloat16, 22, 6, kTwo>;
    Gru({.steps = 6, .has_nan = true});
    Gru({.lead = 1, .has_nan = true, .transposed = true});
    Gru({.unit_stride = 0});
    Gru({.unit_stride = 3});
    constexpr auto Four = Test<AdjointStep, float16, 44, 9, ResidentOptions{.unit_groups = 4}>;
    Four({.steps = 3, .has_nan = true});
    Four({.steps = 2, .lead = 4, .unit_stride = 0});
  }
  {  // few batch entries, of which lanes share out the units
    constexpr ResidentOptions kThree{
        .directions = 2, .scans = 2, .most_delay = 500, .unit_groups = 2};
    constexpr auto Three = Test<LstmStep, float16, 9, 3, kThree>;
    Three({.lead = 1, .has_nan = true, .transposed = true});
    constexpr ResidentOptions kTwo{.groups = 2, .scans = 2, .unit_groups = 2};
    constexpr auto Two = Test<LstmStep, bfloat16, 32, 2, kTwo>;
    Two({.steps = 9, .has_nan = true});
    constexpr auto One = Test<GruStep, bfloat16, 37, 1, ResidentOptions{.unit_groups = 4}>;
    One({.steps = 2, .lead = 1, .has_nan = true});
    constexpr auto Few = Test<AdjointStep, bfloat16, 16, 1, ResidentOptions{.unit_groups = 2}>;
    Few({.has_nan = true, .transposed = true});
    constexpr auto Four = Test<AdjointStep, bfloat16, 16, 4, ResidentOptions{.steps_ahead = 2}>;
    Four({.backwards = true});
  }
  {  // several state parts and one product
    constexpr auto Adjoint =
        Test<AdjointStep, bfloat16, 37, 5, ResidentOptions{.scans = 1, .unit_groups = 2}>;
    Adjoint({.steps = 6, .lead = 1, .has_nan = true, .transposed = true});
  }
  {  // blocks that share a scan, with weights in shared memory as well
    constexpr ResidentOptions kShared{.directions = 2,
                                      .groups = 2,
                                      .scans = 3,
                                      .most_delay = 500,
                                      .steps_ahead = 2,
                                      .blocks = 2,
                                      .register_chunks = 1};
    constexpr auto Gru = Test<GruStep, bfloat16, 37, 9, kShared>;
    Gru({.steps = 4, .lead = 1, .has_nan = true, .transposed = true});
    constexpr ResidentOptions kThree{
        .groups = 2, .scans = 2, .unit_groups = 2, .blocks = 3, .register_chunks = 0};
    constexpr auto Adjoint = Test<AdjointStep, float16, 40, 2, kThree>;
    Adjoint({.has_nan = true, .backwards = true});
    Adjoint({.missing = 4});
  }
  {  // the same with neighbouring units, and inputs that come in the step that needs them
    constexpr ResidentOptions kThree{.groups = 2,
                                     .scans = 2,
                                     .most_delay = 900,
                                     .unit_groups = 2,
                                     .steps_ahead = 1,
                                     .blocks = 3};
    constexpr auto Adjoint = Test<AdjointStep, float16, 40, 9, kThree>;
    Adjoint({.steps = 7, .has_nan = true, .backwards = true});
    Adjoint({.steps = 1});
  }
  Test<RnnStep, bfloat16, 1, 1, ResidentOptions{}>({});
  std::puts("all results agree");
}
