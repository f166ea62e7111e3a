// NVRTC, loaded at run time: nothing of it is needed to build or to run on a CPU.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nvrtc/kernel.h"

namespace jaxsparse {

struct CompiledKernel {
  std::string code;          // machine code for one architecture
  std::string lowered_name;  // the mangled name of the instance
};

// Where the device sources lie and where to look for libnvrtc, best place first.
void ConfigureCompiler(std::string source_folder, std::vector<std::string> libraries);

// "13.0", or an empty string with the reason in `error`.
std::string NvrtcVersion(std::string* error);

// All that a compilation depends on but the version: the source, every file it includes, the
// instance, the options. Equal keys give equal code.
std::optional<std::string> SourceKey(const KernelSource& source, const std::string& architecture,
                                     std::string* error);

// Compiles, whether or not it is cached. A failure's reason quotes the source lines.
std::optional<CompiledKernel> Compile(const KernelSource& source, const std::string& architecture,
                                      std::string* error);

}  // namespace jaxsparse
