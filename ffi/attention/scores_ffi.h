// What a call says becomes of its scores: a printed function with what it reads, and dropout.
#pragma once

#include "attention/problem.h"
#include "host/call_parser.h"

namespace jaxsparse {

// The dimensions of a call, which its first arrays say.
struct AttentionDimensions {
  Dimension queries{"queries"}, keys{"keys"}, groups{"groups"}, per_group{"per_group"};
  Dimension head_size{"head_size"}, value_size{"value_size"};
  Dimension distances{"distances"};  // of a query and a key
};

// Cotangents of operands of scores, which are among the call's first results: words of the
// attribute score_gradients say by what they are summed, "t" by rows, "s" by columns and "d" by
// distances; "ts" has one of each score.
AttentionScores ParseScoreGradients(CallParser& call, AttentionDimensions& d);

// All else, with those.
AttentionScores ParseScores(CallParser& call, AttentionDimensions& d, AttentionScores scores);

}  // namespace jaxsparse
