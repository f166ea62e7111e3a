// From XLA's calls to problem structs and variants, once for all operations and both platforms.
//
// An operation is a struct with
//   using Problem = ...;
//   static constexpr char kName[];
//   static constexpr size_t kResultRank;          // core dimensions of its first result
//   static void Parse(CallParser& call, Problem* problem);
//   static Table<CpuVariant<Problem>> CpuVariants();
//   static Table<CudaVariant<Problem>> CudaVariants();
// and Targets<Operation> has its handlers.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "common/types.h"
#include "common/variant.h"
#include "common/workers.h"
#include "nvrtc/kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsparse {

namespace ffi = xla::ffi;

// Reads the buffers and attributes of one call. The first thing that is wrong is kept and asked for
// once at the end, so that a parse reads top-down. Shapes were checked where the operation was
// traced: what is checked again here is what would read out of bounds.
class CallParser {
 public:
  // The batch dimensions are those of the first result in front of its last `result_rank` ones.
  CallParser(const char* operation, ffi::RemainingArgs operands, ffi::RemainingRets results,
             ffi::Dictionary attributes, size_t result_rank);

  bool ok() const { return error_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(error_); }
  void Fail(const std::string& reason);

  const Batch& batch() const { return batch_; }
  size_t operands() const { return operands_.size(); }
  size_t results() const { return results_.size(); }

  // Size of the dimension of operand `index` that stands `from_last` places before the last one.
  int64_t Size(size_t index, size_t from_last) const;

  // An operand or result of the given core shape under the batch dimensions; an operand of size 1
  // there is broadcast.
  Array Operand(size_t index, const char* name, std::initializer_list<int64_t> core);
  Array Result(size_t index, const char* name, std::initializer_list<int64_t> core);
  DType OperandDType(size_t index, const char* name);
  DType ResultDType(size_t index, const char* name);
  IndexType OperandIndexType(size_t index);  // of column_indices
  // Result `index`, of as many bytes as attribute `workspace` says; none, where these are 0.
  Workspace ResultWorkspace(size_t index);
  // Operands `index` on: row_offsets, column_indices.
  Pattern OperandStored(size_t index, int64_t columns);
  // Operand `index`: where the entries of the pattern's tiles begin, if it says so.
  Array OperandTileStarts(size_t index, const Pattern& pattern);
  // row_offsets, column_indices, row_order, and permutation where it is `permuted`.
  Pattern OperandPattern(size_t index, int64_t columns, bool permuted);

  template <typename T>
  T Attribute(const char* name) {
    const ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    Fail(std::string("attribute '") + name + "' is missing or of the wrong type");
    return T{};
  }

 private:
  ffi::AnyBuffer OperandBuffer(size_t index) const;
  ffi::AnyBuffer ResultBuffer(size_t index) const;
  Array Parse(const char* name, ffi::AnyBuffer buffer, std::initializer_list<int64_t> core);
  DType ParseDType(const char* name, ffi::AnyBuffer buffer);

  std::string operation_;
  std::string error_;
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  Batch batch_;
};

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
    CallParser call(Operation::kName, operands, results, attributes, Operation::kResultRank);
    if constexpr (SeesGpu<typename Operation::Problem>) problem.gpu = gpu;
    const auto forced = call.Attribute<std::string_view>("variant");
    if (call.ok()) Operation::Parse(call, &problem);
    std::string reason;
    if (call.ok()) variant = Choose(table, problem, forced, &reason);
    if (!reason.empty()) call.Fail(reason);
    if (!call.ok()) error = call.error();
  }
};

// What a call would run as on a GPU: the variants that fit, and the one that is taken; or why none
// is.
struct CudaChoice {
  std::string chosen;
  std::vector<Candidate> fitting;
  std::string error;
};

template <typename Operation>
CudaChoice ChooseOnCuda(const DescribedCall& described, const Gpu& gpu) {
  const ParsedCall<Operation, CudaVariant<typename Operation::Problem>> call(
      Operation::CudaVariants(), described.operands(), described.results(), described.attributes(),
      gpu);
  if (call.variant == nullptr) return {"", {}, call.error.message()};
  return {call.variant->name, Fitting(Operation::CudaVariants(), call.problem), ""};
}

template <typename Operation>
class Targets {
 public:
  static XLA_FFI_Error* Cpu(XLA_FFI_CallFrame* frame) {
    static auto* handler = WithCall(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()).To(RunOnCpu).release();
    return handler->Call(frame);
  }

  // Compiles and loads what the execution needs: before any graph capture, where neither is
  // allowed.
  static XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        WithCall(
            ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().template Ctx<ffi::DeviceOrdinal>())
            .To(PrepareOnCuda)
            .release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        WithCall(
            ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().template Ctx<ffi::PlatformStream<void*>>())
            .To(RunOnCuda, {ffi::Traits::kCmdBufferCompatible})
            .release();
    return handler->Call(frame);
  }

 private:
  template <typename Binding>
  static auto WithCall(Binding binding) {
    return std::move(binding).RemainingArgs().RemainingRets().Attrs();
  }

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
    if (const auto* before = call.variant->before) {
      GetKernel(before->source(call.problem), device, &reason);
    }
    if (reason.empty()) GetKernel(call.variant->kernel(call.problem), device, &reason);
    if (reason.empty()) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(Operation::kName) + ": " + reason);
  }

  static ffi::Error RunOnCuda(int32_t device, void* stream, ffi::RemainingArgs operands,
                              ffi::RemainingRets results, ffi::Dictionary attributes) {
    OnCuda call(Operation::CudaVariants(), operands, results, attributes, GpuOf(device));
    if (call.variant == nullptr) return call.error;
    LaunchShape shape = call.variant->shape(call.problem);
    if (shape.blocks == 0) return ffi::Error::Success();  // there is no output to write
    const auto launch = [&](const KernelSource& source, const LaunchShape& as) {
      std::string reason;
      const void* kernel = GetKernel(source, device, &reason);
      if (kernel != nullptr) reason = LaunchKernel(kernel, as, &call.problem, device, stream);
      return reason;
    };
    std::string reason;
    if (call.variant->complete != nullptr) reason = call.variant->complete(&call.problem);
    if (const auto* before = call.variant->before; reason.empty() && before != nullptr) {
      const LaunchShape first = before->shape(call.problem);
      if (first.blocks > 0) {
        reason = launch(before->source(call.problem), first);
        shape.overlaps = true;
      }
    }
    if (reason.empty()) reason = launch(call.variant->kernel(call.problem), shape);
    if (reason.empty()) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(Operation::kName) + ": " + reason);
  }
};

}  // namespace jaxsparse
