// What the host tells the kernel of a loss over graphs and its gradient: a scan whose rows gather,
// the heads of its rows, and a scan whose rows emit (problem.h), all in one launch.
//
// Of every row v that has a label, a leaf or a computed one:
//
//   logits = states[v] * head_weights + head_bias
//   loss = log(sum of exp(logits)) - logits[labels[v]]
//   of_logits[v] = softmax(logits) - onehot(labels[v])
//   of_states[v] = of_logits[v] * transposed head_weights
//
// The adjoint reads the last one of computed rows; that of leaves is a result.
//
// Of other rows all of it is zero. Losses are added up, and the gradients by logits, which are
// those by the bias.
#pragma once

#include "dynamic/problem.h"

namespace jaxsparse {

constexpr int kMostClasses = 64;
constexpr int kLossTotals = 2;  // the sum of losses, and how many rows have labels

struct GraphLossProblem {
  GraphScanProblem gather;
  GraphScanProblem emit;

  const void* head_weights = nullptr;  // state dtype (h, classes)
  const void* head_bias = nullptr;     // state dtype or float (classes)
  const int32_t* labels = nullptr;     // (rows), leaves first; -1 is none
  float* totals = nullptr;             // (kLossTotals)
  float* of_bias = nullptr;            // (classes)
  // Of each warp that makes heads what it adds to both, workspace: (classes + kLossTotals, warps);
  // every byte is 0xff behind WaitForPrologue.
  uint32_t* parts = nullptr;
  // (rows, classes); of computed rows every byte is 0xff behind WaitForPrologue: blocks find each
  // other's there.
  float* of_logits = nullptr;
  float* of_states = nullptr;  // (computed rows, h), workspace
  float* of_leaves = nullptr;  // (leaves, h)
};
// What a kernel can be told.
static_assert(sizeof(GraphLossProblem) <= 4096);

}  // namespace jaxsparse
