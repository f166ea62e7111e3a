// Compiled kernels on disk, shared by processes: a file a kernel, written aside and renamed, and
// checked against its whole key when read. A folder that can't be written to is no error. A
// process that writes a kernel removes those that were used longest ago, where all take too many
// bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "nvrtc/compiler.h"

namespace jaxsparse {

// JAXSPARSE_CACHE_DIR (empty: no disk cache), else $XDG_CACHE_HOME/jaxsparse, else
// ~/.cache/jaxsparse.
std::string CacheFolder();

// JAXSPARSE_CACHE_BYTES, or 1 GiB where that is no number.
int64_t CacheLimit();

// The kernel from the cache, or compiled and put there.
std::optional<CompiledKernel> CompileCached(const KernelSource& source,
                                            const std::string& architecture, std::string* error);

}  // namespace jaxsparse
