"""The lists of tiles of a topology: its entries are scattered into words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.in_program import arrange, lists_in_program, states_of_table
from jaxsparse.block_mask.orders import places_of, positions_of
from jaxsparse.block_mask.regroup import stride_of_entries
from jaxsparse.block_mask.room import cells_of, check_room
from jaxsparse.block_mask.tiles import EMPTY, FULL, PARTIAL, Cells, TileLists, joined, lists_on_host
from jaxsparse.block_mask.words import CELL, TILE, WORDS, place
from jaxsparse.pattern import is_concrete, row_indices

if TYPE_CHECKING:
    from jaxsparse.topology import Topology

_OPERATION = "BlockMask.from_topology"
_CELLS_AT_A_TIME, _ENTRIES_AT_A_TIME = 2**18, 2**18  # on the host, about


def stride_of_topology(topology: Topology) -> int:
    """That with the fewest tiles of all patterns of a batch.

    Raises:
        ValueError: if the topology is traced.
    """
    offsets, columns = topology.row_offsets, topology.column_indices
    if not is_concrete(offsets, columns):
        raise ValueError(f"{_OPERATION}: regroup=True needs a concrete topology: give the stride")
    rows, along = [], []
    for ends, pattern in _patterns(offsets, columns, topology.shape):
        rows.append(np.repeat(np.arange(ends.size - 1), np.diff(ends)))
        along.append(pattern[ends[0] : ends[-1]])
    return stride_of_entries(rows, along, topology.shape)


def of_topology(
    topology: Topology, orders: tuple[Any, Any], max_tiles: int | None, max_cells: int | None
) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of the positions that a topology stores, in these orders."""
    offsets, columns = topology.row_offsets, topology.column_indices
    shape, batch = topology.shape, topology.batch_shape
    if 0 in shape:  # and the arrays may be traced
        return lists_on_host(_OPERATION, [], batch, shape, max_tiles, max_cells)
    if is_concrete(offsets, columns, *jax.tree.leaves(orders)):
        patterns = _patterns(offsets, columns, shape)
        cells = [_cells(*_in_order(*pattern, orders, shape), shape) for pattern in patterns]
        return lists_on_host(_OPERATION, cells, batch, shape, max_tiles, max_cells)
    tile_rows, tile_columns = (-(-size // TILE) for size in shape)
    tiles = min(tile_rows * tile_columns, topology.nse)
    partial = min(cells_of(shape), topology.nse)
    rooms = check_room(_OPERATION, max_tiles, max_cells, tiles, partial)

    def one(offsets: jax.Array, columns: jax.Array) -> tuple[TileLists, TileLists]:
        return _in_program(offsets, columns, orders, shape, *rooms)

    return over_batch(one, len(batch), *map(jnp.asarray, (offsets, columns)))


def _patterns(
    offsets: Any, columns: Any, shape: tuple[int, int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Offsets and columns of each pattern of a concrete batch, of a shape that is not empty.

    They are brought into bounds: it is not for a mask to report a damaged pattern.
    """
    columns = np.clip(np.asarray(columns), 0, shape[1] - 1)
    offsets = np.clip(np.asarray(offsets), 0, columns.shape[-1])
    offsets = np.maximum.accumulate(offsets, axis=-1)
    return ((offsets[entry], columns[entry]) for entry in np.ndindex(columns.shape[:-1]))


def _in_order(
    offsets: np.ndarray, columns: np.ndarray, orders: tuple[Any, Any], shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The same of rows and columns in their orders; the columns of a row need not rise."""
    row_order, column_order = orders
    if row_order is not None:
        rows = positions_of(row_order, shape[0])
        counts = np.diff(offsets)[rows]
        ends = np.concatenate([[0], np.cumsum(counts)])
        columns = columns[np.arange(ends[-1]) + np.repeat(offsets[rows] - ends[:-1], counts)]
        offsets = ends
    return offsets, places_of(column_order, columns, shape[1])


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
    offsets: jax.Array,
    columns: jax.Array,
    orders: tuple[Any, Any],
    shape: tuple[int, int],
    max_tiles: int,
    max_cells: int,
) -> tuple[TileLists, TileLists]:
    down, across = (2 * -(-size // TILE) for size in shape)
    rows = row_indices(offsets, columns.shape[-1])
    stored = rows < shape[0]
    positions = rows, columns.astype(jnp.int32)
    rows, columns = (
        places_of(order, x, size) for order, x, size in zip(orders, positions, shape, strict=True)
    )

    def scattered(x: Any, places: jax.Array, values: Any) -> jax.Array:
        outside = jnp.where(stored & (places >= 0), places, x.size)
        summed: jax.Array = x.at[outside].add(values, mode="drop")
        return summed

    cells = rows // CELL * across + columns // CELL
    counts = scattered(jnp.zeros(down * across, jnp.int32), cells, 1)
    full = counts == CELL * CELL
    states = jnp.where(full, FULL, jnp.where(counts > 0, PARTIAL, EMPTY)).astype(jnp.uint8)
    states = states.reshape(down, across)
    grid = arrange(states_of_table(states), (down // 2, across // 2), max_tiles, max_cells)
    slots = grid.slots(rows // CELL, columns // CELL)
    words, bits = place(rows % CELL, columns % CELL)
    places = jnp.where(slots >= 0, slots * WORDS + words, -1)
    packed = jnp.zeros(max_cells * WORDS, jnp.uint32)
    packed = scattered(packed, places, jnp.uint32(1) << bits.astype(jnp.uint32))
    return lists_in_program(grid, packed.reshape(-1, WORDS))
