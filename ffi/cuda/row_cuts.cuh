// Cuts of rows as kernels read them.
#pragma once

#include "cuda/device.cuh"
#include "cuda/row_cuts.h"

namespace jaxsparse {

// The cuts of a batch entry's pattern, none of which is outside of it, whatever they say.
struct CutsOfRows {
  const RowCut* cuts;
  const int32_t* offsets;
  int rows, nse, units;

  __device__ __forceinline__ CutsOfRows(const Batch& batch, const Pattern& pattern,
                                        const Array& row_cuts, int64_t entry)
      : cuts(reinterpret_cast<const RowCut*>(row_cuts.At<const int32_t>(batch, entry))),
        offsets(pattern.row_offsets.At<const int32_t>(batch, entry)),
        rows(static_cast<int>(pattern.rows)),
        nse(static_cast<int>(pattern.nse)),
        units(static_cast<int>(RowUnits(pattern.rows, pattern.nse))) {}

  __device__ __forceinline__ RowCut Within(const RowCut& cut) const {
    return {static_cast<int>(jaxsparse::Within(cut.row, int64_t{rows} + 1)),
            static_cast<int>(jaxsparse::Within(cut.entry, int64_t{nse} + 1))};
  }
  __device__ __forceinline__ RowCut At(int unit) const { return Within(cuts[unit]); }
  // The end of kUnits units in front of that one, which have no more than there can be.
  template <int kUnits>
  __device__ __forceinline__ RowCut EndOf(const RowCut& begin, int next) const {
    return EndWithin<kUnits>(begin, cuts[next < units ? next : units]);
  }
  template <int kUnits>
  __device__ __forceinline__ RowCut EndWithin(const RowCut& begin, const RowCut& cut) const {
    const RowCut end = Within(cut);
    return {Clamp(end.row, begin.row, begin.row + MostRowsOfUnits(kUnits)),
            Clamp(end.entry, begin.entry, begin.entry + MostEntriesOfUnits(kUnits))};
  }
  // Whether a unit begins behind the begin of a row that it has a piece of. Behind the last row,
  // too, there is an offset: it is loaded without a branch, so that other loads need not wait.
  __device__ __forceinline__ bool IsWithinRow(const RowCut& cut) const {
    const int begin = offsets[cut.row];
    return (cut.row < rows) & (cut.entry > begin);
  }
  // The units that have the begin and the end of a long row, of which offsets say this.
  __device__ __forceinline__ int FirstUnitOf(int row, int row_begin) const {
    return UnitOf(row_begin + int64_t{kPlacesOfRow} * row);
  }
  __device__ __forceinline__ int LastUnitOf(int row, int row_end) const {
    return UnitOf(row_end + int64_t{kPlacesOfRow} * row - 1);
  }

 private:
  __device__ __forceinline__ int UnitOf(int64_t place) const {
    const int64_t unit = place / kPlacesOfUnit;
    return unit < 0 ? 0 : unit < units ? static_cast<int>(unit) : units - 1;
  }
};

}  // namespace jaxsparse
