// The transpose of attention's derivative on an emulated GPU, against float64.
#include "attention/kernels/keys.cu"
#include "attention/kernels/rows.cu"
#include "attention/kernels/tensor_maps.h"
#include "device/attention_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {

constexpr int kMostShared = 232448;  // of a block
alignas(1024) unsigned char attention_shared[kMostShared];

namespace {

// NaN that a query brings with it.
enum class Wrong { kNothing, kQuery, kCtOut, kCtSums };

struct Sums {
  std::vector<double> sums, most;  // and the sums of absolute values

  explicit Sums(size_t size) : sums(size), most(size) {}
  template <typename T>
  void Add(size_t at, double factor, const T* vector, int size) {
    for (int i = 0; i < size; ++i) {
      const double product = factor * ToAccumulator(vector[i]);
      sums[at + i] += product;
      most[at + i] += std::fabs(product);
    }
  }
};

template <typename T, int kSize, typename Scoring>
class CotangentTest {
 public:
  CotangentTest(const AttentionSize& size, const AttentionOptions& options, Wrong wrong)
      : test_(size, options),
        size_(size),
        of_queries_(static_cast<size_t>(size.batch * size.queries * test_.Heads()) * kSize),
        of_keys_(static_cast<size_t>(size.batch * size.keys * size.groups) * kSize),
        ct_out_(Normal<T>(static_cast<int64_t>(of_queries_))),
        ct_sums_(Normal<float>(static_cast<int64_t>(of_queries_) / kSize)),
        lse_(of_queries_ / kSize),
        ct_query_(of_queries_),
        ct_key_(of_keys_),
        ct_value_(of_keys_),
        ct_heat_(of_queries_ / kSize),
        ct_bias_(of_queries_ / kSize * static_cast<size_t>(size.keys)) {
    test_.WriteTo(&p_);
    p_.transposed_mask = test_.TransposedMask();
    const int64_t rows = test_.Heads() * size.queries;
    p_.ct_out = Of(ct_out_, 0, rows * kSize);
    p_.ct_query = Of(ct_query_, 0, rows * kSize);
    p_.ct_key = Of(ct_key_, 0, size.keys * size.groups * kSize);
    p_.ct_value = Of(ct_value_, 0, size.keys * size.groups * kSize);
    p_.scores.ct_values[0] = Of(ct_heat_, 0, rows);
    p_.scores.ct_values[1] = Of(ct_bias_, 0, rows * size.keys);
    p_.lse = Of(lse_, 0, rows);
    p_.ct_sums = Of(ct_sums_, 0, rows);
    p_.log2_scale = static_cast<float>(p_.scale * kLog2OfE);
    const size_t some = of_queries_ / 3;
    if (wrong == Wrong::kQuery) static_cast<T*>(p_.query.data)[some] = FromFloat<T>(NAN);
    if (wrong == Wrong::kCtOut) ct_out_[some] = FromFloat<T>(NAN);
    if (wrong == Wrong::kCtSums) ct_sums_[some / kSize] = NAN;
    for (int64_t b = 0; b < size.batch; ++b) {
      for (int64_t h = 0; h < test_.Heads(); ++h) {
        for (int64_t t = 0; t < size.queries; ++t) {
          lse_[RowAt(b, h, t)] = static_cast<float>(test_.RowOf(b, h, t).lse);
        }
      }
    }
  }

  void Run(int blocks) {
    for (auto* results : {&ct_query_, &ct_key_, &ct_value_}) {
      std::fill(results->begin(), results->end(), FromFloat<T>(NAN));
    }
    std::fill(ct_heat_.begin(), ct_heat_.end(), NAN);
    std::fill(ct_bias_.begin(), ct_bias_.end(), 0.0f);  // as the launch does
    uint32_t counters[kCotangentWorkspaceBytes / 4] = {};
    p_.workspace.data = reinterpret_cast<char*>(counters);
    p_.items.heads_at_once = 3;
    const auto launch = [&](int shared_bytes, const auto& kernel) {
      std::memset(attention_shared, 0xff, sizeof(attention_shared));  // NaN
      __asan_poison_memory_region(attention_shared + shared_bytes, kMostShared - shared_bytes);
      emulated::Launch(blocks, kCotangentThreads, kernel, blocks % 2 == 0);
      __asan_unpoison_memory_region(attention_shared, kMostShared);
    };
    constexpr AttentionRowsConfig kRows{.head_size = kSize};
    static_assert(kRows.SharedBytes() <= kMostShared);
    SetMaps(kMaskCell, kMaskTile);
    p_.items.heads = static_cast<uint32_t>(size_.batch * test_.Heads());
    p_.items.rows = static_cast<uint32_t>(p_.mask.rows);
    launch(kRows.SharedBytes(), [&] { AttentionCotangentOfRows<T, kRows, Scoring>(p_); });
    constexpr AttentionKeysConfig kKeys{.head_size = kSize};
    static_assert(kKeys.SharedBytes() <= kMostShared);
    SetMaps(kMaskCell, kMaskCell);
    p_.items.heads = static_cast<uint32_t>(size_.batch * size_.groups);
    p_.items.rows = static_cast<uint32_t>(p_.transposed_mask.rows);
    launch(kKeys.SharedBytes(), [&] { AttentionCotangentOfKeys<T, kKeys, Scoring>(p_); });
  }

  void Check() const {
    if (test_.IsWrong()) return;
    Sums queries(of_queries_), keys(of_keys_), values(of_keys_);
    Sums heat(ct_heat_.size()), bias(ct_bias_.size());
    for (int64_t b = 0; b < size_.batch; ++b) {
      for (int64_t h = 0; h < test_.Heads(); ++h) {
        for (int64_t t = 0; t < size_.queries; ++t) {
          AddRow(b, h, t, &queries, &keys, &values);
          if (Scoring::Function::kExists) AddOperands(b, h, t, &heat, &bias);
        }
      }
    }
    Compare("ct_query", ct_query_, queries);
    Compare("ct_key", ct_key_, keys);
    Compare("ct_value", ct_value_, values);
    if (!Scoring::Function::kExists) return;
    Compare("ct_heat", ct_heat_, heat);
    Compare("ct_bias", ct_bias_, bias);
  }

  std::vector<T> Results() const {
    std::vector<T> all = ct_query_;
    all.insert(all.end(), ct_key_.begin(), ct_key_.end());
    all.insert(all.end(), ct_value_.begin(), ct_value_.end());
    return all;
  }

 private:
  int64_t RowAt(int64_t b, int64_t h, int64_t t) const {
    return (b * test_.Heads() + h) * size_.queries + t;
  }
  int64_t VectorAt(int64_t b, int64_t h, int64_t t) const {
    return ((b * size_.queries + t) * test_.Heads() + h) * kSize;
  }

  void SetMaps(int queries_at_once, int keys_at_once) {
    const auto set = [&](TensorMap* map, const Array& array, int64_t positions, int64_t heads,
                         int lines) {
      const ArrayOfHalves of = HeadsOf(p_.batch, array, positions, heads, kSize);
      EmulatedArrayMap emulated{static_cast<const uint16_t*>(of.data), {}, {}, lines};
      std::copy_n(of.sizes, 4, emulated.sizes);
      std::copy_n(of.strides, 3, emulated.strides);
      std::memcpy(map, &emulated, sizeof(emulated));
    };
    set(&p_.query_tiles, p_.query, p_.queries, test_.Heads(), queries_at_once);
    set(&p_.ct_out_tiles, p_.ct_out, p_.queries, test_.Heads(), queries_at_once);
    set(&p_.key_tiles, p_.key, p_.keys, p_.groups, keys_at_once);
    set(&p_.value_tiles, p_.value, p_.keys, p_.groups, keys_at_once);
  }

  void AddRow(int64_t b, int64_t h, int64_t t, Sums* queries, Sums* keys, Sums* values) const {
    const T* query = test_.Query(b, h, t);
    const T* ct_out = &ct_out_[VectorAt(b, h, t)];
    const auto dot = [](const T* x, const T* y) {
      double sum = 0;
      for (int i = 0; i < kSize; ++i) sum += double(ToAccumulator(x[i])) * ToAccumulator(y[i]);
      return sum;
    };
    for (int64_t u = 0; u < size_.keys; ++u) {
      if (!test_.Sees(b, h, t, u)) continue;
      const T* key = test_.Key(b, h, u);
      const int64_t at = ((b * size_.keys + u) * size_.groups + h / size_.per_group) * kSize;
      double slope;
      const double score = test_.ScoreOf(b, h, t, u, dot(query, key) * p_.scale, &slope);
      const double p = std::exp(score - lse_[RowAt(b, h, t)]), kept = test_.KeptOf(b, h, t, u);
      const double ct_p = (kept == 0 ? 0 : kept * dot(ct_out, test_.Value(b, h, u)));
      const double ct = p * (ct_p + ct_sums_[RowAt(b, h, t)]) * slope;
      queries->Add(VectorAt(b, h, t), ct * p_.scale, key, kSize);
      keys->Add(at, ct * p_.scale, query, kSize);
      if (kept != 0) values->Add(at, p * kept, ct_out, kSize);
    }
  }

  // Cotangents of the first two operands of the function of scores.
  void AddOperands(int64_t b, int64_t h, int64_t t, Sums* heat, Sums* bias) const {
    const auto dot = [](const T* x, const T* y) {
      double sum = 0;
      for (int i = 0; i < kSize; ++i) sum += double(ToAccumulator(x[i])) * ToAccumulator(y[i]);
      return sum;
    };
    const T* ct_out = &ct_out_[VectorAt(b, h, t)];
    for (int64_t u = 0; u < size_.keys; ++u) {
      if (!test_.Sees(b, h, t, u)) continue;
      const double product = dot(test_.Query(b, h, t), test_.Key(b, h, u)) * p_.scale;
      double slope;
      const double score = test_.ScoreOf(b, h, t, u, product, &slope);
      const double kept = test_.KeptOf(b, h, t, u);
      const double ct_p = kept == 0 ? 0 : kept * dot(ct_out, test_.Value(b, h, u));
      const double ct = std::exp(score - lse_[RowAt(b, h, t)]) * (ct_p + ct_sums_[RowAt(b, h, t)]);
      const float power = static_cast<float>(2 * std::tanh(0.5 * product)), one = 1;
      heat->Add(static_cast<size_t>(RowAt(b, h, t)), ct, &power, 1);
      bias->Add(static_cast<size_t>(RowAt(b, h, t) * size_.keys + u), ct, &one, 1);
    }
  }

  template <typename E>
  static void Compare(const char* what, const std::vector<E>& got, const Sums& wanted) {
    for (size_t i = 0; i < got.size(); ++i) {
      const double x = ToAccumulator(got[i]);
      if (IsClose<T>(x, wanted.sums[i], wanted.most[i])) continue;
      Fail(what, static_cast<int64_t>(i / kSize), static_cast<int64_t>(i % kSize), x,
           wanted.sums[i]);
    }
  }

  AttentionTest<T, kSize, kSize, Scoring> test_;
  AttentionSize size_;
  size_t of_queries_, of_keys_;
  std::vector<T> ct_out_;
  std::vector<float> ct_sums_, lse_;
  std::vector<T> ct_query_, ct_key_, ct_value_;
  std::vector<float> ct_heat_, ct_bias_;
  AttentionCotangentTiles p_;
};

template <typename T, int kSize, typename Scoring = NoScoring>
void Test(const AttentionSize& size, const AttentionOptions& options = {},
          Wrong wrong = Wrong::kNothing) {
  CotangentTest<T, kSize, Scoring> test(size, options, wrong);
  test.Run(2);
  test.Check();
  if (options.mask != MaskKind::kCells || wrong != Wrong::kNothing || AreWrong(options.disorder))
    return;
  std::vector<T> results = test.Results();
  CheckRepeats("attention_cotangent", results, [&] {
    test.Run(3);
    results = test.Results();
  });
}

template <typename T, int kSize>
void TestSizes() {
  for (const MaskKind mask : {MaskKind::kAll, MaskKind::kScattered}) {
    Test<T, kSize>({1, 1}, {.mask = mask});
    Test<T, kSize>({63, 65}, {.mask = mask});
    Test<T, kSize>({129, 64}, {.mask = mask});
  }
  Test<T, kSize>({200, 127}, {.mask = MaskKind::kCausal});
  Test<T, kSize>({40, 70}, {.mask = MaskKind::kNothing});
  Test<T, kSize>({260, 300});
}

template <typename T, int kSize>
void TestHeads() {
  Test<T, kSize>({130, 70, 2, 2, 2}, {.mask_of_group = true, .mask_of_head = true});
  Test<T, kSize>({70, 130, 2, 3, 2},
                 {.mask_of_head = true, .mask_of_entry = true, .shared_keys = true});
}

template <typename T, int kSize, typename Scoring>
void TestScores() {
  Test<T, kSize, Scoring>({1, 1}, {.mask = MaskKind::kAll});
  Test<T, kSize, Scoring>({130, 140, 2, 2, 2}, {.mask_of_head = true, .mask_of_entry = true});
  Test<T, kSize, Scoring>({80, 140},
                          {.mask = MaskKind::kScattered, .disorder = Disorder::kInfinite});
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<bfloat16, 128>();
  TestSizes<float16, 64>();
  TestHeads<bfloat16, 64>();
  TestHeads<float16, 128>();
  for (const Wrong wrong : {Wrong::kQuery, Wrong::kCtOut, Wrong::kCtSums}) {
    Test<bfloat16, 64>({130, 70, 1, 2}, {.mask = MaskKind::kScattered}, wrong);
  }
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite}) {
    Test<bfloat16, 128>({80, 140}, {.mask = MaskKind::kScattered, .disorder = disorder});
    Test<float16, 64>({70, 150, 2}, {.disorder = disorder});
  }
  for (int i = 0; i < 5; ++i) {
    Test<bfloat16, 64>(
        {200, 300, 2, 2, 2},
        {.mask_of_head = true, .mask_of_entry = true, .disorder = Disorder::kWrongIndices});
  }
  TestScores<bfloat16, 64, Scoring<TestScore, false, false>>();
  TestScores<float16, 64, Scoring<NoFunction, true, false>>();
  TestScores<bfloat16, 128, Scoring<TestScore, true, true>>();
  std::puts("all results agree");
}
