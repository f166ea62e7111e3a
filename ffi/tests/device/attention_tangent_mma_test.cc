// The derivative of attention by mma.sync on an emulated GPU, against float64.
#include "attention/kernels/tangent_mma.cu"
#include "device/attention_operands.h"
#include "device/attention_shared.h"

namespace jaxsparse {
namespace {

// A sum, and the sum of the absolute values of what is added up.
struct Sum {
  double sum = 0, most = 0;
  void Add(double x, double rounding = 0) {
    sum += x;
    most += std::fabs(x) + rounding;
  }
};

template <typename T>
Sum Dot(const T* x, const T* y, int size) {
  Sum sum;
  for (int i = 0; i < size; ++i) sum.Add(double(ToAccumulator(x[i])) * ToAccumulator(y[i]));
  return sum;
}

// What beside sizes a kernel is compiled for.
struct Shape {
  int rows = kMaskTile, stages = 2, columns = kMaskCell;
};

template <typename T, int kHeadSize, int kValueSize, Shape kShape>
class Test {
  static constexpr TangentMmaConfig kConfig{.tiles = {.head_size = MmaSizeOf(kHeadSize),
                                                      .value_size = MmaSizeOf(kValueSize),
                                                      .number_bytes = sizeof(T),
                                                      .rows = kShape.rows},
                                            .stages = kShape.stages,
                                            .columns = kShape.columns};

  AttentionSize size_;
  AttentionTest<T, kHeadSize, kValueSize> operands_;
  AttentionTangentWork p_;
  size_t vectors_, key_vectors_;
  std::vector<T> d_query_, d_key_, d_value_;
  std::vector<float> lse_, weighted_, sums_;

 public:
  Test(const AttentionSize& size, const AttentionOptions& options)
      : size_(size),
        operands_(size, options),
        vectors_(static_cast<size_t>(size.batch * size.queries * operands_.Heads())),
        key_vectors_(static_cast<size_t>(size.batch * size.keys * size.groups)),
        d_query_(Normal<T>(static_cast<int64_t>(vectors_) * kHeadSize)),
        d_key_(Normal<T>(static_cast<int64_t>(key_vectors_) * kHeadSize)),
        d_value_(Normal<T>(static_cast<int64_t>(key_vectors_) * kValueSize)),
        lse_(operands_.template Lse<float>()),
        weighted_(vectors_ * kValueSize, NAN),
        sums_(vectors_, NAN) {
    operands_.WriteTo(&p_);
    const int64_t rows = size.queries * operands_.Heads(), keys = size.keys * size.groups;
    p_.d_query = Of(d_query_, 0, rows * kHeadSize);
    p_.d_key = Of(d_key_, 0, keys * kHeadSize);
    p_.d_value = Of(d_value_, 0, keys * kValueSize);
    p_.lse = Of(lse_, 0, rows);
    p_.weighted = Of(weighted_, 0, rows * kValueSize);
    p_.sums = Of(sums_, 0, rows);
    p_.items = {static_cast<uint32_t>(size.batch * operands_.Heads()),
                static_cast<uint32_t>(p_.mask.rows), 3};
    LaunchShared(kConfig.SharedBytes(), p_.items.Count() * kConfig.tiles.BlocksOfTile(),
                 kConfig.tiles.Threads(), [&] { AttentionTangentMma<T, kConfig>(p_); });
    if (operands_.IsWrong()) return;
    operands_.ForEachRow([&](int64_t b, int64_t h, int64_t t) { CheckRow(b, h, t); });
  }

 private:
  void CheckRow(int64_t b, int64_t h, int64_t t) const {
    const int64_t vector = operands_.VectorAt(b, h, t), number = operands_.NumberAt(b, h, t);
    const T *query = operands_.Query(b, h, t), *d_query = &d_query_[vector * kHeadSize];
    const double lse = lse_[number];
    Sum row_sum, u[kValueSize];
    for (int64_t k = 0; k < size_.keys; ++k) {
      if (!operands_.Sees(b, h, t, k)) continue;
      const int64_t at = operands_.KeyVectorAt(b, h, k);
      const T *key = operands_.Key(b, h, k), *value = operands_.Value(b, h, k);
      const double score = Dot(query, key, kHeadSize).sum * p_.scale, p = std::exp(score - lse);
      const Sum a = Dot(d_query, key, kHeadSize),
                c = Dot(query, &d_key_[at * kHeadSize], kHeadSize);
      const double weight = p * p_.scale * (a.sum + c.sum);
      // What float32 rounds scores and their tangents by. Those of 16 bits are rounded by more.
      const bool is_exact = sizeof(T) == 4 && p != 0;
      const double of_p = is_exact ? std::fabs(score) + std::fabs(lse) : 0;
      const double rounding =
          is_exact ? p * p_.scale * (a.most + c.most) * (1 + of_p) : std::fabs(weight);
      row_sum.Add(weight, rounding);
      for (int i = 0; i < kValueSize; ++i) {
        const double number = ToAccumulator(value[i]);
        const double d_number = ToAccumulator(d_value_[at * kValueSize + i]);
        u[i].Add(weight * number, rounding * std::fabs(number));
        u[i].Add(p * d_number, p * of_p * std::fabs(d_number));
      }
    }
    const float sum = sums_[number];
    if (!IsClose<T>(sum, row_sum.sum, row_sum.most)) Fail("sums", h, t, sum, row_sum.sum);
    for (int i = 0; i < kValueSize; ++i) {
      const float got = weighted_[vector * kValueSize + i];
      if (!IsClose<T>(got, u[i].sum, u[i].most)) Fail("weighted", t, i, got, u[i].sum);
    }
  }
};

template <typename T, int kHeadSize, int kValueSize, Shape kShape>
void Check(const AttentionSize& size, const AttentionOptions& options) {
  Test<T, kHeadSize, kValueSize, kShape>(size, options);
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  ForEachMask(Check<bfloat16, 64, 64, Shape{}>);
  ForEachMask(Check<float, 20, 36, Shape{.rows = 64, .stages = 1, .columns = 32}>);
  std::puts("all results agree");
}
