// A call of a scan over graphs, as a program has it, on an emulated GPU:
// tests/test_dynamic_emulated.py writes its sizes and operands to files, and reads the results from
// others.
#pragma once

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "device/call_files.h"
#include "device/filled_memory.h"
#include "dynamic/problem.h"
#include "dynamic/script.h"
#include "emulated/concurrent_blocks.h"

namespace jaxsparse {

alignas(16) __shared__ Words4 shared[16384];

// What the FFI target does (dynamic/dynamic_scan_ffi.cc), with arrays in its order.
inline int RunCall(const std::string& folder, void (*kernel)(const GraphScanProblem)) {
  CallFiles files(folder);
  const auto next = [&] { return files.Next(); };
  const bool emits = next() != 0;
  const int64_t products = next(), hidden = next(), carries = next();
  ScriptForm form;
  form.leaves = next(), form.tiles = next(), form.slots = next(), form.groups = next();
  form.kinds = next();
  form.width = kTileRows;
  const int64_t window = next(), teams = next();
  emulated::ConcurrentLaunch launch;
  launch.blocks = static_cast<int>(next());
  launch.threads = static_cast<int>(next());
  const int shared_bytes = static_cast<int>(next());
  files.Read();
  std::vector<Bytes>&operands = files.operands, &results = files.results;

  GraphScanProblem p;
  p.leaves = static_cast<int32_t>(form.leaves);
  p.tiles = static_cast<int32_t>(form.tiles);
  p.groups = static_cast<int32_t>(form.groups);
  const int64_t columns = products * hidden;
  p.weights = {operands[0].data(), emits ? columns : 1, emits ? 1 : columns};
  p.weight_kind_bytes = static_cast<int64_t>(operands[0].size()) / form.kinds;
  const auto* script = reinterpret_cast<const int32_t*>(operands[1].data());
  p.group_tiles = script + form.GroupTilesAt();
  p.records = script + form.RecordsAt();
  size_t operand = 2, result = 0;
  FilledMemory filled;
  // Where rows emit, those of the tiles that the script uses.
  const size_t tiles = static_cast<size_t>(emits ? p.group_tiles[p.groups] : form.tiles);
  p.states = results[result].data();
  filled.Add(p.states, results[result].size() / static_cast<size_t>(form.tiles) * tiles, 0xff);
  ++result;
  std::vector<std::vector<float>> sums(
      static_cast<size_t>(1 + carries),
      std::vector<float>(static_cast<size_t>(form.tiles * form.width * hidden), 7.f));
  const bool has_sums = emits && form.tiles > window;
  if (has_sums) p.sums = sums[0].data();
  if (emits) {
    p.leaf_sums = FloatsOf(results[result]);
    filled.Add(results[result++], 0);
  } else {
    p.leaf_states = operands[operand++].data();
  }
  for (int64_t c = 0; c < carries; ++c, ++result) {
    if (emits) {
      if (has_sums) p.carries[c] = sums[static_cast<size_t>(1 + c)].data();
      p.leaf_carries[c] = FloatsOf(results[result]);
      filled.Add(results[result], 0);
    } else {
      p.carries[c] = FloatsOf(results[result]);
      p.leaf_carries[c] = FloatsOf(operands[operand++]);
    }
  }
  for (int i = 0; operand < operands.size(); ++i, ++operand) {
    p.inputs[i] = operands[operand].data();
  }
  for (int i = 0; result < results.size(); ++i, ++result) p.outputs[i] = results[result].data();
  uint32_t error = 0, report = 0;
  filled.Add(&error, sizeof(error), 0xff);
  p.wait_limits = {int64_t{1} << 40, &error, &report};
  p.poll_delays = {200, 8, 8};
  std::vector<uint32_t> arrivals(static_cast<size_t>(teams * kScanFlagBytes / 4));
  filled.Add(arrivals, 0xff);
  p.arrivals = arrivals.data();
  launch.prologue = [&] { filled.Fill(); };
  emulated::Launch(launch, {reinterpret_cast<char*>(shared), sizeof(shared)}, shared_bytes,
                   [&] { kernel(p); });
  files.Write();
  std::cout << (error == ~0u ? "done" : "timed out") << std::endl;
  return 0;
}

}  // namespace jaxsparse
