// Scans whose rows gather from their sources, whose teams run at once on an emulated GPU.
#include "device/graph_scan_operands.h"
// The steps come first.
#include "dynamic/kernels/graph_scan.cu"
// The kernel comes first.
#include "device/graph_scan_plans.h"

namespace jaxsparse {
namespace {

template <typename Step, typename Plan>
class GatherTest : public GraphOperands<Step, Plan> {
  using Base = GraphOperands<Step, Plan>;
  using Base::kHidden, Base::kSlots, Base::kHasArrays, Base::script_;
  using typename Base::State;

 public:
  explicit GatherTest(const RandomScript& script, bool has_nan)
      : Base(script, Step::kProducts),
        leaf_states_(Normal<State>(int64_t{script.leaves} * kHidden)),
        leaf_carries_(Normal<float>(int64_t{script.leaves} * kHidden)),
        carries_(static_cast<size_t>(Base::Rows() * kHidden), 7.f) {
    // With the bits of what is not written yet.
    if (has_nan) std::memset(&leaf_states_[1], 0xff, sizeof(State) * 3);
  }

  GraphScanProblem Problem() {
    GraphScanProblem p = Base::Problem();
    p.weights.row_stride = 1;
    p.weights.column_stride = Step::kProducts * kHidden;
    p.leaf_states = leaf_states_.data();
    p.leaf_carries[0] = leaf_carries_.data();
    p.carries[0] = carries_.data();
    return p;
  }

  // Row by row, from the states that the kernel has found: each follows from those before.
  void Check() const {
    for (int64_t row = 0; row < Base::Rows(); ++row) {
      for (int64_t unit = 0; unit < kHidden; ++unit) CheckUnit(row, unit);
    }
  }

 private:
  template <typename T>
  const T* Of(const std::vector<T>& leaves, const std::vector<T>& computed, int64_t source) const {
    if (source < 0) return nullptr;
    return source < script_.leaves ? leaves.data() + source * kHidden
                                   : computed.data() + (source - script_.leaves) * kHidden;
  }

  void CheckUnit(int64_t row, int64_t unit) const {
    float products[Step::kProducts], carry[kSlots], inputs[4], state[1] = {}, outputs[3] = {};
    double sums[Step::kProducts] = {};
    for (int k = 0; k < kSlots; ++k) {
      const int64_t source = Base::SourceOf(row, k);
      const State* states = Of(leaf_states_, this->states_, source);
      const float* carries = Of(leaf_carries_, carries_, source);
      carry[k] = carries == nullptr ? 0 : carries[unit];
      for (int64_t c = 0; states != nullptr && c < kHidden; ++c) {
        for (int g = 0; g < Step::kProducts; ++g) {
          const int64_t at = ((k * kHidden + c) * Step::kProducts + g) * kHidden + unit;
          sums[g] += double(ToAccumulator(this->weights_[at])) * ToAccumulator(states[c]);
        }
      }
    }
    for (int g = 0; g < Step::kProducts; ++g) products[g] = static_cast<float>(sums[g]);
    Base::InputsOf(row, unit, inputs);
    Step::Apply(products, carry, inputs, state, outputs);
    if (!Base::IsReal(row)) carry[0] = state[0] = outputs[0] = outputs[1] = outputs[2] = 0;
    const int64_t at = row * kHidden + unit;
    Base::Compare("state", row, unit, this->states_[at], state[0]);
    if (kHasArrays) Base::Compare("carry", row, unit, carries_[at], carry[0]);
    Base::CompareOutputs(row, unit, outputs);
  }

  std::vector<State> leaf_states_;
  std::vector<float> leaf_carries_, carries_;
};

template <typename Step, typename Arrays, typename S, int kHidden, int kSlots, TeamOptions kOptions>
void Test(const Case& c) {
  using Plan = TeamPlan<Step, Arrays, S, kHidden, kSlots, kOptions>;
  GatherTest<Step, Plan> test(c.script, c.has_nan);
  Run<Plan>(c, &test, GraphGather<Step, Plan>);
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  {  // two slots, all weights in registers, two teams for three groups
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, bfloat16, 24, 2, TeamOptions{8, 2, 2, 3, 1, 2, true}>;
    Tree({.script = {.tiles = 9, .groups = 3}});
    Tree({.script = {.tiles = 9, .unused = 0, .groups = 3}, .has_nan = true, .backwards = true});
    Tree({.script = {.leaves = 1, .tiles = 1, .groups = 1}});
    Tree({.script = {.tiles = 0, .groups = 1}});
    Tree({.script = {.tiles = 9, .groups = 3, .is_damaged = true}});
    Tree({.script = {.tiles = 9, .groups = 3}, .missing = 1});
  }
  {  // a last block with fewer units, several items of a thread, weights in shared memory
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, float16, 40, 2, TeamOptions{32, 1, 2, 2, 1, 1, false}>;
    Tree({.script = {.groups = 2}});
  }
  {  // blocks that meet, and warps that are held up
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, bfloat16, 32, 2, TeamOptions{16, 2, 4, 2, 0, 2, false, true}>;
    Tree({.script = {.tiles = 8}});
    constexpr auto Chain = Test<ChainStep, NoArrays, bfloat16, 64, 1,
                                TeamOptions{16, 2, 1, 1, 1, 2, true, false, 3000}>;
    Chain({.script = {.tiles = 12}, .has_nan = true});
    Chain({.script = {.tiles = 12}, .backwards = true});
  }
  {  // two sets that take tiles in turn, warps that are held up, and a window of a few tiles
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, bfloat16, 24, 2,
             TeamOptions{8, 2, 4, 3, 1, 2, true, false, 40000, 0, /*window=*/16, /*sets=*/2}>;
    Tree({.script = {.tiles = 45, .groups = 3}});
    Tree({.script = {.tiles = 45, .unused = 0, .groups = 2}, .backwards = true});
    Tree({.script = {.tiles = 24, .nearest = 2}});
    Tree({.script = {.tiles = 60, .groups = 1, .nearest = 12}});  // as far as the window reaches
    Tree({.script = {.tiles = 1, .groups = 1}});
    Tree({.script = {.tiles = 30, .groups = 3, .is_damaged = true}});
    Tree({.script = {.tiles = 9, .groups = 3}, .missing = 1});
  }
  {  // two sets without a window, of two stages
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, bfloat16, 16, 2,
             TeamOptions{8, 1, 2, 2, 1, 1, false, false, 3000, 0, /*window=*/0, /*sets=*/2}>;
    Tree({.script = {.tiles = 30, .groups = 2}});
  }
  {  // float32, some weights in shared memory
    constexpr auto Tree =
        Test<TreeStep, TreeArrays, float, 40, 2, TeamOptions{16, 2, 2, 3, 1, 2, true}>;
    Tree({.script = {.tiles = 7}});
  }
  std::puts("all results agree");
}
