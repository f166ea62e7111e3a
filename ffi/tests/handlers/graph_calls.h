// Calls of scans over graphs and of losses, as they should be.
#pragma once

#include <string>

#include "dynamic/script.h"
#include "dynamic/workspace.h"
#include "handlers/calls.h"

namespace jaxsparse {

// Of a cell of 5 products for two children, one carry, an input of each row and one that repeats,
// or of its adjoint.
inline TestCall GraphScanCall(bool emits, const std::string& dtype, int64_t tiles = 3) {
  constexpr int64_t kUnits = 16, kLeaves = 10, kProducts = 5, kSlots = 2, kKinds = 3, kTeams = 2;
  const ScriptForm form{.leaves = kLeaves,
                        .tiles = tiles,
                        .graphs = 4,
                        .width = 8,
                        .slots = kSlots,
                        .groups = 6,
                        .kinds = kKinds};
  const int64_t rows = tiles * form.width;
  TestCall call;
  call.operands = {{"weights", dtype, {kKinds, kSlots * kUnits, kProducts * kUnits}},
                   {"script", "int32", {form.ChannelsAt()}}};
  call.results = {{"states", dtype, {rows, emits ? kProducts : 1, kUnits}}};
  if (emits) {
    Add(&call.results,
        {{"reached", "float32", {kLeaves, 1, kUnits}}, {"carry", "float32", {kLeaves, kUnits}}});
  } else {
    Add(&call.operands,
        {{"state", dtype, {kLeaves, 1, kUnits}}, {"carry", "float32", {kLeaves, kUnits}}});
    call.results.push_back({"carry", "float32", {rows, kUnits}});
  }
  Add(&call.operands, {{"input", dtype, {rows, 3, kUnits}}, {"input", "float32", {1, 7, kUnits}}});
  Add(&call.results,
      {{"output", dtype, {rows, 2, kUnits}}, {"output", "float32", {rows, 1, kUnits}}});
  const GraphWorkspace workspace(kTeams, emits ? 2 : 0, rows * kUnits);
  call.results.push_back({"workspace", "uint8", {workspace.Bytes()}});
  call.attributes = {{"emits", emits},
                     {"window", int64_t{1}},
                     {"products", kProducts},
                     {"slots", kSlots},
                     {"kinds", kKinds},
                     {"leaves", kLeaves},
                     {"tiles", tiles},
                     {"script_groups", form.groups},
                     {"carries", int64_t{1}},
                     {"inputs", "3rh 7h"},
                     {"input_dtypes", dtype + " float32"},
                     {"outputs", "2 1"},
                     {"output_dtypes", dtype + " float32"}};
  AddLaunch({.scans = kTeams}, 8, 1, &call);
  return call;
}

// The loss of that cell, and its gradient, by the input of each row.
inline TestCall GraphLossCall(const std::string& dtype, int64_t tiles = 3) {
  constexpr int64_t kUnits = 16, kLeaves = 10, kProducts = 5, kSlots = 2, kTeams = 2, kClasses = 7;
  const ScriptForm form{
      .leaves = kLeaves, .tiles = tiles, .graphs = 4, .width = 8, .slots = kSlots, .groups = 6};
  const int64_t rows = tiles * form.width;
  TestCall call;
  call.operands = {{"weights", dtype, {1, kSlots * kUnits, kProducts * kUnits}},
                   {"script", "int32", {form.ChannelsAt()}},
                   {"labels", "int32", {kLeaves + rows}},
                   {"head weights", dtype, {kUnits, kClasses}},
                   {"head bias", "float32", {kClasses}},
                   {"state", dtype, {kLeaves, 1, kUnits}},
                   {"carry", "float32", {kLeaves, kUnits}},
                   {"input", dtype, {rows, 3, kUnits}},
                   {"input", "float32", {1, 7, kUnits}}};
  call.results = {{"bias", "float32", {kClasses}},
                  {"totals", "float32", {2}},
                  {"logits", "float32", {kLeaves + rows, kClasses}},
                  {"leaves", "float32", {kLeaves, 1, kUnits}},
                  {"states", dtype, {rows, 1, kUnits}},
                  {"products", dtype, {rows, kProducts, kUnits}},
                  {"reached", "float32", {kLeaves, 1, kUnits}},
                  {"carry", "float32", {kLeaves, kUnits}},
                  {"output", dtype, {rows, 3, kUnits}}};
  const int64_t bytes = dtype == "float32" ? 4 : 2;
  const LossWorkspace workspace(kTeams, 2, 1, rows * kUnits, rows * kUnits * (5 * bytes + 4),
                                LossWorkspace::PartsOf(8, 256, kClasses));
  call.results.push_back({"workspace", "uint8", {workspace.Bytes()}});
  call.attributes = {{"labels_offset", int64_t{-1}},
                     {"head_bias_dtype", "float32"},
                     {"emit_poll_delay", int64_t{1000}},
                     {"window", int64_t{1}},
                     {"products", kProducts},
                     {"slots", kSlots},
                     {"leaves", kLeaves},
                     {"tiles", tiles},
                     {"script_groups", form.groups},
                     {"carries", int64_t{1}},
                     {"inputs", "3rh 7hb"},
                     {"input_dtypes", dtype + " float32"},
                     {"saved", "5 1"},
                     {"saved_dtypes", dtype + " float32"},
                     {"outputs", "3"},
                     {"output_dtypes", dtype}};
  AddLaunch({.scans = kTeams}, 8, 1, &call);
  return call;
}

}  // namespace jaxsparse
