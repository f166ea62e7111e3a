// The C++ expressions that name an instance of a kernel template in device sources. They are made
// at every execution, so that each is written into one string.
#pragma once

#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "types.h"

namespace jaxsparse {

inline const char* TypeName(DType dtype) {
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

inline const char* TypeName(IndexType type) {
  return type == IndexType::kInt32 ? "int32_t" : "uint16_t";
}

inline std::string Literal(std::same_as<bool> auto value) { return value ? "true" : "false"; }
inline std::string Literal(std::same_as<int> auto value) { return std::to_string(value); }

// A field of a config struct: a number, a condition, or an expression.
struct Field {
  const char* name;
  std::string value;

  Field(const char* field, std::string expression) : name(field), value(std::move(expression)) {}
  template <typename T>
    requires std::same_as<T, int> || std::same_as<T, bool>
  Field(const char* field, T literal) : name(field), value(Literal(literal)) {}
};

// A config struct with its fields by name, "jaxsparse::TiledConfig{.vector = 4, .lanes = 8}".
inline std::string ConfigExpression(const char* type, std::initializer_list<Field> fields) {
  std::string text;
  text.reserve(256);
  text += "jaxsparse::";
  text += type;
  const char* before = "{.";
  for (const Field& field : fields) {
    text += std::exchange(before, ", .");
    text += field.name;
    text += " = ";
    text += field.value;
  }
  text += '}';
  return text;
}

// A kernel and its template's arguments, "jaxsparse::SpmmRows<float, float, int32_t>".
inline std::string KernelExpression(const char* kernel,
                                    std::initializer_list<std::string_view> arguments) {
  std::string text;
  text.reserve(320);
  text += "jaxsparse::";
  text += kernel;
  const char* before = "<";
  for (const std::string_view argument : arguments) {
    text += std::exchange(before, ", ");
    text += argument;
  }
  text += '>';
  return text;
}

}  // namespace jaxsparse
