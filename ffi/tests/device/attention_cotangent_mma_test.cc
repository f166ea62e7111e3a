// The transpose of attention's derivative by mma.sync on an emulated GPU, against float64.
#include "attention/kernels/keys_mma.cu"
#include "attention/kernels/rows_mma.cu"
#include "device/attention_cotangent_operands.h"
#include "device/attention_shared.h"

namespace jaxsparse {
namespace {

// What beside sizes a kernel is compiled for.
struct Shape {
  int rows = kMaskTile, strips = 1, stages = 2, columns = kMaskCell;
  bool split = false;
};

template <typename T, int kHeadSize, int kValueSize, Shape kShape, typename Scoring = NoScoring>
class Test : CotangentOperands<T, kHeadSize, kValueSize, AttentionCotangentWork, Scoring> {
  using Operands = CotangentOperands<T, kHeadSize, kValueSize, AttentionCotangentWork, Scoring>;
  using Operands::p;
  static constexpr CotangentMmaConfig ConfigOf(int strips) {
    return {.tiles = {.head_size = MmaSizeOf(kHeadSize),
                      .value_size = MmaSizeOf(kValueSize),
                      .number_bytes = sizeof(T),
                      .rows = kShape.rows,
                      .strips = strips},
            .stages = kShape.stages,
            .columns = kShape.columns,
            .split = kShape.split};
  }

 public:
  Test(const AttentionSize& size, const AttentionOptions& options = {},
       Wrong wrong = Wrong::kNothing)
      : Operands(size, options, wrong) {
    Operands::Clear();
    static constexpr CotangentMmaConfig kRows = ConfigOf(kShape.strips), kKeys = ConfigOf(1);
    Operands::SetRowItems();
    Launch<kRows>(1, [&] { AttentionCotangentOfRowsMma<T, kRows, Scoring>(p); });
    Operands::SetKeyItems();
    Launch<kKeys>(kKeys.split ? 2 : 1, [&] { AttentionCotangentOfKeysMma<T, kKeys, Scoring>(p); });
    Operands::Check();
  }

 private:
  template <CotangentMmaConfig kConfig>
  void Launch(int parts, const std::function<void()>& kernel) {
    LaunchShared(kConfig.SharedBytes(), p.items.Count() * kConfig.tiles.BlocksOfTile() * parts,
                 kConfig.tiles.Threads(), kernel, true);
  }
};

template <typename T, int kHeadSize, int kValueSize, Shape kShape>
void CheckMasks() {
  using Of = Test<T, kHeadSize, kValueSize, kShape>;
  ForEachMask(
      [](const AttentionSize& size, const AttentionOptions& options) { Of(size, options); });
  for (const Wrong wrong : kAllWrong) {
    Of({130, 70, 1, 2}, {.mask = MaskKind::kScattered}, wrong);
  }
}

template <typename T, int kHeadSize, int kValueSize, Shape kShape, typename Scoring>
void CheckScores() {
  using Of = Test<T, kHeadSize, kValueSize, kShape, Scoring>;
  Of({1, 1}, {.mask = MaskKind::kAll});
  Of({130, 140, 2, 2, 2}, {.mask_of_head = true, .mask_of_entry = true});
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
    Of({80, 140}, {.mask = MaskKind::kScattered, .disorder = disorder});
  }
  for (const Wrong wrong : kAllWrong) Of({130, 70, 1, 2}, {.mask = MaskKind::kScattered}, wrong);
  if constexpr (Scoring::kDrops) Of({70, 80}, {.dropout_rate = 1});
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  CheckMasks<bfloat16, 64, 64, Shape{.strips = 2, .columns = 32}>();
  CheckMasks<float16, 40, 72, Shape{.rows = 64, .stages = 1, .split = true}>();
  CheckMasks<float, 20, 32, Shape{.columns = 32}>();
  Test<bfloat16, 192, 128, Shape{.stages = 1}>({70, 130});
  Test<float16, 24, 256, Shape{.stages = 1, .split = true}>({70, 70});
  CheckScores<bfloat16, 64, 64, Shape{}, Scoring<TestScoreByRows, true, true>>();
  CheckScores<float16, 40, 72, Shape{.rows = 64, .stages = 1, .columns = 32, .split = true},
              Scoring<TestScoreByRows, false, false>>();
  CheckScores<bfloat16, 32, 32, Shape{.columns = 32}, Scoring<NoFunction, true, false>>();
  std::puts("all results agree");
}
