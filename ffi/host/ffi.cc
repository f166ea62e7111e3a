#include "host/ffi.h"

#include <utility>

namespace jaxsparse {
DescribedCall::Buffers::Buffers(std::vector<BufferType> given) : types(std::move(given)) {
  alignas(64) static char nowhere;
  for (BufferType& type : types) {
    const auto element_type = static_cast<XLA_FFI_DataType>(DataTypeOf(type.first));
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, element_type, &nowhere,
                       static_cast<int64_t>(type.second.size()), type.second.data()});
  }
  for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
}

DescribedCall::DescribedCall(std::vector<BufferType> operands, std::vector<BufferType> results,
                             std::map<std::string, AttributeValue> attributes)
    : operand_buffers_(std::move(operands)),
      result_buffers_(std::move(results)),
      values_(std::move(attributes)) {
  operand_kinds_.resize(operand_buffers_.types.size(), XLA_FFI_ArgType_BUFFER);
  result_kinds_.resize(result_buffers_.types.size(), XLA_FFI_RetType_BUFFER);
  operands_ = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operand_kinds_.size()),
               operand_kinds_.data(), operand_buffers_.pointers.data()};
  results_ = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(result_kinds_.size()),
              result_kinds_.data(), result_buffers_.pointers.data()};
  // The map's order is the one in which XLA looks names up.
  names_.reserve(values_.size());
  texts_.reserve(values_.size());
  scalars_.reserve(values_.size());
  for (auto& [name, value] : values_) {
    names_.push_back({name.data(), name.size()});
    name_pointers_.push_back(&names_.back());
    if (const auto* text = std::get_if<std::string>(&value)) {
      attribute_kinds_.push_back(XLA_FFI_AttrType_STRING);
      texts_.push_back({text->data(), text->size()});
      value_pointers_.push_back(&texts_.back());
    } else {
      static constexpr XLA_FFI_DataType kTypes[] = {XLA_FFI_DataType_PRED, XLA_FFI_DataType_S64,
                                                    XLA_FFI_DataType_F64};
      attribute_kinds_.push_back(XLA_FFI_AttrType_SCALAR);
      void* data = std::visit([](auto& scalar) -> void* { return &scalar; }, value);
      scalars_.push_back({kTypes[value.index()], data});
      value_pointers_.push_back(&scalars_.back());
    }
  }
  attributes_ = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(values_.size()),
                 attribute_kinds_.data(),
                 name_pointers_.data(),
                 value_pointers_.data()};
}

}  // namespace jaxsparse
