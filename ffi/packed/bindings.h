// What the extension module has for packed matrices.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxsparse {

void BindPacked(nanobind::module_& m);

}  // namespace jaxsparse
