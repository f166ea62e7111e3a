// What the calls of scans over graphs and of losses have in common.
#pragma once

#include <string_view>

#include "dynamic/problem.h"
#include "dynamic/script.h"
#include "recurrent/launches.h"
#include "recurrent/scan_call.h"

namespace jaxsparse {

// Of attributes.
ScriptForm ParseScriptForm(CallParser& call);

// A script that has so many words, which it may be more than.
Array ParseScript(CallParser& call, int64_t words);

// Whether products and slots of so many units are of matrices that there can be.
void CheckUnits(CallParser& call, int64_t products, int64_t slots, const Dimension& units);

// Whether the blocks of a launch are those of so many teams.
void CheckTeams(CallParser& call, int64_t teams, int64_t blocks);

// An input of the step, for each of so many rows, or all of them.
ScanArrays::Input ParseInput(CallParser& call, const Span& span, std::string_view dtype,
                             int64_t rows, const Dimension& units, const ElementType& states);

// What a launch is told of a batch entry's script and of its own waits.
GraphScanProblem LaunchedOn(const int32_t* script, const ScriptForm& form,
                            const KernelLaunch& launch, char* workspace,
                            const ScanLaunches& launches);

// Where a batch entry has an input.
const void* InputOf(const Batch& batch, int64_t entry, const ScanArrays::Input& input);

}  // namespace jaxsparse
