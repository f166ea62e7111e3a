// Calls of FFI handlers as XLA makes them, without XLA: arrays in memory of exactly their size, so
// that AddressSanitizer sees whatever goes beyond.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "host/call_parser.h"

namespace jaxsparse {

struct TestArray {
  const char* name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<int32_t> integers = {};  // what it holds; else 0

  int64_t Elements() const {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    return elements;
  }
  bool IsLike(const TestArray& other) const { return dtype == other.dtype && shape == other.shape; }
};

struct TestCall {
  std::vector<TestArray> operands, results;
  std::map<std::string, std::variant<bool, int64_t, double, std::string>> attributes;
};

struct Answer {
  bool ok = true;
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;
};

}  // namespace jaxsparse

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};
struct XLA_FFI_ExecutionContext {};

namespace jaxsparse {

// One thread, stream 0 of device 0.
inline const XLA_FFI_Api* TestApi() {
  static XLA_FFI_Api api = [] {
    XLA_FFI_Api api = {};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                       XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->errc, args->message};
    };
    api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = nullptr;
      return nullptr;
    };
    api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = 0;
      return nullptr;
    };
    api.XLA_FFI_ThreadPool_NumThreads =
        [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = 1;
      return nullptr;
    };
    api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      args->task(args->data);
      return nullptr;
    };
    return api;
  }();
  return &api;
}

// Buffers as XLA's structs describe them. Larger ones than any test needs have no memory: they have
// to be refused.
class TestBuffers {
 public:
  explicit TestBuffers(std::vector<TestArray> arrays) : arrays_(std::move(arrays)) {
    constexpr size_t kAlignment = 64, kMost = 1 << 17;
    for (TestArray& array : arrays_) {
      const ffi::DataType type = DataTypeOf(array.dtype);
      const size_t width = ffi::ByteWidth(type);
      size_t bytes = width;
      for (const int64_t size : array.shape) {
        bytes = size > static_cast<int64_t>(kMost) ? kMost : bytes * static_cast<size_t>(size);
        bytes = std::min(bytes, kMost);
      }
      void* memory = nullptr;
      if (posix_memalign(&memory, kAlignment, bytes) != 0) std::abort();
      std::memset(memory, 0, bytes);
      for (size_t i = 0; i < array.integers.size() && (i + 1) * width <= bytes; ++i) {
        std::memcpy(static_cast<char*>(memory) + i * width, &array.integers[i],
                    std::min(width, sizeof(int32_t)));
      }
      memory_.emplace_back(memory, std::free);
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(type),
                          memory, static_cast<int64_t>(array.shape.size()), array.shape.data()});
    }
    for (XLA_FFI_Buffer& buffer : buffers_) pointers_.push_back(&buffer);
  }
  int64_t size() const { return static_cast<int64_t>(pointers_.size()); }
  void** pointers() { return pointers_.data(); }

 private:
  std::vector<TestArray> arrays_;
  std::vector<std::unique_ptr<void, decltype(&std::free)>> memory_;
  std::vector<XLA_FFI_Buffer> buffers_;
  std::vector<void*> pointers_;
};

inline Answer Run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, TestCall call) {
  TestBuffers operands(call.operands), results(call.results);
  std::vector<XLA_FFI_ArgType> operand_kinds(call.operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_kinds(call.results.size(), XLA_FFI_RetType_BUFFER);
  const size_t count = call.attributes.size();
  std::vector<XLA_FFI_ByteSpan> names, texts;
  std::vector<XLA_FFI_Scalar> scalars;
  names.reserve(count), texts.reserve(count), scalars.reserve(count);
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<XLA_FFI_AttrType> kinds;
  std::vector<void*> values;
  for (auto& [name, value] : call.attributes) {
    names.push_back({name.data(), name.size()});
    name_pointers.push_back(&names.back());
    if (const auto* text = std::get_if<std::string>(&value)) {
      texts.push_back({text->data(), text->size()});
      kinds.push_back(XLA_FFI_AttrType_STRING);
      values.push_back(&texts.back());
      continue;
    }
    constexpr XLA_FFI_DataType kTypes[] = {XLA_FFI_DataType_PRED, XLA_FFI_DataType_S64,
                                           XLA_FFI_DataType_F64};
    void* data = std::visit([](auto& scalar) -> void* { return &scalar; }, value);
    scalars.push_back({kTypes[value.index()], data});
    kinds.push_back(XLA_FFI_AttrType_SCALAR);
    values.push_back(&scalars.back());
  }
  XLA_FFI_ExecutionContext context;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = TestApi();
  frame.ctx = &context;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operands.size(), operand_kinds.data(),
                operands.pointers()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, results.size(), result_kinds.data(),
                results.pointers()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      static_cast<int64_t>(count), kinds.data(),
                 name_pointers.data(),      values.data()};
  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  if (error == nullptr) return {};
  return {false, error->code, error->message};
}

}  // namespace jaxsparse
