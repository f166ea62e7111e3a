// The host's side of sparse_record.h: assigns a pattern's units to blocks, its entries to threads,
// and orders them so that threads that are served together read different banks of shared memory.
// Once per pattern, in time linear in its entries.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "recurrent/kernels/sparse.h"

namespace jaxsparse {

// Rows are products x hidden, columns state parts x hidden.
struct SparsePatternView {
  int64_t hidden = 0;
  const int32_t* row_offsets = nullptr;
  const void* column_indices = nullptr;
  IndexType index_type = IndexType::kInt32;
  const int32_t* permutation = nullptr;  // where each entry's value lies; null: in this order

  int32_t Column(int64_t i) const {
    return index_type == IndexType::kInt32 ? static_cast<const int32_t*>(column_indices)[i]
                                           : static_cast<const uint16_t*>(column_indices)[i];
  }
};

// Threads of a block, and those of them that may multiply: the others make the pointwise step.
constexpr int kSparseBlockThreads = 1024, kMostSparseThreads = kSparseBlockThreads - 3 * kWarp;

// Share of a GPU's multiprocessors on which clusters find room: these come in groups, and a cluster
// lies within one.
constexpr double kClusterShare = 0.91;

// What is asked of a layout.
struct SparseLayoutPlan {
  SparseShape shape;  // without units and lanes, with the most threads
  int fewest_threads = kWarp;
};

// For a matrix of `nnz` entries, and a state of `batch` times `state_bytes` for each unit.
SparseLayoutPlan PlanSparseLayout(int products, int state_parts, int64_t hidden, int64_t nnz,
                                  int batch, int state_bytes, int multiprocessors);

struct SparseLayout {
  SparseForm form;  // what was asked for, with the threads and lanes that are needed
  double wavefronts =
      0;               // shared-memory wavefronts over the fewest possible: 1 has no bank conflict
  double filling = 0;  // share of the table's slots that hold entries
  std::vector<uint32_t> words;  // form.shape.blocks records
};

// The fewest places per block for `hidden` units, such that parts begin at multiples of 16 bytes.
int UnitsPerBlock(int64_t hidden, int blocks, int cluster, int state_parts, int piece_bytes);

// `shape` without lanes and with the most threads allowed: both come out as needed, but no fewer
// threads than `fewest_threads`, since they have the state to wait for as well. Without
// `bank_aware` a row's entries keep their order.
std::optional<SparseLayout> MakeSparseLayout(const SparsePatternView& pattern,
                                             const SparseShape& shape, int fewest_threads,
                                             int piece_bytes, bool bank_aware, std::string* error);

}  // namespace jaxsparse
