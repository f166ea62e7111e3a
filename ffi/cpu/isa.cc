#include "cpu/isa.h"

#include <cstdlib>
#include <string_view>

namespace jaxsparse {
namespace {

Isa Detect() {
#ifdef JAXSPARSE_X86
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("lzcnt") && __builtin_cpu_supports("f16c");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  const char* wanted = std::getenv("JAXSPARSE_ISA");
  const std::string_view name = wanted == nullptr ? "" : wanted;
  if (name == "portable" || !v3) return Isa::kPortable;
  if (name == "avx2" || !v4) return Isa::kAvx2;
  return Isa::kAvx512;
#else
  return Isa::kPortable;
#endif
}

}  // namespace

Isa CurrentIsa() {
  static const Isa isa = Detect();
  return isa;
}

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "portable";
  }
}

}  // namespace jaxsparse
