// FFI targets of packed matrices: the product, and the matrix written out.
#include "host/activations.h"
#include "host/registry.h"
#include "packed/packed.h"

namespace jaxsparse {
namespace {

constexpr int64_t kMostParts = 1 << 20;

// How a matrix is packed.
void TakeForm(CallParser& call, PackedProblem& p) {
  p.cell = static_cast<int>(call.Integer("cell", 0, 2));
  p.parts = call.Integer("parts", 1, kMostParts);
}

// The numbers, which say what they are; plain ones are what `dtype` says.
void TakeValues(CallParser& call, Dimension& words, ElementType& dtype, PackedProblem& p) {
  ElementType type({ffi::BF16, ffi::F16, ffi::S8, ffi::F8E4M3FN});
  Dimension width("width");
  p.values = call.Operand("values", type, {words, width});
  if (!call.ok()) return;
  p.numbers = type.is(ffi::S8)         ? PackedNumbers::kInt8
              : type.is(ffi::F8E4M3FN) ? PackedNumbers::kE4M3
                                       : PackedNumbers::kPlain;
  if (p.numbers != PackedNumbers::kPlain && p.cell > 1) {
    call.Fail("cell must be 0 or 1 with values of 8 bits, got " + std::to_string(p.cell));
  }
  const int64_t numbers = (p.cell == 0 ? kGapNumbers : NumbersOfWord(p.numbers)) * kWarp;
  if (width.size != numbers) {
    call.Fail("values must have " + std::to_string(numbers) + " numbers in a row, got " +
              std::to_string(width.size));
  }
  if (p.numbers != PackedNumbers::kPlain) return;
  const ffi::DataType plain = type.is(ffi::BF16) ? ffi::BF16 : ffi::F16;
  if (!dtype.Allows(plain)) call.Fail("values must be " + dtype.Text() + ", got " + type.Text());
  dtype.Settle(plain, "values");
}

// masks, starts, panels, rows of a matrix whose sizes are known.
void TakePattern(CallParser& call, Dimension& m, Dimension& k, Dimension& words, PackedProblem& p) {
  Dimension pieces("pieces");
  p.m = m.size;
  p.k = k.size;
  const int64_t panels = p.cell == 0 ? 1 : PackedPanels(p.k, p.parts);
  pieces.size = (p.cell == 0 ? GapStrips(p) : PackedStrips(p)) * p.parts;
  if (p.cell == 0) {
    p.masks = call.Operand("masks", {ffi::U32}, {words, kWarp});
  } else {
    p.masks =
        call.Operand("masks", {ffi::U32}, {pieces, panels * (kPackedPanelMasks / p.cell), kWarp});
  }
  p.starts = call.Operand("starts", {ffi::S32}, {pieces + 1});
  p.panels = call.Operand("panels", {ffi::S32}, {pieces, panels, 2});
  p.rows = call.Operand("rows", {ffi::S32}, {m});
}

struct PackedProduct {
  using Problem = PackedProblem;
  static constexpr char kName[] = "packed_product";
  static constexpr std::initializer_list<ffi::DataType> kTypes = {ffi::BF16, ffi::F16, ffi::F32};

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Dimension m("m"), k("k"), n("n"), words("words");
    TakeForm(call, p);
    p.x_on_left = call.Attribute<bool>("x_on_left");
    p.activation = call.Choice("activation", kActivations);
    const int64_t workspace = call.Integer("workspace", 0, kMostBytes);

    const auto dense = [&](Dimension& rows) -> std::pair<Extent, Extent> {
      if (p.x_on_left) return {n, rows};
      return {rows, n};
    };
    const auto out = dense(m), x = dense(k);
    ElementType out_dtype(kTypes);
    p.out = call.Result("out", out_dtype, {out.first, out.second});
    p.workspace = call.ResultWorkspace(workspace);
    ElementType dtype = ElementType::FactorsOf(out_dtype);
    TakeValues(call, words, dtype, p);
    p.x = call.Operand("x", dtype, {x.first, x.second});
    if (dtype.is(ffi::F32)) call.Fail("x must be bfloat16 or float16, got float32");
    TakePattern(call, m, k, words, p);
    if (p.numbers != PackedNumbers::kPlain) p.scales = call.Operand("scales", {ffi::F32}, {m});
    if (call.operands_left() > 0) p.bias = call.Operand("bias", dtype, {m});
    if (call.batch().rank > 0) call.Fail("takes no batch dimensions");
    p.n = n.size;
    p.words = words.size;
    p.dtype = DTypeOf(dtype);
    p.out_dtype = DTypeOf(out_dtype);
  }

  static Table<CpuVariant<Problem>> CpuVariants() { return {nullptr, 0}; }
  static Table<CudaVariant<Problem>> CudaVariants() { return kPackedCudaVariants; }
};

struct PackedUnpacking {
  using Problem = PackedProblem;
  static constexpr char kName[] = "packed_unpack";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Dimension m("m"), k("k"), words("words");
    TakeForm(call, p);
    ElementType dtype({ffi::BF16, ffi::F16});
    p.out = call.Result("out", dtype, {m, k});
    TakeValues(call, words, dtype, p);
    TakePattern(call, m, k, words, p);
    if (call.batch().rank > 0) call.Fail("takes no batch dimensions");
    p.words = words.size;
    p.dtype = p.out_dtype = DTypeOf(dtype);
  }

  static Table<CpuVariant<Problem>> CpuVariants() { return {nullptr, 0}; }
  static Table<CudaVariant<Problem>> CudaVariants() { return kUnpackCudaVariants; }
};

constexpr PackedNumbers kOf8Bits[] = {PackedNumbers::kInt8, PackedNumbers::kE4M3};
constexpr std::pair<int, int64_t> kFormsOf8Bits[] = {{0, 1}, {0, 8}, {1, 8}, {1, 64}};  // cell, n

}  // namespace

OperationEntry PackedUnpackEntry() {
  std::vector<PackedProblem> problems;
  for (const int cell : {0, 1, 2}) {
    PackedProblem problem;
    problem.m = problem.k = 8192;
    problem.cell = cell;
    problems.push_back(problem);
  }
  for (const PackedNumbers numbers : kOf8Bits) {
    for (const int cell : {0, 1}) {
      PackedProblem problem;
      problem.m = problem.k = 8192;
      problem.cell = cell;
      problem.numbers = numbers;
      problems.push_back(problem);
    }
  }
  return MakeEntry<PackedUnpacking>(problems);
}

OperationEntry PackedProductEntry() {
  std::vector<PackedProblem> problems;
  for (const DTypePair types : kDTypePairs) {
    if (SizeOf(types.dtype) != 2) continue;
    for (const int cell : {1, 2}) {
      for (const int64_t n : {8, 16, 32, 64}) {
        for (const bool x_on_left : {false, true}) {
          for (const int64_t parts : {1, 4}) {
            PackedProblem problem;
            problem.m = problem.k = 8192;
            problem.n = n;
            problem.cell = cell;
            problem.parts = parts;
            problem.x_on_left = x_on_left;
            problem.dtype = types.dtype;
            problem.out_dtype = types.out_dtype;
            problem.workspace.bytes = int64_t{1} << 30;
            problems.push_back(problem);
          }
        }
      }
    }
    for (const int64_t n : {1, 2, 4, 8, 16}) {
      for (const bool x_on_left : {false, true}) {
        for (const int64_t parts : {1, 2}) {
          PackedProblem problem;
          problem.m = problem.k = 8192;
          problem.n = n;
          problem.cell = 0;
          problem.parts = parts;
          problem.x_on_left = x_on_left;
          problem.dtype = types.dtype;
          problem.out_dtype = types.out_dtype;
          problems.push_back(problem);
        }
      }
    }
    for (const PackedNumbers numbers : kOf8Bits) {
      for (const auto& [cell, n] : kFormsOf8Bits) {
        PackedProblem problem;
        problem.m = problem.k = 8192;
        problem.n = n;
        problem.cell = cell;
        problem.numbers = numbers;
        problem.parts = 4;
        problem.x_on_left = types.out_dtype == DType::kFloat32;
        problem.dtype = types.dtype;
        problem.out_dtype = types.out_dtype;
        problem.workspace.bytes = int64_t{1} << 30;
        problems.push_back(problem);
      }
    }
  }
  return MakeEntry<PackedProduct>(problems);
}

}  // namespace jaxsparse
