"""The bits of partial cells: words in the order in which tensor cores give a product to threads.

A cell is 64 x 64 positions, a word 32 of them, and a cell 128 words, one for each thread of a
warpgroup. Bit i of word 32 w + l is of row 16 w + l / 4 + 8 (i / 2 % 2) and of column
8 (i / 4) + 2 (l % 4) + i % 2, as ffi/attention/problem.h says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

CELL = 64
"""Rows and columns of a cell."""
TILE = 128
"""Rows and columns of a tile."""
WORDS = 128
"""Words of a cell."""
CELL_BYTES = 4 * WORDS
"""Bytes of its words."""

# A cell's rows are 16 w + 8 h + r, its columns 8 c + 2 p + b: word (w, r, p), bit (c, h, b).
_ROWS_AND_COLUMNS = (4, 2, 8, 8, 4, 2)  # w h r c p b
_WORDS_AND_BITS = (4, 8, 4, 8, 2, 2)  # w r p c h b
_TO_POSITIONS = (0, 4, 1, 3, 2, 5)  # w h r c p b
_BITS = np.arange(32, dtype=np.uint32)[None, None]
_W, _R, _P, _C, _H, _B = np.ix_(*(np.arange(size, dtype=np.int32) for size in _WORDS_AND_BITS))
ROWS, COLUMNS = 16 * _W + 8 * _H + _R, 8 * _C + 2 * _P + _B
"""Rows and columns in a cell, in the order of words and their bits; they broadcast."""


def place(row: Any, column: Any) -> tuple[Any, Any]:
    """The word and the bit of a position in its cell, in the integers that are given."""
    word = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    bit = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return word, bit


# ---- Bits of a word's index, and of a bit's place in it, change places ----


def _exchanged(xp: Any, words: Any, index_bit: int, place_bit: int) -> Any:
    """Words ``(n, 128)`` where a bit of their index has changed places with one of bits' places."""
    shift = np.uint32(1 << place_bit)
    low = np.uint32(_without(place_bit))
    pairs = words.reshape(-1, WORDS >> index_bit + 1, 2, 1 << index_bit)
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    differ = (first >> shift ^ second) & low
    exchanged = xp.stack([first ^ differ << shift, second ^ differ], axis=2)
    return exchanged.reshape(-1, WORDS)


def _swapped(words: Any, one: int, other: int) -> Any:
    """Words in which two bits of bits' places have changed places, ``one`` above ``other``."""
    shift = np.uint32((1 << one) - (1 << other))
    moved = np.uint32(_without(one) & ~_without(other) & 0xFFFFFFFF)
    differ = (words >> shift ^ words) & moved
    return words ^ differ ^ differ << shift


def _without(place_bit: int) -> int:
    """The bits of a word in whose place this bit is 0."""
    return sum(1 << place for place in range(32) if not place >> place_bit & 1)


def _transposed(xp: Any, words: Any) -> Any:
    # In a transposed cell (w, h, r) are what (c, p, b) were, each three bits or two: of the two
    # places of all, those that go from the index to the bit or back are exchanged.
    for index_bit, place_bit in (6, 4), (5, 3), (2, 0):
        words = _exchanged(xp, words, index_bit, place_bit)
    words = _swapped(words, 2, 1)
    moved = words.reshape(-1, 4, 4, 2, 4).transpose(0, 1, 4, 3, 2)
    return moved.reshape(-1, WORDS)


# ---- On the host ----


def pack_on_host(cells: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """The words ``(n, 128)`` of cells ``(n, 64, 64)``."""
    packed = np.empty((len(cells), WORDS), np.uint32)
    for some in _parts(len(cells)):
        # Half a row is a word: its index is (w, h, r, 1 bit of c), a bit's place (2 of c, p, b).
        halves = np.packbits(cells[some].reshape(-1, WORDS, 32), axis=-1, bitorder="little")
        words = halves.view("<u4").reshape(-1, WORDS)
        for index_bit, place_bit in (4, 1), (0, 2):
            words = _exchanged(np, words, index_bit, place_bit)
        # The index is (w, 1 of p, r, 1 of p) now, the place (2 of c, 1 of c, h, b).
        words = words.reshape(-1, 4, 2, 8, 2).transpose(0, 1, 3, 4, 2).reshape(-1, WORDS)
        packed[some] = _swapped(_swapped(words, 4, 2), 3, 2)
    return packed


def unpack_on_host(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """The cells ``(n, 64, 64)`` of words ``(n, 128)``."""
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    bits = np.unpackbits(packed, axis=-1, bitorder="little").view(np.bool_)
    cells: npt.NDArray[np.bool_] = _unpacked(bits)
    return cells


def transpose_on_host(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The words of the transposed cells."""
    transposed = np.empty_like(words)
    for some in _parts(len(words)):
        transposed[some] = _transposed(np, words[some])
    return transposed


def _parts(count: int) -> Iterator[slice]:
    """So many cells, some at a time, so that what is computed of their words stays in cache."""
    return (slice(begin, begin + 256) for begin in range(0, count, 256))


# ---- In the program ----


def pack(stored: jax.Array) -> jax.Array:
    """The words ``(n, 128)`` of whether positions are stored, bool ``(n, 4, 8, 4, 8, 2, 2)``.

    These are in the order of words and their bits, of the positions `ROWS` and `COLUMNS`, or of
    `first_rows` and `COLUMNS`: then no others are stored. So XLA makes one kernel of this sum and
    of the mask before it, and writes no array of positions.
    """
    bits = np.arange(32, dtype=np.uint32).reshape(1, 1, 1, 1, *_WORDS_AND_BITS[3:])
    bits = bits[..., : stored.shape[5], :]
    words = jnp.sum(stored.astype(jnp.uint32) << bits, axis=(4, 5, 6), dtype=jnp.uint32)
    missing = [(0, size - had) for size, had in zip(_WORDS_AND_BITS, words.shape[1:], strict=False)]
    return jnp.pad(words, [(0, 0), *missing]).reshape(-1, WORDS)


def first_rows(count: int) -> npt.NDArray[np.int32]:
    """`ROWS` with no more than what the words of so many rows need; some may lie behind them."""
    rows: npt.NDArray[np.int32] = ROWS[: -(-count // 16), : min(count, 8), ..., : -(-count // 8), :]
    return rows


def in_order_of_words(cells: jax.Array) -> jax.Array:
    """Cells ``(n, 64, 64)`` as `pack` takes them."""
    moved: jax.Array = cells.reshape(-1, *_ROWS_AND_COLUMNS).transpose(0, 1, 3, 5, 4, 2, 6)
    return moved


def unpack(words: jax.Array) -> jax.Array:
    """The cells ``(n, 64, 64)`` of words ``(n, 128)``, in the program."""
    cells: jax.Array = _unpacked((words[..., None] >> _BITS & 1).astype(bool))
    return cells


def transpose(words: jax.Array) -> jax.Array:
    """The words of the transposed cells, in the program."""
    transposed: jax.Array = _transposed(jnp, words)
    return transposed


def _unpacked(bits: Any) -> Any:
    """Cells of bits ``(n, 128, 32)``."""
    count = bits.shape[0]
    axes = (0, *(axis + 1 for axis in _TO_POSITIONS))
    return bits.reshape(count, *_WORDS_AND_BITS).transpose(axes).reshape(count, CELL, CELL)
