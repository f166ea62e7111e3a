// Attention by mma.sync on tensor cores of an emulated GPU, against float64.
#include <cstring>

#include "attention/kernels/tiles_mma.cu"
#include "device/attention_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {

constexpr int kMostShared = 232448;  // of a block
alignas(1024) unsigned char attention_shared[kMostShared];

namespace {

template <typename T, int kHeadSize, int kValueSize, int kRows, int kStrips,
          typename Scoring = NoScoring>
class Test {
  static constexpr AttentionMmaConfig kConfig{.tiles = {.head_size = MmaSizeOf(kHeadSize),
                                                        .value_size = MmaSizeOf(kValueSize),
                                                        .number_bytes = sizeof(T),
                                                        .rows = kRows,
                                                        .strips = kStrips}};
  static_assert(kConfig.SharedBytes() <= kMostShared);

  AttentionTest<T, kHeadSize, kValueSize, Scoring> operands_;
  AttentionMmaProblem p_;
  std::vector<T> out_;
  std::vector<float> lse_;

 public:
  Test(const AttentionSize& size, const AttentionOptions& options) : operands_(size, options) {
    operands_.WriteTo(&p_);
    const int64_t rows = size.queries * operands_.Heads();
    out_.resize(static_cast<size_t>(size.batch * rows * kValueSize));
    lse_.resize(static_cast<size_t>(size.batch * rows));
    p_.out = Of(out_, 0, rows * kValueSize);
    p_.lse = Of(lse_, 0, rows);
    p_.items = {static_cast<uint32_t>(size.batch * operands_.Heads()),
                static_cast<uint32_t>(p_.mask.rows), 3};
    Run();
    operands_.Check(out_, lse_);
  }

 private:
  void Run() {
    std::fill(out_.begin(), out_.end(), FromFloat<T>(NAN));
    std::fill(lse_.begin(), lse_.end(), NAN);
    std::memset(attention_shared, 0xff, sizeof(attention_shared));  // that nothing must read
    __asan_poison_memory_region(attention_shared + kConfig.SharedBytes(),
                                kMostShared - kConfig.SharedBytes());
    emulated::Launch(static_cast<int>(p_.items.Count()) * kConfig.tiles.BlocksOfTile(),
                     kConfig.tiles.Threads(), [&] { AttentionTilesMma<T, kConfig, Scoring>(p_); });
    __asan_unpoison_memory_region(attention_shared, kMostShared);
  }
};

template <typename T, int kHeadSize, int kValueSize, int kRows, int kStrips>
void CheckMasks() {
  using Of = Test<T, kHeadSize, kValueSize, kRows, kStrips>;
  Of({1, 1}, {});
  Of({63, 129}, {.mask = MaskKind::kAll});
  Of({200, 64}, {.mask = MaskKind::kNothing});
  Of({300, 300}, {.mask = MaskKind::kCausal});
  Of({200, 300, 2, 1, 2}, {.mask_of_group = true, .mask_of_entry = true});
  Of({130, 200, 1, 3, 2},
     {.mask = MaskKind::kScattered, .mask_of_head = true, .shared_keys = true});
  // Numbers that are not finite and lists that are wrong.
  for (const Disorder disorder : {Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
    Of({129, 200}, {.mask = MaskKind::kScattered, .disorder = disorder});
    Of({200, 129, 2}, {.disorder = disorder});
  }
  Of({129, 65}, {.mask = MaskKind::kAll, .disorder = Disorder::kNan});
}

template <typename T, int kHeadSize, int kValueSize, int kRows, typename Scoring>
void CheckScores() {
  using Of = Test<T, kHeadSize, kValueSize, kRows, 1, Scoring>;
  Of({1, 1}, {.mask = MaskKind::kAll});
  Of({130, 140, 2, 2, 2}, {.mask_of_head = true, .mask_of_entry = true});
  for (const Disorder disorder : {Disorder::kInfinite, Disorder::kWrongIndices}) {
    Of({80, 140}, {.mask = MaskKind::kScattered, .disorder = disorder});
  }
  if constexpr (Scoring::kDrops) Of({70, 80}, {.dropout_rate = 1});
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  CheckMasks<bfloat16, 64, 64, 128, 2>();
  CheckMasks<float16, 40, 72, 64, 1>();
  CheckMasks<float, 32, 32, 128, 1>();
  Test<bfloat16, 96, 24, 128, 1>({130, 130}, {});
  Test<float16, 256, 256, 64, 1>({70, 70}, {});
  Test<float, 20, 68, 64, 1>({70, 130}, {});
  CheckScores<bfloat16, 64, 64, 128, Scoring<TestScore, true, true>>();
  CheckScores<float16, 40, 72, 64, Scoring<TestScore, false, false>>();
  CheckScores<bfloat16, 32, 32, 128, Scoring<NoFunction, true, false>>();
  std::puts("all results agree");
}
