"""The lists of tiles of few queries that see a range of keys each, as in decoding.

The tiles between the ends of the ranges are all alike: they share the words of two cells. So words
are made of four tiles at most, whatever the length is, and a step that decodes makes its masks in a
few microseconds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.tiles import EMPTY, PARTIAL, STATES_AT, TileLists
from jaxsparse.block_mask.words import CELL, TILE, pack, transpose
from jaxsparse.integers import integer

OPERATION = "BlockMask.from_lengths"
MOST_QUERIES = CELL
"""More do not lie in one row of cells."""

_OF_TILE = TILE // CELL  # cells that its queries lie in


def of_lengths(
    lengths: jax.Array, shape: tuple[int, int], *, causal: bool, window: int | None
) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of masks for lengths ``(...)``."""

    def one(length: jax.Array) -> tuple[TileLists, TileLists]:
        return _of_length(length, shape, causal, window)

    return over_batch(one, lengths.ndim, jnp.clip(lengths, 0, shape[1]).astype(jnp.int32))


def _of_length(
    length: jax.Array, shape: tuple[int, int], causal: bool, window: int | None
) -> tuple[TileLists, TileLists]:
    queries, keys = shape
    tiles = room = -(-keys // TILE)
    if window is not None:  # All ranges together have so many keys, and begin anywhere in a tile.
        room = min(tiles, -(-(window + queries - 1) // TILE) + 1)
    query = jnp.arange(CELL, dtype=jnp.int32)
    ends = jnp.maximum(length - (queries - 1 - query), 0) if causal else jnp.full(CELL, length)
    begins = jnp.zeros_like(ends) if window is None else jnp.maximum(ends - window, 0)
    # What some query sees, and what all do.
    begin, end = begins[0], ends[queries - 1]
    inner_begin, inner_end = begins[queries - 1], ends[0]
    # The tiles in which ranges end, and those in which they begin: neighbours, as there are few
    # queries.
    at_ends = [inner_end // TILE, inner_end // TILE + 1]
    if window is not None:
        at_ends += [begin // TILE, begin // TILE + 1]
    number = jnp.stack(at_ends)
    columns = number[:, None] * TILE + jnp.arange(TILE, dtype=jnp.int32)
    seen = (begins[:, None] <= columns[:, None]) & (columns[:, None] < ends[:, None])
    cells = jnp.concatenate([jnp.ones((1, CELL, TILE), bool), seen])
    cells &= query[:, None] < queries
    cells = cells.reshape(-1, CELL, _OF_TILE, CELL).swapaxes(1, 2).reshape(-1, CELL, CELL)
    words = pack(cells)

    # The tiles that are listed, of which some behind the last one are none.
    first, behind = begin // TILE, -(-end // TILE)
    count = jnp.where(end > begin, behind - first, 0)
    place = jnp.arange(room, dtype=jnp.int32)
    tile, is_listed = first + place, place < count
    left = (tile[:, None] * _OF_TILE + jnp.arange(_OF_TILE, dtype=jnp.int32)) * CELL
    is_stored = (left < end) & (left + CELL > begin) & is_listed[:, None]
    is_inner = (tile * TILE >= inner_begin) & (tile * TILE + TILE <= inner_end)
    pair = jnp.zeros_like(tile)  # of words
    for which, column in reversed(list(enumerate(at_ends, 1))):
        pair = jnp.where(tile == column, which, pair)
    bits_at = jnp.where(is_inner, 0, pair) * _OF_TILE
    bits_at += jnp.where(is_stored[:, 0], 0, 1)  # of the first cell that there are words of
    bits_at = jnp.where(is_listed, bits_at, 0)

    def lists(offsets: jax.Array, second: int, column: Any, words: jax.Array) -> TileLists:
        """By the place of a tile's second cell in its states, and the column of tiles."""
        shifts = STATES_AT + 2 * np.array([0, second], np.uint32)
        states = jnp.where(is_stored, np.uint32(PARTIAL), np.uint32(EMPTY)) << shifts
        entries = jnp.sum(states, axis=1, dtype=jnp.uint32) | jnp.where(is_listed, column, 0)
        order = jnp.arange(offsets.shape[0] - 1, dtype=jnp.int32)
        return TileLists(offsets, entries, bits_at, words, order)

    in_rows = jnp.stack([jnp.zeros_like(count), count])
    in_columns = jnp.clip(jnp.arange(tiles + 1, dtype=jnp.int32) - first, 0, count)
    rows = lists(in_rows, 1, tile.astype(jnp.uint32), words)
    return rows, lists(in_columns, 2, np.uint32(0), transpose(words))


def check_lengths(lengths: Any, shape: tuple[int, int], window: Any) -> jax.Array:
    """The lengths as an array.

    Raises:
        TypeError, ValueError: see `jaxsparse.BlockMask.from_lengths`.
    """
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{OPERATION}: lengths must be integers, got {lengths.dtype}")
    if not 1 <= shape[0] <= MOST_QUERIES or shape[1] < 1:
        raise ValueError(
            f"{OPERATION}: shape must be (T, S), 1 <= T <= {MOST_QUERIES} and S >= 1, got {shape}: "
            "masks.padding, masks.causal and masks.offset serve more queries"
        )
    if window is not None:
        integer(OPERATION, "window", window, 1)
    return jnp.asarray(lengths)
