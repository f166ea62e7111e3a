"""Pictures of a pattern: where the stored positions of an (m, k) pattern are dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = " ·░▒▓█"
PLOT_CELLS = 512


def percent(share: float) -> str:
    """A share in [0, 1] in words, with as many decimals as it takes to tell it from 0 and 1.

    >>> percent(0.75), percent(0.9996), percent(1.0)
    ('75.0 %', '99.96 %', '100.0 %')
    """
    for decimals in range(1, 9):
        text = f"{100 * share:.{decimals}f}"
        if share in (0, 1) or float(text) not in (0.0, 100.0):
            break
    return f"{text} %"


def _density(
    operation: str,
    row_offsets: npt.ArrayLike,
    column_indices: npt.ArrayLike,
    shape: tuple[int, int],
    cells: tuple[int, int],
) -> npt.NDArray[np.float64]:
    """The stored fraction of each of at most ``cells`` equal parts of the pattern, in O(nnz)."""
    m, k = shape
    offsets, indices = np.asarray(row_offsets, np.int64), np.asarray(column_indices, np.int64)
    if offsets.shape != (m + 1,):
        raise ValueError(
            f"{operation}: row_offsets must have shape ({m + 1},) for shape {(m, k)}, "
            f"got {offsets.shape}"
        )
    if indices.ndim != 1 or indices.size < offsets[-1]:
        raise ValueError(
            f"{operation}: column_indices must have shape (nse,), nse >= row_offsets[-1] = "
            f"{offsets[-1]}, got {indices.shape}"
        )
    rows, columns = min(cells[0], m), min(cells[1], k)
    row_cells = np.arange(m) * rows // max(1, m)
    column_cells = np.arange(k) * columns // max(1, k)
    stored = np.repeat(row_cells, np.diff(offsets)) * columns
    stored += column_cells[indices[: offsets[-1]]]
    counts = np.bincount(stored, minlength=rows * columns).reshape(rows, columns)
    heights = np.bincount(row_cells, minlength=rows)
    widths = np.bincount(column_cells, minlength=columns)
    return counts / np.outer(heights, widths)


def grid(
    row_offsets: npt.ArrayLike,
    column_indices: npt.ArrayLike,
    shape: tuple[int, int],
    *,
    rows: int = 16,
    columns: int = 32,
) -> str:
    """A text picture of an (m, k) pattern, of at most ``rows`` lines of ``columns`` cells.

    A cell is one position of a pattern small enough and else an equal part of it. Its character
    tells the fraction of its positions that are stored: a space for 0, ``·`` up to 1/16, ``░`` up
    to 1/8, ``▒`` up to 1/4, ``▓`` up to 1/2 and ``█`` above.

    Args:
      row_offsets: int (m + 1,).
      column_indices: int (nse,); what is beyond ``row_offsets[-1]`` is padding and not shown.
      shape: (m, k).
      rows: the most cells down, at least 1.
      columns: the most cells across, at least 1.

    Raises:
      ValueError: if ``row_offsets`` or ``column_indices`` has another shape, as of a batch, or
        ``rows`` or ``columns`` is less than 1.

    >>> print(grid([0, 1, 3, 4], [0, 0, 1, 3], (3, 4)))
    ┌────┐
    │█   │
    │██  │
    │   █│
    └────┘
    """
    if min(rows, columns) < 1:
        raise ValueError(f"grid: rows and columns must be >= 1, got {rows} and {columns}")
    density = _density("grid", row_offsets, column_indices, shape, (rows, columns))
    shades = np.searchsorted([0, 1 / 16, 1 / 8, 1 / 4, 1 / 2], density)
    return framed(["".join(_SHADES[shade] for shade in line) for line in shades], density.shape[1])


def framed(lines: Sequence[str], width: int) -> str:
    """Lines of text of that width in a frame.

    >>> print(framed(["ab"], 2))
    ┌──┐
    │ab│
    └──┘
    """
    edge = "─" * width
    return "\n".join([f"┌{edge}┐", *(f"│{line}│" for line in lines), f"└{edge}┘"])


def plot(
    row_offsets: npt.ArrayLike,
    column_indices: npt.ArrayLike,
    shape: tuple[int, int],
    *,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """An image of an (m, k) pattern: the fraction of positions stored, in at most 512 x 512 cells.

    Colours follow the square root of the fraction, so that the sparse parts of a pattern show
    beside the dense ones; a pattern that is not drawn position by position has a colour bar.

    Args:
      row_offsets: int (m + 1,).
      column_indices: int (nse,); what is beyond ``row_offsets[-1]`` is padding and not shown.
      shape: (m, k).
      ax: the Axes to draw into, by default those of a new figure.
      title: the title of the Axes.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if ``row_offsets`` or ``column_indices`` has another shape, as of a batch.

    >>> plot([0, 1, 3, 4], [0, 0, 1, 3], (3, 4), title="pattern").get_title()
    'pattern'
    """

    def density() -> npt.NDArray[np.float64]:
        return _density("plot", row_offsets, column_indices, shape, (PLOT_CELLS, PLOT_CELLS))

    return image(density, shape, ax=ax, title=title)


def image(
    make_density: Callable[[], npt.NDArray[np.float64]],
    shape: tuple[int, int],
    *,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """As `plot`, of the stored fraction of each of at most 512 x 512 equal parts of a pattern."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import PowerNorm
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            "plot: needs matplotlib, install it with: pip install matplotlib"
        ) from error
    density = make_density()
    if ax is None:
        _, ax = plt.subplots(layout="constrained")
    # A pattern of no positions is drawn as one empty cell.
    height, width = (max(1, size) for size in shape)
    image = ax.imshow(
        np.ma.masked_equal(density if density.size else np.zeros((1, 1)), 0),
        cmap="magma_r",
        norm=PowerNorm(0.5, vmin=0, vmax=density.max(initial=0) or 1),
        # Cells are square for as long as neither side becomes a thin strip.
        aspect="equal" if 1 / 4 <= height / width <= 4 else "auto",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    if max(shape) > max(density.shape):
        # An inset is as high as the image and leaves a caller's Axes in place.
        colorbar = ax.figure.colorbar(image, cax=ax.inset_axes((1.03, 0, 0.04, 1)))
        colorbar.set_label("fraction stored")
    for axis in ax.xaxis, ax.yaxis:
        locator = MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        axis.set_major_locator(locator)
    ax.set(xlabel="column", ylabel="row")
    if title is not None:
        ax.set_title(title)
    return ax
