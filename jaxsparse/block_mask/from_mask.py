"""The lists of tiles of a mask: undecided cells are evaluated, the others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsparse.block_mask.cell_states import states_at, states_of
from jaxsparse.block_mask.in_program import arrange, lists_in_program
from jaxsparse.block_mask.room import check_room
from jaxsparse.block_mask.tiles import EMPTY, FULL, PARTIAL, Cells, TileLists, joined, lists_on_host
from jaxsparse.block_mask.words import CELL, COLUMNS, ROWS, TILE, pack, pack_on_host
from jaxsparse.masks.expression import Mask
from jaxsparse.masks.intervals import without_arrays
from jaxsparse.masks.positions import TracedMaskError

_STATES_AT_A_TIME = 2**17  # Few enough for their intervals to stay in cache.
_CELLS_AT_A_TIME = 64  # So are the positions of these.
_CELLS_OF_A_KERNEL = 8192  # So that what XLA makes no one kernel of takes bounded memory.
_WITHIN = np.arange(CELL, dtype=np.int32)[None]


def of_mask(
    operation: str,
    mask: Mask,
    shape: tuple[int, int],
    max_tiles: int | None,
    max_cells: int | None,
) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of a mask, on the host unless it depends on traced arrays.

    Raises:
        IndexError: if the mask has a table that ends before the shape.
    """
    if 0 in shape:
        return lists_on_host(operation, [], (), shape, max_tiles, max_cells)
    if not mask.is_traced:
        try:
            cells = cells_of_mask(mask, shape)
        except TracedMaskError:
            pass
        else:
            return lists_on_host(operation, [cells], (), shape, max_tiles, max_cells)
    rooms = check_room(operation, max_tiles, max_cells, *most_of(mask, shape))
    return of_mask_in_program(mask, shape, *rooms)


def _strips(mask: Mask, shape: tuple[int, int]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The states of all cells, some rows of tiles at a time, with the first row of cells."""
    tiles_down, tiles_across = (-(-size // TILE) for size in shape)
    down = 2 * max(1, _STATES_AT_A_TIME // (4 * tiles_across))
    for begin in range(0, 2 * tiles_down, down):
        rows = range(begin, min(begin + down, 2 * tiles_down))
        yield begin, states_of(np, mask, rows, range(2 * tiles_across), shape)


# ---- On the host ----


def cells_of_mask(mask: Mask, shape: tuple[int, int]) -> Cells:
    """The cells of a mask that are not empty.

    Raises:
        TracedMaskError: if it depends on traced arrays.
        IndexError: if it has a table that ends before the shape.
    """
    mask._check_positions(*(np.array([0, size - 1], np.int32) for size in shape))
    parts = []
    for begin, states in _strips(mask, shape):
        down, across = np.nonzero(states == FULL)
        parts.append(Cells(down + begin, across, np.ones(down.size, bool), _no_words()))
        down, across = np.nonzero(states == PARTIAL)
        for at in range(0, down.size, _CELLS_AT_A_TIME):
            some = slice(at, at + _CELLS_AT_A_TIME)
            parts.append(_evaluated(mask, down[some] + begin, across[some], shape))
    return joined(parts)


def _no_words() -> npt.NDArray[np.uint32]:
    return joined([]).words


def _evaluated(mask: Mask, down: Any, across: Any, shape: tuple[int, int]) -> Cells:
    """Undecided cells, of which those that are empty or full after all become so."""
    try:
        # Functions of jax.numpy are evaluated also where a program is being traced.
        with jax.ensure_compile_time_eval():
            stored = np.asarray(_stored(np, mask, (down, _WITHIN.T), (across, _WITHIN), shape))
    except jax.errors.TracerArrayConversionError:
        raise TracedMaskError("the mask depends on traced arrays") from None
    counts = np.count_nonzero(stored.reshape(-1, CELL * CELL), axis=1)
    kept = counts > 0
    full = counts == CELL * CELL
    return Cells(down[kept], across[kept], full[kept], pack_on_host(stored[kept & ~full]))


def _stored(xp: Any, mask: Mask, rows: Any, columns: Any, shape: tuple[int, int]) -> Any:
    """Positions of cells, bool ``(n, ...)``.

    Rows and columns are each a pair: those of the cells ``(n,)``, and within them, in arrays of one
    rank that broadcast.
    """
    positions = []
    for cells, within in (rows, columns):
        begin = cells.astype(np.int32).reshape(-1, *(1,) * within.ndim) * CELL
        positions.append(begin + within[None])
    rows, columns = positions
    inside = (rows < shape[0]) & (columns < shape[1])
    # Behind the end of the shape a mask is not asked: it may have tables that end there.
    rows, columns = xp.minimum(rows, shape[0] - 1), xp.minimum(columns, shape[1] - 1)
    return mask(rows, columns) & inside


# ---- In the program ----


def most_of(mask: Mask, shape: tuple[int, int]) -> tuple[int, int]:
    """How many tiles and partial cells there are at most, whatever traced arrays hold."""
    tiles, cells = 0, 0
    for _, states in _strips(without_arrays(mask), shape):
        cells += int(np.count_nonzero(states == PARTIAL))
        by_tile = states.reshape(len(states) // 2, 2, -1, 2)
        tiles += int(np.count_nonzero(np.any(by_tile != EMPTY, axis=(1, 3))))
    return tiles, cells


def of_mask_in_program(
    mask: Mask, shape: tuple[int, int], max_tiles: int, max_cells: int
) -> tuple[TileLists, TileLists]:
    """The lists with static room; what has none is left out.

    Raises:
        IndexError: if the mask has a table that ends before the shape.
    """
    mask._check_positions(*(np.array(size - 1, np.int32) for size in shape))
    tiles = -(-shape[0] // TILE), -(-shape[1] // TILE)
    grid = arrange(
        lambda rows, columns: states_at(jnp, mask, rows, columns, shape),
        tiles,
        max_tiles,
        max_cells,
    )

    def words(rows: jax.Array, columns: jax.Array) -> jax.Array:
        return pack(_stored(jnp, mask, (rows, ROWS), (columns, COLUMNS), shape))

    return lists_in_program(grid, _in_chunks(words, grid.rows, grid.columns))


def _in_chunks(evaluate: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """``evaluate`` of arrays ``(n,)``, some of the n at a time."""
    count = arrays[0].shape[0]
    if count <= _CELLS_OF_A_KERNEL:
        return evaluate(*arrays)
    chunks = -(-count // _CELLS_OF_A_KERNEL)
    padding = chunks * _CELLS_OF_A_KERNEL - count
    cut = tuple(jnp.pad(x, (0, padding)).reshape(chunks, _CELLS_OF_A_KERNEL) for x in arrays)
    results: jax.Array = jax.lax.map(lambda some: evaluate(*some), cut)
    return results.reshape(-1, *results.shape[2:])[:count]
