// Matrices packed at random, and products by them against sums in float64, whatever kernel makes
// them; and the matrix written out.
#pragma once

#include "cuda/preparation.h"
#include "device/operands.h"
#include "emulated/gpu.h"
#include "packed/gaps.cc"
#include "packed/layout.cc"
#include "packed/pattern.cc"

namespace jaxsparse {

namespace {

enum class Odd {
  kNothing,
  kStriped,   // streams of some lanes are much longer than others'
  kBadX,      // NaN and infinity in x
  kBadValue,  // in the matrix
  kDamaged    // masks, starts, panels and rows may be any number
};

struct Size {
  int64_t m, k, n;
  double density;
};

struct Options {
  Odd odd = Odd::kNothing;
  int parts = 1;
  bool bias = false;
  Activation activation = Activation::kNone;
  bool backwards = false;
};

// One matrix, packed, with x of random numbers.
// Kernel has a configuration and runs on a problem, its last block first if it is to, with so many
// times kParts as options say; some write a matrix out, too.
template <typename T, typename Out, typename Kernel>
class PackedTest {
  static constexpr auto kConfig = Kernel::kConfig;
  Size size_;
  Options options_;
  std::vector<int32_t> offsets_{0}, columns_, order_;
  // Of 8 bits, codes_ are what is packed, and entries_ are codes times scales_.
  static constexpr PackedNumbers kNumbers = kConfig.numbers;
  static constexpr bool kPlain = kNumbers == PackedNumbers::kPlain;
  std::vector<uint8_t> codes_, code_values_;
  std::vector<float> scales_;
  std::vector<double> entries_;
  std::vector<T> plain_, values_, x_, bias_;
  std::vector<Out> out_;
  PackedStreams streams_;
  PackedProblem p_;

  bool IsStored(int64_t row, int64_t column) const {
    if (options_.odd == Odd::kStriped && column < size_.k / 2) {
      return row < size_.m / 2 ? column % 8 < 2 : generator() % 50 == 0;
    }
    return std::bernoulli_distribution(row % 7 == 3 ? 0 : size_.density)(generator);
  }
  static double NumberOf(uint8_t code) {
    if (kNumbers == PackedNumbers::kInt8) return static_cast<int8_t>(code);
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    return code & 0x80 ? -magnitude : magnitude;
  }
  // Codes are any but that of NaN, so that each is decoded.
  void MakeEntries() {
    const auto count = static_cast<int64_t>(columns_.size());
    if constexpr (kPlain) {
      plain_ = Normal<T>(count);
      if (options_.odd == Odd::kBadValue && count > 0) plain_[0] = FromFloat<T>(INFINITY);
      for (const T entry : plain_) entries_.push_back(ToAccumulator(entry));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        auto code = static_cast<uint8_t>(generator());
        if ((code & 0x7f) == 0x7f) code = 0x2a;
        // Some that count as none by gaps meet a NaN of x (kBadX).
        if (columns_[i] == 3 && i % 2 == 0) code = 0;
        codes_.push_back(code);
      }
      scales_ = Normal<float>(size_.m);
      if (options_.odd == Odd::kBadValue) scales_[0] = NAN;
      for (int64_t row = 0; row < size_.m; ++row) {
        for (int32_t i = offsets_[row]; i < offsets_[row + 1]; ++i) {
          entries_.push_back(NumberOf(codes_[i]) * double(scales_[row]));
        }
      }
    }
  }
  void Pack(int parts) {
    const PackedPattern pattern{offsets_.data(), columns_.data(), order_.data(),
                                size_.m,         size_.k,         int64_t(columns_.size())};
    std::string error;
    if (kConfig.cell == 0) {
      GapArrays packed;
      error = PackGaps(pattern, parts, &packed);
      streams_ = {packed.gaps, packed.starts, {}, packed.sources};
      for (size_t i = 1; i < packed.starts.size(); ++i) {
        streams_.panels.push_back(0);
        streams_.panels.push_back(packed.starts[i] - packed.starts[i - 1]);
      }
    } else {
      error = PackStreams(
          pattern,
          {.cell = kConfig.cell, .parts = parts, .numbers_of_word = NumbersOfWord(kNumbers)},
          &streams_);
    }
    if (!error.empty()) Fail(error.c_str(), 0, 0, 0, 0);
  }
  T& X(int64_t row, int64_t column) {
    return x_[kConfig.x_on_left ? column * size_.k + row : row * size_.n + column];
  }

 public:
  PackedTest(const Size& size, const Options& options) : size_(size), options_(options) {
    for (int64_t row = 0; row < size.m; ++row) {
      for (int64_t column = 0; column < size.k; ++column) {
        if (IsStored(row, column)) columns_.push_back(static_cast<int32_t>(column));
      }
      offsets_.push_back(static_cast<int32_t>(columns_.size()));
      order_.push_back(static_cast<int32_t>(size.m - 1 - row));
    }
    MakeEntries();
    x_ = Normal<T>(size.k * size.n);
    bias_ = Normal<T>(size.m);
    if (options.odd == Odd::kBadX && size.k > 9) {
      X(3, 0) = FromFloat<T>(NAN);
      X(size.k - 1, size.n - 1) = FromFloat<T>(-INFINITY);
    }
    Pack(options.parts * Kernel::kParts);
    for (const int32_t source : streams_.sources) {
      if constexpr (kPlain) values_.push_back(source < 0 ? T{} : plain_[source]);
      else code_values_.push_back(source < 0 ? uint8_t{0} : codes_[source]);
    }
    if (options.odd == Odd::kDamaged) {
      Spoil(streams_.masks);
      Spoil(streams_.starts);
      Spoil(streams_.panels);
      Spoil(order_);
    }
    out_.assign(size.m * size.n, FromFloat<Out>(NAN));
    p_.m = size.m;
    p_.k = size.k;
    p_.n = size.n;
    const int numbers = kConfig.cell == 0 ? kGapNumbers : NumbersOfWord(kNumbers);
    p_.words = static_cast<int64_t>(streams_.sources.size()) / (numbers * kWarp);
    p_.numbers = kNumbers;
    p_.cell = kConfig.cell;
    p_.parts = options.parts * Kernel::kParts;
    p_.x_on_left = kConfig.x_on_left;
    p_.activation = options.activation;
    if constexpr (kPlain) p_.values = Aligned(values_);
    else p_.values = Aligned(code_values_);
    if (!kPlain) p_.scales = Of(scales_);
    p_.masks = Aligned(streams_.masks);
    p_.starts = Of(streams_.starts);
    p_.panels = Aligned(streams_.panels);
    p_.rows = Of(order_);
    p_.x = Of(x_);
    if (options.bias) p_.bias = Of(bias_);
    p_.out = Of(out_);
  }

  // An array as XLA aligns it; a vector does so, too, for what copies ask for.
  template <typename E>
  static Array Aligned(std::vector<E>& x) {
    if (reinterpret_cast<uintptr_t>(x.data()) % 16 != 0) Fail("alignment", 0, 0, 0, 0);
    return Of(x);
  }

  void Run() { Kernel::Run(p_, options_.backwards); }

  void Check() {
    for (int64_t row = 0; row < size_.m; ++row) {
      for (int64_t column = 0; column < size_.n; ++column) {
        double sum = 0, most = 0;
        for (int32_t i = offsets_[row]; i < offsets_[row + 1]; ++i) {
          if (kConfig.cell == 0 && entries_[i] == 0) continue;  // counts as none
          const double term = entries_[i] * double(ToAccumulator(X(columns_[i], column)));
          sum += term;
          most += std::fabs(term);
        }
        if (options_.bias) sum += ToAccumulator(bias_[row]);
        if (options_.activation == Activation::kRelu) sum = sum < 0 ? 0 : sum;
        if (options_.activation == Activation::kGelu) {
          sum = sum / (1 + std::exp(-sum * (1.5957691216057308 + 0.0713548162726 * sum * sum)));
        }
        const double got = ToAccumulator(
            out_[kConfig.x_on_left ? column * size_.m + row : row * size_.n + column]);
        if (!IsClose<Out>(got, sum, most)) Fail("packed", row, column, got, sum);
      }
    }
  }
  std::vector<Out>& out() { return out_; }

  // The matrix written out, bit by bit what was packed; of 8 bits, without scales.
  void Unpack() {
    std::vector<T> matrix(size_.m * size_.k, FromFloat<T>(NAN));
    PackedProblem p = p_;
    p.out = Of(matrix);
    Kernel::Unpack(p);
    if (options_.odd == Odd::kDamaged) return;
    std::vector<T> expected(matrix.size(), T{});
    for (int64_t row = 0; row < size_.m; ++row) {
      for (int32_t i = offsets_[row]; i < offsets_[row + 1]; ++i) {
        T& number = expected[row * size_.k + columns_[i]];
        if constexpr (kPlain) number = plain_[i];
        else number = FromFloat<T>(static_cast<float>(NumberOf(codes_[i])));
      }
    }
    for (size_t i = 0; i < matrix.size(); ++i) {
      if (matrix[i].bits == expected[i].bits) continue;
      Fail("unpack", i / size_.k, i % size_.k, ToAccumulator(matrix[i]),
           ToAccumulator(expected[i]));
    }
  }
};

template <typename T, typename Out, typename Kernel>
void Test(const Size& size, const Options& options = {}) {
  PackedTest<T, Out, Kernel> test(size, options);
  test.Run();
  if constexpr (requires { Kernel::Unpack; }) test.Unpack();
  if (options.odd == Odd::kDamaged) return;
  test.Check();
  CheckRepeats("packed", test.out(), [&] { test.Run(); });
}

template <typename T, typename Out, typename Kernel>
void TestSizes() {
  constexpr auto test = Test<T, Out, Kernel>;
  test({1, 1, 1, 1.0}, {});
  test({20, 0, 3, 1.0}, {.bias = true});
  test({70, 900, 8, 0.5}, {});
  test({40, 1100, 16, 0.3}, {.bias = true, .activation = Activation::kGelu});
  test({33, 1031, 3, 0.95}, {.activation = Activation::kRelu});
  test({50, 2100, 13, 0.1}, {.parts = 3, .bias = true});
  test({150, 1600, 26, 0.2}, {.bias = true});
  test({35, 1536, 40, 1.0}, {.parts = 2, .backwards = true});
  test({17, 2047, 5, 0.4}, {.parts = 8});
  test({48, 9000, 8, 0.02}, {});
  test({33, 2200, 7, 0.1}, {.odd = Odd::kStriped});
  test({40, 600, 9, 0.3}, {.odd = Odd::kBadX, .parts = 2, .bias = true});
  test({40, 600, 8, 0.3}, {.odd = Odd::kBadValue});
  test({70, 900, 8, 0.3}, {.odd = Odd::kDamaged, .parts = 2});
  test({70, 900, 8, 0.3}, {.odd = Odd::kDamaged});
}
}  // namespace
}  // namespace jaxsparse
