"""Packed matrices in plain jnp: the matrix written out, and numbers gathered from one."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.ops import packed_gaps, packed_streams
from jaxsparse.ops.packed_streams import LANES
from jaxsparse.pattern import is_concrete

SIXTEEN_BITS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def numbers_of_row(cell: int, *, quantized: bool = False) -> int:
    """Numbers in a row of ``values``, and of ``sources``."""
    of_lane = packed_gaps.STEP if cell == 0 else 4 if quantized else 2
    return of_lane * LANES


def strip_rows(cell: int) -> int:
    """Rows of a strip."""
    return packed_gaps.STRIP_ROWS if cell == 0 else packed_streams.STRIP_ROWS


def slots(
    masks: jax.Array,
    starts: jax.Array,
    rows: jax.Array,
    *,
    columns: int,
    cell: int,
    parts: int,
    quantized: bool = False,
) -> jax.Array:
    """Which of the numbers stands in each place, -1 where none is stored.

    Args:
        masks, starts, rows: as in `jaxsparse.Packed`.
        columns: of the matrix.
        cell: numbers that are stored together, 1 or 2; 0 where gaps tell their places.
        parts: into how many the columns are cut.
        quantized: whether numbers have 8 bits.

    Returns:
        int32 (m, columns): rows in the order of the strips.
    """
    if cell == 0:
        at = packed_gaps.slots(masks, starts, columns=columns, parts=parts)
    else:
        numbers = numbers_of_row(cell, quantized=quantized) // LANES
        at = packed_streams.slots(masks, starts, cell=cell, parts=parts, numbers=numbers)
    return at[: rows.shape[0], :columns]


@functools.partial(jax.jit, static_argnames=("columns", "cell", "parts"))
def unpacked(
    numbers: jax.Array,
    masks: jax.Array,
    starts: jax.Array,
    rows: jax.Array,
    *,
    columns: int,
    cell: int,
    parts: int,
) -> tuple[jax.Array, jax.Array]:
    """The dense matrix (m, k) of arrays of `jaxsparse.Packed`, and which places are stored.

    Of a cell of 2 one place may not be, nor that of a number that only shortens a gap. Masks don't
    tell, but their numbers are 0: so is every 0.
    """
    quantized = numbers.shape[-1] == numbers_of_row(1, quantized=True)
    form = {"columns": columns, "cell": cell, "parts": parts}
    at = slots(masks, starts, rows, **form, quantized=quantized)
    stored = at >= 0
    if not numbers.size:
        matrix = jnp.zeros(stored.shape, numbers.dtype)
    else:
        matrix = jnp.where(stored, numbers.reshape(-1).at[at].get(mode="clip"), 0)
    if cell != 1:
        stored &= matrix != 0
    return jnp.zeros_like(matrix).at[rows].set(matrix), jnp.zeros_like(stored).at[rows].set(stored)


def gathered_in(matrix: jax.Array, at: jax.Array, rows: jax.Array, like: Any) -> jax.Array:
    """The transpose of writing out: numbers of the shape ``like`` of a dense matrix, by `slots`."""
    size = math.prod(like)
    numbers = jnp.zeros(size, matrix.dtype).at[jnp.where(at >= 0, at, size)]
    return numbers.set(matrix[rows], mode="drop").reshape(like)


def taken(values: jax.Array, sources: Any) -> jax.Array:
    """The value of each number by its entry, 0 for none; on the host where all are known."""
    numpy: Any = np if is_concrete(values, sources) else jnp
    values, sources = numpy.asarray(values), numpy.asarray(sources)
    return jnp.asarray(numpy.concatenate([values, numpy.zeros(1, values.dtype)])[sources])
