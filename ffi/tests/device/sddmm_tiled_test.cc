// The sampled dense-dense product in tiles of entries, on an emulated GPU.
#include "sddmm/sddmm_tiled.cu"

#include "device/sddmm_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {
namespace {

template <typename T, typename Out, typename Index, int kLanes, int kPieces, int kChunks,
          bool kWhole, bool kScaled, SddmmTechnique kWithout>
void Test(const SddmmSize& size, Disorder disorder, int64_t lead, bool own_patterns = false) {
  SddmmTest<T, Out, Index> test(size, disorder, kScaled, lead);
  const SddmmProblem p = test.Problem(own_patterns);
  const int64_t warps = p.batch.count * CeilDivide(p.pattern.nse, kChunks * kWarp);
  const int blocks = static_cast<int>(CeilDivide(warps, kSddmmTiledThreads / kWarp));
  const auto run = [&] {
    emulated::Launch(blocks, kSddmmTiledThreads, [&] {
      if (p.batch.count == 1) {
        SddmmTiled<T, Out, Index, kLanes, kPieces, kChunks, kWhole, kScaled, kWithout, false>(p);
      } else {
        SddmmTiled<T, Out, Index, kLanes, kPieces, kChunks, kWhole, kScaled, kWithout, true>(p);
      }
    });
  };
  run();
  test.Check();
  if (disorder != Disorder::kNone || size.density_of_longest == 0) return;
  CheckRepeats("sddmm", test.out(), run);
}

template <typename T, typename Out, int kLanes, int kPieces, int kChunks,
          SddmmTechnique kWithout = SddmmTechnique::kNone>
void TestSizes() {
  constexpr int64_t kVector = 16 / sizeof(T), kPart = kLanes * kPieces * kVector;
  const auto whole = [](const SddmmSize& size, Disorder disorder = Disorder::kNone) {
    Test<T, Out, uint16_t, kLanes, kPieces, kChunks, true, false, kWithout>(size, disorder, 8);
    Test<T, Out, int32_t, kLanes, kPieces, kChunks, true, true, kWithout>(size, disorder, 1, true);
  };
  const auto part = [](const SddmmSize& size, Disorder disorder = Disorder::kNone,
                       int64_t lead = 8) {
    Test<T, Out, int32_t, kLanes, kPieces, kChunks, false, true, kWithout>(size, disorder, lead);
    Test<T, Out, uint16_t, kLanes, kPieces, kChunks, false, false, kWithout>(size, disorder, lead,
                                                                             true);
  };
  whole({1, 1, kPart, 1.0});
  whole({70, 130, kPart, 0.4});
  part({40, 90, kPart + kVector, 0.3});
  part({40, 90, 3 * kPart - kVector, 0.3});
  part({40, 90, kPart - 1, 0.3}, Disorder::kNone, 1);  // x and y are misaligned
  part({9, 0, kVector, 0.5});
  part({0, 20, 3, 0.5});
  part({20, 13, 0, 0.9});
  // Rows are not where they would be if all were of one length; many are empty, or all but one.
  whole({7, 600, kPart, 0.03, 0.97});
  whole({1500, 40, kPart, 0.002, 1.0});
  whole({60, 2000, kPart, 0.0, 0.5});
  for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                            Disorder::kNan, Disorder::kInfinite, Disorder::kWrongOffsets}) {
    whole({20, 220, kPart, 0.03, 1.0}, disorder);
    part({200, 50, kPart + kVector, 0.05, 1.0}, disorder);
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<float, float, 8, 1, 1>();
  TestSizes<float, float, 8, 4, 3>();
  TestSizes<float, float, 4, 2, 2>();
  TestSizes<bfloat16, bfloat16, 1, 1, 2>();
  TestSizes<float16, float, 8, 3, 1>();
  TestSizes<double, double, 2, 1, 1>();
  TestSizes<float, float, 4, 2, 2, SddmmTechnique::kWideLoads>();
  TestSizes<bfloat16, bfloat16, 2, 1, 1, SddmmTechnique::kWideLoads>();
  TestSizes<float, float, 2, 1, 1, SddmmTechnique::kBalance>();
  TestSizes<float16, float, 4, 1, 3, SddmmTechnique::kBalance>();
  std::puts("all results agree");
}
