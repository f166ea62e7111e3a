// Recurrent scans with sparse weights, whose blocks run at once on an emulated GPU.
#include "device/recurrent_scan_operands.h"
// The steps come first.
#include "recurrent/kernels/sparse.cu"
#include "recurrent/sparse_layout.cc"

namespace jaxsparse {

alignas(16) __shared__ unsigned char dynamic_shared[16384];

namespace {

struct SparseOptions {
  int batch;  // of the scan; the layout's is padded
  int piece_bytes;
  int shared_entries = 0;
  int pointwise_threads = 32;
  bool index_with_value = false;
  int directions = 1, scans = 1;  // of a call and of a launch
  bool barrier = false, prefetch = false;
  unsigned most_delay = 0;
};

// What recurrent/kernels/sparse.cc and jaxsparse/recurrent/engine.py print.
template <typename Step, typename S, typename W, SparseShape kShape, SparseOptions kOptions>
struct SparsePlan {
  using State = S;
  using Weight = W;
  using Arrays = ArraysOf<Step>;
  static constexpr SparseForm kForm{.shape = kShape,
                                    .partial_sums = 8 * kShape.products * kShape.units,
                                    .row_sums = 20,
                                    .piece_bytes = kOptions.piece_bytes};
  static constexpr SparseSizes kSizes{SparseConfig{.form = kForm,
                                                   .state_bytes = sizeof(S),
                                                   .batch = PaddedBatch(kOptions.batch, sizeof(S)),
                                                   .shared_entries = kOptions.shared_entries,
                                                   .pointwise_threads = kOptions.pointwise_threads,
                                                   .index_with_value = kOptions.index_with_value}};
  static constexpr int kScans = kOptions.scans, kBlocks = kSizes.blocks, kGroups = 1, kLayers = 1;
  static constexpr int kLaunches = (kOptions.directions + kScans - 1) / kScans;
  static constexpr bool kBarrier = kOptions.barrier, kPrefetch = kOptions.prefetch;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
};

SparseLayout LayOut(const SparsePatternView& pattern, const SparseShape& shape, int piece_bytes) {
  std::string error;
  SparseShape wanted = shape;
  wanted.lanes = 1;
  auto layout = MakeSparseLayout(pattern, wanted, shape.threads, piece_bytes, true, &error);
  if (!layout) emulated::Block::Fail(error.c_str());
  const SparseShape& made = layout->form.shape;
  if (made.units != shape.units) Fail("units of a block", 0, 0, shape.units, made.units);
  if (made.threads != shape.threads) Fail("threads", 0, 0, shape.threads, made.threads);
  if (made.lanes != shape.lanes) Fail("lanes", 0, 0, shape.lanes, made.lanes);
  return *std::move(layout);
}

struct Case {
  int64_t steps = 5;
  int64_t lead = 0;
  bool has_nan = false, backwards = false;
  int missing = -1;  // a block
};

template <typename Step, typename S, typename W, int kHidden, SparseShape kShape,
          SparseOptions kOptions>
void Test(const Case& c) {
  using Plan = SparsePlan<Step, S, W, kShape, kOptions>;
  constexpr int64_t kRows = Step::kProducts * kHidden, kColumns = Step::kStates * kHidden;
  RandomPattern<uint16_t> random(kRows, kColumns, 0.3, 0.7, Disorder::kNone, 0);
  const Pattern pattern = random.AsOperand();
  SparsePatternView view;
  view.hidden = kHidden;
  view.row_offsets = static_cast<const int32_t*>(pattern.row_offsets.data);
  view.column_indices = pattern.column_indices.data;
  view.index_type = IndexType::kUint16;
  const SparseLayout layout = LayOut(view, kShape, kOptions.piece_bytes);
  const SparseForm& needed = layout.form;
  if (needed.partial_sums > Plan::kForm.partial_sums || needed.row_sums > Plan::kForm.row_sums) {
    Fail("sums", needed.partial_sums, needed.row_sums, Plan::kForm.partial_sums,
         Plan::kForm.row_sums);
  }
  // All directions have one pattern.
  constexpr int64_t kDirections = kOptions.directions;
  std::vector<W> weights = SmallWeights<W>(c.lead + kDirections * pattern.nse, kColumns / 3);
  std::vector<double> matrix(static_cast<size_t>(kDirections * kRows * kColumns));
  std::vector<uint32_t> layouts;
  for (int64_t d = 0; d < kDirections; ++d) {
    layouts.insert(layouts.end(), layout.words.begin(), layout.words.end());
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = random.offset(row); i < random.offset(row + 1); ++i) {
        matrix[(d * kRows + row) * kColumns + random.column(i)] =
            ToAccumulator(weights[c.lead + d * pattern.nse + i]);
      }
    }
  }
  const ScanSize size{c.steps, kOptions.batch, kDirections, 1, Plan::kScans, c.lead, c.has_nan};
  ScanTest<Step, S, kHidden> test(size, matrix, c.steps * Plan::kSizes.slot);
  for (int64_t launch = 0; launch < test.Launches(); ++launch) {
    RecurrentScanProblem p = test.Problem(launch);
    p.weights = weights.data() + c.lead;
    p.weights_size = pattern.nse;
    p.layout = layouts.data();
    if (c.missing >= 0) p.wait_limits.limit_ns = 1000;
    emulated::Launch({.blocks = static_cast<int>(test.ScansOf(launch)) * Plan::kBlocks,
                      .threads = Plan::kSizes.threads,
                      .cluster = kShape.cluster,
                      .missing = c.missing,
                      .backwards = c.backwards},
                     {reinterpret_cast<char*>(dynamic_shared), sizeof(dynamic_shared)},
                     Plan::kSizes.shared_bytes, [&] { RecurrentScan<Step, Plan>(p); });
  }
  c.missing >= 0 ? test.CheckTimedOut(c.missing / Plan::kBlocks) : test.Check();
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  {  // entries in shared memory as well, of unaligned arrays
    constexpr SparseShape kShape{4, 1, 3, 1, 8, 96, 2, 3, 4};
    constexpr auto Lstm = Test<LstmStep, float, float, 23, kShape, SparseOptions{3, 16, 1, 32}>;
    Lstm({});
    Lstm({.steps = 3, .lead = 1, .has_nan = true, .backwards = true});
    Lstm({.missing = 1});
  }
  {  // clusters, whose blocks hand each other partial sums, with warps that are held up
    constexpr SparseShape kShape{3, 1, 4, 2, 8, 96, 2, 4, 2};
    constexpr auto Gru = Test<GruStep, bfloat16, bfloat16, 29, kShape,
                              SparseOptions{5, 16, 0, 32, true, 1, 1, false, true, 3000}>;
    Gru({.steps = 7, .lead = 1});
    Gru({.has_nan = true, .backwards = true});
  }
  {  // two scans side by side, the blocks of each of which meet at a barrier, and a third one
    constexpr SparseShape kShape{1, 3, 2, 1, 8, 64, 1, 4, 4};
    constexpr auto Adjoint = Test<AdjointStep, float16, float, 13, kShape,
                                  SparseOptions{1, 4, 0, 32, false, 3, 2, true}>;
    Adjoint({.lead = 1});
    constexpr auto Two = Test<AdjointStep, float16, float, 13, kShape,
                              SparseOptions{1, 4, 0, 32, false, 2, 2, true}>;
    Two({.missing = 1});
  }
  std::puts("all results agree");
}
