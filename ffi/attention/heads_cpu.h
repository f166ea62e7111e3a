// Which rows of which heads the tasks of CPU kernels of attention have. Compiled once for each
// instruction set, as the kernels are.
#pragma once

#include "attention/mask_cpu.h"
#include "cpu/parallel.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// The rows of a matrix of one head, as they lie in memory.
template <typename T>
struct HeadRows {
  T* data = nullptr;
  int64_t stride = 0, count = 0, size = 0;

  HeadRows() = default;
  // Of head `head` of an array of (count, heads, size).
  JAXSPARSE_INLINE HeadRows(const Array& array, const Batch& batch, int64_t entry, int64_t head,
                            int64_t heads, int64_t count, int64_t size)
      : data(array.At<T>(batch, entry) + head * size),
        stride(heads * size),
        count(count),
        size(size) {}

  JAXSPARSE_INLINE T* Row(int64_t row) const { return data + row * stride; }
};

// Whose rows cotangents are computed for.
enum class Owner { kQueries, kKeys };

// Tasks of a row of tiles, or of one of its rows of cells where threads would be idle otherwise: a
// tile's rows of cells share what is read of its columns. Longest rows come first, and all heads of
// them one after the other: heads side by side share pages of memory.
class HeadTasks {
 public:
  JAXSPARSE_INLINE HeadTasks(const MaskTiles& mask, int64_t entries, int64_t heads,
                             Workers& workers)
      : entries_(entries), heads_(heads), rows_(mask.rows) {
    constexpr int64_t kPerThread = 4;
    parts_ = entries * heads * rows_ < kPerThread * workers.count() ? kCellsOfTile : 1;
  }

  JAXSPARSE_INLINE int64_t count() const { return entries_ * heads_ * rows_ * parts_; }
  JAXSPARSE_INLINE int64_t heads() const { return heads_; }
  JAXSPARSE_INLINE int64_t Head(int64_t task) const { return task % heads_; }
  JAXSPARSE_INLINE int64_t Entry(int64_t task) const { return task / heads_ / parts_ / rows_; }
  // How many tasks of the same head are in front of it.
  JAXSPARSE_INLINE int64_t Place(int64_t task) const { return task / heads_ % (rows_ * parts_); }
  // `row_count`: all that the mask has.
  JAXSPARSE_INLINE TaskRowsOfTiles Rows(int64_t task, const HeadMask& mask,
                                        int64_t row_count) const {
    const int64_t part = task / heads_ % parts_;
    TaskRowsOfTiles result{mask.RowOfTiles(task / heads_ / parts_ % rows_), {}};
    for (int down = 0; down < kCellsOfTile; ++down) {
      if (parts_ == kCellsOfTile && part != down) continue;
      result.counts[down] = Between(0, row_count - result.FirstRow(down), kCell);
    }
    return result;
  }

 private:
  int64_t entries_, heads_, rows_, parts_;
};

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
