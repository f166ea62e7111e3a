// From XLA's calls to problem structs and variants, once for all operations and both platforms.
//
// An operation is a struct with
//   using Problem = ...;
//   static constexpr char kName[];
//   static void Parse(CallParser& call, Problem* problem);
//   static Table<CpuVariant<Problem>> CpuVariants();
//   static Table<CudaVariant<Problem>> CudaVariants();
// and Targets<Operation> has its handlers.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "cpu/workers.h"
#include "host/call_parser.h"
#include "host/handlers.h"
#include "host/variant.h"
#include "nvrtc/kernel.h"
#include "types.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsparse {

// A dtype, as NumPy names it, and a shape.
using BufferType = std::pair<std::string, std::vector<int64_t>>;
using AttributeValue = std::variant<bool, int64_t, double, std::string>;

// A call of types without data, to ask what it would run as. Its buffers all lie at one place that
// holds nothing, so a problem that is parsed from it must not be launched.
class DescribedCall {
 public:
  DescribedCall(std::vector<BufferType> operands, std::vector<BufferType> results,
                std::map<std::string, AttributeValue> attributes);
  DescribedCall(const DescribedCall&) = delete;
  DescribedCall& operator=(const DescribedCall&) = delete;

  ffi::RemainingArgs operands() const { return {&operands_, 0}; }
  ffi::RemainingRets results() const { return {&results_, 0}; }
  ffi::Dictionary attributes() const { return ffi::Dictionary(&attributes_); }

 private:
  // What XLA's structs point to.
  struct Buffers {
    explicit Buffers(std::vector<BufferType> types);
    std::vector<BufferType> types;
    std::vector<XLA_FFI_Buffer> buffers;
    std::vector<void*> pointers;
  };

  Buffers operand_buffers_, result_buffers_;
  std::map<std::string, AttributeValue> values_;
  std::vector<XLA_FFI_ByteSpan> names_, texts_;
  std::vector<XLA_FFI_Scalar> scalars_;
  std::vector<XLA_FFI_ArgType> operand_kinds_;
  std::vector<XLA_FFI_RetType> result_kinds_;
  std::vector<XLA_FFI_AttrType> attribute_kinds_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<void*> value_pointers_;
  XLA_FFI_Args operands_ = {};
  XLA_FFI_Rets results_ = {};
  XLA_FFI_Attrs attributes_ = {};
};

// Whether an operation's variants depend on the GPU.
template <typename Problem>
concept SeesGpu = requires(Problem problem) { problem.gpu; };

// Everything that the handlers of one call share: the parsed problem and the chosen variant.
template <typename Operation, typename Row>
struct ParsedCall {
  typename Operation::Problem problem;
  const Row* variant = nullptr;
  ffi::Error error = ffi::Error::Success();

  ParsedCall(Table<Row> table, ffi::RemainingArgs operands, ffi::RemainingRets results,
             ffi::Dictionary attributes, const Gpu& gpu = {}) {
    CallParser call(Operation::kName, operands, results, attributes);
    if constexpr (SeesGpu<typename Operation::Problem>) problem.gpu = gpu;
    const auto forced = call.Attribute<std::string_view>("variant");
    if (call.ok()) Operation::Parse(call, &problem);
    call.Finish();
    std::string reason;
    if (call.ok()) variant = Choose(table, problem, forced, &reason);
    if (!reason.empty()) call.Fail(reason);
    if (!call.ok()) error = call.error();
  }
};

// What a call would run as: the variants that fit, and the one that is taken; or why none is.
struct VariantChoice {
  std::string chosen;
  std::vector<Candidate> fitting;
  std::string error;
};

template <typename Operation, typename Row>
VariantChoice ChooseFrom(Table<Row> table, const DescribedCall& described, const Gpu& gpu = {}) {
  const ParsedCall<Operation, Row> call(table, described.operands(), described.results(),
                                        described.attributes(), gpu);
  if (call.variant == nullptr) return {"", {}, call.error.message()};
  return {call.variant->name, Fitting(table, call.problem), ""};
}

template <typename Operation>
VariantChoice ChooseOnCpu(const DescribedCall& described) {
  return ChooseFrom<Operation>(Operation::CpuVariants(), described);
}

template <typename Operation>
VariantChoice ChooseOnCuda(const DescribedCall& described, const Gpu& gpu) {
  return ChooseFrom<Operation>(Operation::CudaVariants(), described, gpu);
}

// The kernels that the variant which a call takes has compiled, in the order of their launches.
// None, and the reason in `error`, if there is no such variant.
template <typename Operation>
std::vector<KernelSource> ChosenKernels(const DescribedCall& described, const Gpu& gpu,
                                        std::string* error) {
  const ParsedCall<Operation, CudaVariant<typename Operation::Problem>> call(
      Operation::CudaVariants(), described.operands(), described.results(), described.attributes(),
      gpu);
  std::vector<KernelSource> kernels;
  if (call.variant == nullptr) {
    *error = call.error.message();
    return kernels;
  }
  if (const auto* prologue = call.variant->prologue) {
    kernels.push_back(prologue->source(call.problem));
  }
  kernels.push_back(call.variant->kernel(call.problem));
  return kernels;
}

// The most bytes of workspace that a call's variants may want on any GPU: XLA has to know it when
// it compiles the program, before one of them is chosen. -1, and the reason in `error`, if the call
// is none of this operation.
template <typename Operation>
int64_t WorkspaceOnCuda(const DescribedCall& described, std::string* error) {
  typename Operation::Problem problem;
  CallParser call(Operation::kName, described.operands(), described.results(),
                  described.attributes());
  const auto asked_for = call.Attribute<std::string_view>("variant");
  if (call.ok()) Operation::Parse(call, &problem);
  call.Finish();
  if (!call.ok()) {
    *error = call.error().message();
    return -1;
  }
  int64_t most = 0;
  for (const auto& row : Operation::CudaVariants()) {
    const bool is_asked_for = asked_for == row.name;
    if (row.workspace_bytes == nullptr) continue;
    if (!is_asked_for && !(asked_for.empty() && row.cost != nullptr)) continue;
    most = std::max(most, row.workspace_bytes(problem, is_asked_for));
  }
  return most;
}

template <typename Operation>
class Targets {
 public:
  static XLA_FFI_Error* Cpu(XLA_FFI_CallFrame* frame) {
    static auto* handler = WithCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()).To(RunOnCpu).release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame* frame) {
    return InitializeOnCuda<PrepareOnCuda>(frame);
  }

  static XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame* frame) {
    return ExecuteOnCuda<RunOnCuda, ffi::Traits::kCmdBufferCompatible>(frame);
  }

 private:
  static ffi::Error RunOnCpu(ffi::ThreadPool pool, ffi::RemainingArgs operands,
                             ffi::RemainingRets results, ffi::Dictionary attributes) {
    const ParsedCall<Operation, CpuVariant<typename Operation::Problem>> call(
        Operation::CpuVariants(), operands, results, attributes);
    if (call.variant == nullptr) return call.error;
    XlaWorkers workers(pool);
    call.variant->launch(call.problem, workers);
    return ffi::Error::Success();
  }

  using OnCuda = ParsedCall<Operation, CudaVariant<typename Operation::Problem>>;

  static ffi::Error PrepareOnCuda(int32_t device, ffi::RemainingArgs operands,
                                  ffi::RemainingRets results, ffi::Dictionary attributes) {
    const OnCuda call(Operation::CudaVariants(), operands, results, attributes, GpuOf(device));
    if (call.variant == nullptr) return call.error;
    std::string reason;
    if (const auto* prologue = call.variant->prologue) {
      GetKernel(prologue->source(call.problem), device, &reason);
    }
    if (reason.empty()) GetKernel(call.variant->kernel(call.problem), device, &reason);
    if (reason.empty()) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(Operation::kName) + ": " + reason);
  }

  using Problem = typename Operation::Problem;

  // Returns the reason of a failure, or an empty string.
  static std::string Launch(const KernelSource& source, const LaunchShape& shape,
                            LaunchWithMore<Problem> with_more, Problem* problem, int device,
                            void* stream) {
    std::string reason;
    const CudaLaunch launch{GetKernel(source, device, &reason), shape, device, stream};
    if (launch.kernel == nullptr) return reason;
    return with_more == nullptr ? launch.With(problem) : with_more(*problem, launch);
  }

  static ffi::Error RunOnCuda(int32_t device, void* stream, ffi::RemainingArgs operands,
                              ffi::RemainingRets results, ffi::Dictionary attributes) {
    OnCuda call(Operation::CudaVariants(), operands, results, attributes, GpuOf(device));
    if (call.variant == nullptr) return call.error;
    LaunchShape shape = call.variant->shape(call.problem);
    if (shape.blocks == 0) return ffi::Error::Success();  // there is no output to write
    std::string reason;
    if (const auto* prologue = call.variant->prologue) {
      const LaunchShape first = prologue->shape(call.problem);
      if (first.blocks > 0) {
        reason = Launch(prologue->source(call.problem), first, prologue->launch, &call.problem,
                        device, stream);
        // From compute capability 9.0 on, a kernel may start before the one in front of it has
        // ended.
        shape.overlaps = GpuOf(device).compute_capability >= 90;
      }
    }
    if (reason.empty()) {
      reason = Launch(call.variant->kernel(call.problem), shape, call.variant->launch,
                      &call.problem, device, stream);
    }
    if (reason.empty()) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(Operation::kName) + ": " + reason);
  }
};

}  // namespace jaxsparse
