// The handlers of recurrent scans and of waves. Unlike those of other operations (host/ffi.h) they
// choose nothing: what to launch was planned when the program was lowered.
//
// An operation is a struct with
//   using Call = ...;  // a ScanCall
//   static constexpr char kName[];
//   static void Parse(CallParser& parser, Call* call);
//   static std::vector<KernelSource> MoreKernels(const Call& call);  // beside `call.launch.kernel`
//   // For one batch entry of the call; returns the reason of a failure, or an empty string.
//   static std::string Launch(const Call& call, int64_t entry, const CudaLaunch& launch);
#pragma once

#include <string>
#include <vector>

#include "host/handlers.h"
#include "host/registry.h"
#include "persistent/failures.h"
#include "recurrent/scan_call.h"

namespace jaxsparse {

template <typename Operation>
class ScanTargets {
 public:
  static XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame* frame) {
    return InitializeOnCuda<Prepare>(frame);
  }

  static XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame* frame) {
    return ExecuteOnCuda<Run, ffi::Traits::kCmdBufferCompatible>(frame);
  }

 private:
  using Call = typename Operation::Call;

  static ffi::Error Parse(ffi::RemainingArgs operands, ffi::RemainingRets results,
                          ffi::Dictionary attributes, Call* call) {
    CallParser parser(Operation::kName, operands, results, attributes);
    Operation::Parse(parser, call);
    parser.Finish();
    return parser.ok() ? ffi::Error::Success() : parser.error();
  }

  static ffi::Error ErrorOf(const std::string& reason) {
    if (reason.empty()) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(Operation::kName) + ": " + reason);
  }

  static ffi::Error Prepare(int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                            ffi::Dictionary attributes) {
    Call call;
    ffi::Error error = Parse(operands, results, attributes, &call);
    if (error.failure()) return error;
    std::string reason;
    FailureWord(device, &reason);
    if (reason.empty()) GetKernel(call.launch.kernel, device, &reason);
    for (const KernelSource& kernel : Operation::MoreKernels(call)) {
      if (reason.empty()) GetKernel(kernel, device, &reason);
    }
    return ErrorOf(reason);
  }

  static ffi::Error Run(int32_t device, void* stream, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, ffi::Dictionary attributes) {
    Call call;
    ffi::Error error = Parse(operands, results, attributes, &call);
    if (error.failure()) return error;
    std::string reason;
    // Unified addressing: the device sees it there, too.
    call.launch.wait_limits.report = FailureWord(device, &reason);
    if (TakeFailure(device)) reason = FailedBefore(device);
    CudaLaunch launch{nullptr, call.launch.shape, device, stream};
    if (reason.empty()) launch.kernel = GetKernel(call.launch.kernel, device, &reason);
    for (int64_t entry = 0; entry < call.batch.count && reason.empty(); ++entry) {
      reason = Operation::Launch(call, entry, launch);
    }
    return ErrorOf(reason);
  }
};

// Without variants. There is no CPU kernel: elsewhere a scan is a loop of XLA.
template <typename Operation>
OperationEntry ScanEntry() {
  using Handlers = ScanTargets<Operation>;
  return {Operation::kName, nullptr, Handlers::CudaInitialize, Handlers::CudaExecute, {}, {}, {}};
}

}  // namespace jaxsparse
