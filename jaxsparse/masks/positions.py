"""The stored positions of a mask as compressed sparse rows, on the host or in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsparse.integers import INT32_MAX, integer
from jaxsparse.masks.expression import Mask, broadcast_stored

_BLOCK_POSITIONS = 2**20  # Few enough for the temporaries of a mask to stay in cache.


class TracedMaskError(TypeError):
    """A mask can't be evaluated on the host, as it depends on traced arrays."""


def _shape(operation: str, shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"{operation}: shape must be (m, k), got {shape}")
    return integer(operation, "m", shape[0], 0), integer(operation, "k", shape[1], 0)


def nonzero(
    mask: Callable[[Any, Any], Any], shape: tuple[int, int], *, block_rows: int | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The stored positions of an (m, k) pattern in row-major order, computed on the host.

    Args:
      mask: a :class:`Mask`, or any callable that takes int32 ``rows`` (b, 1) and ``columns``
        (1, k) to bool (b, k), or to what broadcasts to that: bool (1, k), (b, 1), ``True``.
      shape: (m, k).
      block_rows: how many rows b to evaluate at a time, which bounds the memory taken; by default
        as many as have 2**20 positions.

    Returns:
      ``row_offsets`` int32 (m + 1,) and ``column_indices`` int32 (nnz,): row i stores the columns
      ``column_indices[row_offsets[i]:row_offsets[i + 1]]``, ascending.

    Raises:
      TypeError, ValueError: if ``shape`` is not two integers in [0, 2**31), ``block_rows`` is not
        an integer >= 1, the mask returns another shape or dtype or depends on traced arrays, or nnz
        exceeds 2**31 - 1.

    >>> from jaxsparse.masks import causal
    >>> nonzero(causal(), (3, 3))
    (array([0, 1, 3, 6], dtype=int32), array([0, 0, 1, 0, 1, 2], dtype=int32))
    """
    m, k = _shape("nonzero", shape)
    if block_rows is None:
        block_rows = max(1, _BLOCK_POSITIONS // max(1, k))
    block_rows = integer("nonzero", "block_rows", block_rows, 1)
    columns = np.arange(k, dtype=np.int32)
    counts, column_indices, nnz = [np.zeros(1, np.int64)], [columns[:0]], 0
    for start in range(0, m, block_rows):
        rows = np.arange(start, min(start + block_rows, m), dtype=np.int32)
        stored = _on_host(mask, rows[:, None], columns[None, :])
        counts.append(np.count_nonzero(stored, axis=1))
        nnz += int(counts[-1].sum())
        if nnz > INT32_MAX:  # Before the indices of the remaining rows exhaust the memory.
            raise ValueError(f"nonzero: nnz must be <= {INT32_MAX}, got {nnz} by row {rows[-1]}")
        column_indices.append((np.flatnonzero(stored) % k).astype(np.int32))
    row_offsets = np.cumsum(np.concatenate(counts)).astype(np.int32)
    return row_offsets, np.concatenate(column_indices)


def _on_host(
    mask: Callable[[Any, Any], Any], rows: npt.NDArray[np.int32], columns: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    try:
        # Functions of jax.numpy are evaluated also where a program is being traced.
        with jax.ensure_compile_time_eval():
            stored = mask(rows, columns)
            return np.asarray(broadcast_stored("nonzero", stored, (rows.size, columns.size)))
    except jax.errors.TracerArrayConversionError:
        raise TracedMaskError(
            "nonzero: the mask depends on traced arrays: nonzero_traced takes such"
        ) from None


def nonzero_traced(
    mask: Callable[[Any, Any], Any], shape: tuple[int, int], nse: int
) -> tuple[jax.Array, jax.Array]:
    """The first ``nse`` stored positions of an (m, k) pattern in row-major order, in JAX.

    The variant of :func:`nonzero` to be traced, of static sizes: ``column_indices`` int32 (nse,)
    is 0 behind the last position. ``row_offsets`` int32 (m + 1,) count all positions: where
    ``row_offsets[-1]`` exceeds ``nse``, the columns of those at the end are left out. A `Topology`
    of the two leaves out those entries, or reports them if ``JAXSPARSE_CHECK=1``. All m k positions
    are evaluated at once.

    Raises:
      TypeError, ValueError: if ``shape`` is not two integers >= 0 of a product below 2**31, ``nse``
        is not an integer in [0, 2**31), or the mask returns another shape or dtype.
      IndexError: if the mask has a table that ends before the shape.

    >>> from jaxsparse.masks import causal
    >>> nonzero_traced(causal(), (3, 3), nse=4)
    (Array([0, 1, 3, 6], dtype=int32), Array([0, 0, 1, 0], dtype=int32))
    """
    m, k = _shape("nonzero_traced", shape)
    nse = integer("nonzero_traced", "nse", nse, 0)
    if m * k > INT32_MAX:
        raise ValueError(f"nonzero_traced: m * k must be <= {INT32_MAX}, got {m} * {k}")
    if isinstance(mask, Mask) and m and k:
        mask._check_positions(np.array(m - 1, np.int32), np.array(k - 1, np.int32))
    columns = jnp.arange(k, dtype=jnp.int32)
    stored = mask(jnp.arange(m, dtype=jnp.int32)[:, None], columns[None, :])
    stored = jnp.asarray(broadcast_stored("nonzero_traced", stored, (m, k)))
    stops = jnp.cumsum(jnp.sum(stored, axis=1, dtype=jnp.int32))
    row_offsets = jnp.pad(stops, (1, 0))
    column_indices = jnp.nonzero(stored, size=nse, fill_value=0)[1]
    return row_offsets, column_indices.astype(jnp.int32)
