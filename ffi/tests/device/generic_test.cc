// The kernels that take every shape, on an emulated GPU.
#include "sddmm/kernels/generic.cu"

#include "check_topology/check_topology.cu"
#include "device/sddmm_operands.h"
#include "device/spmm_operands.h"
#include "emulated/gpu.h"
#include "persistent/densify.cu"
#include "persistent/fill.cu"
#include "sparse_softmax/kernels/generic.cu"
#include "sparse_softmax/kernels/generic.h"
#include "spmm/kernels/generic.cu"

namespace jaxsparse {
namespace {

constexpr int kBlocks = 2, kThreads = 128;

template <typename T, typename Out, typename Index>
void TestSpmm(const SpmmSize& size, const SpmmOptions& options) {
  SpmmTest<T, Out, Index> test(size, options);
  SpmmProblem p = test.Problem();
  emulated::Launch(kBlocks, kThreads, [&] { SpmmRows<T, Out, Index>(p); });
  test.Check();
  if (!AreWrong(options.disorder)) return;
  // What it computes of x as if that stood on the left is in bounds, too.
  p.dense_on_left = true;
  emulated::Launch(kBlocks, kThreads, [&] { SpmmDots<T, Out, Index>(p); });
}

template <typename T, typename Out, typename Index>
void TestSddmm(const SddmmSize& size, Disorder disorder, bool scaled) {
  SddmmTest<T, Out, Index> test(size, disorder, scaled, 1);
  const SddmmProblem p = test.Problem();
  emulated::Launch(kBlocks, kSddmmGenericThreads, [&] { SddmmEntries<T, Out, Index>(p); });
  test.Check();
}

// That nothing is out of bounds, whatever indices are.
template <typename Index>
void TestOthers(int64_t rows, int64_t columns) {
  RandomPattern<Index> random(rows, columns, 0.3, 0.9, Disorder::kNone, 0);
  random.SpoilIndices();
  const Pattern pattern = random.AsOperand();
  std::vector<float> values = Normal<float>(pattern.nse), out(values.size());

  SparseSoftmaxProblem softmax;
  softmax.pattern = pattern;
  softmax.values = Of(values);
  softmax.tangent = Of(values);
  softmax.out = Of(out);
  emulated::Launch(kBlocks, kSoftmaxGenericThreads, [&] {
    SparseSoftmaxRows<float, SparseSoftmaxGenericConfig{.backward = false}>(softmax);
  });
  emulated::Launch(kBlocks, kSoftmaxGenericThreads, [&] {
    SparseSoftmaxRows<float, SparseSoftmaxGenericConfig{.backward = true}>(softmax);
  });

  std::vector<int32_t> permutation(values.size(), 0), checked(static_cast<size_t>(rows + 1));
  Spoil(permutation);
  unsigned long long bad_row = ~0ull;
  CheckTopologyProblem check;
  check.pattern = pattern;
  check.pattern.permutation = Of(permutation);
  check.checked_offsets = Of(checked);
  check.bad_row = &bad_row;
  emulated::Launch(kBlocks, kThreads, [&] { CheckTopologyRows<Index>(check); });
  if (bad_row == ~0ull) Fail("the check of a pattern", 0, 0, 0, 1);

  std::vector<float> dense(static_cast<size_t>(rows * columns));
  DensifyProblem densify;
  densify.values = values.data();
  densify.row_offsets = static_cast<const int32_t*>(pattern.row_offsets.data);
  densify.column_indices = pattern.column_indices.data;
  densify.dense = dense.data();
  densify.rows = rows;
  densify.columns = columns;
  densify.nse = pattern.nse;
  emulated::Launch(kBlocks, kDensifyThreads, [&] { Densify<float, Index>(densify); });
}

// Regions that begin at each word of 16 bytes, of all short lengths, and one of several turns; with
// parts of so many words, of which a number is used.
void TestFill(int64_t part_words, int32_t used_parts) {
  constexpr int64_t kWords = kWordsOfFill * kFillThreads * kBlocks * 2 + 3;
  std::vector<std::vector<uint32_t>> arrays;
  FillProblem p;
  for (int64_t words : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{4}, int64_t{7},
                        int64_t{8}, kWords}) {
    for (int64_t before = 0; before < (words < kWords ? kWordsOfFill : 1); ++before) {
      arrays.emplace_back(static_cast<size_t>(before + words), 1);
      p.regions[p.count] = {arrays.back().data() + before, words,
                            100u + static_cast<uint32_t>(p.count), part_words};
      ++p.count;
    }
  }
  if (part_words > 0) p.used_parts = &used_parts;
  emulated::Launch(kBlocks, kFillThreads, [&] { FillRegions(p); });
  for (size_t i = 0; i < arrays.size(); ++i) {
    const std::vector<uint32_t>& array = arrays[i];
    const size_t before = array.size() - static_cast<size_t>(p.regions[i].words);
    const auto used = static_cast<size_t>(std::max(used_parts, 0) * part_words);
    const size_t end = part_words > 0 ? before + used : array.size();
    for (size_t j = 0; j < array.size(); ++j) {
      const uint32_t expected = j < before || j >= end ? 1 : p.regions[i].value;
      if (array[j] != expected) Fail("filled memory", i, j, array[j], expected);
    }
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  for (Disorder disorder : {Disorder::kNone, Disorder::kShuffled, Disorder::kRepeated,
                            Disorder::kNan, Disorder::kWrongIndices}) {
    TestSpmm<float, float, uint16_t>({40, 70, 9, 0.3, 0.9}, {.disorder = disorder});
    TestSpmm<bfloat16, float, int32_t>(
        {23, 50, 33, 0.2, 0, 2},
        {.disorder = disorder, .bias = true, .own_patterns = true, .lead = 1});
    TestSpmm<float, float, int32_t>({30, 40, 5, 0.2}, {.disorder = disorder, .permuted = true});
    TestSddmm<float, float, int32_t>({40, 70, 9, 0.3, 0.9}, disorder, true);
    TestSddmm<float16, float, uint16_t>({23, 50, 40, 0.2}, disorder, false);
  }
  TestFill(0, 0);
  TestFill(3, 2);
  for (const int32_t used_parts : {-1, 0, 1 << 30}) TestFill(1 << 10, used_parts);
  for (int turn = 0; turn < 20; ++turn) {
    TestOthers<int32_t>(17, 30);
    TestOthers<uint16_t>(40, 90);
  }
  std::puts("all results agree");
}
