"""The states of cells by interval arithmetic: sound, so that what is undecided is partial."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxsparse.block_mask.tiles import EMPTY, FULL, PARTIAL
from jaxsparse.block_mask.words import CELL
from jaxsparse.masks.expression import Mask
from jaxsparse.masks.intervals import Interval


def states_of(xp: Any, mask: Mask, rows: range, columns: range, shape: tuple[int, int]) -> Any:
    """The states of cells in some rows and columns of cells, uint8 ``(rows, columns)``."""
    down, across = (xp.arange(x.start, x.stop, dtype=np.int32) for x in (rows, columns))
    return states_at(xp, mask, down[:, None], across[None], shape)


def states_at(xp: Any, mask: Mask, rows: Any, columns: Any, shape: tuple[int, int]) -> Any:
    """The states of cells at rows and columns of cells, int32 arrays that broadcast; uint8.

    Cells that reach beyond the shape are not full, and those that lie there are empty.
    """
    bounds, sides = [], []
    for cells, size in (rows, shape[0]), (columns, shape[1]):
        low = cells * CELL
        last = low + (CELL - 1)
        bounds.append(Interval(xp, xp.minimum(low, size - 1), xp.minimum(last, size - 1)))
        sides.append((low < size, last < size))
    with np.errstate(over="ignore"):  # Scalars of NumPy warn where arrays do not.
        stored = mask._truth(*bounds)
    (begin_down, end_down), (begin_across, end_across) = sides
    may = stored.may & (begin_down & begin_across)
    full = stored.must & (end_down & end_across)
    states = xp.where(full, np.uint8(FULL), xp.where(may, np.uint8(PARTIAL), np.uint8(EMPTY)))
    return xp.broadcast_to(states, np.broadcast_shapes(rows.shape, columns.shape))
