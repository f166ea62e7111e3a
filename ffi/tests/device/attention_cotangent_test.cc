// The transpose of attention's derivative on an emulated GPU, against float64.
#include "attention/kernels/keys.cu"
#include "attention/kernels/rows.cu"
#include "device/attention_cotangent_operands.h"
#include "device/attention_maps.h"
#include "device/attention_shared.h"

namespace jaxsparse {
namespace {

template <typename T, int kSize, typename Scoring>
class CotangentTest : public CotangentOperands<T, kSize, kSize, AttentionCotangentTiles, Scoring> {
  using Operands = CotangentOperands<T, kSize, kSize, AttentionCotangentTiles, Scoring>;
  using Operands::p;

 public:
  using Operands::Operands;

  void Run(int blocks) {
    Operands::Clear();
    // Counters, and what tiles add to cotangents of operands: NaN where nothing is written.
    const int64_t sums = TileSumsBefore(p.scores, p.scores.gradients) * TilesOfHeads(p);
    const auto workspace = SpaceFor(kCotangentWorkspaceBytes + 4 * sums);
    std::memset(workspace.get(), 0, kCotangentWorkspaceBytes);
    p.workspace.data = reinterpret_cast<char*>(workspace.get());
    const auto launch = [&](int shared_bytes, const auto& kernel) {
      LaunchShared(shared_bytes, blocks, kCotangentThreads, kernel, blocks % 2 == 0);
    };
    constexpr AttentionRowsConfig kRows{.head_size = kSize};
    SetMaps(kMaskCell, kMaskTile);
    Operands::SetRowItems();
    launch(kRows.SharedBytes(), [&] { AttentionCotangentOfRows<T, kRows, Scoring>(p); });
    constexpr AttentionKeysConfig kKeys{.head_size = kSize};
    SetMaps(kMaskCell, kMaskCell);
    Operands::SetKeyItems();
    launch(kKeys.SharedBytes(), [&] { AttentionCotangentOfKeys<T, kKeys, Scoring>(p); });
  }

 private:
  void SetMaps(int queries_at_once, int keys_at_once) {
    const auto set = [&](TensorMap* map, const Array& array, int64_t positions, int64_t heads,
                         int lines) {
      *map = EmulatedMapOf(p.batch, array, positions, heads, kSize, lines);
    };
    set(&p.query_tiles, p.query, p.queries, Operands::Heads(), queries_at_once);
    set(&p.ct_out_tiles, p.ct_out, p.queries, Operands::Heads(), queries_at_once);
    set(&p.key_tiles, p.key, p.keys, p.groups, keys_at_once);
    set(&p.value_tiles, p.value, p.keys, p.groups, keys_at_once);
  }
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
  std::vector<float> of_operands = test.ResultsOfOperands();
  CheckRepeats("cotangents of operands of scores", of_operands, [&] {
    test.Run(2);
    of_operands = test.ResultsOfOperands();
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
  Test<T, kSize>({200, 260});
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
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite}) {
    Test<T, kSize, Scoring>({80, 140}, {.mask = MaskKind::kScattered, .disorder = disorder});
  }
  for (const Wrong wrong : kAllWrong) {
    Test<T, kSize, Scoring>({130, 70, 1, 2}, {.mask = MaskKind::kScattered}, wrong);
  }
  if constexpr (Scoring::kDrops) Test<T, kSize, Scoring>({70, 80}, {.dropout_rate = 1});
  if constexpr (Scoring::Function::kGradients > 0) {
    // An item with more tiles than there are stages, each with other words than the one before.
    constexpr int kTiles = AttentionRowsConfig{.head_size = kSize}.Stages() + 2;
    Test<T, kSize, Scoring>({70, kTiles * kMaskTile}, {.mask = MaskKind::kScattered});
  }
}

// Three components add up to a term, whatever it is.
void CheckTerms() {
  using Tile = ColumnTerms::Tile;
  alignas(1024) unsigned char tile[ColumnTerms::kBytes];
  std::vector<float> terms = {0x1.fffffep127f,
                              -0x1.fffffep127f,
                              0x1p-100f,
                              INFINITY,
                              -INFINITY,
                              NAN,
                              std::bit_cast<float>(0x7f800001u)};
  while (terms.size() < Tile::kRows) terms.push_back(Normal<float>(1)[0]);
  for (int line = 0; line < Tile::kRows; ++line) ColumnTerms::Set(tile, line, terms[line]);
  for (int line = 0; line < Tile::kRows; ++line) {
    uint16_t components[ColumnTerms::kComponentsOfTerm];
    std::memcpy(components, tile + Tile::At(line, 0), sizeof(components));
    double sum = 0;
    for (const uint16_t component : components) sum += FloatOfBfloat(component);
    const double term = terms[line];
    if (!(sum == term || (sum != sum && term != term))) Fail("a term", line, 0, sum, term);
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  CheckTerms();
  for (const double scale : {-0.37, 1e-20}) {
    Test<bfloat16, 64>({80, 140}, {.mask = MaskKind::kScattered, .scale = scale});
  }
  TestSizes<bfloat16, 128>();
  TestSizes<float16, 64>();
  TestHeads<bfloat16, 64>();
  TestHeads<float16, 128>();
  for (const Wrong wrong : kAllWrong) {
    Test<bfloat16, 64>({130, 70, 1, 2}, {.mask = MaskKind::kScattered}, wrong);
  }
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite}) {
    Test<bfloat16, 128>({80, 140}, {.mask = MaskKind::kScattered, .disorder = disorder});
    Test<float16, 64>({70, 150, 2}, {.disorder = disorder});
  }
  for (int i = 0; i < 5; ++i) {
    const AttentionOptions wrong{
        .mask_of_head = true, .mask_of_entry = true, .disorder = Disorder::kWrongIndices};
    Test<bfloat16, 64>({130, 200, 2, 2, 2}, wrong);
    if (i < 2) Test<bfloat16, 64, Scoring<TestScore, false, false>>({130, 200, 1, 2, 2}, wrong);
  }
  TestScores<bfloat16, 64, Scoring<TestScore, false, false>>();
  TestScores<float16, 64, Scoring<NoFunction, true, false>>();
  TestScores<bfloat16, 128, Scoring<TestScore, true, true>>();
  std::puts("all results agree");
}
