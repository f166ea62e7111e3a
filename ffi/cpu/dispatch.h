// Run-time types to template arguments.
#pragma once

#include "cpu/half.h"
#include "types.h"

namespace jaxsparse {

// Sums of 16-bit products are taken in float32.
template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

// f.operator()<T>() for the C++ type of `dtype`.
template <typename F>
JAXSPARSE_INLINE void DispatchDType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat64:
      return f.template operator()<double>();
    case DType::kBFloat16:
      return f.template operator()<bfloat16>();
    case DType::kFloat16:
      return f.template operator()<float16>();
  }
}

}  // namespace jaxsparse
