"""What lists of tiles say, read on the host, and whether they are as they should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.block_mask.tiles import EMPTY, FULL, PARTIAL, STATES_AT, Cells, TileLists
from jaxsparse.block_mask.words import CELL, TILE, WORDS, unpack_on_host
from jaxsparse.pattern import is_concrete


def masks_of(lists: TileLists) -> Iterator[tuple[str, TileLists]]:
    """The lists of each mask of a batch, as arrays of NumPy, and which one it is, in words."""
    arrays: Any = [np.asarray(x) for x in lists]
    batch = arrays[0].shape[:-1]
    for entry in np.ndindex(batch):
        yield f" of mask {entry}" if batch else "", TileLists(*(x[entry] for x in arrays))


def read(lists: TileLists) -> Cells:
    """The cells of one mask that are not empty, in the order of entries."""
    tile_rows, tile_columns, states = _entries(lists)
    tiles, at = np.nonzero(states != EMPTY)
    rows = 2 * tile_rows[tiles].astype(np.int64) + at // 2
    columns = 2 * tile_columns[tiles].astype(np.int64) + at % 2
    full = states[tiles, at] == FULL
    words: Any = lists.bits
    return Cells(rows, columns, full, words[_slots(lists, states)])


def _slots(lists: TileLists, states: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Where the words of each partial cell are, in the order of entries."""
    bits_at: Any = lists.bits_at[: len(states)]
    partial = states == PARTIAL
    of_tile = bits_at[:, None] + np.cumsum(partial, axis=1) - 1
    slots: npt.NDArray[np.int64] = of_tile[partial]
    return slots


def _entries(lists: TileLists) -> tuple[Any, Any, npt.NDArray[np.uint32]]:
    """Row and column of each listed tile, and the states of its cells."""
    offsets: Any = lists.offsets
    entries: Any = lists.entries[: offsets[-1]]
    rows = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    shifts = STATES_AT + 2 * np.arange(4, dtype=np.uint32)
    return rows, entries & np.uint32((1 << STATES_AT) - 1), entries[:, None] >> shifts & 3


def stored_positions(cells: Cells) -> int:
    """How many positions cells store."""
    bits = np.bitwise_count(cells.words).sum(dtype=np.int64)
    return int(np.count_nonzero(cells.full)) * CELL * CELL + int(bits)


def tile_counts(lists: TileLists, shape: tuple[int, int]) -> tuple[int, int, int]:
    """How many tiles of all masks are empty, partial and full."""
    total = listed = full = 0
    for _, one in masks_of(lists):
        _, _, states = _entries(one)
        total += -(-shape[0] // TILE) * -(-shape[1] // TILE)
        listed += int(np.any(states != EMPTY, axis=1).sum())
        full += int(np.all(states == FULL, axis=1).sum())
    return total - listed, listed - full, full


def verify(
    rows: TileLists, columns: TileLists, shape: tuple[int, int], orders: tuple[Any, Any]
) -> None:
    """Checks the lists of masks, and the orders of their rows and columns.

    Raises:
        ValueError: see `jaxsparse.BlockMask.verify`.
    """
    if not is_concrete(*jax.tree.leaves((rows, columns, orders))):
        raise ValueError("BlockMask.verify: needs a concrete mask, got a traced one")
    try:
        for name, lists, size in ("rows", rows, shape), ("columns", columns, shape[::-1]):
            _check_arrays(lists, size, name)
        if rows.offsets.shape[:-1] != columns.offsets.shape[:-1]:
            raise ValueError("rows and columns are batches of different sizes")
        for (where, down), (_, across) in zip(masks_of(rows), masks_of(columns), strict=True):
            _check_lists(down, shape, f"rows{where}")
            _check_lists(across, shape[::-1], f"columns{where}")
            _check_transposed(down, across, where)
        for name, order, most in zip(("row_order", "column_order"), orders, shape, strict=True):
            if isinstance(order, jax.Array | np.ndarray):
                _check_order(name, order, (*rows.offsets.shape[:-1], most))
    except ValueError as error:
        raise ValueError(f"BlockMask.verify: {error}") from None


def _check_arrays(lists: TileLists, shape: tuple[int, int], name: str) -> None:
    tile_rows = -(-shape[0] // TILE)
    batch = lists.offsets.shape[:-1]
    room, cells = lists.entries.shape[-1:], lists.bits.shape[-2:-1]
    expected: dict[str, tuple[Any, tuple[int, ...]]] = {
        "offsets": (np.int32, (tile_rows + 1,)),
        "entries": (np.uint32, room),
        "bits_at": (np.int32, room),
        "bits": (np.uint32, (*cells, WORDS)),
        "order": (np.int32, (tile_rows,)),
    }
    for field, (dtype, sizes) in expected.items():
        array = getattr(lists, field)
        if array.dtype != dtype or array.shape != (*batch, *sizes) or 0 in (*room, *cells):
            raise ValueError(
                f"{name}.{field} must be {np.dtype(dtype)} {(*batch, *sizes)}, with room for at "
                f"least 1, got {array.dtype} {array.shape}"
            )


def _check_order(name: str, order: Any, expected: tuple[int, ...]) -> None:
    array = np.asarray(order)
    if array.dtype != np.int32 or array.shape != expected:
        raise ValueError(f"{name} must be int32 {expected}, got {array.dtype} {array.shape}")
    if np.any(np.sort(array, axis=-1) != np.arange(expected[-1])):
        raise ValueError(f"{name} must have each of the {expected[-1]} positions once")


def _check_lists(lists: TileLists, shape: tuple[int, int], name: str) -> None:
    offsets: Any = lists.offsets
    tile_columns = -(-shape[1] // TILE)
    falling = np.flatnonzero(np.diff(offsets) < 0)
    if offsets[0] != 0 or falling.size or offsets[-1] > lists.entries.size:
        row = int(falling[0]) if falling.size else 0 if offsets[0] else offsets.size - 2
        raise ValueError(
            f"{name}: offsets must start at 0, not fall and end within the {lists.entries.size} "
            f"entries, got {offsets[row : row + 2].tolist()} at row {row} of tiles"
        )
    rows, columns, states = _entries(lists)

    def refuse(bad: Any, what: str) -> None:
        if np.any(bad):
            entry = int(np.flatnonzero(bad)[0])
            tile = f"row {rows[entry]} of tiles, tile {columns[entry]}"
            raise ValueError(f"{name}: {tile}: {what}")

    columns = columns.astype(np.int64)
    refuse(columns >= tile_columns, f"there are {tile_columns} columns of tiles")
    again = np.zeros(len(rows), bool)
    again[1:] = (np.diff(columns) <= 0) & (np.diff(rows) == 0)
    refuse(again, "the tiles of a row must rise")
    refuse(np.any(states > FULL, axis=1), "a cell's state must be 0, 1 or 2")
    across = 2 * columns[:, None] + np.arange(4) % 2
    down = 2 * rows[:, None] + np.arange(4) // 2
    outside = (down * CELL >= shape[0]) | (across * CELL >= shape[1])
    refuse(np.any(outside & (states != EMPTY), axis=1), "a cell outside of the shape is not empty")
    beyond = ((down + 1) * CELL > shape[0]) | ((across + 1) * CELL > shape[1])
    refuse(np.any(beyond & (states == FULL), axis=1), "a cell that reaches beyond is full")
    partial = np.count_nonzero(states == PARTIAL, axis=1)
    bits_at: Any = lists.bits_at[: len(rows)]
    outside = (bits_at < 0) | (bits_at.astype(np.int64) + partial > len(lists.bits))
    refuse((partial > 0) & outside, f"there are words of {len(lists.bits)} cells")
    slots = _slots(lists, states)
    tiles, at = np.nonzero((states == PARTIAL) & beyond)
    words: Any = lists.bits
    stored = unpack_on_host(words[slots[beyond[states == PARTIAL]]])
    inside_rows = np.arange(CELL) < (shape[0] - down[tiles, at] * CELL)[:, None]
    inside_columns = np.arange(CELL) < (shape[1] - across[tiles, at] * CELL)[:, None]
    stored &= ~(inside_rows[:, :, None] & inside_columns[:, None, :])
    bad = np.zeros(len(rows), bool)
    bad[tiles[stored.any(axis=(1, 2))]] = True
    refuse(bad, "bits outside of the shape are set")
    if lists.entries[len(rows) :].any() or lists.bits_at[len(rows) :].any():
        raise ValueError(f"{name}: what is behind the last entry must be 0")
    if not np.array_equal(np.sort(lists.order), np.arange(offsets.size - 1)):
        raise ValueError(f"{name}: order must have each row of tiles once")


def _check_transposed(rows: TileLists, columns: TileLists, where: str) -> None:
    one, other = in_order(read(rows)), in_order(read(columns).transposed())
    common = min(len(one.rows), len(other.rows))
    differ = np.zeros(common + 1, bool)
    differ[common] = len(one.rows) != len(other.rows)
    for x, y in (one.rows, other.rows), (one.columns, other.columns), (one.full, other.full):
        differ[:common] |= x[:common] != y[:common]
    first = int(np.argmax(differ)) if differ.any() else common
    partial = [np.count_nonzero(~x.full[:first]) for x in (one, other)]
    words = np.any(one.words[: partial[0]] != other.words[: partial[1]], axis=1)
    if words.any():
        first = int(np.flatnonzero(~one.full)[np.argmax(words)])
    elif not differ.any():
        return
    places = [(x.rows[first], x.columns[first]) for x in (one, other) if first < len(x.rows)]
    row, column = min(places)
    raise ValueError(
        f"rows and columns{where} differ at the cell in row {row % 2}, column {column % 2} of the "
        f"tile {column // 2} in row {row // 2} of tiles"
    )


def in_order(cells: Cells) -> Cells:
    """Cells by their rows, then by their columns."""
    order = np.lexsort((cells.columns, cells.rows))
    slots = np.cumsum(~cells.full) - 1
    full = cells.full[order]
    words = cells.words[slots[order][~full]]
    return Cells(cells.rows[order], cells.columns[order], full, words)
