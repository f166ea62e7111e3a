// Sound calls of every target, of small patterns with padding; all sizes differ, so that no array
// fits in place of another one.
#pragma once

#include <algorithm>

#include "handlers/frame.h"
#include "recurrent/launches.h"

namespace jaxsparse {

constexpr int64_t kM = 5, kK = 7, kN = 3, kNse = 12, kD = 6;

// An (m, k) pattern of 11 entries and one of padding; rows in any order.
inline std::vector<int32_t> Offsets(int64_t rows) {
  std::vector<int32_t> offsets = {0};
  for (int64_t row = 0; row < rows; ++row) {
    offsets.push_back(static_cast<int32_t>((kNse - 1) * (row + 1) / rows));
  }
  return offsets;
}
inline std::vector<int32_t> Columns(int64_t rows) {
  std::vector<int32_t> columns(kNse);
  const std::vector<int32_t> offsets = Offsets(rows);
  for (int64_t row = 0; row < rows; ++row) {
    for (int32_t e = offsets[row]; e < offsets[row + 1]; ++e) columns[e] = e - offsets[row];
  }
  return columns;
}
inline std::vector<int32_t> Falling(int64_t count) {
  std::vector<int32_t> numbers;
  for (int64_t i = count; i-- > 0;) numbers.push_back(static_cast<int32_t>(i));
  return numbers;
}

inline std::vector<int64_t> Batched(std::vector<int64_t> batch, std::vector<int64_t> core) {
  batch.insert(batch.end(), core.begin(), core.end());
  return batch;
}

using Arrays = std::vector<TestArray>;
inline void Add(Arrays* to, const Arrays& more) { to->insert(to->end(), more.begin(), more.end()); }

inline Arrays Stored(int64_t rows, const std::string& index, std::vector<int64_t> batch) {
  return {{"row_offsets", "int32", Batched(batch, {rows + 1}), Offsets(rows)},
          {"column_indices", index, Batched(batch, {kNse}), Columns(rows)}};
}
inline Arrays PatternOf(int64_t rows, const std::string& index, std::vector<int64_t> batch) {
  Arrays arrays = Stored(rows, index, batch);
  arrays.push_back({"row_order", "int32", Batched(batch, {rows}), Falling(rows)});
  return arrays;
}

struct SpmmForm {
  bool permuted = false, left = false, has_bias = false, has_starts = false;
  int64_t workspace = 0;
  std::string dtype = "float32", out_dtype = "float32", index = "uint16";
  std::vector<int64_t> batch = {}, pattern_batch = {};
};

inline TestCall SpmmCall(const SpmmForm& f) {
  // Of A^T the rows are the columns of the stored matrix.
  const std::vector<int64_t> x = f.left ? std::vector{kN, kK} : std::vector{kK, kN};
  const std::vector<int64_t> out = f.left ? std::vector{kN, kM} : std::vector{kM, kN};
  TestCall call;
  call.operands = {{"values", f.dtype, Batched(f.batch, {kNse})},
                   {"x", f.dtype, Batched(f.batch, x)}};
  Add(&call.operands, PatternOf(kM, f.index, f.pattern_batch));
  if (f.permuted) {
    call.operands.push_back(
        {"permutation", "int32", Batched(f.pattern_batch, {kNse}), Falling(kNse)});
    Add(&call.operands, Stored(kK, f.index, f.pattern_batch));
  }
  const int64_t starts = f.has_starts ? 2 * 64 : 1;  // of a tile, and the end
  call.operands.push_back({"tile_starts", "int32", Batched(f.pattern_batch, {starts})});
  const int64_t cuts = f.has_starts ? 2 * 2 : 2;  // of a unit, and the end
  call.operands.push_back({"row_cuts", "int32", Batched(f.pattern_batch, {cuts})});
  if (f.has_bias) call.operands.push_back({"bias", f.dtype, Batched(f.batch, {kM})});
  call.results = {{"out", f.out_dtype, Batched(f.batch, out)}};
  if (f.has_bias) call.results.push_back({"preactivation", f.out_dtype, Batched(f.batch, out)});
  if (f.workspace > 0) call.results.push_back({"workspace", "uint8", {f.workspace}});
  call.attributes = {{"variant", ""},
                     {"permuted", f.permuted},
                     {"dense_on_left", f.left},
                     {"activation", f.has_bias ? "gelu" : "none"},
                     {"workspace", f.workspace}};
  return call;
}

inline TestCall SddmmCall(bool scaled, const std::string& dtype, const std::string& out_dtype,
                          std::vector<int64_t> batch, int64_t workspace) {
  TestCall call;
  call.operands = {{"x", dtype, Batched(batch, {kM, kD})}, {"y", dtype, Batched(batch, {kK, kD})}};
  Add(&call.operands, PatternOf(kM, "int32", batch));
  call.operands.push_back({"tile_starts", "int32", Batched(batch, {1})});
  if (scaled) call.operands.push_back({"scale_by", dtype, Batched(batch, {kNse})});
  call.results = {{"out", out_dtype, Batched(batch, {kNse})}};
  if (workspace > 0) call.results.push_back({"workspace", "uint8", {workspace}});
  call.attributes = {{"variant", ""}, {"workspace", workspace}};
  return call;
}

// 4 channels, 3 images of 6 x 9, stride 2; `given`: which of x, y and the kernel it computes.
inline TestCall DepthwiseCall(const std::string& given, bool channels_first,
                              const std::string& dtype, const std::string& out_dtype,
                              std::vector<int64_t> batch) {
  constexpr int64_t kChannels = 4, kImages = 3;
  const int64_t outer = channels_first ? kChannels : kImages;
  const int64_t inner = channels_first ? kImages : kChannels;
  const TestArray x{"x", dtype, Batched(batch, {outer, inner, 6, 9})};
  const TestArray y{"y", dtype, Batched(batch, {outer, inner, 2, 5})};
  const TestArray kernel{"kernel", dtype, Batched(batch, {kChannels, 3, 3})};
  TestCall call;
  if (given == "y") {
    call.operands = {x, kernel, {"bias", dtype, Batched(batch, {kChannels})}};
    call.results = {y, y};
    call.results[0].name = "out";
    call.results[1].name = "preactivation";
  } else if (given == "x") {
    call.operands = {y, kernel};
    call.results = {x};
  } else {
    call.operands = {x, y};
    call.results = {kernel};
  }
  for (TestArray& result : call.results) result.dtype = out_dtype;
  call.attributes = {{"variant", ""},        {"channel_axis", int64_t{channels_first ? 0 : 1}},
                     {"stride", int64_t{2}}, {"above", int64_t{1}},
                     {"left", int64_t{2}},   {"activation", given == "y" ? "gelu" : "none"}};
  if (given == "kernel") {
    call.results.push_back({"workspace", "uint8", {1 << 16}});
    call.attributes["workspace"] = int64_t{1 << 16};
  }
  return call;
}

// Two strips, or three by gaps (cell 0), and two parts of two panels each, in ten rows of words.
inline TestCall PackedCall(int64_t cell, bool left, bool has_bias, const std::string& dtype,
                           const std::string& out_dtype, int64_t workspace) {
  constexpr int64_t kRows = 20, kColumns = 300, kPieces = 4, kPanels = 2, kWords = 10;
  constexpr int64_t kGapPieces = 6;
  const std::vector<int64_t> x = left ? std::vector{kN, kColumns} : std::vector{kColumns, kN};
  const std::vector<int64_t> out = left ? std::vector{kN, kRows} : std::vector{kRows, kN};
  TestCall call;
  call.operands = {{"values", dtype, {kWords, 64}},
                   {"x", dtype, x},
                   {"masks", "uint32", {kPieces, kPanels * 2 / std::max<int64_t>(cell, 1), 32}},
                   {"starts", "int32", {kPieces + 1}, {0, 3, 3, 7, 10}},
                   {"panels", "int32", {kPieces, kPanels, 2}},
                   {"rows", "int32", {kRows}, Falling(kRows)}};
  if (cell == 0) {
    call.operands[0] = {"values", dtype, {kWords, 256}};
    call.operands[2] = {"masks", "uint32", {kWords, 32}};
    call.operands[3] = {"starts", "int32", {kGapPieces + 1}, {0, 2, 4, 6, 7, 9, 10}};
    call.operands[4] = {"panels", "int32", {kGapPieces, 1, 2}};
  }
  if (has_bias) call.operands.push_back({"bias", dtype, {kRows}});
  call.results = {{"out", out_dtype, out}, {"workspace", "uint8", {workspace}}};
  call.attributes = {{"variant", ""},
                     {"cell", cell},
                     {"parts", int64_t{2}},
                     {"x_on_left", left},
                     {"activation", has_bias ? "gelu" : "none"},
                     {"workspace", workspace}};
  return call;
}

// The same in 8 bits, with x on the left and a bias.
inline TestCall QuantizedCall(int64_t cell) {
  TestCall call = PackedCall(cell, true, true, "float16", "float16", 1 << 20);
  call.operands[0] = {"values", "int8", {10, cell == 0 ? 256 : 128}};
  call.operands.insert(call.operands.end() - 1, {"scales", "float32", {20}});
  return call;
}

// A matrix of 16 bits, written out.
inline TestCall UnpackCall(int64_t cell) {
  TestCall call = PackedCall(cell, false, false, "float16", "float16", 1);
  call.operands.erase(call.operands.begin() + 1);  // x
  call.results = {{"out", "float16", {20, 300}}};
  call.attributes = {{"variant", ""}, {"cell", cell}, {"parts", int64_t{2}}};
  return call;
}

inline TestCall CheckTopologyCall(bool permuted, const std::string& index) {
  TestCall call;
  call.operands = PatternOf(kM, index, {});
  if (permuted) call.operands.push_back({"permutation", "int32", {kNse}, Falling(kNse)});
  call.results = {{"checked_offsets", "int32", {kM + 1}}, {"bad_row", "uint32", {2}}};
  call.attributes = {{"columns", kK}};
  return call;
}

// A block mask of a tile of two partial cells, and room for more, of each of so many heads.
inline Arrays BlockMask(std::vector<int64_t> batch, int64_t groups, int64_t per_group) {
  constexpr int64_t kCapacity = 4, kCells = 9, kRows = 1, kWords = 128;
  constexpr int32_t kTwoPartialCells = 5 << 24;
  std::vector<int32_t> offsets, entries;
  for (int64_t mask = 0; mask < groups * per_group; ++mask) {
    offsets.insert(offsets.end(), {0, 1});
    entries.insert(entries.end(), {kTwoPartialCells, 0, 0, 0});
  }
  const auto of_masks = [&](std::vector<int64_t> core) {
    core.insert(core.begin(), {groups, per_group});
    return Batched(batch, core);
  };
  return {{"offsets", "int32", of_masks({kRows + 1}), offsets},
          {"entries", "uint32", of_masks({kCapacity}), entries},
          {"bits_at", "int32", of_masks({kCapacity})},
          {"bits", "uint32", of_masks({kCells, kWords})},
          {"order", "int32", of_masks({kRows})}};
}

// What a call of attention has of a mask: a block mask for all heads or for each, or a pattern.
enum class AttentionMask { kShared, kOfHeads, kPattern };

// What becomes of its scores: nothing, or a function of operands and dropout. Cotangents of
// operands are wanted beside, summed in all ways.
enum class AttentionScoring { kNone, kFunction };

// `target`: attention, its tangent or its cotangent.
inline TestCall AttentionCall(const std::string& target, AttentionMask kind,
                              AttentionScoring scoring, std::vector<int64_t> batch) {
  constexpr int64_t kQueries = 5, kKeys = 7, kGroups = 2, kPerGroup = 3, kSize = 64;
  constexpr int64_t kWorkspace = 1 << 17;
  const std::string dtype = "bfloat16";
  const auto of_queries = Batched(batch, {kQueries, kGroups, kPerGroup, kSize});
  const auto of_keys = Batched(batch, {kKeys, kGroups, kSize});
  const auto of_rows = Batched(batch, {kGroups, kPerGroup, kQueries});
  const bool own_masks = kind == AttentionMask::kOfHeads,
             by_pattern = kind == AttentionMask::kPattern;
  const auto mask_of = [&](int64_t rows) {
    if (by_pattern) return PatternOf(rows, "uint16", Batched(batch, {1, 1}));
    return BlockMask(batch, own_masks ? kGroups : 1, own_masks ? kPerGroup : 1);
  };
  TestCall call;
  call.operands = {
      {"query", dtype, of_queries}, {"key", dtype, of_keys}, {"value", dtype, of_keys}};
  Add(&call.operands, mask_of(kQueries));
  if (target == "attention_tangent") {
    Add(&call.operands, {{"lse", "float32", of_rows},
                         {"d_query", dtype, of_queries},
                         {"d_key", dtype, of_keys},
                         {"d_value", dtype, of_keys}});
    call.results = {{"weighted", "float32", of_queries}, {"sums", "float32", of_rows}};
  } else if (target == "attention_cotangent") {
    Add(&call.operands, mask_of(kKeys));
    Add(&call.operands, {{"lse", "float32", of_rows},
                         {"ct_out", dtype, of_queries},
                         {"ct_sums", "float32", of_rows}});
    call.results = {
        {"ct_query", dtype, of_queries}, {"ct_key", dtype, of_keys}, {"ct_value", dtype, of_keys}};
  } else {
    call.results = {{"out", dtype, of_queries}, {"lse", "float32", of_rows}};
  }
  call.attributes = {{"variant", ""},
                     {"scale", 0.5},
                     {"workspace", kWorkspace},
                     {"has_mask", !by_pattern},
                     {"has_pattern", by_pattern},
                     {"mask_of_group", own_masks},
                     {"mask_of_head", own_masks}};
  const bool has_function = scoring == AttentionScoring::kFunction;
  if (target != "attention_tangent") {
    call.attributes["score"] = has_function ? "struct Score {};" : "";
    call.attributes["score_operands"] =
        has_function ? "nts:float32 d:bfloat16 nt:int32 ns:float32" : "";
    call.attributes["score_offsets"] = has_function;
    call.attributes["dropout"] = has_function;
  }
  if (target == "attention_cotangent") {
    call.attributes["score_gradients"] = has_function ? "t ts d s" : "";
  }
  if (has_function) {
    const auto of_scores = Batched(batch, {kGroups, kPerGroup, kQueries, kKeys});
    const auto of_distances = Batched(batch, {1, 1, kQueries + kKeys - 1});
    const auto of_columns = Batched(batch, {kGroups, kPerGroup, kKeys});
    Add(&call.operands, {{"score operand", "float32", of_scores},
                         {"score operand", dtype, of_distances},
                         {"score operand", "int32", of_rows},
                         {"score operand", "float32", of_columns},
                         {"position_offsets", "int32", Batched(batch, {2})},
                         {"seeds", "uint32", Batched(batch, {kGroups, kPerGroup})},
                         {"dropout_rate", "float32", batch}});
    if (target == "attention_cotangent") {
      Add(&call.results,
          {{"ct_score", "float32", of_rows},
           {"ct_score", "float32", of_scores},
           {"ct_score", "float32", Batched(batch, {kGroups, kPerGroup, kQueries + kKeys - 1})},
           {"ct_score", "float32", of_columns}});
    }
  }
  call.results.push_back({"workspace", "uint8", {kWorkspace}});
  return call;
}

// Keys in pages of a pool, of which batch entries have two each.
inline TestCall PagedAttentionCall(bool own_masks, std::vector<int64_t> batch) {
  constexpr int64_t kQueries = 5, kPages = 2, kPool = 6, kPositions = 64;
  constexpr int64_t kGroups = 2, kPerGroup = 3, kSize = 64, kWorkspace = 65536;
  const std::string dtype = "bfloat16";
  const auto of_queries = Batched(batch, {kQueries, kGroups, kPerGroup, kSize});
  const auto of_keys = Batched(batch, {kPool, kPositions, kGroups, kSize});
  TestCall call;
  call.operands = {{"query", dtype, of_queries},
                   {"key", dtype, of_keys},
                   {"value", dtype, of_keys},
                   {"pages", "int32", Batched(batch, {kPages})}};
  Add(&call.operands, BlockMask(batch, own_masks ? kGroups : 1, own_masks ? kPerGroup : 1));
  call.results = {{"out", dtype, of_queries},
                  {"lse", "float32", Batched(batch, {kGroups, kPerGroup, kQueries})},
                  {"workspace", "uint8", {kWorkspace}}};
  call.attributes = {{"variant", ""},
                     {"scale", 0.5},
                     {"workspace", kWorkspace},
                     {"mask_of_group", own_masks},
                     {"mask_of_head", own_masks}};
  return call;
}

// What scans and waves say of their kernel and its launch.
inline void AddLaunch(const ScanLaunches& launches, int64_t blocks, int64_t cluster,
                      TestCall* call) {
  call->attributes.insert({{"name", "kernel.cu"},
                           {"source", "text"},
                           {"expression", "Kernel"},
                           {"groups", launches.groups},
                           {"scans", launches.scans},
                           {"blocks", blocks},
                           {"threads", int64_t{256}},
                           {"cluster", cluster},
                           {"shared_bytes", int64_t{1024}},
                           {"exchange_bytes", launches.exchange_bytes},
                           {"poll_delay", int64_t{1}},
                           {"poll_delay_increase", int64_t{1}},
                           {"poll_delay_decrease", int64_t{1}},
                           {"wait_limit_ns", int64_t{1000}}});
}

// Of a cell of 4 products, one carry, an input of its own at each step and one that repeats.
inline TestCall ScanCall(const std::string& weights, bool transposed, const std::string& dtype,
                         int64_t steps = 9) {
  constexpr int64_t kDirections = 2, kBatch = 8, kUnits = 16, kGates = 4, kWords = 40;
  const int64_t products = transposed ? 1 : kGates, states = transposed ? kGates : 1;
  const int64_t width = dtype == "float32" ? 4 : 2;
  const ScanLaunches launches{
      .directions = kDirections,
      .groups = 2,
      .scans = 2,
      .exchange_bytes = 4096,
      .dense_bytes = weights == "masked" ? kGates * kUnits * kUnits * width : 0};
  const std::vector<int64_t> d = {kDirections};
  TestCall call;
  if (weights == "dense") {
    call.operands = {{"recurrent", dtype, Batched(d, {kUnits, kGates * kUnits})}};
  } else {
    call.operands = {{"recurrent", dtype, Batched(d, {kNse})}};
  }
  if (weights == "masked") {
    Add(&call.operands, Stored(kGates * kUnits, "uint16", d));
  } else if (weights == "pairs") {
    call.operands.push_back({"layout", "uint32", Batched(d, {kWords})});
  }
  Add(&call.operands, {{"state", dtype, Batched(d, {kBatch, states, kUnits})},
                       {"carry", "float32", Batched(d, {kBatch, kUnits})},
                       {"input", dtype, Batched(d, {steps, kBatch, 3, kUnits})},
                       {"input", "float32", Batched(d, {1, 1, 5, kUnits})}});
  call.results = {{"states", dtype, Batched(d, {steps, kBatch, states, kUnits})},
                  {"last carry", "float32", Batched(d, {kBatch, kUnits})},
                  {"output", dtype, Batched(d, {steps, kBatch, 2, kUnits})},
                  {"output", "float32", Batched(d, {steps, kBatch, 1, kUnits})},
                  {"workspace", "uint8", {launches.WorkspaceBytes()}}};
  call.attributes = {{"weights", weights},
                     {"weight_dtype", dtype},
                     {"input_dtypes", dtype + " float32"},
                     {"products", products},
                     {"layout_words", weights == "pairs" ? kWords : int64_t{0}},
                     {"transposed", transposed},
                     {"carries", int64_t{1}},
                     {"inputs", "3tbh 5h"},
                     {"outputs", "2 1"},
                     {"output_dtypes", dtype + " float32"},
                     {"reversed", "01"}};
  AddLaunch(launches, 8, 2, &call);
  return call;
}

// Of three layers of a GRU, or of their adjoints, in two launches, each with an input of every step
// and one that the upper layers have once.
inline TestCall WaveCall(bool transposed, int64_t steps = 9) {
  constexpr int64_t kLayers = 3, kBatch = 8, kUnits = 16, kGates = 3;
  const std::string dtype = transposed ? "float16" : "bfloat16";
  const int64_t states = transposed ? kGates + 1 : 1;
  const ScanLaunches launches{.groups = 4, .scans = 2, .layers = kLayers, .exchange_bytes = 4096};
  TestCall call;
  std::string inputs;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const TestArray matrix = {"own weights", dtype, {kUnits, kGates * kUnits}};
    call.operands.push_back(matrix);
    if (layer > 0) call.operands.push_back({"below weights", dtype, matrix.shape});
    const bool has_ahead = layer == 0;
    Add(&call.operands, {{"state", dtype, {kBatch, states, kUnits}},
                         {"carry", "float32", {kBatch, kUnits}},
                         {"input", "float32", {1, 1, 5, kUnits}}});
    const std::vector<int64_t> every = {steps, kBatch, 3, kUnits}, once = {1, 1, 3, 1};
    call.operands.push_back({"input", dtype, has_ahead ? every : once});
    inputs += has_ahead ? "5h 3tbh" : " 5h 3";
    Add(&call.results, {{"states", dtype, {steps, kBatch, states, kUnits}},
                        {"last carry", "float32", {kBatch, kUnits}},
                        {"output", "float32", {steps, kBatch, 2, kUnits}}});
  }
  call.results.push_back({"workspace", "uint8", {launches.WorkspaceBytes()}});
  const int64_t products = transposed ? 1 : kGates;
  call.attributes = {{"layers", kLayers},
                     {"own_products", products},
                     {"own_states", transposed ? kGates : int64_t{1}},
                     {"below_products", products},
                     {"below_states", transposed ? kGates : int64_t{1}},
                     {"skips", "- 0 1"},
                     {"norm_epsilon", 0.5},
                     {"transposed", transposed},
                     {"reverse", transposed},
                     {"carries", int64_t{1}},
                     {"inputs", inputs},
                     {"input_dtypes", "float32 " + dtype},
                     {"outputs", "2"},
                     {"output_dtypes", "float32"}};
  AddLaunch(launches, 12, 1, &call);
  return call;
}

}  // namespace jaxsparse
