// What the extension module has for recurrent scans.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxsparse {

void BindRecurrentScan(nanobind::module_& m);

}  // namespace jaxsparse
