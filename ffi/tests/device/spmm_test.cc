// The sparse-dense product on tensor cores of an emulated GPU, against sums in float64.
#include <cstring>

#include "device/spmm_operands.h"
#include "emulated/gpu.h"
#include "spmm/kernels/tensor_cores.cu"

namespace jaxsparse {

alignas(1024) unsigned char spmm_stages[SpmmTensorConfig{.columns = 128}.SharedBytes(3)];
int32_t found_starts[kPrepareBytes / 4];

namespace {

// By two blocks, or by one for each of so many parts of every tile.
template <typename T, typename Out, typename Index, int kColumns, bool kTransposed>
void Test(const SpmmSize& size, SpmmOptions options, int parts = 0) {
  constexpr SpmmTensorConfig kConfig{.columns = kColumns, .transposed = kTransposed};
  static_assert(kConfig.SharedBytes(kComponents<T>) <= sizeof(spmm_stages));
  options.permuted = kTransposed;
  SpmmTest<T, Out, Index> test(size, options);
  SpmmTensorProblem p{test.Problem()};
  if (SpmmCopiesX(p, kColumns)) {
    const EmulatedTensorMap map{static_cast<const uint16_t*>(p.x.data), OwnEntries(p.batch, p.x),
                                p.pattern.columns, p.n};
    std::memcpy(&p.tiles_of_x, &map, sizeof(map));
  }
  std::memset(spmm_stages, 0xff, sizeof(spmm_stages));  // NaN that nothing must read
  const auto tiles = static_cast<int>(ResultTile<kColumns>::Count(p));
  const int blocks = parts > 0 ? tiles * parts : tiles < 2 ? tiles : 2;
  const auto run = [&] {
    auto workspace = SpaceFor(PreparationOf<T, kColumns>(p).Bytes() + kSpmmArrivedBytes +
                              SpmmPartsBytes(tiles * parts, kColumns));
    p.workspace.data = reinterpret_cast<char*>(workspace.get());
    emulated::Launch(3, kPrepareThreads, [&] { SpmmPrepare<T, Index, kConfig>(p); });
    const auto kernel = [&] { SpmmTensorCores<T, Out, Index, Index, kConfig>(p); };
    emulated::Launch(blocks, kConfig.Threads(kComponents<T>), kernel, parts == 3);
    test.Check();
    return workspace;
  };
  const auto workspace = run();
  const bool wrong = options.disorder == Disorder::kWrongIndices;
  if (size.batch == 1 && options.disorder != Disorder::kShuffled && !wrong) return;
  std::vector<int32_t> starts = GiveStarts(PreparationOf<T, kColumns>(p), p.workspace, &p.stored);
  if (wrong) Spoil(starts);
  std::fill(test.out().begin(), test.out().end(), FromFloat<Out>(NAN));
  run();
}

template <typename T, typename Out, int kColumns>
struct Tests {
  static void Plain(const SpmmSize& size, const SpmmOptions& options, int parts = 0) {
    Test<T, Out, uint16_t, kColumns, false>(size, options, parts);
  }

  static void Transposed(const SpmmSize& size, const SpmmOptions& options, int parts = 0) {
    Test<T, Out, int32_t, kColumns, true>(size, options, parts);
  }

  static void Sizes() {
    for (const SpmmSize& size :
         {SpmmSize{1, 1, 1, 1.0}, SpmmSize{70, 130, 5, 0.6}, SpmmSize{37, 700, kColumns + 3, 0.1},
          SpmmSize{130, 0, 4, 0.5}, SpmmSize{65, 200, kColumns - 8, 0.95},
          SpmmSize{20, 600, 12, 0.03, 0.97}}) {
      Plain(size, {.preactivation = true});
      Transposed(size, {.bias = true, .activation = Activation::kGelu});
    }
    Transposed({130, 90, 7, 0.5, 0.99}, {.lead = 3});
    Plain({70, 330, kColumns + 3, 0.2}, {.bias = true, .preactivation = true}, 2);
    Transposed({70, 330, kColumns + 3, 0.6}, {.bias = true, .activation = Activation::kRelu}, 3);
    const SpmmSize batch{18, 150, kColumns + 4, 0.3, 0, 5};  // a block has several tiles
    Plain(batch, {.bias = true, .preactivation = true, .lead = 1});
    Plain(batch, {.shared_x = true, .own_patterns = true});
    Transposed(batch, {.activation = Activation::kRelu, .shared_x = true, .lead = 2});
    const SpmmSize aligned{18, 150, kColumns + 8, 0.3, 0, 5};  // so that x can be copied as it is
    Plain(aligned, {.own_patterns = true}, 3);
    Plain(aligned, {.shared_x = true});
    Transposed(aligned, {.bias = true, .own_patterns = true});
  }

  // Entries that are not in order, are no numbers, or are not of the matrix. How entries are read
  // depends on the number of teams that write tiles, one or two, and on the bits of a value.
  static void Disordered() {
    for (const int64_t batch : {1, 2}) {
      const SpmmSize size{70, 200, 12, 0.2, 0.9, batch};
      Plain(size, {.disorder = Disorder::kWrongIndices, .bias = true, .own_patterns = batch > 1},
            2);
      Transposed(size, {.disorder = Disorder::kWrongIndices});
    }
    if (sizeof(T) == 4) {
      Plain({3, 30, 20, 1.0},
            {.disorder = Disorder::kHuge, .bias = true, .activation = Activation::kRelu});
    }
    for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                              Disorder::kNan, Disorder::kInfinite}) {
      Plain({40, 150, 20, 0.3}, {.disorder = disorder});
      Transposed({10, 70, 24, 0.9}, {.disorder = disorder});
      Plain({9, 150, 24, 0.3}, {.disorder = disorder}, 3);
      Transposed({10, 140, 20, 0.9}, {.disorder = disorder}, 2);
    }
  }
};

// Rows of which one asks for more entries while what another one holds is not in order.
void TestHeldEntries() {
  std::vector<std::vector<int>> rows(16, {0, 1, 2, 3, 4, 5});
  rows[0].resize(64);
  std::iota(rows[0].begin(), rows[0].end(), 64);
  rows[1] = {64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 3, 90, 91};
  std::vector<int32_t> offsets{0}, columns, order(rows.size());
  for (const std::vector<int>& row : rows) {
    columns.insert(columns.end(), row.begin(), row.end());
    offsets.push_back(static_cast<int32_t>(columns.size()));
  }
  columns.resize(columns.size() + 200);  // so that rows can be read on behind their ends
  const auto count = static_cast<int64_t>(rows.size());
  constexpr int64_t kInner = 320, kN = 8;
  std::vector<float> values(columns.size(), 1), x(kInner * kN, 1), out(count * kN);
  SpmmTensorProblem p;
  p.pattern.rows = count;
  p.pattern.columns = kInner;
  p.pattern.nse = static_cast<int64_t>(columns.size());
  p.pattern.row_offsets = Of(offsets);
  p.pattern.column_indices = Of(columns);
  p.pattern.row_order = Of(order);
  p.n = kN;
  p.stored = p.pattern;
  p.batch.rank = 1;
  p.batch.sizes[0] = 1;
  p.values = Of(values);
  p.x = Of(x);
  p.out = Of(out);
  constexpr SpmmTensorConfig kConfig{.columns = 32};
  const auto run = [&] {
    const auto workspace = SpaceFor(PreparationOf<float, 32>(p).Bytes() + kSpmmArrivedBytes);
    p.workspace.data = reinterpret_cast<char*>(workspace.get());
    emulated::Launch(1, kPrepareThreads, [&] { SpmmPrepare<float, int32_t, kConfig>(p); });
    emulated::Launch(1, kConfig.Threads(kComponents<float>),
                     [&] { SpmmTensorCores<float, float, int32_t, int32_t, kConfig>(p); });
  };
  run();
  for (int64_t r = 0; r < count; ++r) {
    if (out[r * kN] != rows[r].size()) Fail("spmm", r, 0, out[r * kN], rows[r].size());
  }
  for (size_t r = 0; r < offsets.size(); ++r) offsets[r] = static_cast<int32_t>(r);
  offsets[8] = 1 << 30;
  run();  // nothing is read out of bounds
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  Tests<float, float, 32>::Sizes();
  Tests<float, float, 64>::Sizes();
  Tests<float, float, 128>::Sizes();
  Tests<bfloat16, bfloat16, 64>::Sizes();
  Tests<float16, float, 32>::Sizes();
  Tests<float, float, 64>::Disordered();
  Tests<float16, float, 32>::Disordered();
  TestHeldEntries();
  std::puts("all results agree");
}
