// The C++ expressions that name an instance of a kernel template in device sources.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

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

inline std::string Literal(bool value) { return value ? "true" : "false"; }
inline std::string Literal(int value) { return std::to_string(value); }

// A config struct with its fields by name, "jaxsparse::TiledConfig{.vector = 4, .lanes = 8}".
inline std::string ConfigExpression(
    const std::string& type, std::initializer_list<std::pair<const char*, std::string>> fields) {
  std::string text;
  for (const auto& [name, value] : fields) {
    text += (text.empty() ? "." : ", .") + std::string(name) + " = " + value;
  }
  return "jaxsparse::" + type + "{" + text + "}";
}

// A kernel and its template's arguments, "jaxsparse::SpmmRows<float, float, int32_t>".
inline std::string KernelExpression(const std::string& kernel,
                                    std::initializer_list<std::string> arguments) {
  std::string text;
  for (const std::string& argument : arguments) text += (text.empty() ? "" : ", ") + argument;
  return "jaxsparse::" + kernel + "<" + text + ">";
}

}  // namespace jaxsparse
