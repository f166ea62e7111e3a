#include "recurrent/scan_call.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

namespace jaxsparse {

std::vector<std::string_view> Words(std::string_view text) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const size_t end = text.find(' ');
    if (end != 0) words.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? "" : text.substr(end + 1);
  }
  return words;
}

std::vector<Span> Spans(CallParser& call, const char* name, std::string_view allowed, size_t most) {
  constexpr int64_t kMostParts = 1024;
  std::vector<Span> spans;
  for (const std::string_view word : Words(call.Attribute<std::string_view>(name))) {
    Span span;
    size_t digits = 0;
    for (; digits < word.size() && word[digits] >= '0' && word[digits] <= '9'; ++digits) {
      if (span.parts <= kMostParts) span.parts = span.parts * 10 + (word[digits] - '0');
    }
    span.dimensions = word.substr(digits);
    if (span.parts < 1 || span.parts > kMostParts ||
        span.dimensions.find_first_not_of(allowed) != std::string_view::npos) {
      call.Fail(std::string("attribute ") + name + " must have words such as '4" +
                std::string(allowed) + "', got '" + std::string(word) + "'");
    }
    spans.push_back(span);
  }
  if (spans.size() > most) {
    call.Fail(std::string("attribute ") + name + " must have at most " + std::to_string(most) +
              " words, got " + std::to_string(spans.size()));
  }
  return spans;
}

InputSizes::InputSizes(const Span& span, int64_t steps, int64_t batch, int64_t hidden)
    : time(span.has('t') ? steps : 1),
      rows(span.has('b') ? batch : 1),
      parts(span.parts),
      units(span.has('h') ? hidden : 1) {}

ScanInput InputSizes::FormOf(const Span& span) const {
  ScanInput form;
  form.part_stride = units;
  form.unit_stride = span.has('h') ? 1 : 0;
  form.row_stride = span.has('b') ? parts * units : 0;
  form.step_stride = span.has('t') ? rows * parts * units : 0;
  form.direction_stride = time * rows * parts * units;
  return form;
}

KernelLaunch ParseLaunch(CallParser& call, ScanLaunches* launches) {
  constexpr int64_t kMostBlocks = 1 << 16, kMostThreads = 1024, kMostShared = 1 << 20;
  constexpr int64_t kMostCluster = 16, kMostClocks = (int64_t{1} << 32) - 1;
  KernelLaunch launch;
  launch.kernel = {std::string(call.Attribute<std::string_view>("name")),
                   std::string(call.Attribute<std::string_view>("expression")),
                   std::string(call.Attribute<std::string_view>("source"))};
  launch.shape = {call.Integer("blocks", 1, kMostBlocks),
                  static_cast<int>(call.Integer("threads", 1, kMostThreads)),
                  call.Integer("shared_bytes", 0, kMostShared),
                  static_cast<int>(call.Integer("cluster", 1, kMostCluster)), true};
  const auto clocks = [&](const char* name) {
    return static_cast<uint32_t>(call.Integer(name, 0, kMostClocks));
  };
  launch.poll_delays = {clocks("poll_delay"), clocks("poll_delay_increase"),
                        clocks("poll_delay_decrease")};
  launch.wait_limits.limit_ns =
      call.Integer("wait_limit_ns", 1, std::numeric_limits<int64_t>::max());
  launches->exchange_bytes = call.Integer("exchange_bytes", 0, kMostBytes);
  launches->groups = call.Integer("groups", 1, kMostIndex);
  launches->scans = call.Integer("scans", 1, kMaxScansOfLaunch);
  return launch;
}

std::vector<std::string_view> DTypeNames(CallParser& call, const char* attribute, size_t count) {
  auto names = Words(call.Attribute<std::string_view>(attribute));
  if (names.size() != count) {
    call.Fail(std::string("attribute ") + attribute + " must have " + std::to_string(count) +
              " words, one for each array, got " + std::to_string(names.size()));
    names.resize(count);
  }
  return names;
}

ElementType TypeNamed(CallParser& call, std::string_view name, const ElementType& states) {
  const ffi::DataType type = DataTypeOf(name);
  if (type == ffi::F32 || states.Allows(type)) return {type};
  call.Fail("inputs and outputs must have the dtype of states or float32, got '" +
            std::string(name) + "'");
  return {ffi::F32};
}

void ScanCall::TakeSizes(CallParser& call, const Dimension& t, const Dimension& b,
                         const Dimension& h) {
  batch = call.batch();
  steps = t.size, rows = b.size, hidden = h.size;
  if (std::min({steps, rows, hidden}) > 0) return;
  call.Fail("steps, batch and units must be at least 1, got " + std::to_string(steps) + ", " +
            std::to_string(rows) + " and " + std::to_string(hidden));
}

void ScanCall::Fill(int64_t scan, RecurrentScanProblem* problem) const {
  RecurrentScanProblem& p = *problem;
  p.steps = steps;
  p.batch = rows;
  p.hidden = hidden;
  p.exchange = workspace + launches.ExchangeAt(scan);
  p.exchange_bytes = launches.exchange_bytes;
  p.arrivals = reinterpret_cast<uint32_t*>(workspace + launches.ArrivalsAt(scan));
  p.poll_delays = launch.poll_delays;
  p.wait_limits = launch.wait_limits;
  p.wait_limits.error = reinterpret_cast<uint32_t*>(workspace + launches.ErrorAt());
}

void ScanArrays::Fill(const Batch& batch, int64_t entry, RecurrentScanProblem* problem) const {
  const auto at = [&](const Array& array, int64_t bytes) {
    return EntryOf(batch, entry, array, bytes);
  };
  RecurrentScanProblem& p = *problem;
  p.initial_state = at(state, state_bytes);
  p.states = at(states, state_bytes);
  for (size_t i = 0; i < carries.size(); ++i) {
    p.initial_carry[i] = reinterpret_cast<const float*>(at(carries[i], sizeof(float)));
    p.final_carry[i] = reinterpret_cast<float*>(at(last_carries[i], sizeof(float)));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    p.inputs[i] = inputs[i].form;
    p.inputs[i].data = at(inputs[i].array, inputs[i].bytes);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    p.outputs[i] = at(outputs[i].array, outputs[i].bytes);
  }
}

char* EntryOf(const Batch& batch, int64_t entry, const Array& array, int64_t bytes) {
  auto* data = static_cast<char*>(array.data);
  return data + (array.At<char>(batch, entry) - data) * bytes;
}

std::string LaunchCleared(const ScanCall& call, const CudaLaunch& launch, void* problem) {
  const ScopedDevice scoped(launch.device);
  const auto bytes = static_cast<size_t>(call.launches.ClearedBytes());
  auto* stream = static_cast<cudaStream_t>(launch.stream);
  const cudaError_t status = cudaMemsetAsync(call.workspace, 0xff, bytes, stream);
  if (status != cudaSuccess) {
    return std::string("clearing the workspace: ") + cudaGetErrorString(status);
  }
  return LaunchKernel(launch.kernel, launch.shape, problem, launch.device, launch.stream);
}

std::string FailedBefore(int device) {
  return "an earlier scan on GPU " + std::to_string(device) +
         " timed out: its blocks waited for one another longer than JAXSPARSE_SCAN_WAIT_LIMIT "
         "seconds; its results are NaN";
}

}  // namespace jaxsparse
