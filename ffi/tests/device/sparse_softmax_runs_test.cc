// The softmax by runs of rows on an emulated GPU, and its derivative, against float64.
#include "device/row_cuts.h"
#include "device/sparse_softmax_operands.h"
#include "emulated/gpu.h"
#include "sparse_softmax/kernels/runs.cu"

namespace jaxsparse {
namespace {

template <typename T, bool kBackward, bool kLong = kBackward>
void Test(const std::vector<int>& lengths, int first, int padding, bool wrong = false) {
  TestSoftmax<T, kBackward>(
      lengths, first, padding, wrong, [&](SparseSoftmaxProblem& p, const std::vector<T>& out) {
        constexpr SparseSoftmaxRunsConfig kConfig{.units = kLong ? 6 : 4,
                                                  .team = kLong ? kWarp : kSoftmaxRunsThreads,
                                                  .backward = kBackward,
                                                  .batched = kBackward};
        std::vector<int32_t> cuts = CutsOf(p.pattern, 1);
        if (wrong) Spoil(cuts);
        p.row_cuts = Of(cuts);
        using Piece = PieceOfRow<Accumulator<T>>;
        const auto space =
            SpaceFor(static_cast<int64_t>(cuts.size() * kPiecesOfRun * sizeof(Piece)) + 15);
        p.workspace.data = reinterpret_cast<char*>(space.get());
        const auto run = [&](int blocks) {
          emulated::Launch(blocks, kSoftmaxRunsThreads, [&] { SparseSoftmaxRuns<T, kConfig>(p); });
          emulated::Launch(blocks, kSoftmaxRunsThreads,
                           [&] { SparseSoftmaxPieces<T, kConfig>(p); });
        };
        run(3);
        if (!wrong) CheckRepeats("runs of rows", out, [&] { run(2); });
      });
}

template <typename T>
void Tests() {
  // Rows that are empty, about as long as what counts as long, in pieces, and one behind the other;
  // a run with the most entries that there can be, of which the first are in no run of four; random
  // ones.
  constexpr int kWhole = kMostOfWholeRow, kPlacesOfRun = 4 * kPlacesOfUnit;
  constexpr int kInFront = kPlacesOfRun - (kWhole + kPlacesOfRow - 1) - 3 * kPlacesOfRow;
  const std::vector<int> all[] = {
      {1},
      {700, 0, 0, 1500, 3},
      {kWhole, kWhole, kWhole - 1, 1, 0, kWhole + 1, kWhole + 2, 2, 5 * kWhole, kWhole},
      {kInFront / 3, kInFront / 3, kInFront - kInFront / 3 * 2, kWhole, 700},
      {0, 0, 7},
      Skewed(300, 900),
      std::vector<int>(90, 0)};
  for (const std::vector<int>& lengths : all) {
    for (int first : {0, 1}) {
      Test<T, false>(lengths, first, 5);
      Test<T, true>(lengths, first, first == 0 ? 700 : 0);
    }
  }
  for (int turn = 0; turn < 5; ++turn) {
    Test<T, false>(Skewed(200, 900), turn % 3, 3, true);
    Test<T, true>(Skewed(200, 900), turn % 3, 0, true);
  }
}

// A row of which a piece is -inf alone, another of nothing else, one with a NaN, and one with +inf.
void Limits() {
  const std::vector<int> lengths = {5, 600, 300, 500, 600, 4};
  constexpr SparseSoftmaxRunsConfig kConfig;
  std::vector<int32_t> offsets{0};
  for (int length : lengths) offsets.push_back(offsets.back() + length);
  const auto nse = offsets.back();
  std::vector<float> values = Normal<float>(nse), out(nse, 77);
  const float infinity = std::numeric_limits<float>::infinity();
  for (int i = 5; i < 605; ++i) values[i] = i == 600 ? 2.0f : -infinity;
  for (int i = 605; i < 905; ++i) values[i] = -infinity;
  values[1000] = NAN;
  values[1500] = infinity;
  SparseSoftmaxProblem p;
  p.pattern.rows = static_cast<int64_t>(lengths.size());
  p.pattern.nse = nse;
  p.pattern.row_offsets = Of(offsets);
  p.values = Of(values);
  p.out = Of(out);
  std::vector<int32_t> cuts = CutsOf(p.pattern, 1);
  p.row_cuts = Of(cuts);
  const auto space = SpaceFor(static_cast<int64_t>(cuts.size()) * 16);
  p.workspace.data = reinterpret_cast<char*>(space.get());
  emulated::Launch(2, kSoftmaxRunsThreads, [&] { SparseSoftmaxRuns<float, kConfig>(p); });
  emulated::Launch(2, kSoftmaxRunsThreads, [&] { SparseSoftmaxPieces<float, kConfig>(p); });
  for (int i = 0; i < nse; ++i) {
    const bool is_nan = i >= 605 && i < 2005, is_known = i >= 5 && i < 605;
    const float wanted = is_nan ? NAN : i == 600 ? 1.0f : 0.0f;
    if (is_nan != std::isnan(out[i]) || (is_known && out[i] != wanted)) {
      Fail("softmax at its limits", -1, i, out[i], wanted);
    }
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  Tests<float>();
  Test<float, false>({3, 70'000, 5}, 0, 0);  // more blocks than lanes add at once
  Test<float, true, false>({3, 70'000, 5}, 0, 0);
  Test<float, false, true>(Skewed(900, 3000), 0, 9);
  Test<float, true, true>({3, 20'000, 5}, 0, 0);
  Tests<double>();
  Tests<bfloat16>();
  Tests<float16>();
  Limits();
  std::puts("all results agree");
}
