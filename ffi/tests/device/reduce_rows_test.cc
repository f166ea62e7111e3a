// Reductions of rows on an emulated GPU, by both kernels, against float64.
#include "device/row_cuts.h"
#include "emulated/gpu.h"
#include "reduce_rows/kernels/rows.cu"
#include "reduce_rows/kernels/runs.cu"

namespace jaxsparse {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// What numbers come to: a NaN if there is one.
template <Reduction kReduction>
double Reduce(const std::vector<double>& x) {
  double max = -kInfinite, sum = 0;
  for (double number : x) max = number > max || std::isnan(number) ? number : max;
  if (kReduction == Reduction::kMaximum || !std::isfinite(max)) return max;
  for (double number : x) sum += std::exp(number - max);
  return max + std::log(sum);
}

// A NaN, +inf, and rows of which a piece or all is -inf.
template <typename T>
void AddLimits(const std::vector<int32_t>& offsets, T* values) {
  const int rows = static_cast<int>(offsets.size()) - 1;
  for (int r = 0; r < rows; ++r) {
    const int length = offsets[r + 1] - offsets[r], kind = r % 11;
    if (length == 0) continue;
    T* of_row = values + offsets[r];
    const auto place = generator() % static_cast<unsigned>(length);
    if (kind == 2) of_row[place] = FromFloat<T>(NAN);
    if (kind == 3) of_row[place] = FromFloat<T>(static_cast<float>(kInfinite));
    if (kind == 4 || kind == 5) {
      const int end = kind == 4 ? length : length * 3 / 4;
      for (int i = 0; i < end; ++i) of_row[i] = FromFloat<T>(static_cast<float>(-kInfinite));
    }
  }
}

// Two batch entries of rows of these lengths, whose values begin `first` elements behind an aligned
// place; `run(p)` runs a kernel.
template <typename T, Reduction kReduction, typename Run>
void Test(const std::vector<int>& lengths, int first, int padding, bool wrong, const Run& run) {
  const auto rows = static_cast<int64_t>(lengths.size());
  std::vector<int32_t> offsets{0}, order(lengths.size());
  for (int length : lengths) offsets.push_back(offsets.back() + length);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return lengths[static_cast<size_t>(a)] > lengths[static_cast<size_t>(b)];
  });
  const int64_t nnz = offsets.back(), nse = nnz + padding, entries = 2;
  std::vector<T> values = Normal<T>(first + entries * nse);
  for (int64_t i = first; i < first + entries * nse; i += 431) {
    FromAccumulator(30 * ToAccumulator(values[i]), &values[i]);  // most are not as large
  }
  for (int64_t entry = 0; entry < entries; ++entry) {
    T* of_entry = values.data() + first + entry * nse;
    AddLimits(offsets, of_entry);
    std::fill(of_entry + nnz, of_entry + nse, FromFloat<T>(NAN));
  }
  const std::vector<int32_t> sound = offsets;
  if (wrong) {
    Spoil(offsets);
    Spoil(order);
  }
  const float untouched = 77;
  std::vector<T> out(static_cast<size_t>(1 + entries * rows + 1), FromFloat<T>(untouched));
  ReduceRowsProblem p;
  p.pattern.rows = rows;
  p.pattern.nse = nse;
  p.pattern.row_offsets = Of(offsets);
  p.pattern.row_order = Of(order);
  p.reduction = kReduction;
  p.batch.rank = 1;
  p.batch.count = p.batch.sizes[0] = entries;
  p.values = Of(values, first, nse);
  p.out = Of(out, 1, rows);
  run(p, out);
  for (const T& beside : {out.front(), out.back()}) {
    if (ToAccumulator(beside) != untouched) Fail("beside", -1, 0, ToAccumulator(beside), untouched);
  }
  if (wrong) return;  // nothing was out of bounds

  for (int64_t i = 0; i < entries * rows; ++i) {
    const int64_t entry = i / rows, row = i % rows;
    std::vector<double> of_row;
    for (int64_t e = sound[row]; e < sound[row + 1]; ++e) {
      of_row.push_back(ToAccumulator(values[first + entry * nse + e]));
    }
    const double got = ToAccumulator(out[1 + i]), wanted = Reduce<kReduction>(of_row);
    const bool is_exact = kReduction == Reduction::kMaximum && !std::isnan(wanted);
    if (is_exact ? got != wanted : !IsClose<T>(got, wanted, 1)) {
      Fail("reduced row", row, entry, got, wanted);
    }
  }
}

template <typename T, Reduction kReduction, int kLanes>
void TestRows(const std::vector<int>& lengths, int first, int padding, bool wrong = false) {
  Test<T, kReduction>(lengths, first, padding, wrong, [](const ReduceRowsProblem& p, const auto&) {
    constexpr ReduceRowsConfig kConfig{.reduction = kReduction, .lanes = kLanes};
    emulated::Launch(3, kConfig.Threads(), [&] { ReduceRows<T, kConfig>(p); });
  });
}

template <typename T, Reduction kReduction, int kUnits>
void TestRuns(const std::vector<int>& lengths, int first, int padding, bool wrong = false) {
  Test<T, kReduction>(
      lengths, first, padding, wrong, [&](ReduceRowsProblem& p, const std::vector<T>& out) {
        constexpr ReduceRunsConfig kConfig{.reduction = kReduction, .units = kUnits};
        std::vector<int32_t> cuts = CutsOf(p.pattern, 1);
        if (wrong) Spoil(cuts);
        p.row_cuts = Of(cuts);
        const int64_t runs = p.batch.count * ReduceRunsOf(p.pattern.rows, p.pattern.nse, kUnits);
        using Piece = Reduced<Accumulator<T>, kReduction>;
        const auto space =
            SpaceFor(runs * kReducedPieces * static_cast<int64_t>(sizeof(Piece)) + 15);
        p.workspace.data = reinterpret_cast<char*>(space.get());
        const auto run = [&](int blocks) {
          emulated::Launch(blocks, kReduceRunsThreads, [&] { ReduceRuns<T, kConfig>(p); });
          emulated::Launch(blocks, kReduceRunsThreads, [&] { ReducePieces<T, kConfig>(p); });
        };
        run(3);
        if (!wrong) CheckRepeats("runs of rows", out, [&] { run(2); });
      });
}

template <typename T, Reduction kReduction, int kUnits>
void TestsOfRuns() {
  // Rows that are empty, about as long as what counts as long, in pieces, one behind the other; a
  // star; a run with the most entries that there can be, and one with the most rows.
  constexpr int kWhole = kMostOfWholeRow, kPlacesOfRun = kUnits * kPlacesOfUnit;
  constexpr int kInFront = kPlacesOfRun - (kWhole + kPlacesOfRow - 1) - 3 * kPlacesOfRow;
  std::vector<int> short_rows(300, 0);
  short_rows[7] = short_rows[200] = 1;
  const std::vector<int> all[] = {
      {1},
      {700, 0, 0, 1500, 3},
      {kWhole, kWhole, kWhole - 1, 1, 0, kWhole + 1, kWhole + 2, 2, 5 * kWhole, kWhole},
      {kInFront / 3, kInFront / 3, kInFront - kInFront / 3 * 2, kWhole, 700},
      {0, 4000, 0, 0},
      short_rows,
      Skewed(300, 900)};
  for (const std::vector<int>& lengths : all) {
    for (int first : {0, 1}) TestRuns<T, kReduction, kUnits>(lengths, first, first == 0 ? 5 : 0);
  }
  for (int turn = 0; turn < 5; ++turn) {
    TestRuns<T, kReduction, kUnits>(Skewed(200, 900), turn % 3, 3, true);
  }
}

template <typename T, Reduction kReduction, int kLanes>
void TestsOfRows(int longest) {
  for (int first : {0, 1, 4}) {
    std::vector<int> lengths = Skewed(40, longest);
    lengths.push_back(longest);
    lengths.push_back(0);
    TestRows<T, kReduction, kLanes>(lengths, first, first == 0 ? 5 : 0);
    TestRows<T, kReduction, kLanes>(lengths, first, 3, true);
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  constexpr Reduction kMaximum = Reduction::kMaximum, kLogSumExp = Reduction::kLogSumExp;
  TestsOfRuns<float, kMaximum, 4>();
  TestsOfRuns<float, kLogSumExp, 8>();
  TestsOfRuns<double, kMaximum, 8>();
  TestsOfRuns<double, kLogSumExp, 4>();
  TestsOfRuns<bfloat16, kMaximum, 8>();
  TestsOfRuns<float16, kLogSumExp, 4>();
  TestRuns<float, kMaximum, 4>({3, 300'000, 5}, 0, 0);  // more pieces than threads add at once
  TestsOfRows<float, kMaximum, 1>(40);
  TestsOfRows<float, kLogSumExp, 8>(300);
  TestsOfRows<bfloat16, kMaximum, 32>(900);
  TestsOfRows<float16, kLogSumExp, 4>(200);
  TestsOfRows<double, kLogSumExp, 32>(500);
  TestsOfRows<float, kLogSumExp, 512>(9000);
  TestsOfRows<bfloat16, kMaximum, 64>(3000);
  TestRows<float, kMaximum, 1>({0, 0, 0}, 0, 0);
  std::puts("all results agree");
}
