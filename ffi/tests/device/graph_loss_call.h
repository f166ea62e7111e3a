// A call of a loss over graphs and its gradient, as a program has it, on an emulated GPU, as
// graph_scan_call.h has one of a scan.
#pragma once

#include <iostream>
#include <string>
#include <vector>

#include "device/call_files.h"
#include "device/filled_memory.h"
#include "dynamic/loss_problem.h"
#include "dynamic/script.h"
#include "dynamic/workspace.h"
#include "emulated/concurrent_blocks.h"

namespace jaxsparse {

alignas(16) __shared__ Words4 shared[16384];

// What the FFI target does (dynamic/dynamic_loss_ffi.cc), with arrays in its order.
inline int RunCall(const std::string& folder, void (*kernel)(const GraphLossProblem)) {
  CallFiles files(folder);
  const auto next = [&] { return files.Next(); };
  const int64_t products = next(), hidden = next(), carries = next(), classes = next();
  const int64_t labels_offset = next();
  ScriptForm form;
  form.leaves = next(), form.tiles = next(), form.slots = next(), form.groups = next();
  form.kinds = next();
  form.width = kTileRows;
  const bool has_sums = form.tiles > next();
  const int64_t teams = next(), rows = form.tiles * form.width;
  emulated::ConcurrentLaunch launch;
  launch.blocks = static_cast<int>(next());
  launch.threads = static_cast<int>(next());
  const int shared_bytes = static_cast<int>(next());
  files.Read();
  std::vector<Bytes>&operands = files.operands, &results = files.results;
  size_t operand = 0, result = 0;

  GraphLossProblem loss;
  GraphScanProblem &p = loss.gather, &back = loss.emit;
  p.leaves = static_cast<int32_t>(form.leaves);
  p.tiles = static_cast<int32_t>(form.tiles);
  p.groups = static_cast<int32_t>(form.groups);
  const void* weights = operands[operand++].data();
  p.weights = {weights, 1, products * hidden};
  const auto* script = reinterpret_cast<const int32_t*>(operands[operand++].data());
  p.group_tiles = script + form.GroupTilesAt();
  p.records = script + form.RecordsAt();
  FilledMemory filled;
  uint32_t error = 0, report = 0;
  filled.Add(&error, sizeof(error), 0xff);
  p.wait_limits = {int64_t{1} << 40, &error, &report};
  p.poll_delays = {200, 8, 8};
  back = p;
  back.weights = {weights, products * hidden, 1};
  std::vector<uint32_t> arrivals(static_cast<size_t>(2 * teams * kScanFlagBytes / 4));
  filled.Add(arrivals, 0xff);
  p.arrivals = arrivals.data();
  back.arrivals = arrivals.data() + teams * kScanFlagBytes / 4;

  loss.labels = labels_offset < 0 ? reinterpret_cast<const int32_t*>(operands[operand++].data())
                                  : script + labels_offset;
  loss.head_weights = operands[operand++].data();
  loss.head_bias = operands[operand++].data();
  p.leaf_states = operands[operand++].data();
  for (int64_t c = 0; c < carries; ++c) p.leaf_carries[c] = FloatsOf(operands[operand++]);

  std::vector<std::vector<float>> floats(  // sums, carries, and the gradient by states
      static_cast<size_t>(2 + 2 * carries), std::vector<float>(static_cast<size_t>(rows * hidden)));
  size_t array = 0;
  loss.of_bias = FloatsOf(results[result++]);
  loss.totals = FloatsOf(results[result++]);
  std::vector<uint32_t> parts(
      static_cast<size_t>(LossWorkspace::PartsOf(launch.blocks, launch.threads, classes)));
  filled.Add(parts, 0xff);
  loss.parts = parts.data();
  loss.of_logits = FloatsOf(results[result++]);
  filled.Add(loss.of_logits + form.leaves * classes, static_cast<size_t>(rows * classes * 4), 0xff);
  loss.of_leaves = FloatsOf(results[result++]);
  p.states = results[result].data();
  filled.Add(results[result++], 0xff);
  back.states = results[result].data();
  filled.Add(back.states,
             results[result].size() / static_cast<size_t>(form.tiles) *
                 static_cast<size_t>(p.group_tiles[p.groups]),
             0xff);
  ++result;
  const auto zeros = [&] {
    filled.Add(results[result], 0);
    return FloatsOf(results[result++]);
  };
  if (has_sums) back.sums = floats[array++].data();
  back.leaf_sums = zeros();
  for (int64_t c = 0; c < carries; ++c) {
    if (has_sums) back.carries[c] = floats[array++].data();
    back.leaf_carries[c] = zeros();
    p.carries[c] = floats[array++].data();
  }
  loss.of_states = floats[array++].data();

  // Saved arrays: parts, bytes of an element.
  std::vector<Bytes> saved(static_cast<size_t>(next()));
  int input_of_back = 0;
  for (size_t i = 0; i < saved.size(); ++i) {
    const int64_t parts = next(), bytes = next();
    saved[i].assign(static_cast<size_t>(rows * parts * hidden * bytes), 7);
    p.outputs[i] = saved[i].data();
    back.inputs[input_of_back++] = saved[i].data();
  }
  for (int i = 0; operand < operands.size(); ++i, ++operand) {
    p.inputs[i] = operands[operand].data();
    if (next() != 0) back.inputs[input_of_back++] = p.inputs[i];
  }
  back.inputs[input_of_back] = loss.of_states;
  for (int i = 0; result < results.size(); ++i, ++result) back.outputs[i] = results[result].data();
  launch.prologue = [&] { filled.Fill(); };
  emulated::Launch(launch, {reinterpret_cast<char*>(shared), sizeof(shared)}, shared_bytes,
                   [&] { kernel(loss); });
  files.Write();
  std::cout << (error == ~0u ? "done" : "timed out") << std::endl;
  return 0;
}

}  // namespace jaxsparse
