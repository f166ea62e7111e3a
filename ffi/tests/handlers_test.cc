// Every handler of every target with calls that are not as it wants them: another dtype, rank,
// length, order or number of operands and results, attributes that are missing, of another type or
// out of range. Each is refused as an invalid argument that names what is wrong; calls that are
// changed at random are refused or stay within their arrays, as sanitizers see.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <set>

#include "handlers/calls.h"
#include "handlers/graph_calls.h"
#include "handlers/no_gpu.h"
#include "handlers/row_calls.h"
#include "handlers/sound.h"

namespace jaxsparse {
namespace {

struct Handler {
  std::string name;
  XLA_FFI_Handler* call;
  XLA_FFI_ExecutionStage stage;
};

int failures = 0, refused = 0, accepted = 0;

void Complain(const std::string& what, const Answer& answer) {
  if (++failures <= 20) {
    std::printf("%s: %s\n", what.c_str(), answer.ok ? "accepted" : answer.message.c_str());
  }
}

const char* const kDTypes[] = {"float32", "float64", "bfloat16", "float16", "int32",     "uint16",
                               "uint8",   "uint32",  "int8",     "int64",   "complex64", "bool"};

// ---- Calls that are to be refused ----

// Calls `check(what is wrong, names that the message may have, call)`.
using Check = std::function<void(const std::string&, const std::string&, const TestCall&)>;

void OfArrays(const Sound& sound, Arrays TestCall::* side, const Check& check) {
  const Arrays& arrays = sound.call.*side;
  TestCall call = sound.call;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const std::string name = arrays[i].name;
    TestArray& array = (call.*side)[i];
    for (const char* dtype : kDTypes) {
      const bool other_index = name == "column_indices" &&
                               (std::string(dtype) == "int32" || std::string(dtype) == "uint16");
      if (array.dtype == dtype || other_index || sound.free_dtype.contains(name + " " + dtype))
        continue;
      array.dtype = dtype;
      check(name + " of " + dtype, name == "row_cuts" ? "" : name, call);  // or the next one's
      array = arrays[i];
    }
    for (size_t d = 0; d < array.shape.size(); ++d) {
      const int64_t size = array.shape[d];
      const std::string from_end = std::to_string(array.shape.size() - 1 - d);
      if (sound.free_size.contains(name + " " + from_end)) continue;
      for (const int64_t other :
           {size + 1, size - 1, size * 2, int64_t{0}, int64_t{1} << 40, (int64_t{1} << 62) + 1}) {
        if (other == size) continue;
        if (side == &TestCall::operands || name == "workspace") {
          if (sound.MayHave(arrays[i], d, other)) continue;
        }
        array.shape[d] = other;
        check(name + " of size " + std::to_string(other) + " at " + std::to_string(d),
              side == &TestCall::operands ? name : "", call);
      }
      array = arrays[i];
    }
    array.shape.insert(array.shape.begin(), 1);
    check(name + " with a dimension in front", "", call);
    array = arrays[i];
    array.shape.push_back(1);
    check(name + " with a dimension behind", "", call);
    array = arrays[i];
    array.shape.erase(array.shape.begin());
    check(name + " without its first dimension", "", call);
    array = arrays[i];
    for (size_t j = i + 1; j < arrays.size(); ++j) {
      if (arrays[i].IsLike(arrays[j])) continue;
      std::swap((call.*side)[i], (call.*side)[j]);
      check(name + " in place of " + arrays[j].name, "", call);
      call.*side = arrays;
    }
    if (!sound.optional.contains(name)) {
      (call.*side).erase((call.*side).begin() + static_cast<std::ptrdiff_t>(i));
      check("without " + name, "", call);
      call.*side = arrays;
    }
  }
  (call.*side).push_back({"superfluous", "int8", {3}});
  check("one array more", "", call);
}

void OfAttributes(const Sound& sound, const Check& check) {
  for (const auto& [name, value] : sound.call.attributes) {
    TestCall call = sound.call;
    call.attributes.erase(name);
    check("without attribute " + name, name, call);
    if (std::holds_alternative<double>(value)) call.attributes[name] = int64_t{3};
    else call.attributes[name] = 3.0;
    check("attribute " + name + " of another type", name, call);
    if (std::holds_alternative<std::string>(value) && name != "name" && name != "source" &&
        name != "expression" && name != "score") {
      call.attributes[name] = "4tbh nonsense 99999999999999999999";
      check("attribute " + name + " with other words", "", call);
    }
  }
  for (const auto& [name, value] : sound.out_of_range) {
    TestCall call = sound.call;
    call.attributes[name] = value;
    check("attribute " + name + " of " + std::to_string(value), name, call);
  }
}

void TestRefused(const Handler& handler, const Sound& sound) {
  const Answer answer = Run(handler.call, handler.stage, sound.call);
  if (!answer.ok) Complain(handler.name + " of " + sound.name + ", as it should be", answer);
  const Check check = [&](const std::string& what, const std::string& names, const TestCall& call) {
    const Answer answer = Run(handler.call, handler.stage, call);
    const auto says = [&](const std::string& text) {
      return answer.message.find(text) != std::string::npos;
    };
    const bool explains = says(": ") && says("got ") && says(names);
    if (answer.ok || answer.code != XLA_FFI_Error_Code_INVALID_ARGUMENT ||
        !(explains || says("no variant named"))) {
      Complain(handler.name + " of " + sound.name + ", " + what, answer);
    }
    ++refused;
  };
  OfArrays(sound, &TestCall::operands, check);
  OfArrays(sound, &TestCall::results, check);
  OfAttributes(sound, check);
  for (const TestCall& call : sound.empty) check("without elements", "at least 1", call);
}

// ---- Calls that are changed at random ----

void ChangeAtRandom(std::mt19937& random, TestCall* call) {
  const auto below = [&](size_t count) { return random() % count; };
  Arrays& arrays = below(3) == 0 ? call->results : call->operands;
  if (arrays.empty()) return;
  const size_t i = below(arrays.size());
  TestArray& array = arrays[i];
  switch (below(5)) {
    case 0:
      array.dtype = kDTypes[below(std::size(kDTypes))];
      break;
    case 1:
      if (!array.shape.empty())
        array.shape[below(array.shape.size())] = static_cast<int64_t>(below(9));
      break;
    case 2:
      array = arrays[below(arrays.size())];
      break;
    case 3:
      array.shape.insert(array.shape.begin(), static_cast<int64_t>(below(3)));
      break;
    default:
      std::swap(array, arrays[below(arrays.size())]);
  }
}

// Also batch dimensions for all arrays at once, so that others may be broadcast.
void TestRandom(const Handler& handler, const Sound& sound, std::mt19937& random) {
  constexpr int kTrials = 150;
  for (int trial = 0; trial < kTrials; ++trial) {
    TestCall call = sound.call;
    const auto batch = static_cast<int64_t>(random() % 3);
    if (random() % 2 == 0) {
      for (Arrays* arrays : {&call.operands, &call.results}) {
        for (TestArray& array : *arrays) {
          if (std::string(array.name) == "workspace" || std::string(array.name) == "bad_row") {
            continue;
          }
          const bool repeats = arrays == &call.operands && random() % 3 == 0;
          array.shape.insert(array.shape.begin(), repeats ? 1 : batch);
          const std::vector<int32_t> once = array.integers;
          if (array.shape[0] == 2)
            array.integers.insert(array.integers.end(), once.begin(), once.end());
        }
      }
    }
    for (size_t changes = random() % 3; changes > 0; --changes) ChangeAtRandom(random, &call);
    const Answer answer = Run(handler.call, handler.stage, call);
    if (!answer.ok && answer.code != XLA_FFI_Error_Code_INVALID_ARGUMENT) {
      Complain(handler.name + " of " + sound.name + ", changed at random", answer);
    }
    ++(answer.ok ? accepted : refused);
  }
}

// ---- The targets ----

constexpr int64_t kHuge = int64_t{1} << 62;  // an attribute that is out of range

// A call of a scan over graphs, or of a loss.
Sound OfGraphs(const char* name, const TestCall& call) {
  Sound sound{name, call};
  // Behind what a kernel reads of a script there may be more.
  sound.free_size = {"script 0"};
  for (const char* attribute :
       {"window", "products", "slots", "leaves", "tiles", "script_groups", "carries", "groups",
        "scans", "blocks", "threads", "cluster", "shared_bytes", "exchange_bytes", "poll_delay",
        "poll_delay_increase", "poll_delay_decrease", "wait_limit_ns"}) {
    sound.out_of_range.push_back({attribute, -1});
    const bool may_be_huge = attribute == std::string("wait_limit_ns");
    if (!may_be_huge) sound.out_of_range.push_back({attribute, kHuge});
  }
  for (const char* attribute : {"scans", "blocks"}) sound.out_of_range.push_back({attribute, 3});
  return sound;
}

std::vector<Target> Targets() {
  const Bounds workspaces = {{"workspace", -1}, {"workspace", kHuge}, {"workspace", 4097}};
  const std::set<std::string> also_float32 = {"out float32"};
  const std::set<std::string> optional = {"bias", "row_cuts", "scale_by", "tangent"};

  Target spmm{SpmmEntry(), {}};
  // With a workspace they are for a GPU alone.
  std::vector<SpmmForm> forms(6);
  forms[1] = {.has_bias = true, .dtype = "float64", .out_dtype = "float64", .index = "int32"};
  forms[2] = {.left = true, .has_bias = true, .dtype = "bfloat16", .out_dtype = "bfloat16"};
  forms[3] = {.permuted = true, .has_starts = true, .dtype = "float16", .out_dtype = "float32"};
  forms[4] = {
      .permuted = true, .left = true, .has_bias = true, .batch = {2, 4}, .pattern_batch = {1, 4}};
  forms[5] = {.has_starts = true, .workspace = 4096, .dtype = "float16", .out_dtype = "float16"};
  for (const SpmmForm& form : forms) {
    Sound sound{"form " + std::to_string(spmm.calls.size()),
                SpmmCall(form),
                optional,
                {},
                {},
                form.batch,
                workspaces};
    if (form.dtype == "float16" && form.out_dtype == form.dtype && !form.has_bias) {
      sound.free_dtype = also_float32;
    }
    if (form.dtype == "float16" && form.out_dtype == "float32") sound.free_dtype = {"out float16"};
    if (form.workspace == 0) sound.out_of_range.pop_back();
    if (form.has_bias) sound.optional = {"bias", "row_cuts", "out", "preactivation"};
    if (!form.permuted) sound.free_size = {form.left ? "x 0" : "x 1"};
    spmm.calls.push_back(sound);
  }

  Target sddmm{
      SddmmEntry(),
      {{"plain",
        SddmmCall(false, "float64", "float64", {}, 0),
        optional,
        {},
        {"y 1"},
        {},
        workspaces},
       {"scaled", SddmmCall(true, "float32", "float32", {3}, 0), optional, {}, {"y 1"}, {3}},
       {"summed",
        SddmmCall(true, "bfloat16", "float32", {}, 4096),
        optional,
        {"out bfloat16"},
        {"y 1"}}}};
  Target softmax{SparseSoftmaxEntry(),
                 {{"forward", SoftmaxCall(false, "float32", {}), optional},
                  {"backward", SoftmaxCall(true, "float16", {3}), optional, {}, {}, {3}}}};
  Target reduce{ReduceRowsEntry(),
                {{"maximum", ReduceRowsCall("max", "float64", {3}, 0), optional, {}, {}, {3}},
                 {"logsumexp",
                  ReduceRowsCall("logsumexp", "bfloat16", {}, 4096),
                  optional,
                  {},
                  {},
                  {},
                  workspaces}}};
  const auto windows = [](const char* made, const char* dtype, std::vector<int64_t> batch) {
    const TestCall call = DepthwiseCall(made, batch.empty(), dtype, "float32", batch);
    Sound sound{made, call, {"bias", "out", "preactivation"}, {made + std::string(" ") + dtype}};
    sound.free_size = {"x 0", "x 1", "y 0", "y 1"};
    sound.batch = batch;
    for (const char* name : {"channel_axis", "stride", "above", "left"})
      sound.out_of_range.insert(sound.out_of_range.end(), {{name, -1}, {name, 3}});
    return sound;
  };
  Target depthwise{DepthwiseEntry(), {windows("y", "float32", {})}};
  Target of_x{DepthwiseInputEntry(), {windows("x", "bfloat16", {2})}};
  Target of_kernel{DepthwiseKernelEntry(), {windows("kernel", "float16", {})}};
  const Bounds of_form = {{"cell", -1}, {"cell", 3}, {"parts", 0}};
  Bounds of_product = of_form;
  of_product.insert(of_product.end(), {{"workspace", -1}, {"workspace", kHuge}});
  Target packed{PackedProductEntry(), {}}, unpacked{PackedUnpackEntry(), {}};
  for (const int64_t cell : {0, 1, 2}) {
    const bool second = cell == 2;
    const std::string name = "cells of " + std::to_string(cell), x = second ? "x 0" : "x 1";
    const std::string in_bytes = cell == 0 ? "values int8" : "";  // as wide, but scales are missing
    const TestCall call = PackedCall(cell, second, second, "float16", "float32", 1 << 20);
    packed.calls.push_back(
        {name, call, optional, {"out float16", in_bytes}, {"values 1", x}, {}, of_product});
    unpacked.calls.push_back(
        {name, UnpackCall(cell), {}, {in_bytes}, {"values 1", "out 0"}, {}, of_form});
  }
  for (const int64_t cell : {0, 1}) {
    Sound call{"8 bits, cells of " + std::to_string(cell), QuantizedCall(cell), optional};
    call.free_dtype = {"out float32", cell == 0 ? "values float16" : ""};
    call.free_size = {"values 1", "x 0"}, call.out_of_range = {{"cell", 2}};
    packed.calls.push_back(call);
  }
  const Bounds columns = {{"columns", -1}, {"columns", kHuge}};
  Target check{
      CheckTopologyEntry(),
      {{"plain", CheckTopologyCall(false, "int32"), {}, {}, {"column_indices 0"}, {}, columns},
       {"permuted", CheckTopologyCall(true, "uint16"), {"permutation"}, {}, {}, {}, columns}}};

  Target attention{AttentionEntry(), {}}, tangent{AttentionTangentEntry(), {}},
      cotangent{AttentionCotangentEntry(), {}};
  for (Target* target : {&attention, &tangent, &cotangent}) {
    struct Kind {
      const char* name;
      AttentionMask mask;
      AttentionScoring scoring = AttentionScoring::kNone;
    };
    const Kind kinds[] = {
        {"one mask", AttentionMask::kShared},
        {"masks of heads", AttentionMask::kOfHeads},
        {"a pattern", AttentionMask::kPattern},
        {"a function of scores", AttentionMask::kShared, AttentionScoring::kFunction}};
    for (const auto& [name, kind, scoring] : kinds) {
      const bool is_scored = scoring != AttentionScoring::kNone;
      // No kernel of tangents takes these.
      if (target == &tangent && (kind == AttentionMask::kPattern || is_scored)) continue;
      const std::vector<int64_t> batch = {kind == AttentionMask::kShared ? 2 : 3};
      target->calls.push_back({name,
                               AttentionCall(target->entry.name, kind, scoring, batch),
                               {},
                               {},
                               {"entries 0", "bits 1", "column_indices 0"},
                               batch,
                               {workspaces[0], workspaces[1], {"workspace", (1 << 17) + 1}},
                               !is_scored});
    }
  }

  Target paged{PagedAttentionEntry(), {}};
  for (const bool own_masks : {false, true}) {
    const std::vector<int64_t> batch = {own_masks ? 3 : 2};
    paged.calls.push_back({own_masks ? "masks of heads" : "one mask",
                           PagedAttentionCall(own_masks, batch),
                           {},
                           {},
                           {"entries 0", "bits 1", "pages 0"},
                           batch,
                           {workspaces[0], workspaces[1], {"workspace", 65537}}});
  }

  Target scan{RecurrentScanEntry(), {}};
  for (const char* weights : {"dense", "masked", "pairs"}) {
    for (const bool transposed : {false, true}) {
      Sound sound{weights, ScanCall(weights, transposed, transposed ? "float32" : "bfloat16")};
      // How many values there are is in the layout, within whose bounds the kernel stays.
      if (std::string(weights) == "pairs") sound.free_size = {"recurrent 0"};
      for (const char* name :
           {"carries", "groups", "scans", "blocks", "threads", "cluster", "shared_bytes",
            "exchange_bytes", "poll_delay", "poll_delay_increase", "poll_delay_decrease",
            "wait_limit_ns", "products", "layout_words"}) {
        sound.out_of_range.push_back({name, -1});
        if (std::string(name) != "wait_limit_ns") sound.out_of_range.push_back({name, kHuge});
      }
      for (const char* name : {"groups", "scans", "blocks"}) {
        sound.out_of_range.push_back({name, 3});
      }
      sound.empty = {ScanCall(weights, transposed, transposed ? "float32" : "bfloat16", 0)};
      scan.calls.push_back(sound);
    }
  }

  Target wave{RecurrentWaveEntry(), {}};
  for (const bool transposed : {false, true}) {
    Sound sound{transposed ? "adjoints" : "layers", WaveCall(transposed)};
    for (const char* name :
         {"layers", "own_products", "own_states", "below_products", "below_states", "carries",
          "groups", "scans", "blocks", "threads", "cluster", "shared_bytes", "exchange_bytes",
          "poll_delay", "poll_delay_increase", "poll_delay_decrease", "wait_limit_ns"}) {
      sound.out_of_range.push_back({name, -1});
      if (std::string(name) != "wait_limit_ns") sound.out_of_range.push_back({name, kHuge});
    }
    for (const char* name : {"layers", "groups", "scans", "blocks"}) {
      sound.out_of_range.push_back({name, 5});
    }
    sound.out_of_range.push_back({"cluster", 2});
    sound.empty = {WaveCall(transposed, 0)};
    wave.calls.push_back(sound);
  }

  Target graphs{DynamicScanEntry(),
                {OfGraphs("from sources", GraphScanCall(false, "float32")),
                 OfGraphs("to sources", GraphScanCall(true, "bfloat16"))}};
  Target losses{DynamicLossEntry(),
                {OfGraphs("in float32", GraphLossCall("float32")),
                 OfGraphs("in bfloat16", GraphLossCall("bfloat16"))}};
  return {spmm,      sddmm, packed, unpacked, softmax, reduce, attention, paged, tangent,
          cotangent, check, scan,   wave,     graphs,  losses, depthwise, of_x,  of_kernel};
}

int Main() {
  std::mt19937 random(7);
  for (const Target& target : Targets()) {
    const std::string& name = target.entry.name;
    const Handler handlers[] = {
        {name + " on CPU", target.entry.cpu, XLA_FFI_ExecutionStage_EXECUTE},
        {name + " on CUDA, prepared", target.entry.cuda_initialize,
         XLA_FFI_ExecutionStage_INITIALIZE},
        {name + " on CUDA", target.entry.cuda_execute, XLA_FFI_ExecutionStage_EXECUTE}};
    for (const Handler& handler : handlers) {
      if (handler.call == nullptr) continue;
      for (const Sound& sound : target.calls) {
        if (handler.call == target.entry.cpu && !sound.for_cpu) continue;
        TestRefused(handler, sound);
        TestRandom(handler, sound, random);
      }
    }
  }
  if (failures > 0) {
    std::printf("%d calls failed\n", failures);
    return 1;
  }
  std::printf("%d calls were refused, %d changed ones accepted\n", refused, accepted);
  return 0;
}

}  // namespace
}  // namespace jaxsparse

int main() { return jaxsparse::Main(); }
