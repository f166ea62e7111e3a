"""Lists of tiles made in the program, with static room, of the states of all cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.block_mask.tiles import EMPTY, PARTIAL, STATES_AT, TileLists
from jaxsparse.block_mask.words import transpose
from jaxsparse.pattern import checked, checks_enabled

_CELLS_AT_A_TIME = 1024  # As many positions of a mask are evaluated at once as 2048 x 2048 have.


class Grid(NamedTuple):
    """The states of all cells of a mask, of those that there is room for.

    Attributes:
        states: uint8 ``(rows, columns, 2, 2)`` of tiles, down and across.
        rows: int32 ``(cells,)``, of the partial cells in the order of entries; 0 behind them.
        columns: int32 ``(cells,)``.
        valid: bool ``(cells,)``, False behind the last.
        tiles: int32, how many tiles would be listed with room for all.
        cells: int32, how many partial cells.
    """

    states: jax.Array
    rows: jax.Array
    columns: jax.Array
    valid: jax.Array
    tiles: jax.Array
    cells: jax.Array

    @property
    def slots(self) -> jax.Array:
        """Int32 ``(rows, columns, 2, 2)``: the place of each partial cell among them."""
        partial = self.states == PARTIAL
        return (_rank(partial) - 1).reshape(partial.shape)


def _rank(flags: jax.Array) -> jax.Array:
    """How many flags are set up to each, it included."""
    return jnp.cumsum(flags.reshape(-1), dtype=jnp.int32)


def _nonzero(flags: jax.Array, room: int) -> jax.Array:
    """The places of the first flags that are set, and behind them the number of all flags.

    As `jnp.nonzero`, which adds where this stores: most flags are not set, and store nothing.
    """
    every = jnp.arange(flags.size, dtype=jnp.int32)
    at = jnp.where(flags.reshape(-1), _rank(flags) - 1, room + every)
    places = jnp.full(room, flags.size, jnp.int32)
    return places.at[at].set(every, mode="drop", unique_indices=True)


def arrange(states: jax.Array, max_tiles: int, max_cells: int) -> Grid:
    """The grid of states ``(rows, columns)`` of cells, both even: what has no room is empty."""
    rows, columns = (size // 2 for size in states.shape)
    grid = states.reshape(rows, 2, columns, 2).swapaxes(1, 2)
    listed = jnp.any(grid != EMPTY, axis=(2, 3))
    ranks = _rank(listed).reshape(listed.shape)
    grid = jnp.where((ranks <= max_tiles)[..., None, None], grid, EMPTY)
    partial = grid == PARTIAL
    partial_ranks = _rank(partial).reshape(partial.shape)
    grid = jnp.where(partial & (partial_ranks > max_cells), EMPTY, grid)
    counts = [x.reshape(-1)[-1] if x.size else jnp.int32(0) for x in (ranks, partial_ranks)]
    down, across, _ = _places(grid, max_cells)
    valid = jnp.arange(max_cells, dtype=jnp.int32) < counts[1]
    return Grid(grid, down, across, valid, counts[0], counts[1])


def _places(grid: jax.Array, room: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the partial cells in the order of entries: rows, columns, places in the grid."""
    columns = grid.shape[1]
    places = _nonzero(grid == PARTIAL, room)
    places = jnp.where(places < grid.size, places, 0)
    tile_row, tile_column = places // 4 // max(columns, 1), places // 4 % max(columns, 1)
    return 2 * tile_row + places // 2 % 2, 2 * tile_column + places % 2, places


def in_chunks(evaluate: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """``evaluate`` of arrays ``(n, ...)``, some of the n at a time."""
    count = arrays[0].shape[0]
    if count <= _CELLS_AT_A_TIME:
        return evaluate(*arrays)
    chunks = -(-count // _CELLS_AT_A_TIME)

    def cut(x: jax.Array) -> jax.Array:
        padding = [(0, chunks * _CELLS_AT_A_TIME - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(chunks, _CELLS_AT_A_TIME, *x.shape[1:])

    results: jax.Array = jax.lax.map(lambda some: evaluate(*some), tuple(map(cut, arrays)))
    return results.reshape(-1, *results.shape[2:])[:count]


def lists_in_program(grid: Grid, words: jax.Array, max_tiles: int) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of a grid and the words of its partial cells.

    They are checked if ``JAXSPARSE_CHECK=1``: the program stops where there is too little room.
    """
    words = jnp.where(grid.valid[:, None], words, 0)
    transposed = grid.states.transpose(1, 0, 3, 2)
    _, _, places = _places(transposed, words.shape[0])
    slots = grid.slots.transpose(1, 0, 3, 2).reshape(-1)
    if slots.size:
        of_column = in_chunks(transpose, words[slots[places]])
        transposed_words = jnp.where(grid.valid[:, None], of_column, 0)
    else:
        transposed_words = jnp.zeros_like(words)
    rows = _list(grid.states, words, max_tiles)
    columns = _list(transposed, transposed_words, max_tiles)
    if checks_enabled():
        start = _fits(grid.tiles, max_tiles) + _fits(grid.cells, words.shape[0])
        rows, columns = (x._replace(offsets=x.offsets + start) for x in (rows, columns))
    return rows, columns


def _fits(count: jax.Array, room: int) -> jax.Array:
    """0, behind a check: the program stops with an error if a count is larger than its room."""
    offsets = jnp.stack([jnp.zeros_like(count), count])
    one_row = jnp.zeros(1, jnp.int32)
    return checked(offsets, jnp.arange(room, dtype=jnp.int32), one_row, columns=room)[0]


def _list(states: jax.Array, words: jax.Array, room: int) -> TileLists:
    tile_rows, tile_columns = states.shape[:2]
    by_tile = states.reshape(tile_rows, tile_columns, 4)
    listed = jnp.any(by_tile != EMPTY, axis=-1)
    stops = jnp.cumsum(jnp.sum(listed, axis=1, dtype=jnp.int32), dtype=jnp.int32)
    offsets = jnp.pad(stops, (1, 0))
    shifts = STATES_AT + 2 * np.arange(4, dtype=np.uint32)[None, None]
    entries = jnp.sum(by_tile.astype(jnp.uint32) << shifts, axis=-1, dtype=jnp.uint32)
    entries |= jnp.arange(tile_columns, dtype=jnp.uint32)[None]
    partial = jnp.sum(by_tile == PARTIAL, axis=-1, dtype=jnp.int32).reshape(-1)
    before = jnp.cumsum(partial, dtype=jnp.int32) - partial
    places = _nonzero(listed, room)
    counts = jnp.sum(by_tile != EMPTY, axis=(1, 2), dtype=jnp.int32)

    def listed_of(x: jax.Array) -> jax.Array:
        return jnp.take(x.reshape(-1), places, mode="fill", fill_value=0)

    order = jnp.argsort(-counts, stable=True).astype(jnp.int32)
    return TileLists(offsets, listed_of(entries), listed_of(before), words, order)
