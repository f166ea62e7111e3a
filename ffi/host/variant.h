// Kernel variants are rows of a table: the cheapest one that fits wins, ties take table order, and
// some row fits whatever the operation accepts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "host/table.h"
#include "nvrtc/kernel.h"

namespace jaxsparse {

// A launch that lacks the kernel's argument.
struct CudaLaunch {
  const void* kernel;
  LaunchShape shape;
  int device;
  void* stream;

  // Returns the reason of a failure, or an empty string.
  template <typename Argument>
  std::string With(Argument* argument) const {
    static_assert(sizeof(Argument) <= kMostArgumentBytes);
    return LaunchKernel(kernel, shape, argument, device, stream);
  }
};

// Launches a kernel that takes more than the problem: what a driver says, or what follows from how
// it is launched. Returns the reason of a failure, or an empty string.
template <typename Problem>
using LaunchWithMore = std::string (*)(const Problem&, const CudaLaunch&);

// A kernel, which takes the problem by value as its only argument unless it has a launch of its
// own, and how it is launched.
template <typename Problem>
struct CudaKernel {
  KernelSource (*source)(const Problem&);
  LaunchShape (*shape)(const Problem&);
  LaunchWithMore<Problem> launch = nullptr;
};

// A row of an operation's table of CUDA variants.
template <typename Problem>
struct CudaVariant {
  const char* name;
  bool (*fits)(const Problem&);
  double (*cost)(const Problem&);  // predicted microseconds, which `explain` prints; or kByName
  KernelSource (*kernel)(const Problem&);
  LaunchShape (*shape)(const Problem&);
  // The prologue kernel: launched before it, if there is one, and overlapped by it. It prepares
  // something, or does a part of the work.
  const CudaKernel<Problem>* prologue = nullptr;
  LaunchWithMore<Problem> launch = nullptr;
  // The bytes of workspace that it may want on any GPU, for which the program is compiled; or null.
  // `is_asked_for`: the variant is forced by its name, so that it gets a workspace even where that
  // would not pay.
  int64_t (*workspace_bytes)(const Problem&, bool is_asked_for) = nullptr;
};

// In place of the cost of a variant that is only taken by its name, whether or not it has been
// measured; and its cost on problems for which it is.
constexpr std::nullptr_t kByName = nullptr;
constexpr double kCostByName = std::numeric_limits<double>::infinity();

// Row is any struct with {const char* name; bool (*fits)(const Problem&); double (*cost)(const
// Problem&);}. A row without a cost is only taken by its name: it is not looked at in the choice,
// which is made at every execution. `forced` names a row, or is empty. Returns null and fills
// `error` if it can't be had.
template <typename Row, typename Problem>
const Row* Choose(Table<Row> table, const Problem& problem, std::string_view forced,
                  std::string* error) {
  const Row* best = nullptr;
  double least = 0;
  for (const Row& row : table) {
    if (!forced.empty()) {
      if (forced != row.name) continue;
      if (row.fits(problem)) return &row;
      *error = std::string("variant '") + row.name + "' does not fit this problem";
      return nullptr;
    }
    if (row.cost == nullptr || !row.fits(problem)) continue;
    const double cost = row.cost(problem);
    if (best == nullptr || cost < least) {
      best = &row;
      least = cost;
    }
  }
  if (best == nullptr) {
    *error = "no variant named '" + std::string(forced) + "'; there are";
    for (const Row& row : table) *error += std::string(" '") + row.name + "'";
  }
  return best;
}

struct Candidate {
  std::string name;
  double cost;
};

// The rows that fit, in table order; those without a cost with an infinite one.
template <typename Row, typename Problem>
std::vector<Candidate> Fitting(Table<Row> table, const Problem& problem) {
  std::vector<Candidate> candidates;
  for (const Row& row : table) {
    if (!row.fits(problem)) continue;
    candidates.push_back({row.name, row.cost == nullptr ? kCostByName : row.cost(problem)});
  }
  return candidates;
}

template <typename Row>
std::vector<std::string> Names(Table<Row> table) {
  std::vector<std::string> names;
  for (const Row& row : table) names.push_back(row.name);
  return names;
}

}  // namespace jaxsparse
