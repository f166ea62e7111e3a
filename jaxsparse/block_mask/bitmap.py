"""Which tiles of a grid are listed: a bit for each, and how many there are before each word of 32.

A grid of 1,024 x 1,024 tiles is 128 KB of words. What is needed of the list, places by ranks and
ranks by places, is found in them by binary searches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WORD = 32
"""Tiles of a word."""

Flags = Callable[[jax.Array, jax.Array], jax.Array]


class Bitmap(NamedTuple):
    """Tiles of a grid, in the order of rows, and of columns within.

    Attributes:
        words: uint32 ``(rows, words)``: bit i of word w is of column ``32 w + i`` of tiles.
        before: int32 ``(rows, words)``: how many tiles are listed before each word.
        offsets: int32 ``(rows + 1,)``: how many are before each row, and in all.
    """

    words: jax.Array
    before: jax.Array
    offsets: jax.Array

    def rank(self, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Whether tiles are listed, and how many are before each of them."""
        at = rows * self.words.shape[1] + columns // WORD
        word = look_up(self.words.reshape(-1), at)
        bit = (columns % WORD).astype(jnp.uint32)
        before = look_up(self.before.reshape(-1), at) + _count(word & (jnp.uint32(1) << bit) - 1)
        return (word >> bit & 1) != 0, before

    def places(self, room: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rows and columns ``(room,)`` of the first tiles, and which of these there are."""
        ranks = jnp.arange(room, dtype=jnp.int32)
        words, before = self.words.reshape(-1), self.before.reshape(-1)
        at = last_not_above(before, ranks)
        columns = kth_bit(look_up(words, at), ranks - look_up(before, at), WORD)
        across = self.words.shape[1]
        return at // across, at % across * WORD + columns, ranks < self.offsets[-1]


def bitmap_of_cells(states: Flags, rows: int, columns: int) -> Bitmap:
    """The tiles of which some of the four cells is not 0, by states at rows and columns of cells.

    One kernel evaluates them in the order in which words are made of them.
    """
    words = -(-columns // WORD)
    down = jnp.arange(2 * rows, dtype=jnp.int32).reshape(rows, 1, 2, 1, 1)
    across = jnp.arange(2 * WORD * words, dtype=jnp.int32).reshape(1, words, 1, WORD, 2)
    listed = (states(down, across) != 0) & (across < 2 * columns)
    return _bitmap(jnp.broadcast_to(listed, (rows, words, 2, WORD, 2)))


def bitmap_of_tiles(listed: Flags, rows: int, columns: int) -> Bitmap:
    """The tiles that are listed, by flags at rows and columns of tiles."""
    words = -(-columns // WORD)
    down = jnp.arange(rows, dtype=jnp.int32).reshape(rows, 1, 1, 1, 1)
    across = jnp.arange(WORD * words, dtype=jnp.int32).reshape(1, words, 1, WORD, 1)
    return _bitmap(listed(down, jnp.minimum(across, columns - 1)) & (across < columns))


def _bitmap(flags: jax.Array) -> Bitmap:
    """Of flags ``(rows, words, n, 32, m)``, of which n times m are of each tile."""
    bits = jnp.where(flags, np.uint32(1) << np.arange(WORD, dtype=np.uint32)[:, None], np.uint32(0))
    words = jax.lax.reduce(bits, np.uint32(0), jax.lax.bitwise_or, (2, 3, 4))
    counts = _count(words)
    upto = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    offsets = jnp.pad(jnp.cumsum(upto[:, -1], dtype=jnp.int32), (1, 0))
    return Bitmap(words, offsets[:-1, None] + upto - counts, offsets)


def _count(bits: jax.Array) -> jax.Array:
    return jax.lax.population_count(bits).astype(jnp.int32)


def kth_bit(words: jax.Array, k: jax.Array, width: int) -> jax.Array:
    """The place of the k-th bit that is set, from 0, in words of so many bits, a power of 2."""
    place = jnp.zeros_like(k)
    half = width // 2
    while half:
        low = words >> place.astype(jnp.uint32) & jnp.uint32((1 << half) - 1)
        count = _count(low)
        behind = k >= count
        place = jnp.where(behind, place + half, place)
        k = jnp.where(behind, k - count, k)
        half //= 2
    return place


def last_not_above(ordered: jax.Array, values: jax.Array) -> jax.Array:
    """The last place of a vector that does not fall and starts with 0 which is not above a value.

    Values are not negative. As `jnp.searchsorted`, in one kernel and with one read a step.
    """
    size = ordered.shape[0]
    place = jnp.zeros_like(values)
    step = 1 << max(size - 1, 1).bit_length() - 1
    while step:
        further = place + step
        there = look_up(ordered, further) <= values
        place = jnp.where((further < size) & there, further, place)
        step //= 2
    return place


def look_up(array: jax.Array, places: jax.Array) -> jax.Array:
    """Entries along the first dimension; places that lie beyond it are clamped."""
    return array.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)
