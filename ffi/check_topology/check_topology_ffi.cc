// FFI targets of the pattern check. Unlike the other operations it waits for its kernel, since a
// bad pattern has to stop the program before the next kernel reads by it: so it has handlers of its
// own, which can't be part of a captured graph.
#include <cuda_runtime_api.h>

#include <cstring>

#include "check_topology/problem.h"
#include "host/handlers.h"
#include "host/registry.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

constexpr char kName[] = "check_topology";
constexpr unsigned long long kNoBadRow = ~0ull;

ffi::Error Parse(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes, CheckTopologyProblem* problem) {
  CallParser call(kName, operands, results, attributes);
  CheckTopologyProblem& p = *problem;
  Dimension rows("m"), columns("columns"), nse("nse");
  columns.size = call.Integer("columns", 0, kMostIndex);
  ElementType int32 = {ffi::S32};
  p.checked_offsets = call.Result("checked_offsets", int32, {rows + 1});
  // The place of the first bad row, which no dtype of JAX has room for by default.
  p.bad_row = static_cast<unsigned long long*>(call.UnbatchedResult("bad_row", {ffi::U32}, {2}));
  p.pattern = call.OperandPattern(rows, columns, nse);
  if (call.operands_left() > 0) {
    p.pattern.permutation = call.Operand("permutation", int32, {nse});
  }
  p.batch = call.batch();
  call.Finish();
  return call.ok() ? ffi::Error::Success() : call.error();
}

ffi::Error Report(const CheckTopologyProblem& p, unsigned long long place, const int32_t* bounds) {
  const auto rows = static_cast<unsigned long long>(p.pattern.rows);
  const unsigned long long row = place % (rows + 1);
  std::string where = row == rows ? "the end of row_offsets" : "row " + std::to_string(row);
  if (p.batch.count > 1) where += " of batch entry " + std::to_string(place / (rows + 1));
  where += row == rows
               ? " (" + std::to_string(bounds[0])
               : " (offsets " + std::to_string(bounds[0]) + " to " + std::to_string(bounds[1]);
  // Patterns made under jit count entries that do not fit, too.
  if (bounds[row == rows ? 0 : 1] > p.pattern.nse) {
    where += "; nse=" + std::to_string(p.pattern.nse) + " is too small";
  }
  where += ")";
  return ffi::Error::InvalidArgument(std::string(kName) + ": bad pattern at " + where + ", with " +
                                     std::to_string(p.pattern.columns) + " columns and " +
                                     std::to_string(p.pattern.nse) +
                                     " stored entries: offsets must start at 0, not fall and stay "
                                     "within the entries; the columns of "
                                     "a row must rise and be in range");
}

template <typename Index>
bool IsValid(const CheckTopologyProblem& p, int64_t entry, int64_t row) {
  const Pattern& a = p.pattern;
  return RowIsValid(
      a.row_offsets.At<const int32_t>(p.batch, entry),
      a.column_indices.At<const Index>(p.batch, entry),
      a.row_order.At<const int32_t>(p.batch, entry),
      a.permutation.data == nullptr ? nullptr : a.permutation.At<const int32_t>(p.batch, entry),
      a.rows, a.columns, a.nse, row);
}

ffi::Error RunOnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                    ffi::Dictionary attributes) {
  CheckTopologyProblem p;
  if (ffi::Error error = Parse(operands, results, attributes, &p); error.failure()) return error;
  const int64_t rows = p.pattern.rows;
  for (int64_t entry = 0; entry < p.batch.count; ++entry) {
    const int32_t* row_offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, entry);
    for (int64_t row = 0; row <= rows; ++row) {
      const bool valid = p.pattern.index_type == IndexType::kInt32
                             ? IsValid<int32_t>(p, entry, row)
                             : IsValid<uint16_t>(p, entry, row);
      if (!valid) {
        return Report(p, static_cast<unsigned long long>(entry * (rows + 1) + row),
                      row_offsets + row);
      }
    }
    std::memcpy(p.checked_offsets.At<int32_t>(p.batch, entry), row_offsets,
                static_cast<size_t>(rows + 1) * sizeof(int32_t));
  }
  *p.bad_row = kNoBadRow;
  return ffi::Error::Success();
}

KernelSource Kernel(IndexType index) {
  return {"check_topology/check_topology.cu",
          KernelExpression("CheckTopologyRows", {TypeName(index)})};
}

ffi::Error PrepareOnCuda(int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
  CheckTopologyProblem p;
  if (ffi::Error error = Parse(operands, results, attributes, &p); error.failure()) return error;
  std::string reason;
  if (GetKernel(Kernel(p.pattern.index_type), device, &reason) == nullptr) {
    return ffi::Error::Internal(std::string(kName) + ": " + reason);
  }
  return ffi::Error::Success();
}

ffi::Error RunOnCuda(int32_t device, void* of_xla, ffi::RemainingArgs operands,
                     ffi::RemainingRets results, ffi::Dictionary attributes) {
  CheckTopologyProblem p;
  if (ffi::Error error = Parse(operands, results, attributes, &p); error.failure()) return error;
  std::string reason;
  const void* kernel = GetKernel(Kernel(p.pattern.index_type), device, &reason);
  if (kernel == nullptr) return ffi::Error::Internal(std::string(kName) + ": " + reason);
  auto* stream = static_cast<cudaStream_t>(of_xla);
  constexpr int kThreads = 128;
  const int64_t units = p.batch.count * (p.pattern.rows + 1);
  if (units == 0) return ffi::Error::Success();
  cudaMemsetAsync(p.bad_row, 0xff, sizeof(*p.bad_row), stream);
  reason = LaunchKernel(kernel, {CeilDivide(units, kThreads), kThreads}, &p, device, stream);
  if (!reason.empty()) return ffi::Error::Internal(std::string(kName) + ": " + reason);
  unsigned long long place = kNoBadRow;
  cudaMemcpyAsync(&place, p.bad_row, sizeof(place), cudaMemcpyDeviceToHost, stream);
  if (const cudaError_t status = cudaStreamSynchronize(stream); status != cudaSuccess) {
    return ffi::Error::Internal(std::string(kName) + ": " + cudaGetErrorString(status));
  }
  if (place == kNoBadRow) return ffi::Error::Success();
  const auto per_entry = static_cast<unsigned long long>(p.pattern.rows + 1);
  const int32_t* offsets =
      p.pattern.row_offsets.At<const int32_t>(p.batch, static_cast<int64_t>(place / per_entry));
  int32_t bounds[2] = {};
  const bool last = place % per_entry + 1 == per_entry;
  cudaMemcpy(bounds, offsets + place % per_entry, last ? sizeof(int32_t) : sizeof(bounds),
             cudaMemcpyDeviceToHost);
  return Report(p, place, bounds);
}

XLA_FFI_Error* Cpu(XLA_FFI_CallFrame* frame) {
  static auto* handler = WithCall(ffi::Ffi::Bind()).To(RunOnCpu).release();
  return handler->Call(frame);
}

}  // namespace

OperationEntry CheckTopologyEntry() {
  return {kName,
          Cpu,
          InitializeOnCuda<PrepareOnCuda>,
          ExecuteOnCuda<RunOnCuda>,
          {"rows"},
          {"generic_rows"},
          {Kernel(IndexType::kInt32), Kernel(IndexType::kUint16)}};
}

}  // namespace jaxsparse
