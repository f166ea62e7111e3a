"""Packed matrices of cells of 1 and 2 in plain jnp: where each number of their streams stands.

`ffi/packed/problem.h` says how streams of lanes are laid out.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

STRIP_ROWS = 16
PANEL_COLUMNS = 128
LANES = 32
DRIFT = 16  # words that a stream may be behind the longest one when a panel ends
_GROUPS = PANEL_COLUMNS // 8  # of a panel


def masks_of_panel(cell: int) -> int:
    """Words of masks that a lane has for a panel."""
    return 2 // cell


def _bits(masks: jax.Array, cell: int, numbers: int) -> jax.Array:
    """Whether words are stored, as bool (pieces, panels, lanes, groups, pairs, streams).

    Of four numbers of a word each is of one stream, and all pairs of one have streams of their own.
    """
    pieces, steps, lanes = masks.shape
    group = jnp.arange(8 * cell)[:, None, None]  # of a step
    pair, stream = jnp.arange(4 // numbers)[:, None], jnp.arange(numbers // cell)
    if cell == 1:
        bit = 8 * (2 * pair + stream) + group
    else:
        bit = 8 * (2 * (group % 2) + pair) + group // 2 + stream
    stored = (masks[..., None, None, None] >> bit.astype(jnp.uint32)) & 1 != 0
    steps_of_panel = masks_of_panel(cell)
    panels = steps // steps_of_panel
    stored = stored.reshape(pieces, panels, steps_of_panel, lanes, *bit.shape)
    return jnp.moveaxis(stored, 2, 3).reshape(pieces, panels, lanes, _GROUPS, *bit.shape[1:])


class _Words(NamedTuple):
    """Where words stand in a piece: (pieces, panels, lanes, in order, streams)."""

    at: jax.Array
    stored: jax.Array
    ends: jax.Array  # of streams when a panel ends, padding not counted: without "in order"
    begins: jax.Array


def _words(bits: jax.Array) -> _Words:
    pieces, panels, lanes, groups, pairs, streams = bits.shape
    stored = bits.astype(jnp.int32).reshape(pieces, panels, lanes, groups * pairs, streams)
    words = jnp.cumsum(stored, 3)

    def next_panel(begin: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        end = begin + count
        longest = jnp.max(end, (1, 2), keepdims=True)
        return jnp.maximum(end, longest - DRIFT), begin

    counts = words[..., -1, :]
    _, begins = jax.lax.scan(next_panel, jnp.zeros_like(counts[:, 0]), jnp.moveaxis(counts, 1, 0))
    begins = jnp.moveaxis(begins, 0, 1)
    return _Words(begins[:, :, :, None] + words - stored, stored, begins + counts, begins)


@functools.partial(jax.jit, static_argnames=("cell", "numbers"))
def panels_of(masks: jax.Array, *, cell: int, numbers: int) -> tuple[jax.Array, jax.Array]:
    """What ``panels`` of `jaxsparse.Packed` are for these masks, and the words of each piece."""
    bits = _bits(masks, cell, numbers)
    pieces, panels = bits.shape[:2]
    if not bits.size:
        return jnp.zeros((pieces, panels, 2), jnp.int32), jnp.zeros(pieces, jnp.int32)
    words = _words(bits)
    needed = jnp.max(words.ends, (2, 3))
    return jnp.stack([jnp.min(words.begins, (2, 3)), needed], -1), needed[:, -1]


def slots(
    masks: jax.Array, starts: jax.Array, *, cell: int, parts: int, numbers: int = 2
) -> jax.Array:
    """Which of the numbers stands in each place, -1 where none is stored.

    Args:
        masks, starts: as in `jaxsparse.Packed`.
        cell: numbers of a word that are stored together, 1 or 2.
        parts: into how many the columns are cut.
        numbers: of a word, 2 of 16 bits or 4 of 8.

    Returns:
        int32 (strips * 16, parts * panels * 128): rows in the order of the strips.
    """
    bits = _bits(masks, cell, numbers)
    pieces, panels, lanes, groups, *_ = bits.shape
    size = pieces // parts * STRIP_ROWS, parts * panels * PANEL_COLUMNS
    if not bits.size:
        return jnp.full(size, -1, jnp.int32)
    words = _words(bits)
    number = numbers * jnp.arange(lanes)[:, None, None] + jnp.arange(numbers)  # of a row of words
    at = (words.at + starts[:-1, None, None, None, None]) * (numbers * lanes) + number
    at = jnp.where(jnp.broadcast_to(words.stored, at.shape) != 0, at, -1)
    # A lane is a row of a strip and a pair of columns of each group.
    at = at.reshape(pieces // parts, parts, panels, 8, 4, groups, 2, 2)
    rows_in_front = at.transpose(0, 6, 3, 1, 2, 5, 4, 7)
    return rows_in_front.reshape(size)
