// Kernel variants are rows of a table: the cheapest one that fits wins, ties take table order, and
// some row fits whatever the operation accepts.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "host/table.h"

namespace jaxsparse {

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
    const bool by_name = row.cost == nullptr;
    candidates.push_back(
        {row.name, by_name ? std::numeric_limits<double>::infinity() : row.cost(problem)});
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
