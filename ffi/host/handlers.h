// From functions of a call's buffers and attributes to the handlers that XLA calls.
#pragma once

#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxsparse {

namespace ffi = xla::ffi;

template <typename Binding>
auto WithCall(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().Attrs();
}

// kPrepare(device, operands, results, attributes) compiles and loads what the execution needs:
// before any graph capture, where neither is allowed.
template <auto kPrepare>
XLA_FFI_Error* InitializeOnCuda(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      WithCall(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>())
          .To(kPrepare)
          .release();
  return handler->Call(frame);
}

// kRun(device, stream, operands, results, attributes).
template <auto kRun, ffi::Traits... kTraits>
XLA_FFI_Error* ExecuteOnCuda(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      WithCall(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<void*>>())
          .To(kRun, {kTraits...})
          .release();
  return handler->Call(frame);
}

}  // namespace jaxsparse
