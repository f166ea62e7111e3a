"""Pictures of results: lines, points and bars, as suits the suite. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.dynamic import plots as dynamic
from benchmarks.panels import OURS, Panel, geometric_mean, panels, teraflops
from benchmarks.published import SOURCE, UNEVEN_ROWS, over_cusparse, without_technique
from benchmarks.recurrent import plots as recurrent
from benchmarks.run import Row
from benchmarks.stacks import plots as stacks

FORMATS = (".png", ".svg", ".pdf")
MISSING = "needs matplotlib: pip install matplotlib"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws every suite and operation, a panel for each pass, and writes the picture.

    Raises:
        ValueError: if there is nothing to draw.
        ModuleNotFoundError: without matplotlib.
    """
    if not available():
        raise ModuleNotFoundError(f"plot {MISSING}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [panel for panel in panels(rows) if any(r["us"] for r in panel.rows.values())]
    if not drawn:
        raise ValueError("plot: nothing was measured")
    groups: dict[tuple[str, str], list[Panel]] = {}
    for panel in drawn:
        groups.setdefault((panel.suite, panel.operation), []).append(panel)
    labels = dict.fromkeys(label for panel in drawn for label in panel.labels)
    colours = {label: f"C{i % 10}" for i, label in enumerate(labels)}
    lines = list(groups.values())
    if len(lines) == len(drawn) > 2:  # of one pass each: two in a line
        lines = [drawn[i : i + 2] for i in range(0, len(drawn), 2)]
    columns = max(len(line) for line in lines)
    figure = Figure(figsize=(8 * columns, 5 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(lines), columns, squeeze=False)
    for axes, group in zip(grid, lines, strict=True):
        for ax in axes[len(group) :]:
            ax.set_axis_off()
        for ax, panel in zip(axes, group, strict=False):
            if panel.operation in OWN:
                OWN[panel.operation](ax, panel)
            else:
                ax.set_ylabel("microseconds")
                DRAWINGS.get(panel.suite, _bars)(ax, panel, colours)
            ax.set_title(panel.title)
            ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def _crossover(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    """A line for each sparse implementation and n; what is dense takes the same time throughout."""
    sizes = list(dict.fromkeys(row["n"] for row in panel.rows.values()))
    for label, (size, marker) in itertools.product(
        panel.labels, zip(sizes, itertools.cycle("os^Dv"), strict=False)
    ):
        points = sorted(
            (1 - row["sparsity"], row["us"])
            for (_, name), row in panel.rows.items()
            if (name, row["n"]) == (label, size) and row["us"] and row["sparsity"] < 1
        )
        if not points:
            continue
        density, us = np.array(points).T
        style = {
            "color": colours[label],
            "label": label if len(sizes) == 1 else f"{label}, n = {size}",
        }
        if label.startswith("dense"):
            ax.axhline(np.median(us), linestyle="--", **style)
        else:
            ax.plot(density, us, marker=marker, **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.invert_xaxis()
    shown = sorted({round(row["sparsity"], 3) for row in panel.rows.values() if row["us"]})
    ax.set_xticks([1 - s for s in shown if s < 1], [f"{100 * s:g}" for s in shown if s < 1])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("sparsity, %")


def _imbalance(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    """Throughput against the variation of row lengths, of that with equal rows."""
    sizes = list(dict.fromkeys(_even(row) for row in panel.rows.values()))
    for label, (size, marker) in itertools.product(
        panel.labels, zip(sizes, itertools.cycle("os^Dv"), strict=False)
    ):
        points = sorted(
            (float(row["problem"].rpartition("_v")[2]), row["nnz"] / row["us"])
            for (_, name), row in panel.rows.items()
            if (name, _even(row)) == (label, size) and row["us"]
        )
        if not points or points[0][0] != 0:
            continue
        variation, throughput = np.array(points).T
        name = label if len(sizes) == 1 else f"{label}, {size}"
        shares = 100 * throughput / throughput[0]
        ax.plot(variation, shares, marker=marker, color=colours[label], label=name)
    if (panel.operation, panel.passed) == ("spmm", "forward"):
        for (order, share), style in zip(UNEVEN_ROWS.items(), (":", "--"), strict=True):
            label = f"{SOURCE}, s0.75: {order}"
            ax.axhline(share, color="black", linewidth=0.8, linestyle=style, label=label)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("coefficient of variation of row lengths")
    ax.set_ylabel("throughput, % of that with equal rows")


def _even(row: Row) -> str:
    """A problem's name without the variation."""
    return str(row["problem"]).rpartition("_v")[0]


_MOST_BARS = 16
_MOST_LETTERS = 24


def _bars(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    """Grouped bars by problem; of more problems than fit, the geometric mean."""
    means = len(panel.problems) > _MOST_BARS
    groups = [panel.problems] if means else [(problem,) for problem in panel.problems]
    width = 0.8 / len(panel.labels)
    for i, label in enumerate(panel.labels):
        figures = [[us for p in group if (us := panel.us(p, label))] for group in groups]
        heights = [geometric_mean(known) or 0.0 for known in figures]
        positions = np.arange(len(groups)) + (i - (len(panel.labels) - 1) / 2) * width
        ax.bar(positions, heights, width, color=colours[label], label=label)
    ax.set_yscale("log")
    names = [
        name if len(name) <= _MOST_LETTERS else f"…{name[-_MOST_LETTERS:]}" for (name, *_) in groups
    ]
    if means:
        names = [f"geometric mean of {len(panel.problems)} problems"]
    ax.set_xticks(range(len(groups)), names)
    if len(groups) > 3:
        ax.tick_params(axis="x", rotation=30)
        for tick in ax.get_xticklabels():
            tick.set_ha("right")


def _by_size(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    """A point for each problem: throughput against multiply-adds; bars where there are none."""
    points: dict[str, list[tuple[float, float]]] = {}
    for (_, label), row in panel.rows.items():
        rate = teraflops(row)
        if rate is not None:
            points.setdefault(label, []).append((row["nnz"] * row["n"], rate))
    if not points:
        _bars(ax, panel, colours)
        return
    for label, both in points.items():
        ax.plot(*zip(*sorted(both), strict=True), ".", color=colours[label], label=label)
        published = over_cusparse(panel, label)
        if published is not None and published.teraflops is not None:
            about = label.replace(OURS, f"the most of {SOURCE}")
            style = {"linewidth": 0.8, "linestyle": "--", "color": colours[label]}
            ax.axhline(published.teraflops, label=about, **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("stored entries by columns")
    ax.set_ylabel("throughput of stored entries, TFLOP/s")


def _networks(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    """What is left of throughput without techniques, if that was measured; else by size."""
    ablations = [(base, x) for base, without in panel.ablations().items() for x in without]
    if not ablations:
        _by_size(ax, panel, colours)
        return
    groups, width = panel.groups(), 0.8 / len(ablations)
    published: list[tuple[float, float]] = []
    for i, (base, label) in enumerate(ablations):
        shares = [geometric_mean(panel.speedups(label, base, g)) for g in groups.values()]
        positions = np.arange(len(groups)) + (i - (len(ablations) - 1) / 2) * width
        heights = [100 * (share or 0.0) for share in shares]
        ax.bar(positions, heights, width, color=colours[label], label=label)
        theirs = without_technique(panel, label)
        published += [(x, theirs[g]) for x, g in zip(positions, groups, strict=True) if g in theirs]
    if published:
        ax.plot(*zip(*published, strict=True), "k_", markersize=15, label=SOURCE)
    ax.axhline(100, color="black", linewidth=0.8)
    ax.set_xticks(range(len(groups)), groups)
    bases = dict.fromkeys(base for base, _ in ablations)
    ax.set_ylabel(f"throughput, % of that of {' and '.join(bases)}")


# operation -> how it is drawn, whatever the suite
OWN: dict[str, Callable[[Any, Panel], None]] = {
    "recurrent": recurrent.draw,
    "recurrent_stack": stacks.draw,
    "dynamic": dynamic.draw,
}

# suite -> how it is drawn; others as bars
DRAWINGS: dict[str, Callable[[Any, Panel, dict[str, str]], None]] = {
    "crossover": _crossover,
    "imbalance": _imbalance,
    "files": _by_size,
    "networks": _networks,
    "dlmc": _networks,
}
