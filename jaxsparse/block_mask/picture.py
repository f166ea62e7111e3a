"""Text and pictures of a block mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxsparse import display
from jaxsparse.block_mask.reading import read
from jaxsparse.block_mask.tiles import Cells, TileLists
from jaxsparse.block_mask.words import CELL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES, _CHARACTERS = 24, 48


def grid(lists: TileLists, shape: tuple[int, int]) -> str:
    """The cells of one mask, or equal parts of it: ``█`` full, ``▒`` partial, a space empty."""
    cells = read(lists)
    sizes, rows, columns = _parts(cells, shape, (_LINES, _CHARACTERS))
    (down, heights), (across, widths) = sizes
    area = np.outer(heights, widths)
    stored, full = (
        np.bincount(rows[kept] * across + columns[kept], minlength=down * across)
        for kept in (slice(None), cells.full)
    )
    characters = np.where(stored == 0, " ", np.where(full == area.reshape(-1), "█", "▒"))
    lines = ["".join(line) for line in characters.reshape(down, across)]
    return display.framed(lines, across)


def plot(
    lists: TileLists, shape: tuple[int, int], *, ax: Axes | None = None, title: str | None = None
) -> Axes:
    """An image of one mask: the fraction of positions stored, by cells or equal parts of them.

    Raises:
        ImportError: if matplotlib is not installed.
    """

    def density() -> npt.NDArray[np.float64]:
        cells = read(lists)
        limits = display.PLOT_CELLS, display.PLOT_CELLS
        ((down, heights), (across, widths)), rows, columns = _parts(cells, shape, limits)
        counts = np.full(cells.full.size, float(CELL * CELL))
        counts[~cells.full] = np.bitwise_count(cells.words).sum(axis=1)
        total = np.bincount(rows * across + columns, counts, down * across)
        # Parts at the end reach beyond the shape.
        area = np.outer(_positions(heights, shape[0]), _positions(widths, shape[1]))
        return total.reshape(down, across) / area

    return display.image(density, shape, ax=ax, title=title)


def _parts(cells: Cells, shape: tuple[int, int], limits: tuple[int, int]) -> Any:
    """How many equal parts there are down and across, of how many cells, and where cells lie."""
    sizes, places = [], []
    for size, limit, at in zip(shape, limits, (cells.rows, cells.columns), strict=True):
        count = -(-size // CELL)
        parts = min(limit, count)
        part_of = np.arange(count) * parts // max(1, count)
        sizes.append((parts, np.bincount(part_of, minlength=parts)))
        places.append(part_of[at])
    return sizes, *places


def _positions(cells: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """How many positions parts of so many cells have, of a number in all."""
    ends = np.minimum(np.cumsum(cells) * CELL, size)
    return np.diff(ends, prepend=0)
