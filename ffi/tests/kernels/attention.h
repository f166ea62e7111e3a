// Attention over random masks, by their blocks and by their entries, beside loops over what each
// query sees, in float64.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string_view>

#include "attention/attention.h"
#include "operands.h"

namespace jaxsparse {
namespace {

// Which positions a head stores, and their lists by rows of tiles.
struct TestMask {
  int64_t rows, columns;
  std::vector<char> stored;

  bool operator()(int64_t row, int64_t column) const {
    return stored[static_cast<size_t>(row * columns + column)] != 0;
  }

  // Cells of every kind; some rows store nothing, whatever cells are.
  TestMask(Random& random, int64_t rows, int64_t columns)
      : rows(rows), columns(columns), stored(static_cast<size_t>(rows * columns)) {
    const int64_t across = CeilDivide(columns, kMaskCell);
    std::vector<int64_t> percent(static_cast<size_t>(CeilDivide(rows, kMaskCell) * across));
    for (int64_t& p : percent) p = std::array<int64_t, 5>{0, 3, 20, 60, 100}[random.Below(5)];
    for (int64_t row = 0; row < rows; ++row) {
      const bool is_empty = random.Below(10) == 0;
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t cell = row / kMaskCell * across + c / kMaskCell;
        const bool is_stored = random.Below(100) < percent[static_cast<size_t>(cell)];
        stored[static_cast<size_t>(row * columns + c)] = is_stored && !is_empty;
      }
    }
  }

  TestMask Transposed() const {
    TestMask result = *this;
    std::swap(result.rows, result.columns);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < columns; ++c) {
        result.stored[static_cast<size_t>(c * rows + row)] = (*this)(row, c);
      }
    }
    return result;
  }
};

// The lists of several masks of one shape, one behind the other.
struct MaskLists {
  int64_t rows, columns, capacity = 1, cells = 0;
  std::unique_ptr<int32_t[]> offsets, bits_at, order;
  std::unique_ptr<uint32_t[]> entries, bits;

  explicit MaskLists(const std::vector<TestMask>& masks)
      : rows(CeilDivide(masks[0].rows, kMaskTile)),
        columns(CeilDivide(masks[0].columns, kMaskTile)) {
    std::vector<One> all;
    for (const TestMask& mask : masks) {
      all.emplace_back(mask);
      capacity = std::max(capacity, static_cast<int64_t>(all.back().entries.size()));
      cells = std::max(cells, static_cast<int64_t>(all.back().bits.size()) / kMaskCellWords);
    }
    const auto count = static_cast<int64_t>(masks.size());
    offsets = Block<int32_t>(count * (rows + 1));
    order = Block<int32_t>(count * rows);
    entries = Block<uint32_t>(count * capacity);
    bits_at = Block<int32_t>(count * capacity);
    bits = Block<uint32_t>(count * cells * kMaskCellWords);
    // Room that is not used holds garbage that must not be followed.
    std::fill_n(entries.get(), count * capacity, 0xffffffffu);
    std::fill_n(bits_at.get(), count * capacity, 1 << 30);
    std::fill_n(bits.get(), count * cells * kMaskCellWords, 0xffffffffu);
    for (int64_t i = 0; i < count; ++i) {
      const One& one = all[static_cast<size_t>(i)];
      std::copy(one.offsets.begin(), one.offsets.end(), offsets.get() + i * (rows + 1));
      std::copy(one.entries.begin(), one.entries.end(), entries.get() + i * capacity);
      std::copy(one.bits_at.begin(), one.bits_at.end(), bits_at.get() + i * capacity);
      std::copy(one.bits.begin(), one.bits.end(), bits.get() + i * cells * kMaskCellWords);
      for (int64_t r = 0; r < rows; ++r) order[i * rows + r] = static_cast<int32_t>(rows - 1 - r);
    }
  }

  MaskTiles View(int64_t groups, int64_t per_group) const {
    MaskTiles view;
    view.groups = groups;
    view.per_group = per_group;
    view.rows = rows;
    view.columns = columns;
    view.capacity = capacity;
    view.cells = cells;
    view.offsets.data = offsets.get();
    view.entries.data = entries.get();
    view.bits_at.data = bits_at.get();
    view.bits.data = bits.get();
    view.order.data = order.get();
    return view;
  }

  // As many wrong numbers as right ones.
  void Spoil(Random& random, int64_t count) {
    const auto spoil = [&](auto* numbers, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        if (random.Below(2) == 0) numbers[i] = static_cast<int32_t>(random.engine());
      }
    };
    if (random.Below(2) == 0) spoil(offsets.get(), count * (rows + 1));
    spoil(entries.get(), count * capacity);
    spoil(bits_at.get(), count * capacity);
    if (random.Below(2) == 0) spoil(order.get(), count * rows);
  }

 private:
  struct One {
    std::vector<int32_t> offsets = {0}, bits_at;
    std::vector<uint32_t> entries, bits;

    explicit One(const TestMask& mask) {
      for (int64_t row = 0; row < mask.rows; row += kMaskTile) {
        for (int64_t column = 0; column < mask.columns; column += kMaskTile) {
          const auto at = static_cast<int32_t>(bits.size() / kMaskCellWords);
          uint32_t states = 0;
          for (int cell = 0; cell < 4; ++cell) {
            const MaskCell state =
                AddCell(mask, row + cell / 2 * kMaskCell, column + cell % 2 * kMaskCell);
            states |= static_cast<uint32_t>(state) << (kMaskStatesAt + 2 * cell);
          }
          if (states == 0) continue;
          entries.push_back(states | static_cast<uint32_t>(column / kMaskTile));
          bits_at.push_back(at);
        }
        offsets.push_back(static_cast<int32_t>(entries.size()));
      }
    }

    MaskCell AddCell(const TestMask& mask, int64_t row, int64_t column) {
      std::vector<uint32_t> words(kMaskCellWords);
      int stored = 0;
      for (int word = 0; word < kMaskCellWords; ++word) {
        for (int i = 0; i < 32; ++i) {
          const int64_t r = row + word / 32 * 16 + word % 32 / 4 + 8 * (i / 2 % 2);
          const int64_t c = column + 8 * (i / 4) + 2 * (word % 4) + i % 2;
          if (r >= mask.rows || c >= mask.columns || !mask(r, c)) continue;
          words[static_cast<size_t>(word)] |= 1u << i;
          ++stored;
        }
      }
      if (stored == kMaskCell * kMaskCell) return MaskCell::kFull;
      if (stored == 0) return MaskCell::kEmpty;
      bits.insert(bits.end(), words.begin(), words.end());
      return MaskCell::kPartial;
    }
  };
};

// The entries of several masks of one shape as patterns, one behind the other, with padding.
struct PatternLists {
  int64_t rows, columns, nse = 0;
  std::unique_ptr<int32_t[]> offsets, indices;

  explicit PatternLists(const std::vector<TestMask>& masks)
      : rows(masks[0].rows), columns(masks[0].columns) {
    const auto count = static_cast<int64_t>(masks.size());
    offsets = Block<int32_t>(count * (rows + 1));
    std::vector<std::vector<int32_t>> all;
    for (const TestMask& mask : masks) {
      int32_t* to = offsets.get() + static_cast<int64_t>(all.size()) * (rows + 1);
      std::vector<int32_t>& stored = all.emplace_back();
      *to = 0;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t c = 0; c < columns; ++c) {
          if (mask(row, c)) stored.push_back(static_cast<int32_t>(c));
        }
        *++to = static_cast<int32_t>(stored.size());
      }
      nse = std::max(nse, static_cast<int64_t>(stored.size()) + 2);
    }
    indices = Block<int32_t>(count * nse);
    std::fill_n(indices.get(), count * nse, 1 << 30);
    for (int64_t i = 0; i < count; ++i) {
      const std::vector<int32_t>& stored = all[static_cast<size_t>(i)];
      std::copy(stored.begin(), stored.end(), indices.get() + i * nse);
    }
  }

  MaskPattern View(int64_t groups, int64_t per_group) const {
    MaskPattern view;
    view.groups = groups;
    view.per_group = per_group;
    view.rows = rows;
    view.columns = columns;
    view.nse = rows == 0 || columns == 0 ? 0 : nse;
    view.row_offsets.data = offsets.get();
    view.column_indices.data = indices.get();
    return view;
  }

  // As many wrong numbers as right ones.
  void Spoil(Random& random, int64_t count) {
    const auto spoil = [&](int32_t* numbers, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        if (random.Below(2) == 0) numbers[i] = static_cast<int32_t>(random.engine());
      }
    };
    if (random.Below(2) == 0) spoil(offsets.get(), count * (rows + 1));
    spoil(indices.get(), count * nse);
  }
};

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
    std::unique_ptr<Acc[]> lse;

    explicit Results(const AttentionTest& test)
        : out(Block<T>(test.OutSize())),
          ct_query(Block<T>(test.QuerySize())),
          ct_key(Block<T>(test.KeySize())),
          ct_value(Block<T>(test.ValueSize())),
          lse(Block<Acc>(test.LseSize())) {}
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
    p.pattern = patterns_.View(mask_groups_, mask_per_group_);
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
        double greatest = -std::numeric_limits<double>::infinity(), sum = 0;
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
          AddTo(&ct_query, q_at, ct, &key_[k_at], h);
          AddTo(&ct_key, k_at, ct, &query_[q_at], h);
          AddTo(&ct_value, v_at, p, &ct_out_[out_at], e);
        }
        Expect(lse, greatest + std::log(sum), sizeof(T) == 8 ? 1e-12 : 1e-5, "lse");
        for (int64_t f = 0; f < e; ++f) {
          const double expected = sum == 0 ? 0 : out[static_cast<size_t>(f)] / sum;
          Expect(ToFloat(results.out[out_at + f]), expected, kTolerance<T>, "out");
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
  std::unique_ptr<T[]> query_, key_, value_, ct_out_;
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
