#include "packed/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "host/numpy.h"
#include "packed/gaps.h"
#include "packed/layout.h"
#include "packed/problem.h"

namespace nb = nanobind;

namespace jaxsparse {
namespace {

using Indices = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

PackedPattern PatternOf(const Indices& row_offsets, const Indices& column_indices,
                        const Indices& row_order, int64_t columns) {
  if (columns < 0 || columns > std::numeric_limits<int32_t>::max()) {
    throw nb::value_error("columns must be from 0 to 2**31 - 1");
  }
  if (row_offsets.size() != row_order.size() + 1) {
    throw nb::value_error("row_offsets must be one more than rows in row_order");
  }
  return {row_offsets.data(),
          column_indices.data(),
          row_order.data(),
          static_cast<int64_t>(row_order.size()),
          columns,
          static_cast<int64_t>(column_indices.size())};
}

void CheckParts(int parts, int64_t columns, int least_columns) {
  if (parts < 1 || parts > std::max<int64_t>(CeilDivide(columns, least_columns), 1)) {
    throw nb::value_error(("parts must be at least 1, and of " + std::to_string(least_columns) +
                           " columns each, but for the last")
                              .c_str());
  }
}

// (masks, starts, panels, sources) of a pattern, or a ValueError that says what is wrong with it.
nb::tuple Pack(Indices row_offsets, Indices column_indices, Indices row_order, int64_t columns,
               int cell, int parts, int bits) {
  if (cell < 1 || cell > 2) throw nb::value_error("cell must be 1 or 2");
  if (bits != 16 && (bits != 8 || cell != 1)) {
    throw nb::value_error("bits must be 16, or 8 with cells of 1");
  }
  const PackedPattern pattern = PatternOf(row_offsets, column_indices, row_order, columns);
  CheckParts(parts, columns, kPackedPanelColumns);
  PackedStreams streams;
  std::string error;
  {
    const nb::gil_scoped_release released;
    error = PackStreams(pattern, {.cell = cell, .parts = parts, .numbers_of_word = 32 / bits},
                        &streams);
  }
  if (!error.empty()) throw nb::value_error(error.c_str());
  return nb::make_tuple(ToNumpy(std::move(streams.masks)), ToNumpy(std::move(streams.starts)),
                        ToNumpy(std::move(streams.panels)), ToNumpy(std::move(streams.sources)));
}

// The order of OrderForGaps, or a ValueError.
nb::object OrderByGaps(Indices row_offsets, Indices column_indices, Indices row_order,
                       int64_t columns, int parts) {
  const PackedPattern pattern = PatternOf(row_offsets, column_indices, row_order, columns);
  CheckParts(parts, columns, kGapLanes);
  std::vector<int32_t> order;
  std::string error;
  {
    const nb::gil_scoped_release released;
    error = OrderForGaps(pattern, parts, &order);
  }
  if (!error.empty()) throw nb::value_error(error.c_str());
  return ToNumpy(std::move(order));
}

// (gaps, starts, sources) of a pattern, or a ValueError.
nb::tuple PackByGaps(Indices row_offsets, Indices column_indices, Indices row_order,
                     int64_t columns, int parts) {
  const PackedPattern pattern = PatternOf(row_offsets, column_indices, row_order, columns);
  CheckParts(parts, columns, kGapLanes);
  GapArrays packed;
  std::string error;
  {
    const nb::gil_scoped_release released;
    error = PackGaps(pattern, parts, &packed);
  }
  if (!error.empty()) throw nb::value_error(error.c_str());
  return nb::make_tuple(ToNumpy(std::move(packed.gaps)), ToNumpy(std::move(packed.starts)),
                        ToNumpy(std::move(packed.sources)));
}

}  // namespace

void BindPacked(nb::module_& m) {
  m.def("pack_streams", Pack, nb::arg("row_offsets"), nb::arg("column_indices"),
        nb::arg("row_order"), nb::kw_only(), nb::arg("columns"), nb::arg("cell"), nb::arg("parts"),
        nb::arg("bits") = 16);
  m.def("order_for_gaps", OrderByGaps, nb::arg("row_offsets"), nb::arg("column_indices"),
        nb::arg("row_order"), nb::kw_only(), nb::arg("columns"), nb::arg("parts"));
  m.def("pack_gaps", PackByGaps, nb::arg("row_offsets"), nb::arg("column_indices"),
        nb::arg("row_order"), nb::kw_only(), nb::arg("columns"), nb::arg("parts"));
}

}  // namespace jaxsparse
