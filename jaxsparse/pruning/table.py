"""What `sparsify` found and did, layer by layer: as text, as data, as a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LayerReport:
    """One layer of a model; None where something was not measured.

    Args:
        path: its name in the model.
        layer: the name of its dense type.
        shapes: (outputs, inputs) of its matrices.
        density: share of weights that are not 0.
        imbalance: the longest row over the mean row; 1 where all outputs have as many weights.
        dense_bytes, sparse_bytes: what its parameters and patterns take.
        dense_seconds, sparse_seconds: the time on this device of all calls in a run of the model.
        kept_dense: why it was left dense, or None.
        note: what else is to be known of the times, or None.
        packed_bytes, packed_seconds: the same with packed weights, if that was asked for, in the
            faster form.
        packed: whether it has them now.
        not_packed: why it has none although that was asked for, if ``kept_dense`` does not say so.
        packed_form: the faster form of packed weights, "cells" or "gaps", if they were tried.
    """

    path: str
    layer: str
    shapes: tuple[tuple[int, int], ...]
    density: float | None
    imbalance: float | None
    dense_bytes: int
    sparse_bytes: int | None
    dense_seconds: float | None
    sparse_seconds: float | None
    kept_dense: str | None
    note: str | None = None
    packed_bytes: int | None = None
    packed_seconds: float | None = None
    packed: bool = False
    not_packed: str | None = None
    packed_form: str | None = None


def imbalance(matrix: np.ndarray) -> float:
    """The longest row over the mean row."""
    lengths = np.count_nonzero(matrix, axis=1)
    return float(lengths.max() / lengths.mean()) if lengths.any() else 1.0


def _shapes(row: LayerReport) -> str:
    return ", ".join(f"{outputs}x{inputs}" for outputs, inputs in row.shapes)


def _number(form: str, value: float | None, scale: float = 1) -> str:
    return "-" if value is None else form.format(value * scale)


def _share(value: float | None) -> str:
    """Three decimals, or as many as tell a share from none and from all."""
    if value is None:
        return "-"
    texts = (f"{value:.{decimals}f}" for decimals in range(3, 17))
    return next(text for text in texts if value in (0, 1) or 0 < float(text) < 1)


def _now(row: LayerReport) -> str:
    packed = "packed by gaps" if row.packed_form == "gaps" else "packed"
    sparse = packed if row.packed else "sparse"
    now = sparse if row.kept_dense is None else f"dense: {row.kept_dense}"
    if row.not_packed is not None:
        now = f"{now}; not packed: {row.not_packed}"
    return now if row.note is None else f"{now} ({row.note})"


# The columns of the text: heading, whether to align left, and what a row shows.
_COLUMNS: tuple[tuple[str, bool, Callable[[LayerReport], str]], ...] = (
    ("path", True, lambda row: row.path or "(model)"),
    ("layer", True, lambda row: row.layer),
    ("shape", False, _shapes),
    ("density", False, lambda row: _share(row.density)),
    ("imbalance", False, lambda row: _number("{:.2f}", row.imbalance)),
    ("KiB dense", False, lambda row: _number("{:.1f}", row.dense_bytes, 1 / 1024)),
    ("KiB sparse", False, lambda row: _number("{:.1f}", row.sparse_bytes, 1 / 1024)),
    ("us dense", False, lambda row: _number("{:.1f}", row.dense_seconds, 1e6)),
    ("us sparse", False, lambda row: _number("{:.1f}", row.sparse_seconds, 1e6)),
    ("KiB packed", False, lambda row: _number("{:.1f}", row.packed_bytes, 1 / 1024)),
    ("us packed", False, lambda row: _number("{:.1f}", row.packed_seconds, 1e6)),
    ("now", True, _now),
)
_OF_PACKED = ("KiB packed", "us packed")  # shown where any layer was tried with packed weights


class SparsityTable:
    """What `sparsify` found and did: ``print`` it, take its ``rows``, or ``plot`` it.

    Args:
        reports: one for each layer.

    >>> report = LayerReport("out", "Linear", ((4, 8),), 0.5, 1.0, 144, 320, 2e-6, 1e-6, None)
    >>> print(SparsityTable([report]))
    path  layer   shape  density  imbalance  KiB dense  KiB sparse  us dense  us sparse  now
    out   Linear    4x8    0.500       1.00        0.1         0.3       2.0        1.0  sparse
    """

    def __init__(self, reports: list[LayerReport]):
        self._reports = tuple(reports)

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """A dict for each layer.

        The keys are ``path``, ``layer``, ``shapes`` (outputs, inputs) of each matrix, ``density``,
        ``imbalance`` (the longest row over the mean), ``dense_bytes``, ``sparse_bytes``,
        ``dense_seconds``, ``sparse_seconds`` (of all calls in a run of the model), ``kept_dense``
        (why it was left dense, or None) and ``note``: what else is to be known of the times, why a
        layer could not be laid out for the GPU for instance, or None. ``packed_bytes`` and
        ``packed_seconds`` are those with packed weights in the faster form. That is
        ``packed_form``: "cells", or "gaps" (``cell=0`` of `jaxsparse.CSR.pack`). ``packed`` is
        whether the layer has them now, and ``not_packed`` says why it has none although they were
        asked for: because something else was faster, or they could not be tried. What was not
        measured is None.
        """
        return [asdict(report) for report in self._reports]

    def __len__(self) -> int:
        return len(self._reports)

    def __str__(self) -> str:
        tried = any(report.packed_bytes is not None for report in self._reports)
        columns = [column for column in _COLUMNS if tried or column[0] not in _OF_PACKED]
        cells = [
            [heading, *(show(report) for report in self._reports)] for heading, _, show in columns
        ]
        widths = [max(map(len, column)) for column in cells]
        lines = []
        for row in zip(*cells, strict=True):
            parts = [
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, (_, left, _) in zip(row, widths, columns, strict=True)
            ]
            lines.append("  ".join(parts).rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"SparsityTable({len(self)} layers)"

    def plot(self, *, axes: Any = None) -> Any:
        """Draws bytes and times of dense, sparse and packed layers side by side, with matplotlib.

        Returns the two axes. Packed ones are there if any was tried.

        Args:
            axes: two axes to draw into, by default those of a new figure.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError(
                "SparsityTable.plot: needs matplotlib, install it with: pip install matplotlib"
            ) from error
        if axes is None:
            size = (9, 1.2 + 0.4 * len(self))
            _, axes = plt.subplots(1, 2, sharey=True, figsize=size, layout="constrained")
        panels = (("KiB", "bytes", 1 / 1024), ("microseconds a call", "seconds", 1e6))
        tried = any(report.packed_bytes is not None for report in self._reports)
        forms = ("dense", "sparse", "packed")[: 2 + tried]
        height = 0.8 / len(forms)
        for ax, (label, quantity, scale) in zip(axes, panels, strict=True):
            for i, form in enumerate(forms):
                offset = (i - (len(forms) - 1) / 2) * height
                measured = [
                    (place + offset, scale * value)
                    for place, row in enumerate(self.rows)
                    if (value := row[f"{form}_{quantity}"]) is not None
                ]
                places, values = zip(*measured, strict=True) if measured else ((), ())
                ax.barh(places, values, height=height, label=form)
            ax.set_xlabel(label)
        labels = [row.path or "(model)" for row in self._reports]
        axes[0].set_yticks(range(len(labels)), labels)
        if not axes[0].yaxis_inverted():
            axes[0].invert_yaxis()  # the first layer on top, as in the text
        axes[1].legend()
        return axes
