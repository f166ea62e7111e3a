// How device sources call the types of a problem, for the expressions that name kernel instances.
#pragma once

#include <string>

#include "types.h"

namespace jaxsparse {

inline std::string TypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float";
    case DType::kFloat64:
      return "double";
    case DType::kBFloat16:
      return "jaxsparse::bfloat16";
    case DType::kFloat16:
      return "jaxsparse::float16";
  }
  return "";
}

inline std::string TypeName(IndexType type) {
  return type == IndexType::kInt32 ? "int32_t" : "uint16_t";
}

}  // namespace jaxsparse
