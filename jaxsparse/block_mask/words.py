"""The bits of partial cells: words in the order in which tensor cores give a product to threads.

A cell is 64 x 64 positions, a word 32 of them, and a cell 128 words, one for each thread of a
warpgroup. Bit i of word 32 w + l is of row 16 w + l / 4 + 8 (i / 2 % 2) and of column
8 (i / 4) + 2 (l % 4) + i % 2, as ffi/attention/problem.h says.
"""

from __future__ import annotations

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
_BITS = np.arange(32, dtype=np.uint32)[None, None]
_TO_WORDS = (0, 2, 4, 3, 1, 5)
_TO_POSITIONS = (0, 4, 1, 3, 2, 5)


def place(row: Any, column: Any) -> tuple[Any, Any]:
    """The word and the bit of a position in its cell, in the integers that are given."""
    word = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    bit = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return word, bit


def _permuted(cells: Any, sizes: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    count = cells.shape[0]
    moved = cells.reshape(count, *sizes).transpose(0, *(axis + 1 for axis in axes))
    return moved.reshape(count, CELL * CELL)


def pack_on_host(cells: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """The words ``(n, 128)`` of cells ``(n, 64, 64)``."""
    bits = _permuted(cells, _ROWS_AND_COLUMNS, _TO_WORDS)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return packed.view("<u4").astype(np.uint32, copy=False)


def unpack_on_host(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """The cells ``(n, 64, 64)`` of words ``(n, 128)``."""
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    bits = np.unpackbits(packed, axis=-1, bitorder="little").view(np.bool_)
    cells: npt.NDArray[np.bool_] = _permuted(bits, _WORDS_AND_BITS, _TO_POSITIONS)
    return cells.reshape(-1, CELL, CELL)


def transpose_on_host(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The words of the transposed cells."""
    transposed = np.empty_like(words)
    for begin in range(0, len(words), 256):  # so that what is unpacked stays in cache
        some = slice(begin, begin + 256)
        transposed[some] = pack_on_host(unpack_on_host(words[some]).swapaxes(1, 2))
    return transposed


def pack(cells: jax.Array) -> jax.Array:
    """The words ``(n, 128)`` of cells ``(n, 64, 64)``, in the program."""
    bits = _permuted(cells, _ROWS_AND_COLUMNS, _TO_WORDS).reshape(-1, WORDS, 32)
    return _words_of(bits.astype(jnp.uint32))


def unpack(words: jax.Array) -> jax.Array:
    """The cells ``(n, 64, 64)`` of words ``(n, 128)``, in the program."""
    bits = (words[..., None] >> _BITS & 1).astype(bool)
    cells: jax.Array = _permuted(bits, _WORDS_AND_BITS, _TO_POSITIONS)
    return cells.reshape(-1, CELL, CELL)


def transpose(words: jax.Array) -> jax.Array:
    """The words of the transposed cells, in the program."""
    sources, shifts = _transposition()
    return _words_of(words[:, sources] >> shifts[None] & 1)


def _words_of(bits: jax.Array) -> jax.Array:
    return jnp.sum(bits << _BITS, axis=-1, dtype=jnp.uint32)


def _transposition() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    """Of each bit ``(128, 32)`` of a transposed cell: the word, and the bit in it, that it is."""
    rows, columns = np.divmod(np.arange(CELL * CELL, dtype=np.int32), CELL)
    at, there = place(rows, columns), place(columns, rows)
    sources, shifts = np.empty((WORDS, 32), np.int32), np.empty((WORDS, 32), np.uint32)
    sources[at], shifts[at] = there
    return sources, shifts
