#include "attention/scores_ffi.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

namespace jaxsparse {
namespace {

// Calls take(number, word) for each word of an attribute, of which there is one for each operand of
// scores or for some of them.
template <typename Take>
void ForEachWord(CallParser& call, const std::string& attribute, Take take) {
  const auto given = call.Attribute<std::string_view>(attribute.c_str());
  std::string_view words = given;
  for (int i = 0; !words.empty(); ++i) {
    if (i == kMaxScoreOperands) {
      return call.Fail("attribute " + attribute + " must have at most " +
                       std::to_string(kMaxScoreOperands) + " words, got '" + std::string(given) +
                       "'");
    }
    const size_t end = std::min(words.find(' '), words.size());
    take(i, words.substr(0, end));
    words.remove_prefix(std::min(end + 1, words.size()));
  }
}

// Of queries and keys, row - column.
int64_t DistancesOf(const AttentionDimensions& d) {
  return std::max<int64_t>(d.queries.size + d.keys.size - 1, 0);
}

// How an operand of scores is indexed and of which type its elements are, of a word such as
// "nts:float32". One of distances, "nd:float32", has no rows and no columns.
ScoreOperand OperandOf(CallParser& call, std::string_view word, ffi::DataType* type) {
  struct Named {
    const char* value;
    ScoreType type;
  };
  constexpr Named kTypes[] = {{"float32", ScoreType::kFloat32}, {"bfloat16", ScoreType::kBFloat16},
                              {"float16", ScoreType::kFloat16}, {"int32", ScoreType::kInt32},
                              {"uint32", ScoreType::kUint32},   {"bool", ScoreType::kBool}};
  const size_t colon = word.find(':');
  const std::string_view axes = word.substr(0, colon);
  const auto has = [&](char axis) { return axes.find(axis) != axes.npos; };
  ScoreOperand operand{has('n'), has('t'), has('s'), has('d')};
  const Named* named =
      colon == word.npos
          ? std::end(kTypes)
          : std::find_if(std::begin(kTypes), std::end(kTypes),
                         [&](const Named& other) { return word.substr(colon + 1) == other.value; });
  if (named == std::end(kTypes) || axes.find_first_not_of("bntsd") != axes.npos ||
      (operand.by_distance && (operand.by_row || operand.by_column))) {
    call.Fail(
        "attribute score_operands must have words such as 'nts:float32' and 'nd:float32', got '" +
        std::string(word) + "'");
    return {};
  }
  operand.type = named->type;
  *type = DataTypeOf(named->value);
  return operand;
}

// The array of an operand of scores, and how many elements it has for each batch entry.
Array OperandOfScores(CallParser& call, AttentionDimensions& d, const ScoreOperand& how,
                      ffi::DataType type, int64_t* elements) {
  const int64_t groups = how.by_head ? d.groups.size : 1;
  const int64_t heads = how.by_head ? d.per_group.size : 1;
  const int64_t rows = d.queries.size, columns = d.keys.size, distances = DistancesOf(d);
  for (const int64_t size : {groups, heads, rows, columns}) {
    if (size > kMostIndex) {
      call.Fail("heads, queries and keys of score operands must be less than 2^31, got " +
                std::to_string(size));
      return {};
    }
  }
  Array array;
  if (how.by_row && how.by_column) {
    array = call.Operand("score operand", {type}, {groups, heads, rows, columns});
  } else if (how.by_row || how.by_column || how.by_distance) {
    const int64_t size = how.by_distance ? distances : how.by_row ? rows : columns;
    array = call.Operand("score operand", {type}, {groups, heads, size});
  } else {
    array = call.Operand("score operand", {type}, {groups, heads});
  }
  if (!call.ok()) return {};
  // An array that is as declared has as many: the product is within 64 bits.
  *elements = groups * heads;
  *elements *=
      how.by_distance ? distances : (how.by_row ? rows : 1) * (how.by_column ? columns : 1);
  return array;
}

}  // namespace

AttentionScores ParseScoreGradients(CallParser& call, AttentionDimensions& d) {
  AttentionScores scores;
  ForEachWord(call, "score_gradients", [&](int number, std::string_view axes) {
    ElementType sums = {ffi::F32};
    scores.gradients = number + 1;
    const auto result = [&](ScoreSums how, Dimension& dimension) {
      scores.sums[number] = how;
      scores.ct_values[number] = call.Result("ct_score", sums, {d.groups, d.per_group, dimension});
    };
    if (axes == "t") return result(ScoreSums::kByRow, d.queries);
    if (axes == "s") return result(ScoreSums::kByColumn, d.keys);
    if (axes == "d") return result(ScoreSums::kByDistance, d.distances);
    if (axes != "ts") {
      return call.Fail("attribute score_gradients must have words 't', 's', 'd' and 'ts', got '" +
                       std::string(axes) + "'");
    }
    scores.sums[number] = ScoreSums::kNone;
    scores.ct_values[number] =
        call.Result("ct_score", sums, {d.groups, d.per_group, d.queries, d.keys});
  });
  return scores;
}

AttentionScores ParseScores(CallParser& call, AttentionDimensions& d, AttentionScores scores) {
  const auto text = call.Attribute<std::string_view>("score");
  const bool has_offsets = call.Attribute<bool>("score_offsets");
  const bool drops = call.Attribute<bool>("dropout");
  scores.text = text.data();
  scores.text_size = static_cast<int64_t>(text.size());
  if (d.distances.size >= 0 && d.distances.size != DistancesOf(d)) {
    call.Fail("ct_score must have " + std::to_string(DistancesOf(d)) + " distances, got " +
              std::to_string(d.distances.size));
  }
  ForEachWord(call, "score_operands", [&](int number, std::string_view word) {
    int64_t elements = 0;
    ffi::DataType type = ffi::DataType::INVALID;
    const ScoreOperand how = OperandOf(call, word, &type);
    if (!call.ok()) return;
    scores.operands = number + 1;
    scores.operand[number] = how;
    scores.values[number] = OperandOfScores(call, d, how, type, &elements);
    scores.most_elements =
        std::max(scores.most_elements, elements * OwnEntries(call.batch(), scores.values[number]));
  });
  if (text.empty() && (scores.operands > 0 || scores.gradients > 0)) {
    call.Fail("attribute score must be a function where it has operands or gradients, got none");
  }
  if (scores.gradients > scores.operands) {
    call.Fail("attribute score_gradients must have at most " + std::to_string(scores.operands) +
              " words, one for an operand, got " + std::to_string(scores.gradients));
  }
  if (has_offsets) scores.offsets = call.Operand("position_offsets", {ffi::S32}, {2});
  if (drops) {
    scores.seeds = call.Operand("seeds", {ffi::U32}, {d.groups, d.per_group});
    scores.dropout_rate = call.Operand("dropout_rate", {ffi::F32}, {});
  }
  return scores;
}

}  // namespace jaxsparse
