"""Where the entries of each tile begin that tensor cores multiply by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _ffi
from jaxsparse.batching import over_batch
from jaxsparse.layouts.kind import LayoutKind, register
from jaxsparse.pattern import is_concrete, row_indices, to_device

if TYPE_CHECKING:
    from jaxsparse.topology import Topology

NO_STARTS = (_ffi.NO_TILE_STARTS,)


@register
class TileStarts(LayoutKind):
    """Where the entries of each row in each tile begin, int32 ``(..., starts)``.

    As ffi/cuda/preparation.h says: of a tile's rows at a time, for each tile across, and for the
    end, one number for each row. A row whose columns do not rise has no entries in any tile, and in
    the end the complement. A single 0 where there would be over two numbers for each entry.
    """

    name = "tile_starts"
    derived = True
    needed = True

    def make(self, topology: Topology, **options: Any) -> jax.Array:
        offsets, columns = topology.row_offsets, topology.column_indices
        return _on_host(np.asarray(offsets), np.asarray(columns), topology.shape)

    def make_traced(self, topology: Topology, **options: Any) -> jax.Array:
        return _in_program(topology.row_offsets, topology.column_indices, topology.shape)

    def transpose(self, layout: Any, transposed: Topology) -> jax.Array:
        offsets, columns = transposed.row_offsets, transposed.column_indices
        if not is_concrete(offsets, columns):
            return self.make_traced(transposed)
        last = max(transposed.shape[1] - 1, 0)
        rising = np.maximum.accumulate(np.clip(np.asarray(offsets), 0, transposed.nse), axis=-1)
        return _on_host(rising, np.clip(np.asarray(columns), 0, last), transposed.shape)

    def operands(self, topology: Topology, *, given: bool) -> tuple[Any, ...]:
        starts = topology.layouts[self.name]
        if given:
            return (starts,)
        return (jnp.zeros_like(starts, shape=(*starts.shape[:-1], *NO_STARTS)),)

    def verify(self, layout: Any, topology: Topology) -> None:
        if not np.array_equal(layout, self.make(topology)):
            raise ValueError(
                f"the starts of tiles of {topology!r} are not those of its offsets and columns"
            )

    def pad(self, layout: Any, padded: Topology) -> Any:
        """More entries, padding included, may have starts where fewer have none."""
        if layout.shape[-1] == math.prod(_ffi.tile_starts_shape(*padded.shape, padded.nse)):
            return layout
        make = self.make if is_concrete(*padded.pattern[:2]) else self.make_traced
        return make(padded)


def _on_host(offsets: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> jax.Array:
    """Of checked patterns, whose rows rise."""
    batch = columns.shape[:-1]
    sizes = _ffi.tile_starts_shape(*shape, columns.shape[-1])
    starts = np.zeros((*batch, math.prod(sizes)), np.int32)
    for entry in np.ndindex(batch if len(sizes) > 1 else (0,)):
        starts[entry] = _of_one(offsets[entry], columns[entry], shape[0], sizes)
    on_device: jax.Array = to_device(starts)
    return on_device


def _of_one(offsets: np.ndarray, columns: np.ndarray, m: int, sizes: tuple[int, ...]) -> np.ndarray:
    down, ends, tile = sizes
    rows, stored = np.repeat(np.arange(m), np.diff(offsets)), columns[: offsets[-1]]
    counts = np.bincount(rows * ends + stored // tile + 1, minlength=m * ends)
    starts = np.zeros((down * tile, ends), np.int32)
    starts[:m] = offsets[:-1, None] + np.cumsum(counts.reshape(m, ends), axis=1)
    return starts.reshape(down, tile, ends).swapaxes(1, 2).reshape(-1)


def _in_program(
    row_offsets: jax.Array, column_indices: jax.Array, shape: tuple[int, int]
) -> jax.Array:
    m, sizes = shape[0], _ffi.tile_starts_shape(*shape, column_indices.shape[-1])

    def one(offsets: jax.Array, columns: jax.Array) -> jax.Array:
        down, ends, tile = sizes
        rows = row_indices(offsets, columns.shape[-1])  # padding's is m, which is dropped
        places = rows * ends + columns.astype(jnp.int32) // tile + 1
        places = jnp.where(rows < m, places, m * ends)
        counts = jnp.zeros(m * ends, jnp.int32).at[places].add(1, mode="drop").reshape(m, ends)
        begins = offsets[:-1, None]
        falls = (rows[1:] == rows[:-1]) & (columns[1:] <= columns[:-1])
        falling = jnp.zeros(m, bool).at[rows[1:]].max(falls, mode="drop")[:, None]
        starts = jnp.where(falling, begins, begins + jnp.cumsum(counts, axis=1))
        starts = starts.at[:, -1:].set(jnp.where(falling, ~offsets[1:, None], starts[:, -1:]))
        starts = jnp.pad(starts, [(0, down * tile - m), (0, 0)])
        return starts.reshape(down, tile, ends).swapaxes(1, 2).reshape(-1)

    if len(sizes) == 1:
        return jnp.zeros((*row_offsets.shape[:-1], *sizes), jnp.int32)
    return over_batch(one, row_offsets.ndim - 1, row_offsets, column_indices)
