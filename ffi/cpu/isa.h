// Which of the separately compiled copies of a CPU kernel this machine runs.
#pragma once

namespace jaxsparse {

#ifndef JAXSPARSE_X86
namespace portable {}
namespace avx2 = portable;
namespace avx512 = portable;
#endif

enum class Isa { kPortable, kAvx2, kAvx512 };

// The best one that this processor has; JAXSPARSE_ISA=portable|avx2|avx512 asks for a lesser one.
Isa CurrentIsa();
const char* IsaName(Isa isa);

template <typename T>
T ForCurrentIsa(T portable, T avx2, T avx512) {
  switch (CurrentIsa()) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    default:
      return portable;
  }
}

}  // namespace jaxsparse
