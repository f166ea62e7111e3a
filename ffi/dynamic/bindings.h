// What the extension module has for scans over graphs.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxsparse {

void BindDynamic(nanobind::module_& m);

}  // namespace jaxsparse
