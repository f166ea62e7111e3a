#include "dynamic/team_bindings.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "dynamic/problem.h"
#include "dynamic/team_plan.h"
#include "dynamic/workspace.h"
#include "recurrent/variants.h"

namespace nb = nanobind;

namespace jaxsparse {
namespace {

// By the names of dynamic/plan.py; None if there is no plan.
nb::object Described(const TeamChoice& choice) {
  if (!choice.best) return nb::none();
  const TeamPlan& plan = *choice.best;
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

// (the best plan or None, why there is none).
nb::tuple PlanDescribedTeams(const std::string& variant, bool emits, int64_t products,
                             int64_t slots, int64_t kinds, int64_t carries, int64_t arrays,
                             int64_t hidden, int64_t tiles, int64_t groups,
                             const std::string& dtype, int multiprocessors, int64_t shared_bytes) {
  constexpr int64_t kMost = int64_t{1} << 20;
  if (std::min({products, slots, kinds, hidden}) < 1 ||
      std::min({carries, arrays, tiles, groups}) < 0 ||
      std::max({products, slots, kinds, hidden, carries, arrays, groups}) > kMost) {
    throw nb::value_error("the sizes of a scan over graphs are out of range");
  }
  const auto* named = std::find_if(std::begin(kScanDTypes), std::end(kScanDTypes),
                                   [&](const NamedScanDType& n) { return n.name == dtype; });
  if (named == std::end(kScanDTypes)) {
    throw nb::value_error(("scans have no states or weights of " + dtype).c_str());
  }
  const GraphScanForm form{emits,  products, slots, kinds,  carries,
                           arrays, hidden,   tiles, groups, named->value};
  const Gpu gpu{.multiprocessors = multiprocessors, .shared_bytes = shared_bytes};
  const TeamChoice choice = PlanTeams(form, gpu, variant);
  return nb::make_tuple(Described(choice), choice.reason);
}

// Of a launch: what its blocks tell each other beside states, and the sums of `sums` arrays.
int64_t WorkspaceBytes(int64_t teams, int64_t sums, int64_t rows, int64_t hidden) {
  return GraphWorkspace(teams, sums, rows * hidden).Bytes();
}

}  // namespace

void BindTeams(nb::module_& m) {
  m.def("plan_teams", PlanDescribedTeams, nb::arg("variant"), nb::kw_only(), nb::arg("emits"),
        nb::arg("products"), nb::arg("slots"), nb::arg("kinds"), nb::arg("carries"),
        nb::arg("arrays"), nb::arg("hidden"), nb::arg("tiles"), nb::arg("groups"), nb::arg("dtype"),
        nb::arg("multiprocessors"), nb::arg("shared_bytes"));
  m.def("team_workspace_bytes", WorkspaceBytes, nb::kw_only(), nb::arg("teams"), nb::arg("sums"),
        nb::arg("rows"), nb::arg("hidden"));
  m.attr("TEAM_MOST_ARRAYS") = kMaxGraphArrays;
  m.attr("TEAM_TILE_ROWS") = kTileRows;
}

}  // namespace jaxsparse
