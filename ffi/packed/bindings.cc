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
#include "packed/layout.h"
#include "packed/problem.h"

namespace nb = nanobind;

namespace jaxsparse {
namespace {

using Indices = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// (masks, starts, panels, sources) of a pattern, or a ValueError that says what is wrong with it.
nb::tuple Pack(Indices row_offsets, Indices column_indices, Indices row_order, int64_t columns,
               int cell, int parts, int bits) {
  const int64_t most_parts = std::max<int64_t>(CeilDivide(columns, kPackedPanelColumns), 1);
  if (cell < 1 || cell > 2) throw nb::value_error("cell must be 1 or 2");
  if (bits != 16 && (bits != 8 || cell != 1)) {
    throw nb::value_error("bits must be 16, or 8 with cells of 1");
  }
  if (columns < 0 || columns > std::numeric_limits<int32_t>::max()) {
    throw nb::value_error("columns must be from 0 to 2**31 - 1");
  }
  if (parts < 1 || parts > most_parts) {
    throw nb::value_error("parts must be at least 1, and of a panel of columns each");
  }
  if (row_offsets.size() != row_order.size() + 1) {
    throw nb::value_error("row_offsets must be one more than rows in row_order");
  }
  PackedStreams streams;
  std::string error;
  {
    const nb::gil_scoped_release released;
    error = PackStreams({row_offsets.data(), column_indices.data(), row_order.data(),
                         static_cast<int64_t>(row_order.size()), columns,
                         static_cast<int64_t>(column_indices.size())},
                        {.cell = cell, .parts = parts, .numbers_of_word = 32 / bits}, &streams);
  }
  if (!error.empty()) throw nb::value_error(error.c_str());
  return nb::make_tuple(ToNumpy(std::move(streams.masks)), ToNumpy(std::move(streams.starts)),
                        ToNumpy(std::move(streams.panels)), ToNumpy(std::move(streams.sources)));
}

}  // namespace

void BindPacked(nb::module_& m) {
  m.def("pack_streams", Pack, nb::arg("row_offsets"), nb::arg("column_indices"),
        nb::arg("row_order"), nb::kw_only(), nb::arg("columns"), nb::arg("cell"), nb::arg("parts"),
        nb::arg("bits") = 16);
}

}  // namespace jaxsparse
