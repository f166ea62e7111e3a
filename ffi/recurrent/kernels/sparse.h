// How a block of a sparse recurrent scan uses its threads, registers and shared memory, once its
// matrix is laid out (sparse_record.h). The host plans with what is here, and the kernel takes its
// sizes from it.
#pragma once

#include "recurrent/kernels/sparse_record.h"

namespace jaxsparse {

// The batch entries that a kernel has room for: a power of 2, whole words of a state.
JAXSPARSE_INLINE constexpr int PaddedBatch(int batch, int state_bytes) {
  int padded = 1;
  while (padded < batch) padded *= 2;
  return padded * state_bytes < 4 ? 4 / state_bytes : padded;
}

// Bytes of a column of the state that an entry loads at once: the whole batch, up to 16.
JAXSPARSE_INLINE constexpr int WidestPiece(int64_t batch, int state_bytes) {
  const int bytes =
      PaddedBatch(batch < 16 ? static_cast<int>(batch) : 16, state_bytes) * state_bytes;
  return bytes < 16 ? bytes : 16;
}

// More would spill registers.
JAXSPARSE_INLINE constexpr int MostPairsBatch(int state_bytes) { return state_bytes == 4 ? 8 : 16; }

// What a kernel is compiled for, beside the types of the state and the weights.
struct SparseConfig {
  SparseForm form;
  int state_bytes = 4;            // of an element
  int batch = 1;                  // padded
  int shared_entries = 0;         // of a lane, its last ones, that lie in shared memory
  int pointwise_threads = 32;     // behind those that multiply
  bool index_with_value = false;  // a register holds an entry's column and its 16-bit value
};

struct SparseSizes : SparseConfig {
  JAXSPARSE_INLINE explicit constexpr SparseSizes(const SparseConfig& config)
      : SparseConfig(config) {}

  int blocks = form.shape.blocks;
  int threads = form.shape.threads + pointwise_threads;
  int items = form.shape.units * batch;  // (unit, batch entry), of the block
  bool clustered = form.shape.cluster > 1;
  int register_entries = form.shape.entries - shared_entries;  // of a lane

  // Columns lie next to each other, one slice of them for each piece of the batch, so that one
  // order of the entries avoids bank conflicts in all slices.
  int width = form.piece_bytes / state_bytes;  // batch entries of a piece
  int pieces = batch / width;
  int slice = form.shape.columns() * form.piece_bytes;            // of the exchange buffer
  int part_slice = form.shape.part_columns() * form.piece_bytes;  // a block's part of one
  int64_t slot = static_cast<int64_t>(pieces) * slice;            // bytes of a step's exchange

  // Shared memory: the slices of a block's part, each with zeros behind; entries; two sets of
  // partial sums, because a peer may be a step ahead.
  int shared_slice = part_slice + kZeroBytes;
  int entries_at = pieces * shared_slice;
  int sums_at = entries_at + shared_entries * form.shape.lanes * form.shape.threads * 8;
  int set_bytes = (form.partial_sums * batch * 4 + 15) / 16 * 16;
  int shared_bytes = sums_at + 2 * set_bytes;
};

// What the kernel has beside that: two counters of bytes and a flag.
constexpr int kStaticSharedBytes = 32;

}  // namespace jaxsparse
