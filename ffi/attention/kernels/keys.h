// How the kernel of cotangents of keys and values is configured, by the host, for the device.
#pragma once

#include "attention/kernels/cotangent.h"
#include "cuda/pipeline.h"

namespace jaxsparse {

// Queries of a step: a cell's.
constexpr int kKeysStepRows = kMaskCell;
constexpr int kKeysStepWarps = 2;  // that have what steps need copied, in turns

struct AttentionKeysConfig {
  int head_size = 128;  // of keys and of values: 64 or 128

  static constexpr int kStages = 4;
  // Beside a stage's tiles: what is added to columns of scores and of their cotangents, as tiles of
  // terms (column_terms.cuh) or, with a function of scores, as numbers of lse and ct_sums; then
  // words of both warpgroups' cells.
  static constexpr int kTermsBytes = kMaskCell * 16 * 2;
  static constexpr int kWordsAt = 2 * kTermsBytes;
  static constexpr int kSideBytes = kWordsAt + kCotangentGroups * kMaskCellWords * 4;

  // Of 64 rows of an operand, in blocks of 64 numbers of each.
  constexpr int TileBytes() const { return kMaskCell * head_size * 2; }
  constexpr int StageBytes() const { return 2 * TileBytes(); }
  // Shared memory: both warpgroups' keys, their values, stages, what comes beside, a tile
  // of ones, and what controls the block's work.
  constexpr int StagesAt() const { return 2 * kCotangentGroups * TileBytes(); }
  constexpr int SideAt() const { return StagesAt() + kStages * StageBytes(); }
  constexpr int OnesAt() const { return SideAt() + kStages * kSideBytes; }
  constexpr int ControlAt() const { return OnesAt() + kTermsBytes; }
  constexpr int SharedBytes() const { return ControlAt() + kCotangentControlBytes; }
};

}  // namespace jaxsparse
