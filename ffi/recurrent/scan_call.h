// What the calls of recurrent scans and of waves have in common: attributes, arrays, and what is
// done before each launch.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "host/call_parser.h"
#include "host/variant.h"
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

// One call: everything but its arrays, and the place of a batch entry in them.
struct ScanCall {
  Batch batch;
  int64_t steps = 0, rows = 0, hidden = 0;
  char* workspace = nullptr;
  ScanLaunches launches;
  KernelLaunch launch;

  // As results have them. None may be 0: a kernel asks for its first inputs before anything else.
  void TakeSizes(CallParser& call, const Dimension& steps, const Dimension& batch,
                 const Dimension& units);
  // Sizes and waits; `scan`: of those that share the workspace, the problem's first one.
  void Fill(int64_t scan, RecurrentScanProblem* problem) const;
};

// The arrays of all scans of a call, or of one layer.
struct ScanArrays {
  struct Input {
    Array array;
    int64_t bytes = 0;  // of an element
    ScanInput form;
  };
  struct Output {
    Array array;
    int64_t bytes = 0;  // of an element
  };
  Array state, states;
  int64_t state_bytes = 0;  // of an element
  std::vector<Array> carries, last_carries;
  std::vector<Input> inputs;
  std::vector<Output> outputs;

  // Where a batch entry of the call has them.
  void Fill(const Batch& batch, int64_t entry, RecurrentScanProblem* problem) const;
};

// Where a batch entry lies in an array with elements of so many bytes.
char* EntryOf(const Batch& batch, int64_t entry, const Array& array, int64_t bytes);

// Launches with a cleared workspace: a kernel that found an earlier scan's states in the exchange
// buffer would take them for its own. Returns the reason of a failure, or an empty string.
std::string LaunchCleared(const ScanCall& call, const CudaLaunch& launch, void* problem);

// What is said of a scan that timed out, by the next one on that GPU.
std::string FailedBefore(int device);

}  // namespace jaxsparse
