"""Puts the rows of a group into tiles, by list scheduling.

The tail of a row is the number of rows that follow it one after another, up to a row that has no
parents. Rows come by falling tail, and each goes to the first tile that has room behind its
children (T. C. Hu, Parallel sequencing and assembly line problems, 1961): of trees of one kind no
other order makes fewer tiles. The C++ scheduler (ffi/dynamic/schedule.cc) is the one that is used;
this is its reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# How many tiles a row should be behind its children, so that they have come when its tile begins:
# 2, or 3 if the group has 3 times as many tiles as levels.
_LEAST_DISTANCE, _MOST_DISTANCE = 2, 3


def schedule(
    children: Sequence[Sequence[int]], tails: np.ndarray, kinds: np.ndarray, width: int
) -> np.ndarray:
    """The tile of each row of a group: integers (rows,) from 0 on.

    Rows keep a distance from their children, but come closer where they would otherwise leave
    fewer tiles of `least_tiles` behind them than their tails are long. If that takes more tiles
    than these, rows are placed without a distance, too, and the shorter schedule is taken.

    Args:
        children: those of each row that are rows of the group, by number.
        tails: (rows,), which fall.
        kinds: (rows,), of which a tile has one.
        width: rows of a tile.

    >>> schedule([[], [], [0, 1]], np.array([1, 1, 0]), np.zeros(3, int), 8).tolist()
    [0, 0, 1]
    """
    if not children:
        return np.zeros(0, np.int64)
    least, levels = least_tiles(tails, kinds, width), int(tails[0]) + 1
    distance = min(max(least // levels, _LEAST_DISTANCE), _MOST_DISTANCE)
    tiles = _place(children, tails, kinds, width, least, distance)
    if tiles.max() >= least:
        closer = _place(children, tails, kinds, width, least, 1)
        if closer.max() < tiles.max():
            return closer
    return tiles


def least_tiles(tails: np.ndarray, kinds: np.ndarray, width: int) -> int:
    """No schedule has fewer tiles.

    Behind the last row of a tail come as many tiles as the tail is long, and up to it those of all
    rows whose tails are not shorter.
    """
    before = np.zeros(int(tails.max()) + 1, np.int64)
    for kind in np.unique(kinds):
        counts = np.bincount(tails[kinds == kind], minlength=len(before))
        before += -(-np.cumsum(counts[::-1])[::-1] // width)
    return int((before + np.arange(len(before))).max())


def _place(
    children: Sequence[Sequence[int]],
    tails: np.ndarray,
    kinds: np.ndarray,
    width: int,
    least: int,
    distance: int,
) -> np.ndarray:
    tiles: list[int] = []
    used: dict[int, int] = {}  # rows of each tile
    kind_of: dict[int, int] = {}
    for own, tail, kind in zip(children, tails.tolist(), kinds.tolist(), strict=True):
        tile = 0
        if own:
            child = max(tiles[row] for row in own)
            tile = max(child + 1, min(child + distance, least - 1 - tail))
        while used.get(tile, 0) == width or kind_of.get(tile, kind) != kind:
            tile += 1
        used[tile] = used.get(tile, 0) + 1
        kind_of[tile] = kind
        tiles.append(tile)
    return np.unique(tiles, return_inverse=True)[1]  # without the tiles that are empty
