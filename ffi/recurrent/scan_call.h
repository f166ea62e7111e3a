// What the calls of recurrent scans and of waves have in common: attributes, and what is done
// before each launch.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <vector>

#include "host/call_parser.h"
#include "nvrtc/kernel.h"
#include "recurrent/launches.h"
#include "recurrent/problem.h"

namespace jaxsparse {

// What an attribute lists, set off by spaces.
std::vector<std::string_view> Words(std::string_view text);

// Of an input or output: how many parts it has, and along which of the dimensions t, b and h it
// does not repeat, such as "4tbh".
struct Span {
  int64_t parts = 0;
  std::string_view dimensions;
  bool has(char dimension) const { return dimensions.find(dimension) != std::string_view::npos; }
};

// At most so many.
std::vector<Span> Spans(CallParser& call, const char* name, std::string_view allowed,
                        size_t most = kMaxScanArrays);

// An operand (directions, time, rows, parts, units), the last four of which `sizes` has.
struct InputSizes {
  int64_t time, rows, parts, units;

  InputSizes(const Span& span, int64_t steps, int64_t batch, int64_t hidden);
  ScanInput FormOf(const Span& span) const;
};

// The kernel of a call, and how it is launched.
struct KernelLaunch {
  KernelSource kernel;
  LaunchShape shape;
  PollDelays poll_delays;
  WaitLimits wait_limits;
};
// Reads `exchange_bytes`, `groups` and `scans` of the launches, too.
KernelLaunch ParseLaunch(CallParser& call, ScanLaunches* launches);

// The names of so many arrays' dtypes, in an attribute.
std::vector<std::string_view> DTypeNames(CallParser& call, const char* attribute, size_t count);

// Of an array beside states of a dtype.
ElementType TypeNamed(CallParser& call, std::string_view name, const ElementType& states);

// A kernel that found an earlier scan's states in the exchange buffer would take them for its own.
// The reason of a failure, or nothing.
std::string ClearWorkspace(const ScanLaunches& launches, void* workspace, int device,
                           cudaStream_t stream);

// What is said of a scan that timed out, by the next one on that GPU.
std::string FailedBefore(int device);

}  // namespace jaxsparse
