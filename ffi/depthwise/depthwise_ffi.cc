// FFI targets of depthwise convolutions and their transposes.
#include "depthwise/depthwise.h"
#include "host/activations.h"
#include "host/registry.h"

namespace jaxsparse {
namespace {

constexpr std::initializer_list<ffi::DataType> kTypes = {ffi::F32, ffi::BF16, ffi::F16};

DepthwiseCpuTables DepthwiseOnCpu() {
  return ForCurrentIsa(portable::kDepthwiseCpuVariants, avx2::kDepthwiseCpuVariants,
                       avx512::kDepthwiseCpuVariants);
}

// What all three targets have in common: the attributes, and dimensions that arrays share.
struct Convolution {
  CallParser& call;
  DepthwiseProblem& p;
  Dimension channels{"channels"}, images{"images"};
  Dimension height{"height"}, width{"width"}, rows{"rows"}, columns{"columns"};

  Convolution(CallParser& call, DepthwiseProblem& p) : call(call), p(p) {
    p.channels_first = call.Integer("channel_axis", 0, 1) == 0;
    p.stride = static_cast<int>(call.Integer("stride", 1, 2));
    p.above = static_cast<int>(call.Integer("above", 0, kTaps - 1));
    p.left = static_cast<int>(call.Integer("left", 0, kTaps - 1));
    p.activation = call.Choice("activation", kActivations);
  }

  Dimension& Outer() { return p.channels_first ? channels : images; }
  Dimension& Inner() { return p.channels_first ? images : channels; }

  void Finish(const ElementType& dtype, const ElementType& out_dtype) {
    p.channels = channels.size;
    p.images = images.size;
    p.height = height.size;
    p.width = width.size;
    p.rows = rows.size;
    p.columns = columns.size;
    p.batch = call.batch();
    p.dtype = DTypeOf(dtype);
    p.out_dtype = DTypeOf(out_dtype);
    if ((p.rows - 1) * p.stride >= p.height + p.above ||
        (p.columns - 1) * p.stride >= p.width + p.left) {
      const auto text = [](int64_t n, int64_t m) {
        return std::to_string(n) + " x " + std::to_string(m);
      };
      call.Fail("y must have no windows behind images of " + text(p.height, p.width) + ", got " +
                text(p.rows, p.columns));
    }
  }
};

struct Depthwise {
  using Problem = DepthwiseProblem;
  static constexpr char kName[] = "depthwise";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Convolution c(call, p);
    ElementType out_dtype(kTypes);
    p.y = call.Result("out", out_dtype, {c.Outer(), c.Inner(), c.rows, c.columns});
    if (call.results_left() > 0) {
      p.preactivation =
          call.Result("preactivation", out_dtype, {c.Outer(), c.Inner(), c.rows, c.columns});
    }
    ElementType dtype = ElementType::FactorsOf(out_dtype);
    p.x = call.Operand("x", dtype, {c.Outer(), c.Inner(), c.height, c.width});
    p.kernel = call.Operand("kernel", dtype, {c.channels, kTaps, kTaps});
    if (call.operands_left() > 0) p.bias = call.Operand("bias", dtype, {c.channels});
    c.Finish(dtype, out_dtype);
  }

  static Table<CpuVariant<Problem>> CpuVariants() { return DepthwiseOnCpu().forward; }
  static Table<CudaVariant<Problem>> CudaVariants() { return kDepthwiseCudaVariants; }
};

struct DepthwiseInput {
  using Problem = DepthwiseProblem;
  static constexpr char kName[] = "depthwise_input";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Convolution c(call, p);
    ElementType out_dtype(kTypes);
    p.x = call.Result("x", out_dtype, {c.Outer(), c.Inner(), c.height, c.width});
    ElementType dtype = ElementType::FactorsOf(out_dtype);
    p.y = call.Operand("y", dtype, {c.Outer(), c.Inner(), c.rows, c.columns});
    p.kernel = call.Operand("kernel", dtype, {c.channels, kTaps, kTaps});
    c.Finish(dtype, out_dtype);
  }

  static Table<CpuVariant<Problem>> CpuVariants() { return DepthwiseOnCpu().input; }
  static Table<CudaVariant<Problem>> CudaVariants() { return kDepthwiseInputCudaVariants; }
};

struct DepthwiseKernel {
  using Problem = DepthwiseProblem;
  static constexpr char kName[] = "depthwise_kernel";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Convolution c(call, p);
    const int64_t workspace = call.Integer("workspace", 0, kMostBytes);
    ElementType out_dtype(kTypes);
    p.kernel = call.Result("kernel", out_dtype, {c.channels, kTaps, kTaps});
    p.workspace = call.ResultWorkspace(workspace);
    ElementType dtype = ElementType::FactorsOf(out_dtype);
    p.x = call.Operand("x", dtype, {c.Outer(), c.Inner(), c.height, c.width});
    p.y = call.Operand("y", dtype, {c.Outer(), c.Inner(), c.rows, c.columns});
    c.Finish(dtype, out_dtype);
  }

  static Table<CpuVariant<Problem>> CpuVariants() { return DepthwiseOnCpu().kernel; }
  static Table<CudaVariant<Problem>> CudaVariants() { return kDepthwiseKernelCudaVariants; }
};

// One for every instance of the kernels.
std::vector<DepthwiseProblem> Problems() {
  std::vector<DepthwiseProblem> problems;
  for (const DTypePair types : kDTypePairs) {
    if (types.dtype == DType::kFloat64) continue;
    for (const int stride : {1, 2}) {
      for (int left = 0; left < kTaps; ++left) {
        if (types.dtype != DType::kFloat32 && left != 2 - stride) continue;  // as "SAME" has it
        for (const int64_t images : {1, 16}) {
          DepthwiseProblem problem;
          problem.channels = 64;
          problem.images = images;
          problem.height = problem.width = 56;
          problem.rows = problem.columns = 56 / stride;
          problem.stride = stride;
          problem.above = problem.left = left;
          problem.dtype = types.dtype;
          problem.out_dtype = types.out_dtype;
          problem.workspace.bytes = int64_t{1} << 30;
          problems.push_back(problem);
        }
      }
    }
  }
  return problems;
}

}  // namespace

OperationEntry DepthwiseEntry() { return MakeEntry<Depthwise>(Problems()); }
OperationEntry DepthwiseInputEntry() { return MakeEntry<DepthwiseInput>(Problems()); }
OperationEntry DepthwiseKernelEntry() { return MakeEntry<DepthwiseKernel>(Problems()); }

}  // namespace jaxsparse
