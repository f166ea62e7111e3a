"""The lists of tiles of few queries that see a range of keys each, as in decoding.

The tiles between the ends of the ranges are all alike: they share the words of two cells. So words
are made of four tiles at most, whatever the length is, and only of the rows that there are: a step
that decodes makes its masks in a few microseconds.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.tiles import EMPTY, PARTIAL, STATES_AT, TileLists
from jaxsparse.block_mask.words import CELL, COLUMNS, TILE, first_rows, pack, transpose
from jaxsparse.integers import integer

OPERATION = "BlockMask.from_lengths"
MOST_QUERIES = CELL
"""More do not lie in one row of cells."""

_OF_TILE = TILE // CELL  # cells that its queries lie in


def of_lengths(
    lengths: jax.Array, shape: tuple[int, int], *, causal: bool, window: int | None
) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of masks for lengths ``(...)``, int32 within [0, S].

    Outside of a program they are one program, too: a loop that decodes may make them at each step.
    """
    lists: tuple[TileLists, TileLists] = _of_lengths(lengths, shape, causal, window)
    return lists


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _of_lengths(
    lengths: jax.Array, shape: tuple[int, int], causal: bool, window: int | None
) -> tuple[TileLists, TileLists]:
    def one(length: jax.Array) -> tuple[TileLists, TileLists]:
        return _of_length(length, shape, causal, window)

    return over_batch(one, lengths.ndim, lengths)


def _of_length(
    length: jax.Array, shape: tuple[int, int], causal: bool, window: int | None
) -> tuple[TileLists, TileLists]:
    queries, keys = shape
    tiles = room = -(-keys // TILE)
    if window is not None:  # All ranges together have so many keys, and begin anywhere in a tile.
        room = min(tiles, -(-(window + queries - 1) // TILE) + 1)

    def seen_by(query: Any) -> tuple[jax.Array, jax.Array]:
        """The first key that a query sees, and the one behind the last."""
        stop = jnp.maximum(length - (queries - 1 - query), 0) if causal else length
        return jnp.zeros_like(stop) if window is None else jnp.maximum(stop - window, 0), stop

    # What some query sees, and what all do.
    (begin, inner_end), (inner_begin, end) = seen_by(0), seen_by(queries - 1)
    # The tiles in which ranges end, and those in which they begin: neighbours, as there are few
    # queries.
    at_ends = [inner_end // TILE, inner_end // TILE + 1]
    if window is not None:
        at_ends += [begin // TILE, begin // TILE + 1]
    # Two cells each; the first two have all that queries may see.
    cell = jnp.arange(_OF_TILE * len(at_ends), dtype=jnp.int32)
    left = jnp.stack(at_ends)[cell // _OF_TILE] * TILE + cell % _OF_TILE * CELL
    columns = left.reshape(-1, *(1,) * COLUMNS.ndim) + COLUMNS[None]
    row = first_rows(queries)[None]
    low, high = seen_by(row)
    of_ends = (low <= columns) & (columns < high)
    whole = jnp.ones((_OF_TILE, *of_ends.shape[1:]), bool)
    words = pack(jnp.concatenate([whole, of_ends]) & (row < queries))

    # The tiles that are listed, of which some behind the last one are none.
    first, behind = begin // TILE, -(-end // TILE)
    count = jnp.where(end > begin, behind - first, 0)
    place = jnp.arange(room, dtype=jnp.int32)
    tile, is_listed = first + place, place < count
    side = (tile[:, None] * _OF_TILE + jnp.arange(_OF_TILE, dtype=jnp.int32)) * CELL
    is_stored = (side < end) & (side + CELL > begin) & is_listed[:, None]
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
    """The lengths as int32, clipped to what there is.

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
    # A narrow integer can't hold S, and int32 not what a wide one holds.
    if lengths.dtype.itemsize < 4:
        lengths = lengths.astype(np.int32)
    xp: Any = np if isinstance(lengths, np.ndarray) else jnp
    return jnp.asarray(xp.clip(lengths, 0, shape[1]).astype(np.int32))
