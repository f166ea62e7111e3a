// Where the parts of a script lie: the rows of a batch of graphs, in the order in which a scan
// computes them. The same layout as jaxsparse/dynamic/form.py has, in 32-bit words:
//
//   header | group_tiles (groups + 1) | a record of each tile | roots (graphs) | channels
//
// Every section, and every record, begins at a multiple of 32 words, and a script has a multiple of
// 64. Row leaves + t * width + l is lane l of tile t; rows before it are leaves. -1 is no row, and
// what pads channels of integers.
#pragma once

#include "types.h"

namespace jaxsparse {

constexpr int32_t kScriptVersion = 1;
constexpr int64_t kScriptSection = 32;
constexpr int64_t kScriptAlignment = 64;

// Words of the header: the version, how much is used, and the sizes of the form.
enum ScriptHeader : int {
  kHeaderVersion,
  kHeaderUsedLeaves,
  kHeaderUsedTiles,
  kHeaderUsedGraphs,
  kHeaderUsedInputs,
  kHeaderLeaves,
  kHeaderTiles,
  kHeaderGraphs,
  kHeaderInputs,
  kHeaderWidth,
  kHeaderSlots,
  kHeaderGroups,
  kHeaderKinds,
  kHeaderWords,
};

// Words of a tile's record; behind them width * slots sources, then width rows of inputs.
enum ScriptRecord : int { kRecordKind, kRecordWait, kRecordSources };

JAXSPARSE_INLINE constexpr int64_t PaddedSection(int64_t words) {
  return (words + kScriptSection - 1) / kScriptSection * kScriptSection;
}

// What a script has that ends after so many words.
JAXSPARSE_INLINE constexpr int64_t PaddedScript(int64_t words) {
  return (words + kScriptAlignment - 1) / kScriptAlignment * kScriptAlignment;
}

struct ScriptForm {
  int64_t leaves = 0;
  int64_t tiles = 0;
  int64_t graphs = 0;
  int64_t inputs = 0;
  int64_t width = 0;
  int64_t slots = 0;
  int64_t groups = 0;
  int64_t kinds = 0;

  JAXSPARSE_INLINE constexpr int64_t Rows() const { return leaves + tiles * width; }
  JAXSPARSE_INLINE constexpr int64_t RecordWords() const {
    return PaddedSection(kRecordSources + width * slots + width);
  }
  JAXSPARSE_INLINE constexpr int64_t GroupTilesAt() const { return kScriptSection; }
  JAXSPARSE_INLINE constexpr int64_t RecordsAt() const {
    return GroupTilesAt() + PaddedSection(groups + 1);
  }
  JAXSPARSE_INLINE constexpr int64_t RootsAt() const { return RecordsAt() + tiles * RecordWords(); }
  JAXSPARSE_INLINE constexpr int64_t ChannelsAt() const {
    return RootsAt() + PaddedSection(graphs);
  }
};

}  // namespace jaxsparse
