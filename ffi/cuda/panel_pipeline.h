// The sizes of a pipeline of panels (cuda/panel_pipeline.cuh), for host and device.
#pragma once

#include "cuda/pipeline.h"
#include "types.h"

namespace jaxsparse {

// Of a PanelPipeline: for each stage its barriers and the turns, and for all of them the rows.
constexpr int kPanelCounterBytes = kPipelineBarrierBytes + 4;
constexpr int kPanelsBytes = 192 << 10;

// Rows of a panel, of which a pipeline has room for `most`: as many as are useful for a matrix of
// so many rows.
JAXSPARSE_INLINE int PanelRows(int64_t rows, int most) {
  int panel = 16;
  while (panel < rows && panel * 2 <= most) panel *= 2;
  return panel < rows && panel / 2 * 3 <= most ? panel / 2 * 3 : panel;
}

}  // namespace jaxsparse
