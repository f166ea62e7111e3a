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

// The arrays that a convolution is between: each target takes two and makes the third.
enum class Role { kX, kY, kKernel };

// Arrays are declared as results or as operands alike.
using Declared = Array (CallParser::*)(const char*, ElementType&, std::initializer_list<Extent>);

// Parses a call of the target that makes `made`. Its operands are the other two, in their order.
void ParseConvolution(Role made, CallParser& call, DepthwiseProblem& p) {
  p.channels_first = call.Integer("channel_axis", 0, 1) == 0;
  p.stride = static_cast<int>(call.Integer("stride", 1, 2));
  p.above = static_cast<int>(call.Integer("above", 0, kTaps - 1));
  p.left = static_cast<int>(call.Integer("left", 0, kTaps - 1));
  p.activation = call.Choice("activation", kActivations);
  const int64_t workspace = made == Role::kKernel ? call.Integer("workspace", 0, kMostBytes) : 0;

  Dimension channels("channels"), images("images");
  Dimension height("height"), width("width"), rows("rows"), columns("columns");
  Dimension& outer = p.channels_first ? channels : images;
  Dimension& inner = p.channels_first ? images : channels;
  const auto declare = [&](Role role, Declared as, ElementType& type) {
    if (role == Role::kX) p.x = (call.*as)("x", type, {outer, inner, height, width});
    if (role == Role::kY)
      p.y = (call.*as)(made == role ? "out" : "y", type, {outer, inner, rows, columns});
    if (role == Role::kKernel) p.kernel = (call.*as)("kernel", type, {channels, kTaps, kTaps});
  };
  ElementType out_dtype(kTypes);
  declare(made, &CallParser::Result, out_dtype);
  if (made == Role::kY && call.results_left() > 0) {
    p.preactivation = call.Result("preactivation", out_dtype, {outer, inner, rows, columns});
  }
  p.workspace = call.ResultWorkspace(workspace);
  ElementType dtype = ElementType::FactorsOf(out_dtype);
  for (const Role role : {Role::kX, Role::kY, Role::kKernel}) {
    if (role != made) declare(role, &CallParser::Operand, dtype);
  }
  if (made == Role::kY && call.operands_left() > 0) {
    p.bias = call.Operand("bias", dtype, {channels});
  }

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

struct Depthwise {
  using Problem = DepthwiseProblem;
  static constexpr char kName[] = "depthwise";

  static void Parse(CallParser& call, Problem* p) { ParseConvolution(Role::kY, call, *p); }
  static Table<CpuVariant<Problem>> CpuVariants() { return DepthwiseOnCpu().forward; }
  static Table<CudaVariant<Problem>> CudaVariants() { return kDepthwiseCudaVariants; }
};

struct DepthwiseInput {
  using Problem = DepthwiseProblem;
  static constexpr char kName[] = "depthwise_input";

  static void Parse(CallParser& call, Problem* p) { ParseConvolution(Role::kX, call, *p); }
  static Table<CpuVariant<Problem>> CpuVariants() { return DepthwiseOnCpu().input; }
  static Table<CudaVariant<Problem>> CudaVariants() { return kDepthwiseInputCudaVariants; }
};

struct DepthwiseKernel {
  using Problem = DepthwiseProblem;
  static constexpr char kName[] = "depthwise_kernel";

  static void Parse(CallParser& call, Problem* p) { ParseConvolution(Role::kKernel, call, *p); }
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
          if (images > 1) continue;
          for (const int64_t size : {7, 14, 28}) {  // of which several fit into shared memory
            problem.height = problem.width = size;
            problem.rows = problem.columns = CeilDivide(size, stride);
            problems.push_back(problem);
          }
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
