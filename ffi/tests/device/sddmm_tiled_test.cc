// The sampled dense-dense product in tiles of entries, on an emulated GPU.
#include "device/sddmm_operands.h"
#include "emulated/gpu.h"
#include "sddmm/kernels/tiled.cu"

namespace jaxsparse {
namespace {

constexpr SddmmTiledConfig With(SddmmTiledConfig config, bool whole, bool scaled, bool batched) {
  config.whole = whole;
  config.scaled = scaled;
  config.batched = batched;
  return config;
}

template <typename T, typename Out, typename Index, SddmmTiledConfig kConfig>
void Test(SddmmSize size, Disorder disorder, int64_t lead, bool own_patterns = false) {
  size.entries = kConfig.batched ? 2 : 1;
  SddmmTest<T, Out, Index> test(size, disorder, kConfig.scaled, lead);
  const SddmmProblem p = test.Problem(own_patterns);
  const int64_t warps = p.batch.count * CeilDivide(p.pattern.nse, kConfig.chunks * kWarp);
  const int blocks =
      static_cast<int>(CeilDivide(warps * kConfig.sharing, kSddmmTiledThreads / kWarp));
  const auto run = [&] {
    emulated::Launch(blocks, kSddmmTiledThreads, [&] { SddmmTiled<T, Out, Index, kConfig>(p); });
  };
  run();
  test.Check();
  if (disorder != Disorder::kNone || size.density_of_longest == 0) return;
  CheckRepeats("sddmm", test.out(), run);
}

template <typename T, typename Out, SddmmTiledConfig kConfig>
struct Tests {
  static constexpr int64_t kVector = kConfig.vector, kPart = kConfig.PartSize();

  // What else a kernel is compiled for stands apart from how it finds rows and adds: of each config
  // two kernels that differ in all of it are enough, of a few the other two as well.
  static void Whole(const SddmmSize& size, Disorder disorder = Disorder::kNone) {
    Test<T, Out, uint16_t, With(kConfig, true, false, false)>(size, disorder, 8);
  }
  static void Part(const SddmmSize& size, Disorder disorder = Disorder::kNone, int64_t lead = 8) {
    Test<T, Out, int32_t, With(kConfig, false, true, true)>(size, disorder, lead, true);
  }
  static void WholeOfBatch(const SddmmSize& size, Disorder disorder) {
    Test<T, Out, int32_t, With(kConfig, true, true, true)>(size, disorder, 1, true);
  }
  static void PartUnscaled(const SddmmSize& size, Disorder disorder) {
    Test<T, Out, uint16_t, With(kConfig, false, false, true)>(size, disorder, 8);
  }

  static void Sizes() {
    Whole({1, 1, kPart, 1.0});
    Whole({70, 130, kPart, 0.4});
    Part({40, 90, kPart + kVector, 0.3});
    Part({40, 90, 3 * kPart - kVector, 0.3});
    Part({40, 90, kPart - 1, 0.3}, Disorder::kNone, 1);  // x and y are misaligned
    Part({9, 0, kVector, 0.5});
    Part({0, 20, 3, 0.5});
    Part({20, 13, 0, 0.9});
    // Rows are not where they would be if all were of one length; many are empty, or all but one.
    Whole({7, 600, kPart, 0.03, 0.97});
    Whole({1500, 40, kPart, 0.002, 1.0});
    Whole({60, 2000, kPart, 0.0, 0.5});
    Whole({9000, 40, kPart, 0.0002});  // some rows' entries are searched for
    Part({90, 110, kPart, 0.1, 0.9});
  }

  // Entries that are not in order, are no numbers, or are not of the matrix.
  static void Disordered() {
    WholeOfBatch({90, 110, kPart, 0.1, 0.9}, Disorder::kNone);
    PartUnscaled({40, 90, kPart + kVector, 0.3}, Disorder::kNone);
    for (Disorder disorder :
         {Disorder::kWrongOffsets, Disorder::kFallingOffsets, Disorder::kWrongIndices}) {
      Whole({9000, 40, kPart, 0.0002}, disorder);
      WholeOfBatch({9000, 40, kPart, 0.0002}, disorder);
    }
    for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                              Disorder::kNan, Disorder::kInfinite, Disorder::kWrongOffsets,
                              Disorder::kFallingOffsets, Disorder::kWrongIndices}) {
      Whole({20, 220, kPart, 0.03, 1.0}, disorder);
      WholeOfBatch({20, 220, kPart, 0.03, 1.0}, disorder);
      Part({200, 50, kPart + kVector, 0.05, 1.0}, disorder);
      PartUnscaled({200, 50, kPart + kVector, 0.05, 1.0}, disorder);
    }
  }
};

// 32 warps share 32 entries: all sizes would make this program take half as long again.
template <SddmmTiledConfig kConfig>
void TestFewLongRows() {
  for (const int64_t d : {128, 520}) {
    const SddmmSize size{12, 30, d, 0.3, 1.0};
    for (Disorder disorder : {Disorder::kNone, Disorder::kNan, Disorder::kWrongOffsets}) {
      Test<float, float, uint16_t, With(kConfig, false, false, false)>(size, disorder, 8);
      Test<float, float, int32_t, With(kConfig, false, true, true)>(size, disorder, 1, true);
    }
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  Tests<float, float, SddmmTiledConfig{.lanes = 8, .vector = 4}>::Sizes();
  Tests<float, float,
        SddmmTiledConfig{.lanes = 8, .vector = 4, .vectors = 4, .chunks = 3}>::Sizes();
  Tests<float, float,
        SddmmTiledConfig{.lanes = 4, .vector = 4, .vectors = 2, .chunks = 2}>::Sizes();
  Tests<bfloat16, bfloat16, SddmmTiledConfig{.vector = 8, .chunks = 2}>::Sizes();
  Tests<float16, float, SddmmTiledConfig{.lanes = 8, .vector = 8, .vectors = 3}>::Sizes();
  Tests<double, double, SddmmTiledConfig{.lanes = 2, .vector = 2}>::Sizes();
  Tests<float, float, SddmmTiledConfig{.lanes = 8, .vectors = 5}>::Sizes();
  Tests<bfloat16, bfloat16, SddmmTiledConfig{.lanes = 2, .vector = 2, .vectors = 3}>::Sizes();
  Tests<float, float, SddmmTiledConfig{.lanes = 2, .vector = 4, .balanced = false}>::Sizes();
  Tests<float16, float,
        SddmmTiledConfig{.lanes = 4, .vector = 8, .chunks = 3, .balanced = false}>::Sizes();
  Tests<float, float,
        SddmmTiledConfig{.lanes = 8, .vector = 4, .vectors = 4, .sharing = 2}>::Sizes();
  Tests<float, float,
        SddmmTiledConfig{.lanes = 8, .vector = 4, .vectors = 4, .sharing = 2, .own_rows = true}>::
      Sizes();  // in several rounds
  Tests<float16, float,
        SddmmTiledConfig{.lanes = 16, .vector = 4, .sharing = 4, .own_rows = true}>::Sizes();
  TestFewLongRows<SddmmTiledConfig{.lanes = 32, .vector = 4, .sharing = 32, .own_rows = true}>();
  Tests<bfloat16, bfloat16,
        SddmmTiledConfig{.lanes = 2, .vectors = 3, .chunks = 2, .own_rows = true}>::Sizes();
  Tests<float, float,
        SddmmTiledConfig{
            .lanes = 2, .vector = 2, .sharing = 2, .own_rows = true, .balanced = false}>::Sizes();
  // One of each way to find an entry's row and to share its work.
  Tests<float, float,
        SddmmTiledConfig{.lanes = 8, .vector = 4, .vectors = 4, .chunks = 3}>::Disordered();
  Tests<float16, float,
        SddmmTiledConfig{.lanes = 4, .vector = 8, .chunks = 3, .balanced = false}>::Disordered();
  Tests<float, float,
        SddmmTiledConfig{
            .lanes = 8, .vector = 4, .vectors = 4, .sharing = 2, .own_rows = true}>::Disordered();
  std::puts("all results agree");
}
