// Reads the buffers and attributes of one call. Each operand and result is declared, in its order,
// by a name, an element type and a shape; a call that is not as declared is refused with what was
// expected and what came. Calls come from programs that were traced here, and from exported ones
// that may be damaged, so whatever a kernel takes for granted is checked.
//
//   Dimension m("m"), n("n");
//   ElementType dtype(kFloats);
//   p.out = call.Result("out", dtype, {m, n});        // says how large m and n are, and the dtype
//   p.x = call.Operand("x", dtype, {n});              // has to agree
//   p.row_offsets = call.Operand("row_offsets", kInt32, {m + 1});
//   call.Finish();                                    // there are no others
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "types.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsparse {

namespace ffi = xla::ffi;

// Of rows, columns and stored entries, which int32 counts; of bytes, more than any machine has.
inline constexpr int64_t kMostIndex = (int64_t{1} << 31) - 1, kMostBytes = int64_t{1} << 47;

// As NumPy names it.
std::string_view NameOf(ffi::DataType type);
ffi::DataType DataTypeOf(std::string_view name);  // INVALID if there is none of that name
ffi::DataType DataTypeOf(DType dtype);

// A dimension that several arrays have: the first one says how large it is.
struct Dimension {
  explicit Dimension(const char* name) : name(name) {}

  const char* name;
  int64_t size = -1;              // not known yet
  const char* said_by = nullptr;  // the array that said so
};

// Of a declared shape: a number, or a dimension and so many more.
struct Extent {
  Extent(int64_t size) : more(size) {}                     // NOLINT: so {m, 4} is a shape
  Extent(Dimension& dimension) : dimension(&dimension) {}  // NOLINT: as above
  Extent(Dimension& dimension, int64_t more) : dimension(&dimension), more(more) {}

  Dimension* dimension = nullptr;
  int64_t more = 0;
};
inline Extent operator+(Dimension& dimension, int64_t more) { return {dimension, more}; }

// The element types that arrays may have; all those that are declared by one ElementType have the
// same, that of the first one.
class ElementType {
 public:
  ElementType(std::initializer_list<ffi::DataType> allowed);  // NOLINT: one type is a declaration
  // Of a table of {name, value}, as CallParser::Choice takes it.
  template <typename Row, int kCount>
  static ElementType OneOf(const Row (&table)[kCount]) {
    static_assert(kCount <= kMostTypes);
    ElementType types = {};
    for (const Row& row : table) types.allowed_[types.count_++] = DataTypeOf(row.value);
    return types;
  }
  // Of what a result of this type may be a product: of the same, or if it is float32 of 16 bits.
  static ElementType FactorsOf(const ElementType& result);
  bool Allows(ffi::DataType type) const;
  void Settle(ffi::DataType type, const char* by);
  std::string Text() const;  // "float32 or float64", "float32 (by x)"
  bool is(ffi::DataType other) const { return count_ == 1 && allowed_[0] == other; }

 private:
  static constexpr int kMostTypes = 4;
  ffi::DataType allowed_[kMostTypes];
  int count_ = 0;
  const char* said_by_ = nullptr;
};

inline constexpr std::initializer_list<ffi::DataType> kFloats = {ffi::F32, ffi::F64, ffi::BF16,
                                                                 ffi::F16};
inline constexpr std::initializer_list<ffi::DataType> kIndices = {ffi::S32, ffi::U16};

// Of an element type among kFloats, and among kIndices.
DType DTypeOf(const ElementType& type);
IndexType IndexTypeOf(const ElementType& type);

class CallParser {
 public:
  CallParser(const char* operation, ffi::RemainingArgs operands, ffi::RemainingRets results,
             ffi::Dictionary attributes)
      : operation_(operation), operands_(operands), results_(results), attributes_(attributes) {}

  bool ok() const { return error_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(error_); }
  // The first thing that is wrong is kept, so that a parse reads top-down and asks once.
  void Fail(const std::string& reason);

  // The next result, under the batch dimensions: those that the first one has in front of its
  // declared ones.
  Array Result(const char* name, ElementType& type, std::initializer_list<Extent> core);
  // The next operand; where it has size 1 in place of a batch dimension it is broadcast.
  Array Operand(const char* name, ElementType& type, std::initializer_list<Extent> core);
  Array Operand(const char* name, ElementType&& type, std::initializer_list<Extent> core) {
    return Operand(name, type, core);
  }
  // The next result, whatever the batch dimensions are.
  void* UnbatchedResult(const char* name, ElementType type, std::initializer_list<Extent> core);
  // The next result, of at least so many bytes, if they are not 0.
  Workspace ResultWorkspace(int64_t bytes);

  // Patterns of operands: row_offsets, column_indices, row_order.
  Pattern OperandPattern(Dimension& rows, Dimension& columns, Dimension& nse);
  // row_offsets, column_indices.
  Pattern OperandStored(Dimension& rows, Dimension& columns, Dimension& nse);
  // Where the entries of the pattern's tiles begin, if the operand says so.
  Array OperandTileStarts(const Pattern& pattern);
  // How the pattern's rows are cut into units, if the operand says so. Programs that were exported
  // before there were cuts have no such operand: they end there, or an array of numbers follows.
  Array OperandRowCuts(const Pattern& pattern);

  const Batch& batch() const { return batch_; }
  // How many operands or results have not been declared yet.
  size_t operands_left() const { return Left(operands_.size(), operand_); }
  size_t results_left() const { return Left(results_.size(), result_); }
  void Finish();

  template <typename T>
  T Attribute(const char* name) {
    const ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    const char* kind = std::is_same_v<T, bool>      ? "a boolean"
                       : std::is_same_v<T, int64_t> ? "an int64"
                       : std::is_same_v<T, double>  ? "a float64"
                                                    : "a string";
    Fail(std::string("attribute ") + name + " must be " + kind + ", got " +
         (attributes_.contains(name) ? "one of another type" : "none"));
    return T{};
  }
  // An integer in [least, most].
  int64_t Integer(const char* name, int64_t least, int64_t most);
  // One of the names of a table of {name, value}; the first one's value where it is none of them.
  template <typename Row, int kCount>
  auto Choice(const char* name, const Row (&table)[kCount]) {
    const auto given = Attribute<std::string_view>(name);
    std::string names;
    for (const Row& row : table) {
      if (given == row.name) return row.value;
      names += (names.empty() ? "" : ", ") + std::string(row.name);
    }
    Fail(std::string("attribute ") + name + " must be one of " + names + ", got '" +
         std::string(given) + "'");
    return table[0].value;
  }

 private:
  enum class BatchRule { kDefines, kHas, kMayBroadcast, kNone };

  static size_t Left(size_t count, size_t taken) { return taken < count ? count - taken : 0; }
  std::optional<ffi::AnyBuffer> BufferOfOperand(size_t index) const;
  std::optional<ffi::AnyBuffer> BufferOfResult(size_t index) const;
  Array Take(std::string_view kind, size_t index, const char* name,
             std::optional<ffi::AnyBuffer> buffer, ElementType& type,
             std::initializer_list<Extent> core, BatchRule rule);
  // The strides of an array that is as declared, which then says how large its dimensions are.
  std::optional<Array> Matching(const char* name, ffi::AnyBuffer buffer, ElementType& type,
                                std::initializer_list<Extent> core, BatchRule rule);
  std::string ShapeOf(std::initializer_list<Extent> core, BatchRule rule) const;

  std::string operation_;
  std::string error_;
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  size_t operand_ = 0, result_ = 0;  // the next ones
  Batch batch_;
};

}  // namespace jaxsparse
