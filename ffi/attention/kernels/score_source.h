// The source of kernels that a printed function of scores, or dropout, is compiled into.
#pragma once

#include <string>
#include <string_view>

#include "attention/problem.h"
#include "nvrtc/expression.h"
#include "nvrtc/kernel.h"

namespace jaxsparse {

// A check that a printed function is about the operands and cotangents that a call was parsed to
// have. Places in these follow from what is printed: a text that belongs to another call, as in a
// damaged file, must not compile.
inline std::string CheckOfScore(const AttentionScores& scores) {
  const auto enumerator = [](const char* type, int value) {
    return std::string("static_cast<") + type + ">(" + std::to_string(value) + ")";
  };
  std::string text = "namespace jaxsparse {\n";
  const auto check = [&](const std::string& condition) {
    text +=
        "static_assert(" + condition + ", \"the function of scores is that of another call\");\n";
  };
  check("Score::kExists && Score::kOperands == " + std::to_string(scores.operands));
  check("Score::kGradients == " + std::to_string(scores.gradients));
  for (int i = 0; i < scores.operands; ++i) {
    const ScoreOperand& operand = scores.operand[i];
    const std::string wanted = ConfigExpression(
        "ScoreOperand",
        {Field("by_head", operand.by_head), Field("by_row", operand.by_row),
         Field("by_column", operand.by_column), Field("by_distance", operand.by_distance),
         Field("type", enumerator("ScoreType", static_cast<int>(operand.type)))});
    check("Score::kOperand[" + std::to_string(i) + "] == " + wanted);
  }
  for (int i = 0; i < scores.gradients; ++i) {
    check("Score::kSums[" + std::to_string(i) +
          "] == " + enumerator("ScoreSums", static_cast<int>(scores.sums[i])));
  }
  return text + "}  // namespace jaxsparse\n";
}

// An instance of the file's kernel template, whose last argument is a Scoring: left out where
// scores stay as they are. Places in operands have 32 bits (FitsScores).
inline KernelSource WithScores(const AttentionScores& scores, const char* file, const char* kernel,
                               const std::string& dtype, const std::string& config) {
  if (!scores.Exist()) return {file, KernelExpression(kernel, {dtype, config})};
  const bool has_function = scores.text_size > 0;
  const std::string scoring = KernelExpression(
      "Scoring", {has_function ? "jaxsparse::Score" : "jaxsparse::NoFunction",
                  Literal(scores.seeds.data != nullptr), Literal(scores.offsets.data != nullptr)});
  const std::string_view function(scores.text, static_cast<size_t>(scores.text_size));
  const std::string check = has_function ? CheckOfScore(scores) : "";
  return {std::string("scored/") + file, KernelExpression(kernel, {dtype, config, scoring}),
          "#include \"attention/kernels/scores.cuh\"\n" + std::string(function) + check +
              "#include \"" + file + "\"\n"};
}

inline bool FitsScores(const AttentionScores& scores) {
  return scores.most_elements < int64_t{1} << 32;
}

}  // namespace jaxsparse
