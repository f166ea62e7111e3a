// The derivative of attention by mma.sync on an emulated GPU, against float64.
#include <cstring>

#include "attention/kernels/tangent_mma.cu"
#include "device/attention_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {

constexpr int kMostShared = 232448;  // of a block
alignas(1024) unsigned char attention_shared[kMostShared];

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
  static constexpr int kBytes = kConfig.SharedBytes();
  static_assert(kBytes <= kMostShared);

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
        lse_(vectors_),
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
    for (int64_t b = 0; b < size.batch; ++b) {
      for (int64_t h = 0; h < operands_.Heads(); ++h) {
        for (int64_t t = 0; t < size.queries; ++t) {
          lse_[RowAt(b, h, t)] = static_cast<float>(operands_.RowOf(b, h, t).lse);
        }
      }
    }
    std::memset(attention_shared, 0xff, sizeof(attention_shared));  // NaN
    __asan_poison_memory_region(attention_shared + kBytes, kMostShared - kBytes);
    emulated::Launch(static_cast<int>(p_.items.Count()) * kConfig.tiles.BlocksOfTile(),
                     kConfig.tiles.Threads(), [&] { AttentionTangentMma<T, kConfig>(p_); });
    __asan_unpoison_memory_region(attention_shared, kMostShared);
    if (operands_.IsWrong()) return;
    for (int64_t b = 0; b < size.batch; ++b) {
      for (int64_t h = 0; h < operands_.Heads(); ++h) {
        for (int64_t t = 0; t < size.queries; ++t) CheckRow(b, h, t);
      }
    }
  }

 private:
  int64_t RowAt(int64_t b, int64_t h, int64_t t) const {
    return (b * operands_.Heads() + h) * size_.queries + t;
  }

  void CheckRow(int64_t b, int64_t h, int64_t t) const {
    const int64_t vector = (b * size_.queries + t) * operands_.Heads() + h;
    const T *query = operands_.Query(b, h, t), *d_query = &d_query_[vector * kHeadSize];
    const double lse = lse_[RowAt(b, h, t)];
    Sum row_sum, u[kValueSize];
    for (int64_t k = 0; k < size_.keys; ++k) {
      if (!operands_.Sees(b, h, t, k)) continue;
      const int64_t at = (b * size_.keys + k) * size_.groups + h / size_.per_group;
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
    const float sum = sums_[RowAt(b, h, t)];
    if (!IsClose<T>(sum, row_sum.sum, row_sum.most)) Fail("sums", h, t, sum, row_sum.sum);
    for (int i = 0; i < kValueSize; ++i) {
      const float got = weighted_[vector * kValueSize + i];
      if (!IsClose<T>(got, u[i].sum, u[i].most)) Fail("weighted", t, i, got, u[i].sum);
    }
  }
};

template <typename T, int kHeadSize, int kValueSize, Shape kShape>
void CheckMasks() {
  using Of = Test<T, kHeadSize, kValueSize, kShape>;
  Of({1, 1}, {.mask = MaskKind::kAll});
  Of({40, 70}, {.mask = MaskKind::kNothing});
  Of({200, 127}, {.mask = MaskKind::kCausal});
  Of({130, 70, 2, 2, 2}, {.mask_of_group = true, .mask_of_head = true});
  // Numbers that are not finite and lists that are wrong.
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
    Of({80, 140}, {.mask = MaskKind::kScattered, .disorder = disorder});
    Of({130, 150, 2}, {.disorder = disorder});
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  CheckMasks<bfloat16, 64, 64, Shape{}>();
  CheckMasks<float, 20, 36, Shape{.rows = 64, .stages = 1, .columns = 32}>();
  std::puts("all results agree");
}
