#include "common/ffi.h"

#include <utility>

namespace jaxsparse {
namespace {

std::string ShapeString(ffi::AnyBuffer buffer) {
  std::string text = "(";
  for (const int64_t size : buffer.dimensions()) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + ")";
}

// Stands for an operand that is not there; only made after an error was kept.
ffi::AnyBuffer NoBuffer() {
  static const XLA_FFI_Buffer none = {};
  return ffi::AnyBuffer(&none);
}

XLA_FFI_DataType DataTypeOf(const std::string& name) {
  static constexpr struct {
    std::string_view name;
    XLA_FFI_DataType type;
  } kTable[] = {{"float32", XLA_FFI_DataType_F32},   {"float64", XLA_FFI_DataType_F64},
                {"bfloat16", XLA_FFI_DataType_BF16}, {"float16", XLA_FFI_DataType_F16},
                {"int32", XLA_FFI_DataType_S32},     {"uint16", XLA_FFI_DataType_U16},
                {"uint8", XLA_FFI_DataType_U8}};
  for (const auto& row : kTable) {
    if (name == row.name) return row.type;
  }
  return XLA_FFI_DataType_INVALID;  // which the parser refuses
}

}  // namespace

DescribedCall::Buffers::Buffers(std::vector<BufferType> given) : types(std::move(given)) {
  alignas(64) static char nowhere;
  for (BufferType& type : types) {
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, DataTypeOf(type.first), &nowhere,
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

CallParser::CallParser(const char* operation, ffi::RemainingArgs operands,
                       ffi::RemainingRets results, ffi::Dictionary attributes, size_t result_rank)
    : operation_(operation), operands_(operands), results_(results), attributes_(attributes) {
  const ffi::AnyBuffer result = ResultBuffer(0);
  const auto dimensions = result.dimensions();
  if (dimensions.size() < result_rank || dimensions.size() - result_rank > kMaxBatchRank) {
    Fail("a result of shape " + ShapeString(result) + " does not have 0 to " +
         std::to_string(kMaxBatchRank) + " batch dimensions");
    return;
  }
  batch_.rank = static_cast<int>(dimensions.size() - result_rank);
  for (int d = 0; d < batch_.rank; ++d) {
    batch_.sizes[d] = dimensions[d];
    batch_.count *= dimensions[d];
  }
}

void CallParser::Fail(const std::string& reason) {
  if (error_.empty()) error_ = operation_ + ": " + reason;
}

ffi::AnyBuffer CallParser::OperandBuffer(size_t index) const {
  const auto buffer = operands_.get<ffi::AnyBuffer>(index);
  return buffer.has_value() ? *buffer : NoBuffer();
}

ffi::AnyBuffer CallParser::ResultBuffer(size_t index) const {
  auto buffer = results_.get<ffi::AnyBuffer>(index);
  return buffer.has_value() ? **buffer : NoBuffer();
}

int64_t CallParser::Size(size_t index, size_t from_last) const {
  const auto dimensions = OperandBuffer(index).dimensions();
  return from_last < dimensions.size() ? dimensions[dimensions.size() - 1 - from_last] : 0;
}

Array CallParser::Operand(size_t index, const char* name, std::initializer_list<int64_t> core) {
  return Parse(name, OperandBuffer(index), core);
}

Array CallParser::Result(size_t index, const char* name, std::initializer_list<int64_t> core) {
  return Parse(name, ResultBuffer(index), core);
}

Array CallParser::Parse(const char* name, ffi::AnyBuffer buffer,
                        std::initializer_list<int64_t> core) {
  Array array;
  if (!ok()) return array;
  const auto dimensions = buffer.dimensions();
  const auto rank = static_cast<size_t>(batch_.rank);
  bool matches = dimensions.size() == rank + core.size();
  int64_t stride = 1;
  for (size_t c = 0; matches && c < core.size(); ++c) {
    matches = dimensions[rank + c] == core.begin()[c];
    stride *= core.begin()[c];
  }
  for (size_t d = rank; matches && d-- > 0;) {
    matches = dimensions[d] == batch_.sizes[d] || dimensions[d] == 1;
    array.strides[d] = dimensions[d] == 1 ? 0 : stride;
    stride *= dimensions[d];
  }
  if (!matches) {
    std::string expected;
    for (const int64_t size : core) expected += ", " + std::to_string(size);
    Fail(std::string(name) + " has shape " + ShapeString(buffer) + ", expected (..." + expected +
         ")");
  }
  array.data = buffer.untyped_data();
  return array;
}

DType CallParser::OperandDType(size_t index, const char* name) {
  return ParseDType(name, OperandBuffer(index));
}

DType CallParser::ResultDType(size_t index, const char* name) {
  return ParseDType(name, ResultBuffer(index));
}

DType CallParser::ParseDType(const char* name, ffi::AnyBuffer buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return DType::kFloat32;
    case ffi::F64:
      return DType::kFloat64;
    case ffi::BF16:
      return DType::kBFloat16;
    case ffi::F16:
      return DType::kFloat16;
    default:
      Fail(std::string(name) + " has an unsupported dtype");
      return DType::kFloat32;
  }
}

IndexType CallParser::OperandIndexType(size_t index) {
  const ffi::DataType type = OperandBuffer(index).element_type();
  if (type != ffi::S32 && type != ffi::U16) Fail("column_indices must be int32 or uint16");
  return type == ffi::S32 ? IndexType::kInt32 : IndexType::kUint16;
}

Workspace CallParser::ResultWorkspace(size_t index) {
  Workspace workspace;
  workspace.bytes = Attribute<int64_t>("workspace");
  if (workspace.bytes <= 0) return {};
  const ffi::AnyBuffer buffer = ResultBuffer(index);
  if (buffer.element_type() != ffi::U8 ||
      static_cast<int64_t>(buffer.size_bytes()) < workspace.bytes) {
    Fail("the workspace is smaller than its call says");
    return {};
  }
  workspace.data = static_cast<char*>(buffer.untyped_data());
  return workspace;
}

Pattern CallParser::OperandStored(size_t index, int64_t columns) {
  Pattern pattern;
  pattern.rows = Size(index, 0) - 1;
  pattern.columns = columns;
  pattern.nse = Size(index + 1, 0);
  if (pattern.rows < 0) Fail("row_offsets is empty");
  if (OperandBuffer(index).element_type() != ffi::S32) Fail("row_offsets must be int32");
  pattern.index_type = OperandIndexType(index + 1);
  pattern.row_offsets = Operand(index, "row_offsets", {pattern.rows + 1});
  pattern.column_indices = Operand(index + 1, "column_indices", {pattern.nse});
  return pattern;
}

Array CallParser::OperandTileStarts(size_t index, const Pattern& pattern) {
  constexpr int64_t kNone = 1;  // as NO_STARTS in jaxsparse/pattern.py
  if (Size(index, 0) == kNone) return {};
  if (OperandBuffer(index).element_type() != ffi::S32) Fail("tile_starts must be int32");
  const TileStarts starts(pattern.rows, pattern.columns);
  return Operand(index, "tile_starts", {starts.At(1, 0)});
}

Pattern CallParser::OperandPattern(size_t index, int64_t columns, bool permuted) {
  Pattern pattern = OperandStored(index, columns);
  pattern.row_order = Operand(index + 2, "row_order", {pattern.rows});
  if (permuted) pattern.permutation = Operand(index + 3, "permutation", {pattern.nse});
  return pattern;
}

}  // namespace jaxsparse
