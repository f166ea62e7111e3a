"""Packed matrices of cell 0 in plain jnp: where each number stands that a lane walks to by gaps.

`ffi/packed/problem.h` says how lanes, their streams, steps and gaps are laid out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops.packed_streams import LANES

STRIP_ROWS = 8
STEP = 8  # entries of a lane in a row of values
STREAMS = 2  # of a lane, whose entries take turns
LARGEST_GAP = 15
STEP_OF_STREAM = STEP // STREAMS
_LANES_OF_ROW = LANES // STRIP_ROWS
STREAMS_OF_ROW = _LANES_OF_ROW * STREAMS  # one for each residue of columns


def width_of_part(columns: int, parts: int) -> int:
    """Columns of each part: whole turns of a row's streams."""
    return -(-columns // (STREAMS_OF_ROW * parts)) * STREAMS_OF_ROW


def gaps_of(masks: jax.Array) -> jax.Array:
    """The gap in front of each entry, int32 (rows of values, lanes, entries)."""
    shifts = 4 * jnp.arange(STEP, dtype=jnp.uint32)
    return (masks[..., None] >> shifts & LARGEST_GAP).astype(jnp.int32)


def by_streams(entries: jax.Array | np.ndarray) -> Any:
    """What is given for each entry (rows of values, lanes, entries), along streams.

    (rows of values, entries of a stream, lanes, streams): those of a stream are neighbours.
    """
    return entries.reshape(-1, LANES, STEP_OF_STREAM, STREAMS).swapaxes(1, 2)


def places(
    masks: jax.Array, starts: jax.Array, *, columns: int, parts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The row, in the order of strips, and the column of each entry; the piece of each row.

    Of one that is beyond its part the column is beyond the matrix.
    """
    gaps = gaps_of(masks)
    walked = jnp.cumsum(by_streams(gaps).reshape(-1, LANES, STREAMS), 0)
    piece = jnp.searchsorted(starts[1:], jnp.arange(masks.shape[0]), side="right")
    # Of all entries in front of the piece: sums that pass 2**31 still have the right difference.
    before = jnp.concatenate([jnp.zeros_like(walked[:1]), walked])
    turn = walked.reshape(-1, STEP_OF_STREAM, LANES, STREAMS)
    turn -= before[STEP_OF_STREAM * starts[piece]][:, None] + 1
    width = width_of_part(columns, parts)
    lane, stream = jnp.arange(LANES)[:, None], jnp.arange(STREAMS)
    of_strip = lane // _LANES_OF_ROW
    within = STREAMS_OF_ROW * turn + lane % _LANES_OF_ROW * STREAMS + (stream ^ of_strip % STREAMS)
    part = (piece % parts)[:, None, None, None]
    column = jnp.where((turn >= 0) & (within < width), part * width + within, parts * width)
    row = STRIP_ROWS * (piece // parts)[:, None, None] + of_strip
    column = column.swapaxes(1, 2).reshape(gaps.shape)
    return jnp.broadcast_to(row, column.shape), column, piece


def slots(masks: jax.Array, starts: jax.Array, *, columns: int, parts: int) -> jax.Array:
    """As `packed_places.slots`, with the rows and columns that strips and parts have beyond."""
    size = (starts.shape[0] - 1) // parts * STRIP_ROWS, parts * width_of_part(columns, parts)
    at = jnp.full(size, -1, jnp.int32)
    if not at.size or not masks.size:
        return at
    row, column, _ = places(masks, starts, columns=columns, parts=parts)
    number = jnp.arange(row.size, dtype=jnp.int32).reshape(row.shape)
    return at.at[row, jnp.where(gaps_of(masks) > 0, column, size[1])].set(number, mode="drop")
