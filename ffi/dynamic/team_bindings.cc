#include "dynamic/team_bindings.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "dynamic/loss_plan.h"
#include "dynamic/loss_problem.h"
#include "dynamic/problem.h"
#include "dynamic/team_plan.h"
#include "dynamic/workspace.h"
#include "recurrent/variants.h"

namespace nb = nanobind;

namespace jaxsparse {
namespace {

// By the names of dynamic/plan.py.
nb::dict Described(const TeamPlan& plan) {
  nb::dict result;
  result["variant"] = plan.variant->name;
  result["constants"] = plan.constants;
  result["teams"] = plan.teams;
  result["blocks"] = plan.blocks;
  result["threads"] = plan.threads;
  result["shared_bytes"] = plan.shared_bytes;
  result["window"] = plan.window;
  result["poll_delay"] = plan.poll_delay;
  result["poll_delay_increase"] = plan.poll_delay_increase;
  result["poll_delay_decrease"] = plan.poll_delay_decrease;
  result["tile_microseconds"] = plan.tile_microseconds;
  result["beside_microseconds"] = plan.beside_microseconds;
  result["total_microseconds"] = plan.total_microseconds;
  result["in_registers"] = plan.in_registers;
  return result;
}

DType ScanDTypeNamed(const std::string& dtype) {
  const auto* named = std::find_if(std::begin(kScanDTypes), std::end(kScanDTypes),
                                   [&](const NamedScanDType& n) { return n.name == dtype; });
  if (named == std::end(kScanDTypes)) {
    throw nb::value_error(("scans have no states or weights of " + dtype).c_str());
  }
  return named->value;
}

void CheckSizes(const GraphScanForm& form) {
  constexpr int64_t kMost = int64_t{1} << 20;
  const auto [least, most] = std::minmax({form.products, form.slots, form.kinds, form.hidden,
                                          form.carries + 1, form.arrays + 1, form.groups + 1});
  if (least < 1 || most > kMost || form.tiles < 0) {
    throw nb::value_error("the sizes of a scan over graphs are out of range");
  }
}

// (the best plan or None, why there is none).
nb::tuple PlanDescribedTeams(const std::string& variant, bool emits, int64_t products,
                             int64_t slots, int64_t kinds, int64_t carries, int64_t arrays,
                             int64_t hidden, int64_t tiles, int64_t groups,
                             const std::string& dtype, int multiprocessors, int64_t shared_bytes) {
  const GraphScanForm form{emits,  products, slots, kinds,  carries,
                           arrays, hidden,   tiles, groups, ScanDTypeNamed(dtype)};
  CheckSizes(form);
  const Gpu gpu{.multiprocessors = multiprocessors, .shared_bytes = shared_bytes};
  const TeamChoice choice = PlanTeams(form, gpu, variant);
  const nb::object plan = choice.best ? nb::object(Described(*choice.best)) : nb::none();
  return nb::make_tuple(plan, choice.reason);
}

// The same of a loss and its gradient, with the constants of the second pass.
nb::tuple PlanDescribedLoss(const std::string& variant, int64_t products, int64_t slots,
                            int64_t carries, int64_t arrays, int64_t emit_arrays, int64_t hidden,
                            int64_t tiles, int64_t groups, int64_t classes,
                            const std::string& dtype, int multiprocessors, int64_t shared_bytes) {
  GraphLossForm form;
  form.gather.products = products;
  form.gather.slots = slots;
  form.gather.carries = carries;
  form.gather.arrays = arrays;
  form.gather.hidden = hidden;
  form.gather.tiles = tiles;
  form.gather.groups = groups;
  form.gather.dtype = ScanDTypeNamed(dtype);
  form.emit = form.gather;
  form.emit.emits = true;
  form.emit.arrays = emit_arrays;
  form.classes = classes;
  CheckSizes(form.gather);
  CheckSizes(form.emit);
  if (groups < 1 || classes < 1 || classes > kMostClasses) {
    throw nb::value_error("the sizes of a loss over graphs are out of range");
  }
  const Gpu gpu{.multiprocessors = multiprocessors, .shared_bytes = shared_bytes};
  const LossChoice choice = PlanLoss(form, gpu, variant);
  if (!choice.best) return nb::make_tuple(nb::none(), choice.reason);
  nb::dict plan = Described(choice.best->launch);
  plan["emit_constants"] = choice.best->emit_constants;
  plan["emit_poll_delay"] = choice.best->emit_poll_delay;
  return nb::make_tuple(plan, choice.reason);
}

// Of a launch: what its blocks tell each other beside states, and the sums of `sums` arrays.
int64_t WorkspaceBytes(int64_t teams, int64_t sums, int64_t rows, int64_t hidden) {
  return GraphWorkspace(teams, sums, rows * hidden).Bytes();
}

int64_t LossWorkspaceBytes(int64_t teams, int64_t sums, int64_t carries, int64_t rows,
                           int64_t hidden, int64_t saved_bytes, int64_t blocks, int64_t threads,
                           int64_t classes) {
  const int64_t parts = LossWorkspace::PartsOf(blocks, threads, classes);
  return LossWorkspace(teams, sums, carries, rows * hidden, saved_bytes, parts).Bytes();
}

}  // namespace

void BindTeams(nb::module_& m) {
  m.def("plan_teams", PlanDescribedTeams, nb::arg("variant"), nb::kw_only(), nb::arg("emits"),
        nb::arg("products"), nb::arg("slots"), nb::arg("kinds"), nb::arg("carries"),
        nb::arg("arrays"), nb::arg("hidden"), nb::arg("tiles"), nb::arg("groups"), nb::arg("dtype"),
        nb::arg("multiprocessors"), nb::arg("shared_bytes"));
  m.def("plan_loss", PlanDescribedLoss, nb::arg("variant"), nb::kw_only(), nb::arg("products"),
        nb::arg("slots"), nb::arg("carries"), nb::arg("arrays"), nb::arg("emit_arrays"),
        nb::arg("hidden"), nb::arg("tiles"), nb::arg("groups"), nb::arg("classes"),
        nb::arg("dtype"), nb::arg("multiprocessors"), nb::arg("shared_bytes"));
  m.def("team_workspace_bytes", WorkspaceBytes, nb::kw_only(), nb::arg("teams"), nb::arg("sums"),
        nb::arg("rows"), nb::arg("hidden"));
  m.def("loss_workspace_bytes", LossWorkspaceBytes, nb::kw_only(), nb::arg("teams"),
        nb::arg("sums"), nb::arg("carries"), nb::arg("rows"), nb::arg("hidden"),
        nb::arg("saved_bytes"), nb::arg("blocks"), nb::arg("threads"), nb::arg("classes"));
  m.attr("TEAM_MOST_ARRAYS") = kMaxGraphArrays;
  m.attr("TEAM_TILE_ROWS") = kTileRows;
  m.attr("LOSS_MOST_CLASSES") = kMostClasses;
}

}  // namespace jaxsparse
