// The source of kernels that a printed function of scores, or dropout, is compiled into.
#pragma once

#include <string>
#include <string_view>

#include "attention/problem.h"
#include "nvrtc/expression.h"
#include "nvrtc/kernel.h"

namespace jaxsparse {

// An instance of the file's kernel template, whose last argument is a Scoring: left out where
// scores stay as they are. Places in operands have 32 bits (FitsScores).
inline KernelSource WithScores(const AttentionScores& scores, const char* file, const char* kernel,
                               const std::string& dtype, const std::string& config) {
  if (!scores.Exist()) return {file, KernelExpression(kernel, {dtype, config})};
  const std::string scoring = KernelExpression(
      "Scoring", {scores.text_size > 0 ? "jaxsparse::Score" : "jaxsparse::NoFunction",
                  Literal(scores.seeds.data != nullptr), Literal(scores.offsets.data != nullptr)});
  const std::string_view function(scores.text, static_cast<size_t>(scores.text_size));
  return {std::string("scored/") + file, KernelExpression(kernel, {dtype, config, scoring}),
          "#include \"attention/kernels/scores.cuh\"\n" + std::string(function) + "#include \"" +
              file + "\"\n"};
}

inline bool FitsScores(const AttentionScores& scores) {
  return scores.most_elements < int64_t{1} << 32;
}

}  // namespace jaxsparse
