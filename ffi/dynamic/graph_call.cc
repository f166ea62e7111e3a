#include "dynamic/graph_call.h"

#include <string>

namespace jaxsparse {

ScriptForm ParseScriptForm(CallParser& call) {
  ScriptForm form;
  form.leaves = call.Integer("leaves", 0, kMostIndex);
  form.tiles = call.Integer("tiles", 1, kMostIndex / kTileRows);
  form.width = kTileRows;
  form.slots = call.Integer("slots", 1, kMaxGraphArrays);
  form.groups = call.Integer("script_groups", 1, kMostIndex);
  if (call.ok() && form.Rows() > kMostIndex) {
    call.Fail("leaves and rows of tiles must be at most " + std::to_string(kMostIndex) +
              " together, got " + std::to_string(form.Rows()));
  }
  return form;
}

Array ParseScript(CallParser& call, int64_t words) {
  Dimension all("words");
  const Array script = call.Operand("script", {ffi::S32}, {all});
  if (call.ok() && all.size < words) {
    call.Fail("a script of its sizes has " + std::to_string(words) + " words or more, got " +
              std::to_string(all.size));
  }
  return script;
}

void CheckUnits(CallParser& call, int64_t products, int64_t slots, const Dimension& units) {
  if (!call.ok()) return;
  const int64_t h = units.size;
  if (h < 1 || products * h > kMaxMatrixRows || slots * h > kMaxMatrixRows) {
    call.Fail("products and slots of all units must be 1 to " + std::to_string(kMaxMatrixRows) +
              ", got " + std::to_string(products) + " and " + std::to_string(slots) + " times " +
              std::to_string(h));
  }
}

void CheckTeams(CallParser& call, int64_t teams, int64_t blocks) {
  if (teams < 1 || blocks % teams == 0) return;
  call.Fail("attribute blocks must be a multiple of scans, " + std::to_string(teams) + ", got " +
            std::to_string(blocks));
}

ScanArrays::Input ParseInput(CallParser& call, const Span& span, std::string_view dtype,
                             int64_t rows, const Dimension& units, const ElementType& states) {
  const int64_t of_unit = span.has('h') ? units.size : 1;
  ElementType type = TypeNamed(call, dtype, states);
  ScanArrays::Input input;
  input.array = call.Operand("input", type, {span.has('r') ? rows : 1, span.parts, of_unit});
  input.bytes = SizeOf(DTypeOf(type));
  return input;
}

GraphScanProblem LaunchedOn(const int32_t* script, const ScriptForm& form,
                            const KernelLaunch& launch, char* workspace,
                            const ScanLaunches& launches) {
  GraphScanProblem p;
  p.group_tiles = script + form.GroupTilesAt();
  p.records = script + form.RecordsAt();
  p.leaves = static_cast<int32_t>(form.leaves);
  p.tiles = static_cast<int32_t>(form.tiles);
  p.groups = static_cast<int32_t>(form.groups);
  p.poll_delays = launch.poll_delays;
  p.wait_limits = launch.wait_limits;
  p.wait_limits.error = reinterpret_cast<uint32_t*>(workspace + launches.ErrorAt());
  p.arrivals = reinterpret_cast<uint32_t*>(workspace + launches.ArrivalsAt(0));
  return p;
}

const void* InputOf(const Batch& batch, int64_t entry, const ScanArrays::Input& input) {
  return EntryOf(batch, entry, input.array, input.bytes);
}

}  // namespace jaxsparse
