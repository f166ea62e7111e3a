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

// Tasks of a row of tiles, or of one of its rows of cells where threads would be idle otherwise: a
// tile's rows of cells share what is read of its columns. Those of a head follow one another,
// longest first, so that what they read stays in the cache.
struct HeadTasks {
  int64_t heads, rows, parts;

  JAXSPARSE_INLINE HeadTasks(const MaskTiles& mask, int64_t heads, Workers& workers)
      : heads(heads), rows(mask.rows) {
    constexpr int64_t kPerThread = 4;
    parts = heads * rows < kPerThread * workers.count() ? kCellsOfTile : 1;
  }

  JAXSPARSE_INLINE int64_t count() const { return heads * rows * parts; }
  JAXSPARSE_INLINE int64_t Head(int64_t task) const { return task / (rows * parts); }
  // `row_count`: all that the mask has.
  JAXSPARSE_INLINE TaskRowsOfTiles Rows(int64_t task, const HeadMask& mask,
                                        int64_t row_count) const {
    TaskRowsOfTiles result{mask.RowOfTiles(task / parts % rows), {}};
    for (int down = 0; down < kCellsOfTile; ++down) {
      if (parts == kCellsOfTile && task % parts != down) continue;
      result.counts[down] = Between(0, row_count - result.FirstRow(down), kCell);
    }
    return result;
  }
};

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
