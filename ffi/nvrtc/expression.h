// The C++ expressions that name an instance of a kernel template in device sources.
#pragma once

#include <initializer_list>
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

inline std::string Literal(bool value) { return value ? "true" : "false"; }
inline std::string Literal(int value) { return std::to_string(value); }

// `parts` with ", " between them.
inline std::string Joined(std::initializer_list<std::string> parts) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty()) text += ", ";
    text += part;
  }
  return text;
}

inline std::string Field(const char* name, const std::string& value) {
  std::string text = ".";
  text += name;
  text += " = ";
  text += value;
  return text;
}

// A config struct with its fields by name, "jaxsparse::TiledConfig{.vector = 4, .lanes = 8}".
inline std::string ConfigExpression(const char* type, std::initializer_list<std::string> fields) {
  std::string text = "jaxsparse::";
  text += type;
  text += "{";
  text += Joined(fields);
  text += "}";
  return text;
}

// A kernel and its template's arguments, "jaxsparse::SpmmRows<float, float, int32_t>".
inline std::string KernelExpression(const char* kernel,
                                    std::initializer_list<std::string> arguments) {
  std::string text = "jaxsparse::";
  text += kernel;
  text += "<" + Joined(arguments) + ">";
  return text;
}

}  // namespace jaxsparse
