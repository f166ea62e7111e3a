// Sound calls of what works on the rows of a pattern: softmaxes and reductions.
#pragma once

#include "handlers/calls.h"

namespace jaxsparse {

inline TestCall SoftmaxCall(bool backward, const std::string& dtype, std::vector<int64_t> batch) {
  TestCall call;
  call.operands = {{"values", dtype, Batched(batch, {kNse})}};
  Add(&call.operands, PatternOf(kM, "uint16", batch));
  call.operands.push_back({"row_cuts", "int32", Batched(batch, {backward ? 2 * 2 : 2})});
  if (backward) call.operands.push_back({"tangent", dtype, Batched(batch, {kNse})});
  call.results = {{"out", dtype, Batched(batch, {kNse})}};
  call.attributes = {{"variant", ""}, {"scale", 0.5}, {"workspace", int64_t{0}}};
  return call;
}

inline TestCall ReduceRowsCall(const std::string& reduction, const std::string& dtype,
                               std::vector<int64_t> batch, int64_t workspace) {
  TestCall call;
  call.operands = {{"values", dtype, Batched(batch, {kNse})}};
  Add(&call.operands, PatternOf(kM, "int32", batch));
  call.operands.push_back({"row_cuts", "int32", Batched(batch, {workspace > 0 ? 2 * 2 : 2})});
  call.results = {{"out", dtype, Batched(batch, {kM})}};
  if (workspace > 0) call.results.push_back({"workspace", "uint8", {workspace}});
  call.attributes = {{"variant", ""}, {"reduction", reduction}, {"workspace", workspace}};
  return call;
}

}  // namespace jaxsparse
