"""Lists of tiles, and how they are made on the host of the cells that are not empty."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.block_mask.words import TILE, WORDS, transpose_on_host
from jaxsparse.pattern import to_device

EMPTY, PARTIAL, FULL = 0, 1, 2
"""States of a cell."""
STATES_AT = 24
"""The lowest bit of the states in an entry; below it is the column of tiles."""


class TileLists(NamedTuple):
    """The tiles of 128 x 128 positions that a block mask stores, listed by rows of tiles.

    The kernels' form, as ffi/attention/problem.h says. What lies behind the last entry is room and
    0.

    Attributes:
        offsets: int32 ``(..., rows + 1)``; the entries of row i of tiles are ``offsets[i]`` to
            ``offsets[i + 1]``.
        entries: uint32 ``(..., capacity)``, by rising column in each row: the column of tiles in 24
            bits, and above them in two bits each the states of the cells top left, top right,
            bottom left, bottom right: 0 for empty, 1 for partial, 2 for full.
        bits_at: int32 ``(..., capacity)``: where the words of an entry's first partial cell are;
            those of its others follow.
        bits: uint32 ``(..., cells, 128)``: the words of the partial cells. Cells may share them.
        order: int32 ``(..., rows)``: rows of tiles by falling number of cells that are not empty.
    """

    offsets: jax.Array
    entries: jax.Array
    bits_at: jax.Array
    bits: jax.Array
    order: jax.Array


# So that exported programs may take and return block masks.
jax.export.register_namedtuple_serialization(TileLists, serialized_name="jaxsparse.TileLists")


class Cells(NamedTuple):
    """Cells that are not empty, in any order.

    Attributes:
        rows: int64 ``(n,)``, of cells.
        columns: int64 ``(n,)``.
        full: bool ``(n,)``.
        words: uint32 ``(partial cells, 128)``, in the order of the partial ones.
    """

    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    full: npt.NDArray[np.bool_]
    words: npt.NDArray[np.uint32]

    def transposed(self) -> Cells:
        """The cells of the transposed mask."""
        return Cells(self.columns, self.rows, self.full, transpose_on_host(self.words))


def joined(parts: Sequence[Cells]) -> Cells:
    """All cells of several lists."""
    nothing = np.zeros(0, np.int64)
    none = Cells(nothing, nothing, np.zeros(0, bool), np.zeros((0, WORDS), np.uint32))
    return Cells(*(np.concatenate(arrays) for arrays in zip(none, *parts, strict=True)))


def lists_on_host(
    operation: str,
    masks: Sequence[Cells],
    batch: tuple[int, ...],
    shape: tuple[int, int],
    max_tiles: int | None = None,
    max_cells: int | None = None,
) -> tuple[TileLists, TileLists]:
    """The lists of masks by rows and by columns, with as much room as is asked for or needed.

    Raises:
        ValueError: if there is less room than that.
    """
    both = []
    if 0 in (*shape, *batch):  # One empty mask says of which sizes the arrays are.
        masks = [joined([])]
    for size, oriented in (shape[0], masks), (shape[1], [cells.transposed() for cells in masks]):
        tile_rows = -(-size // TILE)
        both.append([_list(cells, tile_rows) for cells in oriented])
    tiles = max((x.entries.size for x in both[0]), default=0)
    cells = max((len(x.bits) for x in both[0]), default=0)
    for name, room, needed in ("max_tiles", max_tiles, tiles), ("max_cells", max_cells, cells):
        if room is not None and room < needed:
            what = "tiles" if name == "max_tiles" else "partial cells"
            raise ValueError(f"{operation}: {name}={room} is less than the {needed} {what}")
    rooms = (
        max(1, tiles if max_tiles is None else max_tiles),
        max(1, cells if max_cells is None else max_cells),
    )
    rows, columns = (_stacked(lists, batch, *rooms) for lists in both)
    return rows, columns


def _list(cells: Cells, tile_rows: int) -> TileLists:
    """The lists of one mask, with room for no more."""
    keys = cells.rows // 2 << 33 | cells.columns // 2 << 2 | cells.rows % 2 * 2 | cells.columns % 2
    by_place = np.argsort(keys, kind="stable")
    keys, full = keys[by_place], cells.full[by_place]
    slots = (np.cumsum(~cells.full) - 1)[by_place][~full]
    tiles = keys >> 2
    first = np.flatnonzero(np.diff(tiles, prepend=-1))
    states = np.where(full, FULL, PARTIAL) << STATES_AT + 2 * (keys & 3)
    entries = tiles[first] & (1 << STATES_AT) - 1
    entries |= np.add.reduceat(states, first) if first.size else entries
    offsets = np.zeros(tile_rows + 1, np.int32)
    np.cumsum(np.bincount(tiles[first] >> 31, minlength=tile_rows), out=offsets[1:])
    counts = np.bincount(tiles >> 31, minlength=tile_rows)
    partial = ~full
    arrays: dict[str, Any] = {
        "offsets": offsets,
        "entries": entries.astype(np.uint32),
        "bits_at": (np.cumsum(partial) - partial)[first].astype(np.int32),
        "bits": cells.words[slots],
        "order": np.argsort(-counts, kind="stable").astype(np.int32),
    }
    return TileLists(**arrays)


def _stacked(
    lists: Sequence[TileLists], batch: tuple[int, ...], tiles: int, cells: int
) -> TileLists:
    """Lists of several masks as those of a batch, each with room for so much."""
    rooms = {"entries": tiles, "bits_at": tiles, "bits": cells}
    stacked: dict[str, Any] = {}
    for name in TileLists._fields:
        arrays: list[Any] = [getattr(x, name) for x in lists]
        size = rooms.get(name, len(arrays[0]))
        result = np.zeros((*batch, size, *arrays[0].shape[1:]), arrays[0].dtype)
        for entry, array in zip(np.ndindex(batch), itertools.cycle(arrays)):
            result[entry][: len(array)] = array
        stacked[name] = result
    on_device: TileLists = to_device(TileLists(**stacked))
    return on_device
