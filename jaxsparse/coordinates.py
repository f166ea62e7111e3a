"""Compressed sparse rows from coordinates: sorted by row and column, duplicates made one entry."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Compressed(NamedTuple):
    """Rows that coordinates were compressed to.

    Attributes:
        row_offsets: ``(m + 1,)``.
        column_indices: ``(nse,)``.
        entries: ``(coordinates,)``, the entry that each pair of coordinates became a part of; nse
            for what is left out.
    """

    row_offsets: Any
    column_indices: Any
    entries: Any


def compress_on_host(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Compressed:
    """Compresses concrete coordinates, which must be inside the shape."""
    m, k = shape
    keys, entries = np.unique(rows.astype(np.int64) * k + columns, return_inverse=True)
    row_offsets = np.zeros(m + 1, np.int64)
    np.cumsum(np.bincount(keys // max(k, 1), minlength=m), out=row_offsets[1:])
    return Compressed(row_offsets, keys % max(k, 1), entries)


def compress_traced(
    rows: jax.Array, columns: jax.Array, shape: tuple[int, int], nse: int
) -> Compressed:
    """Compresses traced coordinates to at most nse entries; leaves out those outside the shape.

    The offsets tell how many entries there would be with room for all.
    """
    m, k = shape
    inside = (rows >= 0) & (rows < m) & (columns >= 0) & (columns < k)
    rows, columns = (jnp.where(inside, x, m).astype(jnp.int32) for x in (rows, columns))
    places = jnp.arange(rows.size, dtype=jnp.int32)
    rows, columns, places = jax.lax.sort((rows, columns, places), num_keys=2)
    same = (rows[1:] == rows[:-1]) & (columns[1:] == columns[:-1])
    first = jnp.concatenate([jnp.ones(min(rows.size, 1), bool), ~same]) & (rows < m)
    sorted_entries = jnp.cumsum(first, dtype=jnp.int32) - 1
    counts = jnp.zeros(m, jnp.int32).at[rows].add(first.astype(jnp.int32), mode="drop")
    row_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    column_indices = (
        jnp.zeros(nse, jnp.int32)
        .at[jnp.where(first, sorted_entries, nse)]
        .set(columns, mode="drop")
    )
    entries = jnp.full(rows.size, nse, jnp.int32)
    entries = entries.at[places].set(jnp.where(rows < m, sorted_entries, nse))
    return Compressed(row_offsets, column_indices, entries)


def sum_into_entries(values: jax.Array, entries: Any, nse: int) -> jax.Array:
    """The sum of the values ``(..., coordinates)`` of each entry, ``(..., nse)``."""
    summed = jnp.zeros((*values.shape[:-1], nse), values.dtype).at[..., entries]
    if values.dtype == bool:
        return summed.max(values, mode="drop")
    return summed.add(values, mode="drop")
