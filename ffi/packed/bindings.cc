#include "packed/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

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

// (masks, starts, panels, sources) of a pattern that is right, or a ValueError.
nb::tuple Pack(Indices row_offsets, Indices column_indices, Indices row_order, int64_t columns,
               int cell, int parts) {
  if (cell < 1 || cell > 2 || parts < 1 || row_offsets.size() != row_order.size() + 1) {
    throw nb::value_error("cells are of 1 or 2, parts at least 1, and each row is in the order");
  }
  PackedStreams streams;
  std::string error;
  {
    const nb::gil_scoped_release released;
    error = PackStreams({row_offsets.data(), column_indices.data(), row_order.data(),
                         static_cast<int64_t>(row_order.size()), columns},
                        cell, parts, &streams);
  }
  if (!error.empty()) throw nb::value_error(error.c_str());
  return nb::make_tuple(ToNumpy(std::move(streams.masks)), ToNumpy(std::move(streams.starts)),
                        ToNumpy(std::move(streams.panels)), ToNumpy(std::move(streams.sources)));
}

}  // namespace

void BindPacked(nb::module_& m) {
  m.def("pack_streams", Pack, nb::arg("row_offsets"), nb::arg("column_indices"),
        nb::arg("row_order"), nb::kw_only(), nb::arg("columns"), nb::arg("cell"), nb::arg("parts"));
}

}  // namespace jaxsparse
