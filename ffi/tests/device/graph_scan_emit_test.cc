// Scans whose rows emit to their sources, whose teams run at once on an emulated GPU.
#include "device/graph_scan_operands.h"
// The steps come first.
#include "dynamic/kernels/graph_scan.cu"
// The kernel comes first.
#include "device/graph_scan_plans.h"

namespace jaxsparse {
namespace {

template <typename Step, typename Plan>
class EmitTest : public GraphOperands<Step, Plan> {
  using Base = GraphOperands<Step, Plan>;
  using Base::kHidden, Base::kSlots, Base::script_;
  using typename Base::State;

 public:
  explicit EmitTest(const RandomScript& script)
      : Base(script, Step::kStates),
        sums_(Room(Base::Rows(), 7.f)),  // which the kernel clears itself
        carries_(Room(Base::Rows(), 7.f)),
        leaf_sums_(Room(script.leaves)),
        leaf_carries_(Room(script.leaves)) {
    Base::filled_.Add(leaf_sums_, 0);
    Base::filled_.Add(leaf_carries_, 0);
  }

  GraphScanProblem Problem() {
    GraphScanProblem p = Base::Problem();
    p.weights.row_stride = Step::kStates * kHidden;
    p.weights.column_stride = 1;
    // Or else nothing is added there.
    if (script_.AllTiles() > Plan::kSizes.window) {
      p.sums = sums_.data();
      p.carries[0] = carries_.data();
    }
    p.leaf_sums = leaf_sums_.data();
    p.leaf_carries[0] = leaf_carries_.data();
    return p;
  }

  // From the last row to the first, by the states that the kernel has found.
  void Check() const {
    const int64_t all = script_.leaves + Base::Rows();
    std::vector<double> sums(static_cast<size_t>(all * kHidden)), carries(sums);
    for (int64_t row = Base::Rows() - 1; row >= 0; --row) {
      const int64_t own = (script_.leaves + row) * kHidden;
      for (int64_t unit = 0; unit < kHidden; ++unit) {
        CheckUnit(row, unit, sums[own + unit], carries[own + unit], &carries);
      }
      Emit(row, &sums);
    }
    for (int64_t i = 0; i < script_.leaves * kHidden; ++i) {
      Base::Compare("sum of leaf", i / kHidden, i % kHidden, leaf_sums_[i], sums[i]);
      if (Step::kCarries == 0) continue;
      Base::Compare("carry of leaf", i / kHidden, i % kHidden, leaf_carries_[i], carries[i]);
    }
  }

  std::vector<float> Sums() const {
    std::vector<float> all = leaf_sums_;
    all.insert(all.end(), leaf_carries_.begin(), leaf_carries_.end());
    return all;
  }

 private:
  static std::vector<float> Room(int64_t rows, float value = 0) {
    return std::vector<float>(static_cast<size_t>(rows * kHidden), value);
  }

  void CheckUnit(int64_t row, int64_t unit, double sum, double carry_sum,
                 std::vector<double>* carries) const {
    float products[1] = {static_cast<float>(sum)}, carry[kSlots] = {static_cast<float>(carry_sum)};
    float inputs[4], states[Step::kStates] = {}, outputs[3] = {};
    Base::InputsOf(row, unit, inputs);
    float prepared[Step::kPrepared + 1];
    Step::Prepare(inputs, prepared);
    Step::Finish(products, carry, prepared, states, outputs);
    const bool is_real = Base::IsReal(row);
    for (int s = 0; s < Step::kStates; ++s) {
      const State got = this->states_[(row * Step::kStates + s) * kHidden + unit];
      Base::Compare("state", row, unit, got, is_real ? states[s] : 0);
    }
    if (!is_real) outputs[0] = outputs[1] = outputs[2] = 0;
    Base::CompareOutputs(row, unit, outputs);
    for (int k = 0; k < kSlots; ++k) {
      const int64_t source = Base::SourceOf(row, k);
      if (source >= 0) (*carries)[source * kHidden + unit] += carry[k];
    }
  }

  void Emit(int64_t row, std::vector<double>* sums) const {
    constexpr int64_t kColumns = Step::kStates * kHidden;
    for (int k = 0; k < kSlots; ++k) {
      const int64_t source = Base::SourceOf(row, k);
      for (int64_t unit = 0; source >= 0 && unit < kHidden; ++unit) {
        for (int64_t c = 0; c < kColumns; ++c) {
          (*sums)[source * kHidden + unit] +=
              Base::WeightOf(row, (k * kHidden + unit) * kColumns + c) *
              ToAccumulator(this->states_[row * kColumns + c]);
        }
      }
    }
  }

  std::vector<float> sums_, carries_, leaf_sums_, leaf_carries_;
};

template <typename Step, typename Arrays, typename S, int kHidden, int kSlots, TeamOptions kOptions>
std::vector<float> Test(const Case& c) {
  using Plan = TeamPlan<Step, Arrays, S, kHidden, kSlots, kOptions>;
  EmitTest<Step, Plan> test(c.script);
  Run<Plan>(c, &test, GraphEmit<Step, Plan>);
  return test.Sums();
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  {  // two slots, two teams for three groups, states that are asked for ahead
    constexpr auto Tree = Test<TreeAdjointStep, TreeArrays, bfloat16, 24, 2,
                               TeamOptions{8, 2, 2, 3, 2, 2, /*asks_ahead=*/true, false, 0, 2}>;
    Tree({.script = {.tiles = 9, .groups = 3}});
    Tree({.script = {.tiles = 9, .unused = 0, .groups = 3}, .backwards = true});
    Tree({.script = {.leaves = 1, .tiles = 1, .groups = 1}});
    Tree({.script = {.tiles = 0, .groups = 1}});
    Tree({.script = {.tiles = 9, .groups = 3, .is_damaged = true}});
    Tree({.script = {.tiles = 9, .groups = 3}, .missing = 1});
  }
  {  // rows that emit farther than the window, and more of them to each source
    constexpr auto Tree = Test<TreeAdjointStep, TreeArrays, bfloat16, 32, 4,
                               TeamOptions{16, 2, 2, 2, 1, 2, false, false, 0, 2}>;
    Tree({.script = {.leaves = 2, .tiles = 24, .groups = 2}});
    Tree({.script = {.tiles = 24, .groups = 2, .is_damaged = true}});
    constexpr auto Chain =
        Test<ChainStep, NoArrays, bfloat16, 16, 1,
             TeamOptions{8, 1, 2, 4, 1, 1, false, false, 0, 1, /*window=*/8, /*sets=*/2}>;
    Chain({.script = {.leaves = 1, .tiles = 24, .groups = 2}, .backwards = true});
  }
  {  // 8 warps for steps and 8 for sums
    constexpr auto Tree = Test<TreeAdjointStep, TreeArrays, bfloat16, 64, 2,
                               TeamOptions{32, 2, 8, 3, 3, 1, false, false, 0, 8}>;
    Tree({.script = {.tiles = 9, .groups = 1}});
  }
  {  // a last block with fewer units, several items of a thread, weights in shared memory
    constexpr auto Tree = Test<TreeAdjointStep, TreeArrays, float16, 40, 2,
                               TeamOptions{32, 1, 2, 2, 3, 1, false, false, 0, 1}>;
    Tree({.script = {.groups = 2}});
    Tree({.script = {.tiles = 11, .groups = 1}});
  }
  {  // rows of several kinds, whose weights are in registers, in shared memory, or in both
    constexpr auto Both = Test<TreeAdjointStep, TreeArrays, bfloat16, 24, 2,
                               TeamOptions{.units = 8,
                                           .warps = 2,
                                           .pointwise_warps = 2,
                                           .stages = 3,
                                           .register_chunks = 1,
                                           .teams = 2,
                                           .sum_warps = 2,
                                           .sets = 2,
                                           .kinds = 2}>;
    Both({.script = {.tiles = 9, .kinds = 2}});
    constexpr auto Shared = Test<TreeAdjointStep, TreeArrays, float, 24, 2,
                                 TeamOptions{.units = 8,
                                             .warps = 2,
                                             .pointwise_warps = 2,
                                             .stages = 3,
                                             .register_chunks = 0,
                                             .teams = 1,
                                             .asks_ahead = true,
                                             .sum_warps = 2,
                                             .kinds = 3}>;
    Shared({.script = {.tiles = 9, .groups = 1, .kinds = 3}});
    Shared({.script = {.tiles = 9, .groups = 3, .kinds = 3, .is_damaged = true}});
  }
  {  // blocks that meet, and warps that are held up
    constexpr auto Tree = Test<TreeAdjointStep, TreeArrays, bfloat16, 32, 2,
                               TeamOptions{16, 2, 4, 2, 1, 2, false, true, 0, 1}>;
    Tree({.script = {.tiles = 8}});
    constexpr auto Chain = Test<ChainStep, NoArrays, bfloat16, 64, 1,
                                TeamOptions{16, 2, 1, 4, 1, 2, false, false, 3000, 4}>;
    Chain({.script = {.tiles = 12}});
    Chain({.script = {.tiles = 12}, .backwards = true});
  }
  {  // sums are the same, in whatever order blocks and warps run, and by two sets, too
    constexpr auto Tree = Test<TreeAdjointStep, TreeArrays, bfloat16, 24, 2,
                               TeamOptions{8, 2, 2, 3, 2, 2, false, false, 0, 2}>;
    constexpr auto Late = Test<TreeAdjointStep, TreeArrays, bfloat16, 24, 2,
                               TeamOptions{8, 2, 4, 3, 2, 2, true, false, 3000, 2, /*window=*/8,
                                           /*sets=*/2}>;
    const Case c{.script = {.leaves = 2, .tiles = 9, .groups = 1}, .backwards = true};
    for (const uint32_t seed : {3u, 4u}) {
      generator.seed(seed);
      const std::vector<float> sums = Tree(c);
      generator.seed(seed);
      if (Late(c) != sums) Fail("sums of other runs", seed, 0, 1, 0);
    }
    // The last tile of a team's group, and the first one of the next group, a window from it in the
    // script: two sets make their steps at once.
    generator.seed(0);
    Late({.script = {.leaves = 1, .tiles = 12, .groups = 4}});
  }
  {  // float32, some weights in shared memory
    constexpr auto Tree = Test<TreeAdjointStep, TreeArrays, float, 40, 2,
                               TeamOptions{8, 4, 2, 3, 1, 2, false, false, 0, 2}>;
    Tree({.script = {.tiles = 7}});
  }
  std::puts("all results agree");
}
