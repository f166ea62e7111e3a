#include "host/call_parser.h"

#include <algorithm>

#include "cuda/row_cuts.h"
#include "host/preparation.h"

namespace jaxsparse {
namespace {

// Sizes of arrays below these can be multiplied by one another.
constexpr int64_t kMostElements = kMostBytes, kMostBatch = int64_t{1} << 31;

constexpr int64_t kNumbersOfCut = sizeof(RowCut) / sizeof(int32_t);

constexpr struct {
  std::string_view name;
  ffi::DataType type;
} kTypes[] = {{"float32", ffi::F32},     {"float64", ffi::F64},
              {"bfloat16", ffi::BF16},   {"float16", ffi::F16},
              {"int32", ffi::S32},       {"uint16", ffi::U16},
              {"uint8", ffi::U8},        {"uint32", ffi::U32},
              {"int8", ffi::S8},         {"int16", ffi::S16},
              {"int64", ffi::S64},       {"uint64", ffi::U64},
              {"bool", ffi::PRED},       {"complex64", ffi::C64},
              {"complex128", ffi::C128}, {"float8_e4m3fn", ffi::F8E4M3FN}};

std::string ShapeString(ffi::AnyBuffer buffer) {
  std::string text = "(";
  for (const int64_t size : buffer.dimensions()) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + ")";
}

// Of all dimensions, those of size 0 aside; kMostElements if it is more.
int64_t ProductOf(ffi::AnyBuffer::Dimensions sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || size > kMostElements / product) return kMostElements;
    product *= std::max<int64_t>(size, 1);
  }
  return product;
}

}  // namespace

std::string_view NameOf(ffi::DataType type) {
  for (const auto& row : kTypes) {
    if (row.type == type) return row.name;
  }
  return "another type";
}

ffi::DataType DataTypeOf(std::string_view name) {
  for (const auto& row : kTypes) {
    if (row.name == name) return row.type;
  }
  return ffi::DataType::INVALID;
}

ffi::DataType DataTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ffi::F32;
    case DType::kFloat64:
      return ffi::F64;
    case DType::kBFloat16:
      return ffi::BF16;
    case DType::kFloat16:
      return ffi::F16;
  }
  return ffi::DataType::INVALID;
}

ElementType::ElementType(std::initializer_list<ffi::DataType> allowed)
    : count_(static_cast<int>(allowed.size())) {
  std::copy(allowed.begin(), allowed.end(), allowed_);
}

bool ElementType::Allows(ffi::DataType type) const {
  return std::find(allowed_, allowed_ + count_, type) != allowed_ + count_;
}

void ElementType::Settle(ffi::DataType type, const char* by) {
  if (count_ == 1) return;
  allowed_[0] = type;
  count_ = 1;
  said_by_ = by;
}

std::string ElementType::Text() const {
  std::string text;
  for (int i = 0; i < count_; ++i) {
    text += (i == 0 ? "" : i + 1 < count_ ? ", " : " or ") + std::string(NameOf(allowed_[i]));
  }
  return said_by_ == nullptr ? text : text + " (by " + said_by_ + ")";
}

ElementType ElementType::FactorsOf(const ElementType& result) {
  ElementType factors = result;
  if (result.is(ffi::F32)) factors = {ffi::F32, ffi::BF16, ffi::F16};
  factors.said_by_ = result.said_by_;
  return factors;
}

DType DTypeOf(const ElementType& type) {
  return type.is(ffi::F64)    ? DType::kFloat64
         : type.is(ffi::BF16) ? DType::kBFloat16
         : type.is(ffi::F16)  ? DType::kFloat16
                              : DType::kFloat32;
}

IndexType IndexTypeOf(const ElementType& type) {
  return type.is(ffi::U16) ? IndexType::kUint16 : IndexType::kInt32;
}

void CallParser::Fail(const std::string& reason) {
  if (error_.empty()) error_ = operation_ + ": " + reason;
}

std::optional<ffi::AnyBuffer> CallParser::BufferOfOperand(size_t index) const {
  const auto buffer = operands_.get<ffi::AnyBuffer>(index);
  return buffer.has_value() ? std::optional(*buffer) : std::nullopt;
}

std::optional<ffi::AnyBuffer> CallParser::BufferOfResult(size_t index) const {
  auto buffer = results_.get<ffi::AnyBuffer>(index);
  return buffer.has_value() ? std::optional(**buffer) : std::nullopt;
}

Array CallParser::Result(const char* name, ElementType& type, std::initializer_list<Extent> core) {
  const BatchRule rule = result_ == 0 ? BatchRule::kDefines : BatchRule::kHas;
  const size_t index = result_++;
  return Take("result ", index, name, BufferOfResult(index), type, core, rule);
}

Array CallParser::Operand(const char* name, ElementType& type, std::initializer_list<Extent> core) {
  const size_t index = operand_++;
  return Take("operand ", index, name, BufferOfOperand(index), type, core,
              BatchRule::kMayBroadcast);
}

void* CallParser::UnbatchedResult(const char* name, ElementType type,
                                  std::initializer_list<Extent> core) {
  const size_t index = result_++;
  return Take("result ", index, name, BufferOfResult(index), type, core, BatchRule::kNone).data;
}

Workspace CallParser::ResultWorkspace(int64_t bytes) {
  if (bytes == 0) return {};
  ElementType type = {ffi::U8};
  Dimension size("bytes");
  void* data = UnbatchedResult("workspace", type, {size});
  if (ok() && size.size < bytes) {
    Fail("result " + std::to_string(result_ - 1) + " (workspace) must have at least " +
         std::to_string(bytes) + " bytes, got " + std::to_string(size.size));
  }
  return {static_cast<char*>(data), bytes};
}

Array CallParser::Take(std::string_view kind, size_t index, const char* name,
                       std::optional<ffi::AnyBuffer> buffer, ElementType& type,
                       std::initializer_list<Extent> core, BatchRule rule) {
  if (!ok()) return {};
  if (buffer) {
    if (std::optional<Array> array = Matching(name, *buffer, type, core, rule)) return *array;
  }
  Fail(std::string(kind) + std::to_string(index) + " (" + name + ") must be " + type.Text() +
       " of shape " + ShapeOf(core, rule) + ", got " +
       (buffer ? std::string(NameOf(buffer->element_type())) + " of shape " + ShapeString(*buffer)
               : "none"));
  return {};
}

std::optional<Array> CallParser::Matching(const char* name, ffi::AnyBuffer buffer,
                                          ElementType& type, std::initializer_list<Extent> core,
                                          BatchRule rule) {
  const auto sizes = buffer.dimensions();
  const bool has_batch = rule == BatchRule::kHas || rule == BatchRule::kMayBroadcast;
  if (!type.Allows(buffer.element_type()) || sizes.size() < core.size() ||
      ProductOf(sizes) >= kMostElements) {
    return std::nullopt;
  }
  const size_t rank = sizes.size() - core.size();
  if (rule == BatchRule::kDefines ? rank > kMaxBatchRank
                                  : rank != (has_batch ? static_cast<size_t>(batch_.rank) : 0)) {
    return std::nullopt;
  }
  for (size_t c = 0; c < core.size(); ++c) {
    const auto& [dimension, more] = core.begin()[c];
    const int64_t size = sizes[rank + c] - more;
    if (size < 0 ||
        (dimension == nullptr ? size != 0 : dimension->size >= 0 && dimension->size != size)) {
      return std::nullopt;
    }
  }
  Array array;
  array.data = buffer.untyped_data();
  int64_t stride = 1;
  for (size_t c = 0; c < core.size(); ++c) stride *= sizes[rank + c];
  if (rule == BatchRule::kDefines && ProductOf(sizes.first(rank)) >= kMostBatch) {
    return std::nullopt;
  }
  if (rule == BatchRule::kDefines) {
    batch_.rank = static_cast<int>(rank);
    for (size_t d = 0; d < rank; ++d) {
      batch_.sizes[d] = sizes[d];
      batch_.count *= sizes[d];
    }
  }
  for (size_t d = rank; d-- > 0;) {
    const bool repeats = rule == BatchRule::kMayBroadcast && sizes[d] == 1;
    if (sizes[d] != batch_.sizes[d] && !repeats) return std::nullopt;
    array.strides[d] = sizes[d] == 1 ? 0 : stride;
    stride *= sizes[d];
  }
  for (size_t c = 0; c < core.size(); ++c) {
    const auto& [dimension, more] = core.begin()[c];
    if (dimension == nullptr || dimension->size >= 0) continue;
    dimension->size = sizes[rank + c] - more;
    dimension->said_by = name;
  }
  type.Settle(buffer.element_type(), name);
  return array;
}

// "(1 or 2, m + 1, k), where k = 5 by x".
std::string CallParser::ShapeOf(std::initializer_list<Extent> core, BatchRule rule) const {
  std::string text, known;
  const auto add = [](std::string* to, const char* before, const std::string& more) {
    *to += (to->empty() ? "" : before) + more;
  };
  if (rule == BatchRule::kDefines) text = "0 to " + std::to_string(kMaxBatchRank) + " for a batch";
  for (int d = 0; d < batch_.rank && rule != BatchRule::kNone; ++d) {
    const bool either = rule == BatchRule::kMayBroadcast && batch_.sizes[d] != 1;
    add(&text, ", ", (either ? "1 or " : "") + std::to_string(batch_.sizes[d]));
  }
  for (const auto& [dimension, more] : core) {
    if (dimension == nullptr) {
      add(&text, ", ", std::to_string(more));
      continue;
    }
    add(&text, ", ", dimension->name + (more == 0 ? "" : " + " + std::to_string(more)));
    if (dimension->said_by != nullptr) {
      add(&known, " and ",
          std::string(dimension->name) + " = " + std::to_string(dimension->size) + " by " +
              dimension->said_by);
    }
  }
  return "(" + text + ")" + (known.empty() ? "" : ", where " + known);
}

Pattern CallParser::OperandStored(Dimension& rows, Dimension& columns, Dimension& nse) {
  Pattern pattern;
  ElementType int32 = {ffi::S32}, index(kIndices);
  pattern.row_offsets = Operand("row_offsets", int32, {rows + 1});
  pattern.column_indices = Operand("column_indices", index, {nse});
  pattern.index_type = IndexTypeOf(index);
  pattern.rows = rows.size;
  pattern.columns = columns.size;
  pattern.nse = nse.size;
  for (const Dimension* dimension : {&rows, &columns, &nse}) {
    if (dimension->size > kMostIndex) {
      Fail(std::string(dimension->name) + " must be less than 2^31, got " +
           std::to_string(dimension->size) + " by " + dimension->said_by);
    }
  }
  return pattern;
}

Pattern CallParser::OperandPattern(Dimension& rows, Dimension& columns, Dimension& nse) {
  Pattern pattern = OperandStored(rows, columns, nse);
  pattern.row_order = Operand("row_order", {ffi::S32}, {rows});
  return pattern;
}

Array CallParser::OperandTileStarts(const Pattern& pattern) {
  if (!ok()) return {};
  const auto buffer = BufferOfOperand(operand_);
  const bool none =
      buffer && buffer->dimensions().size() > 0 && buffer->dimensions().back() == kNoTileStarts;
  const int64_t starts = TileStarts(pattern.rows, pattern.columns).At(1, 0);
  const Array array = Operand("tile_starts", {ffi::S32}, {none ? kNoTileStarts : starts});
  return none ? Array{} : array;
}

Array CallParser::OperandRowCuts(const Pattern& pattern) {
  if (!ok()) return {};
  const auto buffer = BufferOfOperand(operand_);
  const auto is_of = [&](ffi::DataType type) { return buffer->element_type() == type; };
  if (!buffer || std::any_of(kFloats.begin(), kFloats.end(), is_of)) return {};
  const bool none = buffer->dimensions().size() > 0 && buffer->dimensions().back() == kNumbersOfCut;
  const int64_t units = none ? 0 : RowUnits(pattern.rows, pattern.nse);
  const Array array = Operand("row_cuts", {ffi::S32}, {(units + 1) * kNumbersOfCut});
  return none ? Array{} : array;
}

void CallParser::Finish() {
  const auto check = [&](const char* what, size_t wanted, size_t given) {
    if (given > wanted) {
      Fail("takes " + std::to_string(wanted) + what + ", got " + std::to_string(given));
    }
  };
  check(" operands", operand_, operands_.size());
  check(" results", result_, results_.size());
}

int64_t CallParser::Integer(const char* name, int64_t least, int64_t most) {
  const auto value = Attribute<int64_t>(name);
  if (value >= least && value <= most) return value;
  Fail(std::string("attribute ") + name + " must be in [" + std::to_string(least) + ", " +
       std::to_string(most) + "], got " + std::to_string(value));
  return least;
}

}  // namespace jaxsparse
