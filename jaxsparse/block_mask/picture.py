"""Text and pictures of a block mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse import display
from jaxsparse.block_mask.reading import read, stored_positions, tile_counts
from jaxsparse.block_mask.tiles import Cells, TileLists
from jaxsparse.block_mask.words import CELL, TILE
from jaxsparse.pattern import is_concrete

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxsparse.block_mask.block_mask import BlockMask

_LINES, _CHARACTERS = 24, 48


def is_whole(mask: BlockMask) -> bool:
    """Whether it holds arrays, and not what a tree of its structure may hold in place of them."""
    leaves = jax.tree.leaves((mask.rows, mask.columns))
    shapes = [getattr(x, "shape", None) for x in leaves]
    return len(leaves) == 2 * len(TileLists._fields) and None not in shapes


def line(mask: BlockMask) -> str:
    """The mask in one line: how many tiles are empty, partial and full, if they are concrete."""
    if not is_whole(mask):
        return f"BlockMask(shape={mask.shape})"
    parts = [f"shape={mask.shape}"]
    parts += [f"batch={mask.batch_shape}"] if mask.batch_shape else []
    parts += ["regrouped"] if mask.is_regrouped else []
    if is_concrete(*jax.tree.leaves(mask)):
        empty, partial, full = tile_counts(mask.rows, mask.shape)
        parts.append(f"tiles: {empty} empty, {partial} partial, {full} full")
    else:
        room, cells = mask.rows.entries.shape[-1], mask.rows.bits.shape[-2]
        parts.append(f"room for {room} tiles, {cells} partial cells")
    return f"BlockMask({', '.join(parts)}, {_in_words(mask.nbytes)})"


def _in_words(size: int) -> str:
    return f"{size / 2**20:.1f} MB" if size >= 2**20 else f"{size / 2**10:.1f} KB"


def text(mask: BlockMask, lists: TileLists) -> str:
    """One concrete mask in words, and a picture of its cells."""
    stored = stored_positions(read(lists))
    empty, partial, full = tile_counts(lists, mask.shape)
    regrouped = ", regrouped" if mask.is_regrouped else ""
    return (
        f"BlockMask of shape {mask.shape}, {stored} stored, {display.percent(mask.sparsity)} "
        f"sparse{regrouped}\n"
        f"tiles of {TILE} x {TILE}: {empty} empty, {partial} partial, {full} full\n"
        f"{grid(lists, mask.shape)}"
    )


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
