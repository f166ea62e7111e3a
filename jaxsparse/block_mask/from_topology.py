"""The lists of tiles of a topology: its entries are scattered into words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.in_program import arrange, at, lists_in_program
from jaxsparse.block_mask.room import cells_of, check_room
from jaxsparse.block_mask.tiles import EMPTY, FULL, PARTIAL, Cells, TileLists, joined, lists_on_host
from jaxsparse.block_mask.words import CELL, TILE, WORDS, place
from jaxsparse.pattern import is_concrete, row_indices

if TYPE_CHECKING:
    from jaxsparse.topology import Topology

_CELLS_AT_A_TIME, _ENTRIES_AT_A_TIME = 2**18, 2**18  # on the host, about


def of_topology(
    topology: Topology, max_tiles: int | None, max_cells: int | None
) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of the positions that a topology stores."""
    topology.check_positions()
    offsets, columns = topology.row_offsets, topology.column_indices
    shape, batch = topology.shape, topology.batch_shape
    operation = "BlockMask.from_topology"
    if is_concrete(offsets, columns) or 0 in shape:
        cells = _cells_of_batch(offsets, columns, shape)
        return lists_on_host(operation, cells, batch, shape, max_tiles, max_cells)
    tile_rows, tile_columns = (-(-size // TILE) for size in shape)
    tiles = min(tile_rows * tile_columns, topology.nse)
    partial = min(cells_of(shape), topology.nse)
    rooms = check_room(operation, max_tiles, max_cells, tiles, partial)

    def one(offsets: jax.Array, columns: jax.Array) -> tuple[TileLists, TileLists]:
        return _in_program(offsets, columns, shape, *rooms)

    return over_batch(one, len(batch), offsets, columns)


def _cells_of_batch(offsets: Any, columns: Any, shape: tuple[int, int]) -> list[Cells]:
    if 0 in shape:  # and the arrays may be traced
        return []
    # Within bounds: it is not for a mask to report a damaged pattern.
    columns = np.clip(np.asarray(columns), 0, shape[1] - 1)
    offsets = np.clip(np.asarray(offsets), 0, columns.shape[-1])
    offsets = np.maximum.accumulate(offsets, axis=-1)
    batch = columns.shape[:-1]
    return [_cells(offsets[entry], columns[entry], shape) for entry in np.ndindex(batch)]


def _cells(offsets: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Cells:
    cells_down, across = (-(-size // CELL) for size in shape)
    for_entries = _ENTRIES_AT_A_TIME * cells_down // max(1, int(offsets[-1]))
    down = CELL * max(1, min(_CELLS_AT_A_TIME // across, for_entries))
    parts = []
    for begin in range(0, shape[0], down):
        ends = offsets[begin : begin + down + 1]
        rows = np.repeat(np.arange(ends.size - 1), np.diff(ends))
        if rows.size:
            parts.append(_cells_of_rows(begin, rows, columns[ends[0] : ends[-1]], across))
    return joined(parts)


def _cells_of_rows(begin: int, rows: np.ndarray, columns: np.ndarray, across: int) -> Cells:
    """Those of entries in some rows, counted from the first, which begins a row of cells."""
    cells = rows // CELL * across + columns // CELL
    counts = np.bincount(cells)
    listed = np.flatnonzero(counts)
    full = counts[listed] == CELL * CELL
    partial = listed[~full]
    slots = np.full(counts.size, -1)
    slots[partial] = np.arange(partial.size)
    words, bits = place(rows % CELL, columns % CELL)
    places = slots[cells] * WORDS + words
    kept = places >= 0
    # Bits are distinct, so that sums are unions; of 32 bits they are exact in float64.
    weights = np.ldexp(1.0, bits[kept])
    packed = np.bincount(places[kept], weights, partial.size * WORDS).astype(np.uint32)
    at = (listed // across + begin // CELL, listed % across)
    return Cells(*at, full, packed.reshape(-1, WORDS))


def _in_program(
    offsets: jax.Array, columns: jax.Array, shape: tuple[int, int], max_tiles: int, max_cells: int
) -> tuple[TileLists, TileLists]:
    down, across = (2 * -(-size // TILE) for size in shape)
    rows = row_indices(offsets, columns.shape[-1])
    stored = rows < shape[0]
    columns = columns.astype(jnp.int32)

    def scattered(x: Any, places: jax.Array, values: Any) -> jax.Array:
        outside = jnp.where(stored & (places >= 0), places, x.size)
        summed: jax.Array = x.at[outside].add(values, mode="drop")
        return summed

    cells = rows // CELL * across + columns // CELL
    counts = scattered(jnp.zeros(down * across, jnp.int32), cells, 1)
    full = counts == CELL * CELL
    states = jnp.where(full, FULL, jnp.where(counts > 0, PARTIAL, EMPTY)).astype(jnp.uint8)
    states = states.reshape(down, across)
    grid = arrange(at(states), (down // 2, across // 2), max_tiles, max_cells)
    slots = grid.slots(rows // CELL, columns // CELL)
    words, bits = place(rows % CELL, columns % CELL)
    places = jnp.where(slots >= 0, slots * WORDS + words, -1)
    packed = jnp.zeros(max_cells * WORDS, jnp.uint32)
    packed = scattered(packed, places, jnp.uint32(1) << bits.astype(jnp.uint32))
    return lists_in_program(grid, packed.reshape(-1, WORDS))
