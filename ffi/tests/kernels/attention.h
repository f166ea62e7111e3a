// Attention over random masks, by their blocks and by their entries, beside loops over what each
// query sees, in float64.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include "attention_masks.h"

namespace jaxsparse {
namespace {

struct AttentionSizes {
  int64_t queries, keys, groups, per_group, head_size, value_size;
  bool mask_of_group, mask_of_head;
};

template <typename T>
class AttentionTest {
 public:
  AttentionTest(Random& random, const AttentionSizes& sizes)
      : sizes_(sizes),
        mask_groups_(sizes.mask_of_group ? sizes.groups : 1),
        mask_per_group_(sizes.mask_of_head ? sizes.per_group : 1),
        masks_(MakeMasks(random)),
        lists_(masks_),
        transposed_lists_(Transposed(masks_)),
        patterns_(masks_),
        transposed_patterns_(Transposed(masks_)),
        query_(Values<T>(random, QuerySize())),
        key_(Values<T>(random, KeySize())),
        value_(Values<T>(random, ValueSize())),
        d_query_(Values<T>(random, QuerySize())),
        d_key_(Values<T>(random, KeySize())),
        d_value_(Values<T>(random, ValueSize())),
        ct_out_(Values<T>(random, OutSize())),
        ct_sums_(Values<Acc>(random, LseSize())) {}

  // Numbers that are not finite, of which a head sees some and others not.
  void Poison(Random& random) {
    const auto poison = [&](T* numbers, int64_t size, double with) {
      if (size > 0) FromFloat(static_cast<Acc>(with), &numbers[random.Below(size)]);
    };
    const double nan = std::numeric_limits<double>::quiet_NaN();
    poison(query_.get(), QuerySize(), nan);
    poison(key_.get(), KeySize(), nan);
    poison(value_.get(), ValueSize(), nan);
    poison(value_.get(), ValueSize(), std::numeric_limits<double>::infinity());
    poison(d_query_.get(), QuerySize(), nan);
    poison(d_key_.get(), KeySize(), nan);
    poison(d_value_.get(), ValueSize(), nan);
    poison(ct_out_.get(), OutSize(), nan);
  }

  void Check() {
    for (const char* variant : {"tiles", "csr"}) CheckVariant(variant);
  }
  // The same results from any number of threads.
  void CheckVariant(std::string_view variant) {
    Results results(*this), others(*this);
    Run(variant, &results, 3);
    Compare(results);
    Run(variant, &others, 1);
    const auto expect_same = [](const auto& a, const auto& b, int64_t size) {
      if (std::memcmp(a.get(), b.get(), static_cast<size_t>(size) * sizeof(a[0])) == 0) return;
      std::printf("FAILED: results depend on the number of threads\n");
      std::exit(1);
    };
    expect_same(results.out, others.out, OutSize());
    expect_same(results.lse, others.lse, LseSize());
    expect_same(results.weighted, others.weighted, OutSize());
    expect_same(results.sums, others.sums, LseSize());
    expect_same(results.ct_query, others.ct_query, QuerySize());
    expect_same(results.ct_key, others.ct_key, KeySize());
    expect_same(results.ct_value, others.ct_value, ValueSize());
  }

  // Lists that say anything at all: results are of no use then, but arrays are not left.
  void CheckSpoiled(Random& random) {
    const auto count = static_cast<int64_t>(masks_.size());
    lists_.Spoil(random, count);
    transposed_lists_.Spoil(random, count);
    patterns_.Spoil(random, count);
    transposed_patterns_.Spoil(random, count);
    Results results(*this);
    // A wrong order may give two tasks the same rows.
    for (const char* variant : {"tiles", "csr"}) Run(variant, &results, 1);
  }

 private:
  using Acc = typename Accumulator<T>::type;
  static constexpr double kScale = 0.3;

  struct Results {
    std::unique_ptr<T[]> out, ct_query, ct_key, ct_value;
    std::unique_ptr<Acc[]> lse, weighted, sums;

    explicit Results(const AttentionTest& test)
        : out(Block<T>(test.OutSize())),
          ct_query(Block<T>(test.QuerySize())),
          ct_key(Block<T>(test.KeySize())),
          ct_value(Block<T>(test.ValueSize())),
          lse(Block<Acc>(test.LseSize())),
          weighted(Block<Acc>(test.OutSize())),
          sums(Block<Acc>(test.LseSize())) {}
  };

  int64_t Heads() const { return sizes_.groups * sizes_.per_group; }
  int64_t QuerySize() const { return sizes_.queries * Heads() * sizes_.head_size; }
  int64_t OutSize() const { return sizes_.queries * Heads() * sizes_.value_size; }
  int64_t KeySize() const { return sizes_.keys * sizes_.groups * sizes_.head_size; }
  int64_t ValueSize() const { return sizes_.keys * sizes_.groups * sizes_.value_size; }
  int64_t LseSize() const { return sizes_.queries * Heads(); }

  std::vector<TestMask> MakeMasks(Random& random) const {
    std::vector<TestMask> masks;
    for (int64_t i = 0; i < mask_groups_ * mask_per_group_; ++i) {
      masks.emplace_back(random, sizes_.queries, sizes_.keys);
    }
    return masks;
  }
  static std::vector<TestMask> Transposed(const std::vector<TestMask>& masks) {
    std::vector<TestMask> result;
    for (const TestMask& mask : masks) result.push_back(mask.Transposed());
    return result;
  }

  template <typename Problem>
  Problem MakeProblem() const {
    Problem p;
    p.dtype = kDType<T>;
    p.queries = sizes_.queries;
    p.keys = sizes_.keys;
    p.groups = sizes_.groups;
    p.per_group = sizes_.per_group;
    p.head_size = sizes_.head_size;
    p.value_size = sizes_.value_size;
    p.scale = kScale;
    p.has_mask = p.has_pattern = true;
    p.mask = lists_.View(mask_groups_, mask_per_group_);
    if constexpr (requires { p.pattern; }) {
      p.pattern = patterns_.View(mask_groups_, mask_per_group_);
    }
    p.query.data = query_.get();
    p.key.data = key_.get();
    p.value.data = value_.get();
    return p;
  }

  void Run(std::string_view name, Results* results, int64_t threads) const {
    ThreadWorkers workers(threads);
    auto forward = MakeProblem<AttentionProblem>();
    forward.out.data = results->out.get();
    forward.lse.data = results->lse.get();
    for (const auto& variant : JAXSPARSE_ISA::kAttentionCpuVariants) {
      if (variant.name == name) variant.launch(forward, workers);
    }
    auto tangent = MakeProblem<AttentionTangentProblem>();
    tangent.lse.data = results->lse.get();
    tangent.d_query.data = d_query_.get();
    tangent.d_key.data = d_key_.get();
    tangent.d_value.data = d_value_.get();
    tangent.weighted.data = results->weighted.get();
    tangent.sums.data = results->sums.get();
    for (const auto& variant : JAXSPARSE_ISA::kAttentionTangentCpuVariants) {
      variant.launch(tangent, workers);
    }
    auto backward = MakeProblem<AttentionCotangentProblem>();
    backward.transposed_mask = transposed_lists_.View(mask_groups_, mask_per_group_);
    backward.transposed_pattern = transposed_patterns_.View(mask_groups_, mask_per_group_);
    backward.lse.data = results->lse.get();
    backward.ct_out.data = ct_out_.get();
    backward.ct_sums.data = ct_sums_.get();
    backward.ct_query.data = results->ct_query.get();
    backward.ct_key.data = results->ct_key.get();
    backward.ct_value.data = results->ct_value.get();
    for (const auto& variant : JAXSPARSE_ISA::kAttentionCotangentCpuVariants) {
      if (variant.name == name) variant.launch(backward, workers);
    }
  }

  static void AddTo(std::vector<double>* sums, int64_t at, double factor, const T* row,
                    int64_t size) {
    for (int64_t f = 0; f < size; ++f) {
      (*sums)[static_cast<size_t>(at + f)] += factor * double(ToFloat(row[f]));
    }
  }
  static double Dot(const T* x, const T* y, int64_t size) {
    double sum = 0;
    for (int64_t f = 0; f < size; ++f) sum += double(ToFloat(x[f])) * double(ToFloat(y[f]));
    return sum;
  }

  // What each query sees, one after the other.
  void Compare(const Results& results) const {
    const int64_t h = sizes_.head_size, e = sizes_.value_size, heads = Heads();
    std::vector<double> ct_query(static_cast<size_t>(QuerySize())),
        ct_key(static_cast<size_t>(KeySize())), ct_value(static_cast<size_t>(ValueSize()));
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t group = head / sizes_.per_group;
      const int64_t own = (sizes_.mask_of_group ? group : 0) * mask_per_group_ +
                          (sizes_.mask_of_head ? head % sizes_.per_group : 0);
      const TestMask& mask = masks_[static_cast<size_t>(own)];
      for (int64_t t = 0; t < sizes_.queries; ++t) {
        const int64_t q_at = (t * heads + head) * h, out_at = (t * heads + head) * e;
        const double lse = results.lse[head * sizes_.queries + t];
        std::vector<double> scores(static_cast<size_t>(sizes_.keys)), out(static_cast<size_t>(e));
        std::vector<double> weighted(static_cast<size_t>(e));
        double greatest = -std::numeric_limits<double>::infinity(), sum = 0, sum_of_tangents = 0;
        for (int64_t u = 0; u < sizes_.keys; ++u) {
          if (!mask(t, u)) continue;
          const int64_t k_at = (u * sizes_.groups + group) * h;
          const double s = Dot(&query_[q_at], &key_[k_at], h) * double{kScale};
          scores[static_cast<size_t>(u)] = s;
          greatest = std::max(greatest, std::isnan(s) ? 0 : s);
        }
        for (int64_t u = 0; u < sizes_.keys; ++u) {
          if (!mask(t, u)) continue;
          const int64_t k_at = (u * sizes_.groups + group) * h;
          const int64_t v_at = (u * sizes_.groups + group) * e;
          const double s = scores[static_cast<size_t>(u)], weight = std::exp(s - greatest);
          sum += weight;
          AddTo(&out, 0, weight, &value_[v_at], e);
          const double p = std::exp(s - lse);
          const double ct_sum = ct_sums_[head * sizes_.queries + t];
          const double ct = p * (Dot(&ct_out_[out_at], &value_[v_at], e) + ct_sum) * double{kScale};
          const double ds =
              (Dot(&d_query_[q_at], &key_[k_at], h) + Dot(&query_[q_at], &d_key_[k_at], h)) *
              double{kScale};
          sum_of_tangents += p * ds;
          AddTo(&weighted, 0, p * ds, &value_[v_at], e);
          AddTo(&weighted, 0, p, &d_value_[v_at], e);
          AddTo(&ct_query, q_at, ct, &key_[k_at], h);
          AddTo(&ct_key, k_at, ct, &query_[q_at], h);
          AddTo(&ct_value, v_at, p, &ct_out_[out_at], e);
        }
        Expect(results.sums[head * sizes_.queries + t], sum_of_tangents, kTolerance<T>, "sums");
        Expect(lse, greatest + std::log(sum), sizeof(T) == 8 ? 1e-12 : 1e-5, "lse");
        for (int64_t f = 0; f < e; ++f) {
          const double expected = sum == 0 ? 0 : out[static_cast<size_t>(f)] / sum;
          Expect(ToFloat(results.out[out_at + f]), expected, kTolerance<T>, "out");
          Expect(results.weighted[out_at + f], weighted[static_cast<size_t>(f)], kTolerance<T>,
                 "weighted");
        }
      }
    }
    const auto expect = [](const T* actual, const std::vector<double>& expected, const char* what) {
      for (size_t i = 0; i < expected.size(); ++i) {
        Expect(ToFloat(actual[i]), expected[i], kTolerance<T>, what);
      }
    };
    expect(results.ct_query.get(), ct_query, "ct_query");
    expect(results.ct_key.get(), ct_key, "ct_key");
    expect(results.ct_value.get(), ct_value, "ct_value");
  }

  const AttentionSizes sizes_;
  const int64_t mask_groups_, mask_per_group_;
  const std::vector<TestMask> masks_;
  MaskLists lists_, transposed_lists_;
  PatternLists patterns_, transposed_patterns_;
  std::unique_ptr<T[]> query_, key_, value_, d_query_, d_key_, d_value_, ct_out_;
  std::unique_ptr<Acc[]> ct_sums_;
};

// Features of more than one part, and of every remainder of a vector.
void TestAttention(Random& random) {
  constexpr AttentionSizes kSizes[] = {
      {200, 200, 1, 1, 64, 64, false, false}, {129, 65, 2, 2, 33, 5, true, true},
      {63, 127, 1, 3, 16, 96, false, true},   {64, 128, 2, 1, 8, 1, true, false},
      {1, 200, 2, 2, 20, 24, false, false},   {127, 1, 1, 1, 1, 16, false, false},
      {65, 64, 1, 1, 300, 4, false, false},   {70, 66, 1, 2, 3, 270, false, false},
      {0, 5, 1, 1, 4, 4, false, false},       {5, 0, 1, 1, 4, 4, false, false},
      {330, 130, 1, 1, 2, 48, false, false},  {3, 3, 2, 2, 0, 2, true, true},
      {2, 129, 600, 1, 1, 1, false, false},  // more tasks than take turns at once
  };
  int dtype = 0;
  for (const AttentionSizes& sizes : kSizes) {
    for (int trial = 0; trial < 2; ++trial) {
      DispatchDType(static_cast<DType>(dtype++ % 4), [&]<typename T>() {
        AttentionTest<T> test(random, sizes);
        test.Check();
        test.Poison(random);
        test.Check();
        test.CheckSpoiled(random);
      });
    }
    ++dtype;
  }
}

}  // namespace
}  // namespace jaxsparse
