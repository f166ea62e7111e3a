// Recurrent scans that one block makes, on an emulated GPU.
#include "device/recurrent_scan_operands.h"
// The steps come first.
#include "recurrent/kernels/resident.cu"

namespace jaxsparse {

alignas(16) __shared__ Words4 shared[2048];

namespace {

struct ResidentOptions {
  int directions = 1, groups = 1, scans = 1;  // of a call and of a launch
  unsigned most_delay = 0;
};

// What recurrent/plan.cc and jaxsparse/recurrent/engine.py print. `kBatch`: of a part.
template <typename Step, typename S, int kHidden, int kBatch, ResidentOptions kOptions>
struct ResidentPlan {
  using State = S;
  using Weight = S;
  using Arrays = ArraysOf<Step>;
  static constexpr ResidentSizes kSizes{ResidentConfig{.products = Step::kProducts,
                                                       .state_parts = Step::kStates,
                                                       .state_bytes = sizeof(S),
                                                       .hidden = kHidden,
                                                       .batch = kBatch}};
  static constexpr int kScans = kOptions.scans, kBlocks = kSizes.blocks;
  static constexpr int kLayers = 1;
  static constexpr int kGroups = kOptions.groups;
  static constexpr int kLaunches = (kOptions.directions * kGroups + kScans - 1) / kScans;
  static constexpr bool kBarrier = false;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
};

struct Case {
  int64_t steps = 5;
  int64_t lead = 0;
  bool has_nan = false, backwards = false, transposed = false;
};

template <typename Step, typename S, int kHidden, int kBatch, ResidentOptions kOptions>
void Test(const Case& c) {
  using Plan = ResidentPlan<Step, S, kHidden, kBatch, kOptions>;
  constexpr int64_t kRows = Step::kProducts * kHidden, kColumns = Step::kStates * kHidden;
  const DenseMatrices<S> matrices(kOptions.directions, kRows, kColumns, c.transposed, c.lead);
  const ScanSize size{
      c.steps,  kOptions.groups * kBatch, kOptions.directions, Plan::kGroups, Plan::kScans, c.lead,
      c.has_nan};
  ScanTest<Step, S, kHidden> test(size, matrices.Rows(), 0);
  for (int64_t launch = 0; launch < test.Launches(); ++launch) {
    RecurrentScanProblem p = test.Problem(launch);
    matrices.Give(&p);
    emulated::Launch({.blocks = static_cast<int>(test.ScansOf(launch)),
                      .threads = Plan::kSizes.threads,
                      .backwards = c.backwards},
                     {reinterpret_cast<char*>(shared), sizeof(shared)}, Plan::kSizes.shared_bytes,
                     [&] { RecurrentScan<Step, Plan>(p); });
  }
  test.Check();
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
    constexpr auto Gru = Test<GruStep, float16, 13, 11, ResidentOptions{}>;
    Gru({.has_nan = true});
    Gru({.steps = 1, .lead = 3});
  }
  {  // few batch entries, which lanes hand on
    constexpr auto Few = Test<LstmStep, float16, 9, 3, ResidentOptions{2, 1, 2, 500}>;
    Few({.lead = 1, .has_nan = true, .transposed = true});
    constexpr auto Four = Test<AdjointStep, bfloat16, 16, 4, ResidentOptions{}>;
    Four({.backwards = true});
  }
  {  // several state parts and one product
    constexpr auto Adjoint = Test<AdjointStep, bfloat16, 37, 5, ResidentOptions{.scans = 1}>;
    Adjoint({.steps = 6, .lead = 1, .has_nan = true, .transposed = true});
  }
  Test<RnnStep, bfloat16, 1, 1, ResidentOptions{}>({});
  std::puts("all results agree");
}
