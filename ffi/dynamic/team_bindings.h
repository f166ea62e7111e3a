// What the extension module has for kernels of scans over graphs.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxsparse {

void BindTeams(nanobind::module_& m);

}  // namespace jaxsparse
