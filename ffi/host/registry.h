// What an operation tells the Python side: its FFI targets, its variants, every kernel instance
// that its device sources can be asked for, and which variant a call takes.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "host/ffi.h"

namespace jaxsparse {

struct OperationEntry {
  std::string name;
  // Null where a platform has no target: there the operation is plain XLA.
  XLA_FFI_Handler* cpu = nullptr;
  XLA_FFI_Handler* cuda_initialize = nullptr;
  XLA_FFI_Handler* cuda_execute = nullptr;
  std::vector<std::string> cpu_variants;
  std::vector<std::string> cuda_variants;
  std::vector<KernelSource> kernels;
  // Null where the choice is not made among variants of a table.
  VariantChoice (*choose_on_cpu)(const DescribedCall&) = nullptr;
  VariantChoice (*choose_on_cuda)(const DescribedCall&, const Gpu&) = nullptr;
  int64_t (*workspace_on_cuda)(const DescribedCall&, std::string* error) = nullptr;
  std::vector<KernelSource> (*kernels_on_cuda)(const DescribedCall&, const Gpu&,
                                               std::string* error) = nullptr;
};

// `problems`: at least one for every combination of types that selects another kernel instance.
template <typename Operation>
OperationEntry MakeEntry(const std::vector<typename Operation::Problem>& problems) {
  using Handlers = Targets<Operation>;
  const bool has_cpu = Operation::CpuVariants().count > 0;
  OperationEntry entry{Operation::kName,
                       has_cpu ? Handlers::Cpu : nullptr,
                       Handlers::CudaInitialize,
                       Handlers::CudaExecute,
                       Names(Operation::CpuVariants()),
                       Names(Operation::CudaVariants()),
                       {},
                       has_cpu ? ChooseOnCpu<Operation> : nullptr,
                       ChooseOnCuda<Operation>,
                       WorkspaceOnCuda<Operation>,
                       ChosenKernels<Operation>};
  for (const auto& row : Operation::CudaVariants()) {
    for (const auto& problem : problems) {
      if (!row.fits(problem)) continue;
      std::vector<KernelSource> kernels = {row.kernel(problem)};
      if (row.prologue != nullptr) kernels.push_back(row.prologue->source(problem));
      for (const KernelSource& kernel : kernels) {
        const auto is_same = [&](const KernelSource& other) {
          return other.file == kernel.file && other.expression == kernel.expression;
        };
        if (std::none_of(entry.kernels.begin(), entry.kernels.end(), is_same)) {
          entry.kernels.push_back(kernel);
        }
      }
    }
  }
  return entry;
}

// Supported pairs of operand and result dtype.
struct DTypePair {
  DType dtype, out_dtype;
};
inline constexpr DTypePair kDTypePairs[] = {
    {DType::kFloat32, DType::kFloat32},   {DType::kFloat64, DType::kFloat64},
    {DType::kBFloat16, DType::kBFloat16}, {DType::kBFloat16, DType::kFloat32},
    {DType::kFloat16, DType::kFloat16},   {DType::kFloat16, DType::kFloat32},
};

OperationEntry SpmmEntry();
OperationEntry SddmmEntry();
OperationEntry SparseSoftmaxEntry();
OperationEntry ReduceRowsEntry();
OperationEntry AttentionEntry();
OperationEntry AttentionTangentEntry();
OperationEntry PagedAttentionEntry();
OperationEntry AttentionCotangentEntry();
OperationEntry CheckTopologyEntry();
OperationEntry DepthwiseEntry();
OperationEntry DepthwiseInputEntry();
OperationEntry DepthwiseKernelEntry();
OperationEntry PackedProductEntry();
OperationEntry PackedUnpackEntry();
OperationEntry RecurrentScanEntry();
OperationEntry RecurrentWaveEntry();
OperationEntry DynamicScanEntry();
OperationEntry DynamicLossEntry();

}  // namespace jaxsparse
