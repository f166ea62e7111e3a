// Random operands of kernels on an emulated GPU, and how their results are compared with float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/vector_access.cuh"

namespace jaxsparse {

inline std::mt19937 generator(0);

template <typename T>
T FromFloat(float x) {
  T y;
  FromAccumulator(Accumulator<T>(x), &y);
  return y;
}

template <typename T>
std::vector<T> Normal(int64_t size) {
  std::normal_distribution<float> normal;
  std::vector<T> x(static_cast<size_t>(size));
  for (T& element : x) element = FromFloat<T>(normal(generator));
  return x;
}

// From element `first` on, batch entries `stride` apart.
template <typename T>
Array Of(std::vector<T>& x, int64_t first = 0, int64_t stride = 0) {
  Array array;
  array.data = x.data() + first;
  array.strides[0] = stride;
  return array;
}

// Batch entries that have a copy each of what begins at `first`, or all the same if there are none.
template <typename T>
Array CopiesOf(std::vector<T>& x, int64_t first, int64_t copies) {
  const std::vector<T> copy(x.begin() + first, x.end());
  for (int64_t i = 1; i < copies; ++i) x.insert(x.end(), copy.begin(), copy.end());
  return Of(x, first, copies > 0 ? static_cast<int64_t>(copy.size()) : 0);
}

// What may be odd about a pattern or its operands.
enum class Disorder {
  kNone,
  kReversed,
  kShuffled,  // every other row
  kRepeated,
  kNan,
  kInfinite,
  kHuge,
  kWrongOffsets,    // negative, or behind the end
  kFallingOffsets,  // to fewer entries than there are
  kWrongIndices     // all that a pattern has, and what is derived from it, may be any number
};

// Whether it is no pattern: there is no right result, but nothing must be out of bounds.
inline bool AreWrong(Disorder indices) { return indices >= Disorder::kWrongOffsets; }

// Makes a third of the indices wrong.
template <typename E>
void Spoil(std::vector<E>& indices) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min(), kMost = ~kLeast;
  constexpr int32_t kWrong[] = {-1, -2, -7, kLeast, kMost, kMost - 1, 1 << 30, 1 << 20, 70000};
  for (E& index : indices) {
    if (generator() % 3 == 0) index = static_cast<E>(kWrong[generator() % std::size(kWrong)]);
  }
}

// A random pattern whose middle row is empty. The columns begin `lead` elements behind an aligned
// place; padding follows them, which nothing must read.
template <typename Index>
class RandomPattern {
  static constexpr int64_t kPadding = 5;

  int64_t rows_, columns_, lead_;
  std::vector<int32_t> offsets_{0}, order_;
  std::vector<Index> column_indices_;

  void AddRow(int64_t row, double density, Disorder disorder) {
    const auto first = static_cast<std::ptrdiff_t>(column_indices_.size());
    std::bernoulli_distribution stored(density);
    for (int64_t c = 0; c < columns_; ++c) {
      if (!stored(generator)) continue;
      const int times = disorder == Disorder::kRepeated && c % 7 == 0 ? 2 : 1;
      column_indices_.insert(column_indices_.end(), times, static_cast<Index>(c));
    }
    if (disorder == Disorder::kReversed) {
      std::reverse(column_indices_.begin() + first, column_indices_.end());
    }
    if (disorder == Disorder::kShuffled && row % 2 == 1) {
      std::shuffle(column_indices_.begin() + first, column_indices_.end(), generator);
    }
    offsets_.push_back(static_cast<int32_t>(static_cast<int64_t>(column_indices_.size()) - lead_));
  }

 public:
  // Every eighth row has a density of its own unless that is 0.
  RandomPattern(int64_t rows, int64_t columns, double density, double density_of_longest,
                Disorder disorder, int64_t lead)
      : rows_(rows),
        columns_(columns),
        lead_(lead),
        order_(static_cast<size_t>(rows)),
        column_indices_(static_cast<size_t>(lead)) {
    for (int64_t r = 0; r < rows; ++r) {
      const bool empty = rows > 1 && r == rows / 2, longest = r % 8 == 1 && density_of_longest != 0;
      AddRow(r, empty ? 0 : longest ? density_of_longest : density, disorder);
    }
    column_indices_.resize(column_indices_.size() + kPadding, static_cast<Index>(-1));
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      return offsets_[a + 1] - offsets_[a] > offsets_[b + 1] - offsets_[b];
    });
    if (disorder == Disorder::kWrongOffsets) {
      offsets_[rows / 3] = -7;
      offsets_[rows / 2] = offsets_[rows] = 1 << 30;
    }
    if (disorder == Disorder::kFallingOffsets) {
      offsets_[rows / 4] = 1 << 30;
      offsets_[rows / 2] = -7;
      offsets_[rows] /= 2;
    }
  }

  // Rows may be taken in any order.
  void ShuffleRows() { std::shuffle(order_.begin(), order_.end(), generator); }

  void SpoilIndices() {
    Spoil(offsets_);
    Spoil(order_);
    Spoil(column_indices_);
  }

  int64_t nse() const { return static_cast<int64_t>(column_indices_.size()) - lead_; }
  int64_t offset(int64_t row) const { return offsets_[row]; }
  int64_t column(int64_t i) const { return static_cast<int64_t>(column_indices_[lead_ + i]); }

  // For so many batch entries that have a copy each, or for all of them.
  Pattern AsOperand(int64_t copies = 0) {
    Pattern pattern;
    pattern.rows = rows_;
    pattern.columns = columns_;
    pattern.nse = nse();
    pattern.row_offsets = CopiesOf(offsets_, 0, copies);
    pattern.column_indices = CopiesOf(column_indices_, lead_, copies);
    pattern.row_order = CopiesOf(order_, 0, copies);
    return pattern;
  }
};

// Runs a kernel once more, which has to write what it wrote before, bit by bit.
template <typename Out, typename Run>
void CheckRepeats(const char* operation, const std::vector<Out>& out, const Run& run) {
  const std::vector<Out> first = out;
  run();
  if (std::memcmp(first.data(), out.data(), first.size() * sizeof(Out)) == 0) return;
  std::printf("%s: a second run differs\n", operation);
  std::exit(1);
}

// A workspace of exactly as many bytes, of numbers that are not finite and places that are outside,
// which nothing must read.
inline std::unique_ptr<Vector<uint32_t, 4>[]> SpaceFor(int64_t bytes) {
  const int64_t count = bytes / 16;
  std::unique_ptr<Vector<uint32_t, 4>[]> space(new Vector<uint32_t, 4>[count]);
  std::memset(space.get(), 0xff, count * 16);
  return space;
}

// Starts of a pattern's tiles as a kernel has found them, given with the pattern from now on.
inline std::vector<int32_t> GiveStarts(const Preparation& found, const Workspace& workspace,
                                       Pattern* pattern) {
  const int32_t* starts = found.StartsIn(workspace);
  std::vector<int32_t> given(starts, starts + found.StartsBytes() / 4);
  pattern->tile_starts = Of(given, 0, found.own_starts > 1 ? found.starts.At(1, 0) : 0);
  return given;
}

// `most`: the sum of the absolute values of what was added up.
template <typename Out>
bool IsClose(double got, double wanted, double most) {
  const double rounding = sizeof(Out) == 2 ? 0x1p-8 : sizeof(Out) == 4 ? 0x1p-21 : 0x1p-50;
  if (std::isnan(wanted)) return std::isnan(got);
  if (std::isinf(wanted)) return got == wanted;
  const double least = std::is_same_v<Out, float16> ? 0x1p-25 : 1e-30;  // half of the least number
  return std::fabs(got - wanted) <= rounding * (most + std::fabs(wanted)) + least;
}

[[noreturn]] inline void Fail(const char* what, int64_t row, int64_t column, double got,
                              double wanted) {
  std::fprintf(stderr, "%s: (%ld, %ld) is %.9g, not %.9g\n", what, long(row), long(column), got,
               wanted);
  std::exit(1);
}

}  // namespace jaxsparse
