"""The lists of tiles of a mask that is an array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.in_program import arrange, lists_in_program, states_of_table
from jaxsparse.block_mask.orders import Residues, ordered, positions_of
from jaxsparse.block_mask.room import cells_of, check_room, tiles_of
from jaxsparse.block_mask.tiles import EMPTY, FULL, PARTIAL, Cells, TileLists, joined, lists_on_host
from jaxsparse.block_mask.words import CELL, TILE, in_order_of_words, pack, pack_on_host

_OPERATION = "BlockMask.from_dense"


def of_dense(
    mask: Any, orders: tuple[Any, Any], max_tiles: int | None, max_cells: int | None
) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of a boolean array ``(..., T, S)``, in these orders."""
    *batch, T, S = mask.shape
    if 0 in mask.shape:
        return lists_on_host(_OPERATION, [], tuple(batch), (T, S), max_tiles, max_cells)
    arrays = [x for x in (mask, *orders) if not isinstance(x, Residues)]
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        stored = np.asarray(mask)
        for axis, order in enumerate(orders, -2):
            if order is not None:
                stored = np.take(stored, positions_of(order, stored.shape[axis]), axis)
        cells = [_cells(stored[i]) for i in np.ndindex(*batch)]
        return lists_on_host(_OPERATION, cells, tuple(batch), (T, S), max_tiles, max_cells)
    rooms = check_room(_OPERATION, max_tiles, max_cells, tiles_of((T, S)), cells_of((T, S)))

    def one(stored: jax.Array) -> tuple[TileLists, TileLists]:
        for axis, order in enumerate(orders):
            stored = ordered(order, stored, axis)
        return _in_program(stored, *rooms)

    return over_batch(one, len(batch), jnp.asarray(mask))


def _cells(stored: npt.NDArray[np.bool_]) -> Cells:
    (T, S), parts = stored.shape, []
    for begin in range(0, T, CELL):
        rows = stored[begin : begin + CELL]
        whole = np.zeros((CELL, -(-S // CELL) * CELL), bool)
        whole[: len(rows), :S] = rows
        cells = whole.reshape(CELL, -1, CELL).swapaxes(0, 1)
        counts = np.count_nonzero(cells, axis=(1, 2))
        columns = np.flatnonzero(counts)
        full = counts[columns] == CELL * CELL
        words = pack_on_host(cells[columns[~full]])
        parts.append(Cells(np.full_like(columns, begin // CELL), columns, full, words))
    return joined(parts)


def _in_program(stored: jax.Array, max_tiles: int, max_cells: int) -> tuple[TileLists, TileLists]:
    widths = [(0, -size % TILE) for size in stored.shape]
    whole = jnp.pad(stored, widths)
    down, across = (size // CELL for size in whole.shape)
    cells = whole.reshape(down, CELL, across, CELL).swapaxes(1, 2)
    every, some = jnp.all(cells, axis=(2, 3)), jnp.any(cells, axis=(2, 3))
    states = jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY)).astype(jnp.uint8)
    grid = arrange(states_of_table(states), (down // 2, across // 2), max_tiles, max_cells)
    return lists_in_program(grid, pack(in_order_of_words(cells[grid.rows, grid.columns])))
