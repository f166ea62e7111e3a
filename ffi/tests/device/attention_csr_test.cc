// Attention by the rows of a pattern on an emulated GPU, and the transpose of its derivative,
// against float64.
#include "attention/kernels/csr.cu"
#include "attention/kernels/csr_cotangent.cu"
#include "attention/kernels/csr_prologue.cu"
#include "device/attention_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {
namespace {

// Patterns as their arrays, from positions that are stored, with padding that nothing must read.
template <typename Index>
class PatternArrays {
 public:
  // `stored(mask, row, column)` of so many masks.
  template <typename Stored>
  PatternArrays(int64_t masks, int64_t rows, int64_t columns, const Stored& stored)
      : masks_(masks), rows_(rows), columns_(columns) {
    std::vector<std::vector<Index>> entries(static_cast<size_t>(masks));
    for (int64_t mask = 0; mask < masks; ++mask) {
      std::vector<int64_t> counts;
      offsets_.push_back(0);
      for (int64_t row = 0; row < rows; ++row) {
        const size_t before = entries[mask].size();
        for (int64_t column = 0; column < columns; ++column) {
          if (stored(mask, row, column)) entries[mask].push_back(static_cast<Index>(column));
        }
        counts.push_back(static_cast<int64_t>(entries[mask].size() - before));
        offsets_.push_back(static_cast<int32_t>(entries[mask].size()));
      }
      std::vector<int32_t> order(static_cast<size_t>(rows));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return counts[a] > counts[b]; });
      order_.insert(order_.end(), order.begin(), order.end());
      nse_ = std::max(nse_, entries[mask].size() + 3);
    }
    for (std::vector<Index>& of_mask : entries) {
      of_mask.resize(nse_, static_cast<Index>(-1));
      column_indices_.insert(column_indices_.end(), of_mask.begin(), of_mask.end());
    }
  }

  void Spoil() {
    jaxsparse::Spoil(offsets_);
    jaxsparse::Spoil(order_);
    jaxsparse::Spoil(column_indices_);
  }

  // Of `entries` batch entries that have patterns of their own, or of all.
  MaskPattern AsOperand(int64_t groups, int64_t per_group, int64_t entries) {
    const auto of = [&](auto& array) {
      return Of(array, 0, entries > 1 ? static_cast<int64_t>(array.size()) / entries : 0);
    };
    MaskPattern pattern;
    pattern.groups = groups;
    pattern.per_group = per_group;
    pattern.rows = rows_;
    pattern.columns = columns_;
    pattern.nse = static_cast<int64_t>(nse_);
    pattern.row_offsets = of(offsets_);
    pattern.column_indices = of(column_indices_);
    pattern.row_order = of(order_);
    return pattern;
  }

 private:
  int64_t masks_, rows_, columns_;
  size_t nse_ = 0;
  std::vector<int32_t> offsets_, order_;
  std::vector<Index> column_indices_;
};

// Sums, what their rounding grows with, and the sums of vectors' magnitudes, whatever the factors.
struct Sums {
  std::vector<double> sums, most, vectors;

  explicit Sums(size_t size) : sums(size), most(size), vectors(size) {}
  template <typename T>
  void Add(size_t at, double factor, const T* vector, int size) {
    Add(at, factor, std::fabs(factor), vector, size);
  }
  // `largest`: what the rounding of the factor grows with.
  template <typename T>
  void Add(size_t at, double factor, double largest, const T* vector, int size) {
    for (int i = 0; i < size; ++i) {
      sums[at + i] += factor * ToAccumulator(vector[i]);
      most[at + i] += std::fabs(largest * ToAccumulator(vector[i]));
      vectors[at + i] += std::fabs(ToAccumulator(vector[i]));
    }
  }
};

// `kConfig` of attention, `kOfCotangents` of the transpose of its derivative.
template <typename T, typename Index, int kHeadSize, int kValueSize, AttentionCsrConfig kConfig,
          AttentionCsrConfig kOfCotangents>
class CsrTest {
  using Acc = Accumulator<T>;
  // An exponential is as exact as its argument, whose rounding grows with it.
  static constexpr double kRounding = sizeof(T) == 2 ? 1 : 32;
  static constexpr bool kIsFloat16 = std::is_same_v<T, float16>;
  // By what tensor cores round a weight that is small, where the largest one of a row is 1: float16
  // has multiples of 2^-24.
  static constexpr double kLeast = kIsFloat16 && kConfig.on_tensor_cores ? 0x1p-25 : 0;

 public:
  CsrTest(const AttentionSize& size, const AttentionOptions& options)
      : test_(size, options),
        size_(size),
        of_group_(options.mask_of_group ? size.groups : 1),
        of_head_(options.mask_of_head ? size.per_group : 1),
        of_entry_(options.mask_of_entry ? size.batch : 1),
        rows_(size.batch * test_.Heads() * size.queries),
        columns_(size.batch * size.groups * size.keys),
        pattern_(of_group_ * of_head_ * of_entry_, size.queries, size.keys,
                 [&](int64_t mask, int64_t t, int64_t u) { return Sees(mask, t, u); }),
        transposed_(of_group_ * of_head_ * of_entry_, size.keys, size.queries,
                    [&](int64_t mask, int64_t u, int64_t t) { return Sees(mask, t, u); }),
        ct_out_(Normal<T>(rows_ * kValueSize)),
        ct_sums_(Normal<Acc>(rows_)),
        lse_(static_cast<size_t>(rows_)) {
    // Cotangents of some queries are small, so that sums of terms are that float16 could not hold.
    const auto shrink = [&](auto& numbers, int64_t of_query) {
      for (size_t i = 0; i < numbers.size(); ++i) {
        const int64_t query = static_cast<int64_t>(i) / of_query % size.queries;
        if (query % 3 != 1) continue;
        using X = std::remove_reference_t<decltype(numbers[i])>;
        numbers[i] = FromFloat<X>(ToAccumulator(numbers[i]) * 0x1p-14f);
      }
    };
    shrink(ct_out_, test_.Heads() * kValueSize);
    shrink(ct_sums_, 1);
    if (test_.IsWrong()) {
      pattern_.Spoil();
      transposed_.Spoil();
    }
  }

  // `cuts`: whether there is a workspace, so that long rows are cut.
  void Check(bool cuts) {
    CheckAttention(cuts);
    CheckCotangent(cuts);
  }

 private:
  bool Sees(int64_t mask, int64_t t, int64_t u) const {
    const int64_t of_group = mask % of_head_, group = mask / of_head_ % of_group_;
    return test_.Sees(mask / of_head_ / of_group_, group * size_.per_group + of_group, t, u);
  }

  // What a pass has beside the pattern, with counters that are 0 and sums that nothing must read.
  struct Space {
    std::vector<uint32_t> counters;
    std::vector<Acc> sums;
    CsrPass pass;

    Space(int64_t heads, int64_t parts, int64_t numbers, uint32_t blocks)
        : counters(static_cast<size_t>(heads * parts)),
          sums(static_cast<size_t>(heads * parts * 2 * numbers), Acc(NAN)) {
      pass.heads = static_cast<uint32_t>(heads);
      pass.blocks = blocks;
      pass.parts = static_cast<uint32_t>(parts);
      pass.numbers = static_cast<uint32_t>(numbers);
      pass.done = counters.data();
      pass.sums = sums.data();
    }
  };
  static int64_t PartsOf(const MaskPattern& pattern, bool cuts) {
    return cuts && pattern.nse > kCsrPart ? CeilDivide(pattern.nse, kCsrPart) : 0;
  }

  template <typename Problem>
  void Set(Problem* p) {
    test_.WriteTo(p);
    p->pattern = pattern_.AsOperand(of_group_, of_head_, of_entry_);
    p->log2_scale = p->scale * kLog2OfE<double>;
  }

  void CheckAttention(bool cuts) {
    AttentionCsrProblem p;
    Set(&p);
    std::vector<T> out(static_cast<size_t>(rows_ * kValueSize));
    p.out = Of(out, 0, rows_ / size_.batch * kValueSize);
    p.lse = Of(lse_, 0, rows_ / size_.batch);
    const int64_t heads = size_.batch * test_.Heads();
    const auto run = [&](uint32_t blocks) {
      std::fill(out.begin(), out.end(), FromFloat<T>(NAN));
      std::fill(lse_.begin(), lse_.end(), Acc(NAN));
      Space space(heads, PartsOf(p.pattern, cuts), kValueSize + 2, blocks);
      p.pass = space.pass;
      emulated::Launch(
          static_cast<int>(heads * blocks), kCsrThreads,
          [&] { AttentionCsr<T, Index, kConfig>(p); }, blocks % 2 == 0);
    };
    run(2);
    if (test_.IsWrong()) return;
    CheckRepeats("lse", lse_, [&] { CheckRepeats("attention", out, [&] { run(3); }); });
    test_.ForEachRow([&](int64_t b, int64_t h, int64_t t) { CheckRow(b, h, t, out); });
  }

  void CheckRow(int64_t b, int64_t h, int64_t t, const std::vector<T>& out) const {
    const auto row = test_.RowOf(b, h, t);
    const Acc lse = lse_[test_.NumberAt(b, h, t)];
    if (!IsClose<Acc>(lse, row.lse, 20)) Fail("lse", h, t, lse, row.lse);
    Sums wanted(kValueSize);
    for (size_t k = 0; k < row.keys.size(); ++k) {
      wanted.Add(0, row.probabilities[k], test_.Value(b, h, row.keys[k]), kValueSize);
    }
    for (int i = 0; i < kValueSize; ++i) {
      const double got = ToAccumulator(out[test_.VectorAt(b, h, t) * kValueSize + i]);
      if (!IsNear(got, wanted.sums[i], wanted.most[i], kLeast * wanted.vectors[i])) {
        Fail("attention", t, i, got, wanted.sums[i]);
      }
    }
  }

  void CheckCotangent(bool cuts) {
    AttentionCsrCotangentProblem p;
    Set(&p);
    p.transposed_pattern = transposed_.AsOperand(of_group_, of_head_, of_entry_);
    lse_ = test_.template Lse<Acc>();
    std::vector<T> ct_query(static_cast<size_t>(rows_ * kHeadSize));
    std::vector<T> ct_key(static_cast<size_t>(columns_ * kHeadSize));
    std::vector<T> ct_value(static_cast<size_t>(columns_ * kValueSize));
    const int64_t rows = rows_ / size_.batch, columns = columns_ / size_.batch;
    p.lse = Of(lse_, 0, rows);
    p.ct_sums = Of(ct_sums_, 0, rows);
    p.ct_out = Of(ct_out_, 0, rows * kValueSize);
    p.ct_query = Of(ct_query, 0, rows * kHeadSize);
    p.ct_key = Of(ct_key, 0, columns * kHeadSize);
    p.ct_value = Of(ct_value, 0, columns * kValueSize);
    const int64_t heads = size_.batch * test_.Heads(), groups = size_.batch * size_.groups;
    const bool cuts_keys = cuts && (of_head_ == 1 || size_.per_group == 1);
    const auto run = [&](uint32_t blocks) {
      for (auto* results : {&ct_query, &ct_key, &ct_value}) {
        std::fill(results->begin(), results->end(), FromFloat<T>(NAN));
      }
      Space queries(heads, PartsOf(p.pattern, cuts), kHeadSize, blocks);
      Space keys(groups, PartsOf(p.transposed_pattern, cuts_keys), kHeadSize + kValueSize, blocks);
      p.of_queries = queries.pass;
      p.of_keys = keys.pass;
      std::vector<CsrQuery<Acc>> pairs(static_cast<size_t>(rows_), {Acc(NAN), Acc(NAN)});
      if (kOfCotangents.in_pairs) {
        std::fill(queries.counters.begin(), queries.counters.end(), 7u);
        p.queries_in_pairs = pairs.data();
        p.counters = static_cast<int64_t>(queries.counters.size());
        emulated::Launch(static_cast<int>(size_.batch * blocks), kCsrThreads,
                         [&] { AttentionCsrPrologue<Acc>(p); });
      }
      emulated::Launch(
          static_cast<int>((heads + groups) * blocks), kCsrThreads,
          [&] { AttentionCsrCotangent<T, Index, Index, kOfCotangents>(p); }, blocks % 2 == 0);
    };
    run(1);
    if (test_.IsWrong()) return;
    CheckRepeats("ct_query", ct_query, [&] {
      CheckRepeats("ct_key", ct_key, [&] { CheckRepeats("ct_value", ct_value, [&] { run(2); }); });
    });
    Sums of_queries(ct_query.size()), of_keys(ct_key.size()), of_values(ct_value.size());
    test_.ForEachRow([&](int64_t b, int64_t h, int64_t t) {
      AddRow(b, h, t, &of_queries, &of_keys, &of_values);
    });
    Compare("ct_query", ct_query, of_queries, kHeadSize);
    Compare("ct_key", ct_key, of_keys, kHeadSize);
    Compare("ct_value", ct_value, of_values, kValueSize);
  }

  void AddRow(int64_t b, int64_t h, int64_t t, Sums* queries, Sums* keys, Sums* values) const {
    const T* query = test_.Query(b, h, t);
    const T* ct_out = &ct_out_[test_.VectorAt(b, h, t) * kValueSize];
    const auto dot = [](const T* x, const T* y, int size) {
      double sum = 0;
      for (int i = 0; i < size; ++i) sum += double(ToAccumulator(x[i])) * ToAccumulator(y[i]);
      return sum;
    };
    for (int64_t u = 0; u < size_.keys; ++u) {
      if (!test_.Sees(b, h, t, u)) continue;
      const T* key = test_.Key(b, h, u);
      const int64_t row = test_.NumberAt(b, h, t);
      const bool is_seen = lse_[row] != -HUGE_VAL;
      const double score = dot(query, key, kHeadSize) * test_.Scale();
      const double p = is_seen ? std::exp(score - lse_[row]) : 0;
      const T* value = test_.Value(b, h, u);
      const double dp = dot(ct_out, value, kValueSize) + ct_sums_[row];
      // Sums of 32 bits and more may cancel; beside 16 bits their rounding is nothing.
      double largest = std::fabs(dp);
      if (sizeof(T) > 2) {
        largest = std::fabs(ct_sums_[row]);
        for (int i = 0; i < kValueSize; ++i) {
          largest += std::fabs(double(ToAccumulator(ct_out[i])) * ToAccumulator(value[i]));
        }
      }
      const double factor = p * test_.Scale();
      const size_t query_row = test_.VectorAt(b, h, t) * kHeadSize,
                   key_row = test_.KeyVectorAt(b, h, u) * kHeadSize;
      queries->Add(query_row, factor * dp, factor * largest, key, kHeadSize);
      keys->Add(key_row, factor * dp, factor * largest, query, kHeadSize);
      values->Add(test_.KeyVectorAt(b, h, u) * kValueSize, p, ct_out, kValueSize);
    }
  }

  // IsClose expects of numbers of 16 bits what bfloat16 has; float16 has more.
  static bool IsNear(double got, double wanted, double most, double least = 0) {
    if (!kIsFloat16 || !std::isfinite(wanted)) return IsClose<T>(got, wanted, kRounding * most);
    constexpr double kHalfOfNumber = 0x1p-25;
    const double rounding = 1.25 * 0x1p-11 * (most + std::fabs(wanted));
    return std::fabs(got - wanted) <= rounding + kHalfOfNumber + least;
  }

  static void Compare(const char* what, const std::vector<T>& got, const Sums& wanted, int size) {
    for (size_t i = 0; i < got.size(); ++i) {
      const double x = ToAccumulator(got[i]);
      if (IsNear(x, wanted.sums[i], wanted.most[i])) continue;
      Fail(what, static_cast<int64_t>(i) / size, static_cast<int64_t>(i) % size, x, wanted.sums[i]);
    }
  }

  AttentionTest<T, kHeadSize, kValueSize> test_;
  AttentionSize size_;
  int64_t of_group_, of_head_, of_entry_;
  int64_t rows_, columns_;  // of all heads and batch entries
  PatternArrays<Index> pattern_, transposed_;
  std::vector<T> ct_out_;
  std::vector<Acc> ct_sums_, lse_;
};

// `is_long`: only what other sizes of vectors may change.
template <typename T, typename Index, int kHeadSize, int kValueSize, AttentionCsrConfig kConfig,
          AttentionCsrConfig kOfCotangents = kConfig>
void Test(bool is_long = false) {
  const auto check = [](const AttentionSize& size, const AttentionOptions& options,
                        bool cuts = true) {
    CsrTest<T, Index, kHeadSize, kValueSize, kConfig, kOfCotangents>(size, options).Check(cuts);
  };
  if (is_long) {
    check({30, 70, 2, 2}, {.mask = MaskKind::kScattered});
    check({2, 1100}, {.mask = MaskKind::kAll});
    check({30, 40}, {.disorder = Disorder::kNan});
    return;
  }
  check({1, 1}, {.mask = MaskKind::kAll});
  check({40, 70}, {.mask = MaskKind::kNothing});
  check({129, 200, 2, 2, 2}, {.mask = MaskKind::kScattered, .mask_of_head = true});
  check({75, 130, 2, 1, 2}, {.mask_of_group = true, .mask_of_entry = true, .shared_keys = true});
  // Rows that are cut, where their number is no multiple and where others begin.
  check({3, 2500}, {.mask = MaskKind::kAll});
  check({2050, 2, 1, 2}, {.mask = MaskKind::kAll});
  check({3, 2500}, {.mask = MaskKind::kAll}, false);
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
    check({130, 65, 1, 2}, {.mask = MaskKind::kScattered, .disorder = disorder});
    // Wrong offsets may make each row as long as all are together.
    const int64_t queries = disorder == Disorder::kWrongIndices ? 1 : 4;
    check({queries, 1100}, {.mask = MaskKind::kAll, .disorder = disorder});
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  // On tensor cores, in both numbers of stages; float16 only forward.
  Test<bfloat16, int32_t, 64, 64, AttentionCsrConfig{.on_tensor_cores = true, .in_pairs = true}>();
  constexpr AttentionCsrConfig kShort{.head_vector = 2,
                                      .value_vectors = 2,
                                      .own_scores = true,
                                      .on_tensor_cores = true,
                                      .stages = 1};
  Test<float16, int32_t, 2, 128, kShort,
       AttentionCsrConfig{.lanes = 16, .head_vector = 2, .own_scores = true}>();
  Test<bfloat16, int32_t, 2, 128, kShort>(true);
  Test<bfloat16, int32_t, 64, 128,
       AttentionCsrConfig{.value_vectors = 2, .on_tensor_cores = true, .stages = 1}>(true);
  Test<bfloat16, uint16_t, 128, 64,
       AttentionCsrConfig{.head_vectors = 2, .on_tensor_cores = true, .stages = 1}>(true);
  // Accesses that not all lanes have, several of a lane, and other sizes of values.
  Test<float16, uint16_t, 6, 20,
       AttentionCsrConfig{.lanes = 4,
                          .step = 4,
                          .head_vector = 2,
                          .head_vectors = 1,
                          .value_vector = 4,
                          .value_vectors = 2,
                          .whole_heads = false,
                          .whole_values = false}>(true);
  Test<float, int32_t, 3, 5,
       AttentionCsrConfig{.lanes = 8,
                          .step = 2,
                          .head_vector = 1,
                          .head_vectors = 3,
                          .value_vector = 1,
                          .whole_values = false,
                          .own_scores = true}>();
  Test<double, uint16_t, 64, 2,
       AttentionCsrConfig{.lanes = 32,
                          .step = 8,
                          .head_vector = 2,
                          .value_vector = 2,
                          .whole_values = false,
                          .in_pairs = true}>(true);
  std::puts("all results agree");
}
