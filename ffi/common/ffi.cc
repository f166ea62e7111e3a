#include "common/ffi.h"

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

}  // namespace

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

Pattern CallParser::OperandPattern(size_t index, int64_t columns, bool permuted) {
  Pattern pattern;
  pattern.rows = Size(index, 0) - 1;
  pattern.columns = columns;
  pattern.nse = Size(index + 1, 0);
  if (pattern.rows < 0) Fail("row_offsets is empty");
  if (OperandBuffer(index).element_type() != ffi::S32) Fail("row_offsets must be int32");
  pattern.index_type = OperandIndexType(index + 1);
  pattern.row_offsets = Operand(index, "row_offsets", {pattern.rows + 1});
  pattern.column_indices = Operand(index + 1, "column_indices", {pattern.nse});
  pattern.row_order = Operand(index + 2, "row_order", {pattern.rows});
  if (permuted) pattern.permutation = Operand(index + 3, "permutation", {pattern.nse});
  return pattern;
}

}  // namespace jaxsparse
