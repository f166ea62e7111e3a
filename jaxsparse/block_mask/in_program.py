"""Lists of tiles made in the program, with static room, of the states of cells.

The states of all cells are computed once, and become a bit for each tile at once. Of the tiles that
are listed, for which there is room, they are computed again. So nothing has the size of all cells.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.block_mask.bitmap import (
    Bitmap,
    Flags,
    bitmap_of_cells,
    bitmap_of_tiles,
    kth_bit,
    last_not_above,
    look_up,
)
from jaxsparse.block_mask.tiles import PARTIAL, STATES_AT, TileLists
from jaxsparse.block_mask.words import transpose
from jaxsparse.pattern import checked, checks_enabled

_PARTIAL_CELLS = np.uint32(PARTIAL * 0b01010101)  # the states of a tile whose cells all are


class Tiles(NamedTuple):
    """Tiles in the order of a list, with static room.

    Attributes:
        states: uint32 ``(room,)``: two bits for each of a tile's four cells; 0 behind the last.
        before: int32 ``(room,)``: how many partial cells are before each tile.
        cells: int32, how many there are.
    """

    states: jax.Array
    before: jax.Array
    cells: jax.Array

    def slots(self, tiles: jax.Array, cells: jax.Array) -> jax.Array:
        """How many partial cells are before cells, of 0 to 3, of tiles."""
        below = (jnp.uint32(1) << 2 * cells.astype(jnp.uint32)) - 1
        return look_up(self.before, tiles) + _partial_cells(look_up(self.states, tiles) & below)

    def places(self, room: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of the first partial cells: their tiles, which of the four, and which there are."""
        ranks = jnp.arange(room, dtype=jnp.int32)
        tiles = last_not_above(self.before, ranks)
        partial = look_up(self.states, tiles) & _PARTIAL_CELLS
        cells = kth_bit(partial, ranks - look_up(self.before, tiles), 8) // 2
        return tiles, cells, ranks < self.cells


def _tiles(states: jax.Array) -> tuple[Tiles, jax.Array]:
    """Tiles by their states, and how many cells that are not empty are before each, and in all."""
    partial = _partial_cells(states)
    listed = jax.lax.population_count((states | states >> 1) & _PARTIAL_CELLS).astype(jnp.int32)
    upto, before = jnp.cumsum(jnp.stack([partial, listed]), axis=1, dtype=jnp.int32)
    return Tiles(states, upto - partial, upto[-1]), jnp.pad(before, (1, 0))


def _partial_cells(states: jax.Array) -> jax.Array:
    return jax.lax.population_count(states & _PARTIAL_CELLS).astype(jnp.int32)


class Grid(NamedTuple):
    """The cells of a mask for which there is room.

    Attributes:
        size: rows and columns of tiles.
        listed: the tiles of which cells are not empty, those without room, too.
        tiles: those that there is room for; a cell without room is empty.
        rows: int32 ``(max_cells,)``: rows of cells of the partial ones in the order of the tiles.
        columns: int32 ``(max_cells,)``.
        valid: bool ``(max_cells,)``, False behind the last.
        cells: int32, how many partial cells there would be with room for all.
    """

    size: tuple[int, int]
    listed: Bitmap
    tiles: Tiles
    rows: jax.Array
    columns: jax.Array
    valid: jax.Array
    cells: jax.Array

    def slots(self, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """The places of cells among the partial ones; -1 for those that are not among them."""
        there, rank = self.kept(rows // 2, columns // 2)
        cell = rows % 2 * 2 + columns % 2
        states = look_up(self.tiles.states, rank)
        partial = states >> 2 * cell.astype(jnp.uint32) & 3 == PARTIAL
        return jnp.where(there & partial, self.tiles.slots(rank, cell), -1)

    def kept(self, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Whether tiles have cells that there is room for, and their places in the list."""
        there, rank = self.listed.rank(rows, columns)
        there &= rank < self.tiles.states.shape[0]
        return there & (look_up(self.tiles.states, rank) != 0), rank


def arrange(states: Flags, size: tuple[int, int], max_tiles: int, max_cells: int) -> Grid:
    """The grid of so many rows and columns of tiles, by the states of cells at their places.

    Args:
        states: of rows and columns of cells, int32 arrays that broadcast, to uint8 ``EMPTY``,
            ``PARTIAL`` or ``FULL``. Columns may lie beyond the last.
        size: rows and columns of tiles.
        max_tiles: room for tiles, at least 1.
        max_cells: room for partial cells, at least 1. What has no room is left out.
    """
    listed = bitmap_of_cells(states, *size)
    rows, columns, valid = listed.places(max_tiles)
    down, across = (2 * x[:, None, None] for x in (rows, columns))
    two = jnp.arange(2, dtype=jnp.int32)
    of_cells = states(down + two[None, :, None], across + two[None, None]).astype(jnp.uint32)
    shifts = 2 * np.arange(4, dtype=np.uint32).reshape(1, 2, 2)
    of_cells = jnp.broadcast_to(of_cells, (max_tiles, 2, 2))
    packed = jnp.sum(of_cells << shifts, axis=(1, 2), dtype=jnp.uint32)
    tiles, _ = _tiles(jnp.where(valid, packed, jnp.uint32(0)))
    at, cell, there = tiles.places(max_cells)
    kept = jnp.zeros_like(tiles.states)
    for each in range(4):
        state = tiles.states & np.uint32(3 << 2 * each)
        partial = state == np.uint32(PARTIAL << 2 * each)
        slots = tiles.before + _partial_cells(tiles.states & np.uint32((1 << 2 * each) - 1))
        kept |= jnp.where(partial & (slots >= max_cells), jnp.uint32(0), state)
    return Grid(
        size,
        listed,
        Tiles(kept, jnp.minimum(tiles.before, max_cells), jnp.minimum(tiles.cells, max_cells)),
        2 * look_up(rows, at) + cell // 2,
        2 * look_up(columns, at) + cell % 2,
        there,
        tiles.cells,
    )


def states_of_table(states: jax.Array) -> Flags:
    """The states of all cells ``(rows, columns)``, as `arrange` takes them."""
    return lambda rows, columns: states.at[rows, columns].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )


def lists_in_program(grid: Grid, words: jax.Array) -> tuple[TileLists, TileLists]:
    """The lists by rows and by columns of a grid and the words of its partial cells.

    They are checked if ``JAXSPARSE_CHECK=1``: the program stops where there is too little room.
    """
    room, max_cells = grid.tiles.states.shape[0], words.shape[0]
    words = jnp.where(grid.valid[:, None], words, jnp.uint32(0))
    down, across = grid.size
    rows, _, _ = _list(bitmap_of_tiles(lambda i, j: grid.kept(i, j)[0], down, across), grid, False)
    columns, tiles, ranks = _list(
        bitmap_of_tiles(lambda j, i: grid.kept(i, j)[0], across, down), grid, True
    )
    at, cell, there = tiles.places(max_cells)
    slots = grid.tiles.slots(look_up(ranks, at), cell // 2 + cell % 2 * 2)
    transposed = jnp.where(there[:, None], transpose(look_up(words, slots)), jnp.uint32(0))
    rows, columns = rows._replace(bits=words), columns._replace(bits=transposed)
    if checks_enabled():
        start = _fits(grid.listed.offsets[-1], room) + _fits(grid.cells, max_cells)
        rows, columns = (x._replace(offsets=x.offsets + start) for x in (rows, columns))
    return rows, columns


def _fits(count: jax.Array, room: int) -> jax.Array:
    """0, behind a check: the program stops with an error if a count is larger than its room."""
    offsets = jnp.stack([jnp.zeros_like(count), count])
    one_row = jnp.zeros(1, jnp.int32)
    return checked(offsets, jnp.arange(room, dtype=jnp.int32), one_row, columns=room)[0]


def _list(bitmap: Bitmap, grid: Grid, transposed: bool) -> tuple[TileLists, Tiles, jax.Array]:
    """The list of a bitmap of what there is room for, still without words.

    And its tiles, and which of the grid's each is.
    """
    rows, columns, valid = bitmap.places(grid.tiles.states.shape[0])
    _, ranks = grid.kept(*((columns, rows) if transposed else (rows, columns)))
    states = jnp.where(valid, look_up(grid.tiles.states, ranks), jnp.uint32(0))
    if transposed:
        states = states & np.uint32(0xC3) | (states & 0x0C) << 2 | (states & 0x30) >> 2
    tiles, cells = _tiles(states)
    entries = states << STATES_AT | columns.astype(jnp.uint32)
    counts = jnp.diff(look_up(cells, bitmap.offsets))
    lists = TileLists(
        bitmap.offsets,
        jnp.where(valid, entries, jnp.uint32(0)),
        jnp.where(valid, tiles.before, 0),
        jnp.zeros(0, jnp.uint32),
        jnp.argsort(-counts, stable=True).astype(jnp.int32),
    )
    return lists, tiles, ranks
