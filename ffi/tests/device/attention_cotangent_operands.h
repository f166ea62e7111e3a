// Operands of the transpose of attention's derivative, and what its results are in float64.
#pragma once

#include "attention/kernels/cotangent_entries.cuh"
#include "device/attention_operands.h"

namespace jaxsparse {

// NaN that a query brings with it.
enum class Wrong { kNothing, kQuery, kCtOut, kCtSums };
constexpr Wrong kAllWrong[] = {Wrong::kQuery, Wrong::kCtOut, Wrong::kCtSums};

struct Sums {
  std::vector<double> sums, most;  // and the sums of absolute values

  explicit Sums(size_t size) : sums(size), most(size) {}
  // `rounding`: what counts as the factor's absolute value beside it.
  template <typename T>
  void Add(size_t at, double factor, double rounding, const T* vector, int size) {
    for (int i = 0; i < size; ++i) {
      const double number = ToAccumulator(vector[i]);
      sums[at + i] += factor * number;
      most[at + i] += (std::fabs(factor) + rounding) * std::fabs(number);
    }
  }
};

// `Problem` is what kernels take.
template <typename T, int kHeadSize, int kValueSize, typename Problem, typename Scoring = NoScoring>
class CotangentOperands {
 public:
  CotangentOperands(const AttentionSize& size, const AttentionOptions& options, Wrong wrong)
      : test_(size, options),
        size_(size),
        vectors_(static_cast<size_t>(size.batch * size.queries * test_.Heads())),
        key_vectors_(static_cast<size_t>(size.batch * size.keys * size.groups)),
        ct_out_(Normal<T>(static_cast<int64_t>(vectors_) * kValueSize)),
        ct_sums_(Normal<float>(static_cast<int64_t>(vectors_))),
        lse_(test_.template Lse<float>()),
        ct_query_(vectors_ * kHeadSize),
        ct_key_(key_vectors_ * kHeadSize),
        ct_value_(key_vectors_ * kValueSize),
        ct_heat_(vectors_),
        ct_bias_(OfScores(static_cast<int64_t>(vectors_) * size.keys)),
        ct_table_(OfScores(size.batch * test_.Heads() * test_.Distances())),
        ct_tilt_(OfScores(size.batch * test_.Heads() * size.keys)) {
    test_.WriteTo(&p);
    p.transposed_mask = test_.TransposedMask();
    const int64_t rows = test_.Heads() * size.queries, keys = size.keys * size.groups;
    p.ct_out = Of(ct_out_, 0, rows * kValueSize);
    p.ct_query = Of(ct_query_, 0, rows * kHeadSize);
    p.ct_key = Of(ct_key_, 0, keys * kHeadSize);
    p.ct_value = Of(ct_value_, 0, keys * kValueSize);
    p.scores.ct_values[0] = Of(ct_heat_, 0, rows);
    p.scores.ct_values[1] = Of(ct_bias_, 0, rows * size.keys);
    p.scores.ct_values[2] = Of(ct_table_, 0, test_.Heads() * test_.Distances());
    p.scores.ct_values[3] = Of(ct_tilt_, 0, test_.Heads() * size.keys);
    p.lse = Of(lse_, 0, rows);
    p.ct_sums = Of(ct_sums_, 0, rows);
    p.log2_scale = static_cast<float>(p.scale * kLog2OfE<double>);
    p.items.heads_at_once = 3;
    const size_t some = vectors_ / 3;
    if (wrong == Wrong::kQuery) {
      static_cast<T*>(p.query.data)[some * kHeadSize] = FromFloat<T>(NAN);
    }
    if (wrong == Wrong::kCtOut) ct_out_[some * kValueSize] = FromFloat<T>(NAN);
    if (wrong == Wrong::kCtSums) ct_sums_[some] = NAN;
  }

  Problem p;
  int64_t Heads() const { return test_.Heads(); }
  // What items of rows are, and of keys.
  void SetRowItems() {
    p.items.heads = static_cast<uint32_t>(size_.batch * test_.Heads());
    p.items.rows = static_cast<uint32_t>(p.mask.rows);
  }
  void SetKeyItems() {
    p.items.heads = static_cast<uint32_t>(size_.batch * size_.groups);
    p.items.rows = static_cast<uint32_t>(p.transposed_mask.rows);
  }

  void Clear() {
    for (auto* results : {&ct_query_, &ct_key_, &ct_value_}) {
      std::fill(results->begin(), results->end(), FromFloat<T>(NAN));
    }
    for (auto* results : {&ct_heat_, &ct_table_, &ct_tilt_}) {
      std::fill(results->begin(), results->end(), NAN);
    }
    std::fill(ct_bias_.begin(), ct_bias_.end(), 0.0f);  // as a launch does
  }

  void Check() const {
    if (test_.IsWrong()) return;
    Sums queries(ct_query_.size()), keys(ct_key_.size()), values(ct_value_.size());
    SumsOfOperands operands{Sums(ct_heat_.size()), Sums(ct_bias_.size()), Sums(ct_table_.size()),
                            Sums(ct_tilt_.size())};
    test_.ForEachRow([&](int64_t b, int64_t h, int64_t t) {
      AddRow(b, h, t, &queries, &keys, &values);
      if (Scoring::Function::kExists) AddOperands(b, h, t, &operands);
    });
    Compare("ct_query", ct_query_, queries, kHeadSize);
    Compare("ct_key", ct_key_, keys, kHeadSize);
    Compare("ct_value", ct_value_, values, kValueSize);
    if (!Scoring::Function::kExists) return;
    Compare("ct_heat", ct_heat_, operands.heat, 1);
    Compare("ct_bias", ct_bias_, operands.bias, static_cast<int>(size_.keys));
    if (Scoring::Function::kGradients == 2) return;
    Compare("ct_table", ct_table_, operands.table, static_cast<int>(test_.Distances()));
    Compare("ct_tilt", ct_tilt_, operands.tilt, static_cast<int>(size_.keys));
  }

  std::vector<T> Results() const {
    std::vector<T> all = ct_query_;
    all.insert(all.end(), ct_key_.begin(), ct_key_.end());
    all.insert(all.end(), ct_value_.begin(), ct_value_.end());
    return all;
  }
  // Of the function of scores.
  std::vector<float> ResultsOfOperands() const {
    std::vector<float> all = ct_heat_;
    for (const auto* results : {&ct_bias_, &ct_table_, &ct_tilt_}) {
      all.insert(all.end(), results->begin(), results->end());
    }
    return all;
  }

 private:
  static size_t OfScores(int64_t size) {
    return Scoring::Function::kExists ? static_cast<size_t>(size) : 0;
  }

  // A product, and the sum of the absolute values of what is added up.
  struct Dot {
    double sum = 0, most = 0;
    Dot(const T* x, const T* y, int size) {
      for (int i = 0; i < size; ++i) {
        const double product = double(ToAccumulator(x[i])) * ToAccumulator(y[i]);
        sum += product;
        most += std::fabs(product);
      }
    }
  };

  void AddRow(int64_t b, int64_t h, int64_t t, Sums* queries, Sums* keys, Sums* values) const {
    const T* query = test_.Query(b, h, t);
    const T* ct_out = &ct_out_[test_.VectorAt(b, h, t) * kValueSize];
    for (int64_t u = 0; u < size_.keys; ++u) {
      if (!test_.Sees(b, h, t, u)) continue;
      const T* key = test_.Key(b, h, u);
      const int64_t at = test_.KeyVectorAt(b, h, u);
      const Dot score(query, key, kHeadSize);
      const Dot ct_score(ct_out, test_.Value(b, h, u), kValueSize);
      double slope;
      const double of_score = test_.ScoreOf(b, h, t, u, score.sum * p.scale, &slope);
      const double p_tu = std::exp(of_score - lse_[test_.NumberAt(b, h, t)]);
      const double kept = test_.KeptOf(b, h, t, u), ct_p = kept == 0 ? 0 : kept * ct_score.sum;
      const double ct = p_tu * (ct_p + ct_sums_[test_.NumberAt(b, h, t)]) * slope;
      // What float32 rounds scores and their cotangents by. Those of 16 bits are rounded by more,
      // and weights of float16 are multiples of 2^-24: by 2^-25, which is a part of 2^-8 of this.
      double rounded_p = std::is_same_v<T, float16> ? 0x1p-17 : 0, rounded_ct = rounded_p;
      if (sizeof(T) == 4 && p_tu != 0) {
        rounded_p =
            p_tu * (std::fabs(score.sum * p.scale) + std::fabs(lse_[test_.NumberAt(b, h, t)]));
        rounded_ct = p_tu * (ct_score.most + std::fabs(ct_sums_[test_.NumberAt(b, h, t)])) +
                     std::fabs(rounded_p * (ct_score.sum + ct_sums_[test_.NumberAt(b, h, t)]));
      }
      queries->Add(test_.VectorAt(b, h, t) * kHeadSize, ct * p.scale,
                   rounded_ct * std::fabs(p.scale), key, kHeadSize);
      keys->Add(at * kHeadSize, ct * p.scale, rounded_ct * std::fabs(p.scale), query, kHeadSize);
      // A dropped probability is 0, whatever it was, and meets the cotangent as such.
      const double weight = kept == 0 ? 0 : p_tu * kept;
      values->Add(at * kValueSize, weight, kept == 0 ? 0 : rounded_p * kept, ct_out, kValueSize);
    }
  }

  struct SumsOfOperands {
    Sums heat, bias, table, tilt;
  };

  // Cotangents of operands of the function of scores.
  void AddOperands(int64_t b, int64_t h, int64_t t, SumsOfOperands* sums) const {
    const auto row = static_cast<size_t>(test_.NumberAt(b, h, t));
    const auto head = static_cast<size_t>(b * test_.Heads() + h);
    for (int64_t u = 0; u < size_.keys; ++u) {
      if (!test_.Sees(b, h, t, u)) continue;
      const double product = Dot(test_.Query(b, h, t), test_.Key(b, h, u), kHeadSize).sum * p.scale;
      const Dot ct_score(&ct_out_[test_.VectorAt(b, h, t) * kValueSize], test_.Value(b, h, u),
                         kValueSize);
      double slope;
      const double score = test_.ScoreOf(b, h, t, u, product, &slope);
      const double kept = test_.KeptOf(b, h, t, u), ct_p = kept == 0 ? 0 : kept * ct_score.sum;
      const double p_tu = std::exp(score - lse_[row]), ct = p_tu * (ct_p + ct_sums_[row]);
      // Numbers that nearly cancel out leave what float32 rounds them by, which is 2^-13 of what
      // those of 16 bits are.
      const double most = (kept == 0 ? 0 : kept * ct_score.most) + std::fabs(ct_sums_[row]);
      const double rounded = 0x1p-13 * p_tu * most;
      const float power = static_cast<float>(2 * std::tanh(0.5 * product)), one = 1, half = 0.5f;
      sums->heat.Add(row, ct, rounded, &power, 1);
      sums->bias.Add(row * size_.keys + u, ct, rounded, &one, 1);
      sums->table.Add(head * test_.Distances() + t - u + size_.keys - 1, ct, rounded, &one, 1);
      sums->tilt.Add(head * size_.keys + u, ct, rounded, &half, 1);
    }
  }

  template <typename E>
  static void Compare(const char* what, const std::vector<E>& got, const Sums& wanted, int size) {
    for (size_t i = 0; i < got.size(); ++i) {
      const double x = ToAccumulator(got[i]);
      if (IsClose<T>(x, wanted.sums[i], wanted.most[i])) continue;
      Fail(what, static_cast<int64_t>(i / size), static_cast<int64_t>(i % size), x, wanted.sums[i]);
    }
  }

  AttentionTest<T, kHeadSize, kValueSize, Scoring> test_;
  AttentionSize size_;
  size_t vectors_, key_vectors_;
  std::vector<T> ct_out_;
  std::vector<float> ct_sums_, lse_;
  std::vector<T> ct_query_, ct_key_, ct_value_;
  std::vector<float> ct_heat_, ct_bias_, ct_table_, ct_tilt_;
};

}  // namespace jaxsparse
