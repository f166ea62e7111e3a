"""Pictures of recurrent scans: microseconds a step, above what the exchange of the state takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.panels import Panel
from benchmarks.recurrent.problems import SUITES, Suite
from benchmarks.recurrent.report import fastest, step_us, ways
from benchmarks.run import Row

# way -> colour and marker, the same in every picture
STYLES = {
    "jaxsparse": ("C3", "o"),
    "jaxsparse, dense": ("C1", "s"),
    "jaxsparse, forced": ("C8", "."),
    "plain": ("C3", "1"),
    "wide-loads": ("C3", "2"),
    "bank-aware": ("C3", "3"),
    "data-flags": ("C3", "4"),
    "jax.lax.scan": ("C0", "D"),
    "cuDNN by PyTorch": ("C2", "v"),
    "cuDNN, forced": ("C4", "^"),
    "graph of cuBLAS": ("C5", "P"),
    "graph of cuSPARSE": ("C6", "X"),
}

# what a suite varies -> the axis' label, and the value of a row
AXES: dict[str, tuple[str, Callable[[Row], float]]] = {
    "density": ("weights stored, %", lambda row: 100 * (1 - row["sparsity"])),
    "hidden": ("units", lambda row: row["hidden"]),
    "batch": ("batch", lambda row: row["batch"]),
    "length": ("steps", lambda row: row["length"]),
}


def draw(ax: Any, panel: Panel) -> None:
    """A line for each way over what the suite varies, or a row of dots for each layer."""
    suite = SUITES.get(panel.suite)
    if suite is None or suite.varies is None:
        _layers(ax, panel)
    else:
        _lines(ax, panel, suite, suite.varies)


def _lines(ax: Any, panel: Panel, suite: Suite, varies: str) -> None:
    label, value = AXES[varies]

    def point(row: Row, us: float) -> tuple[float, float]:
        flops = 2 * row["nnz"] * row["batch"]
        return value(row), flops / us / 1e6 if suite.throughput else us

    for way in ways(panel):
        rows = [row for p in panel.problems if (row := fastest(panel, p, way))]
        points = sorted(point(row, step_us(row)) for row in rows)
        if points:
            colour, marker = STYLES[way]
            ax.plot(*np.array(points).T, color=colour, marker=marker, label=way)
    first = list({problem: row for (problem, _), row in panel.rows.items()}.values())
    floors = sorted(point(row, row["floor_us"]) for row in first if row["floor_us"])
    if floors:
        name = "at the exchange floor" if suite.throughput else "exchange floor"
        ax.plot(*np.array(floors).T, color="black", linestyle="--", label=name)
    ax.set_xlabel(label)
    ax.set_ylabel("TFLOP/s" if suite.throughput else "microseconds a step")
    logarithmic(ax, sorted({value(row) for row in first}))


def _layers(ax: Any, panel: Panel) -> None:
    heights = dots(ax, panel, STYLES, step_us, 0.4)
    floors = {heights[p]: row["floor_us"] for (p, _), row in panel.rows.items() if row["floor_us"]}
    if floors:
        ys, xs = np.array(list(floors.items())).T
        ax.vlines(xs, ys - 0.4, ys + 0.4, color="black", label="exchange floor")
    ax.set_xlabel("microseconds a step")


def dots(
    ax: Any,
    panel: Panel,
    styles: Mapping[str, tuple[Any, str]],
    value: Callable[[Row], float],
    spread: float,
) -> dict[str, int]:
    """A row of dots for each problem, one for each way; returns their heights.

    Args:
        styles: colour and marker of each way.
        value: where a row's dot is.
        spread: of a row's dots in height, or equal values would hide each other.
    """
    heights = {problem: -i for i, problem in enumerate(panel.problems)}
    drawn = ways(panel)
    for i, way in enumerate(drawn):
        lower = spread * ((i + 0.5) / len(drawn) - 0.5)
        rows = [(heights[p] - lower, fastest(panel, p, way)) for p in panel.problems]
        points = [(value(row), y) for y, row in rows if row]
        if points:
            colour, marker = styles[way]
            ax.plot(*np.array(points).T, marker, color=colour, label=way, alpha=0.85)
    ax.set_xscale("log")
    plain_numbers(ax.xaxis)
    ax.set_yticks(list(heights.values()), told_apart(list(heights)))
    ax.grid(axis="x", alpha=0.3)
    return heights


def lines(
    ax: Any,
    panel: Panel,
    styles: Mapping[str, tuple[Any, str]],
    rest: Callable[[Row], tuple[Any, ...]],
    point: Callable[[Row], tuple[float, float]],
) -> None:
    """A line for each way and each of what does not vary along it.

    Args:
        styles: colour and marker of each way.
        rest: what is the same along a line.
        point: where a row's figure is.
    """
    drawn: set[str] = set()
    for way in ways(panel):
        rows = [row for p in panel.problems if (row := fastest(panel, p, way))]
        colour, marker = styles[way]
        for _, group in itertools.groupby(sorted(rows, key=rest), key=rest):
            name = way if way not in drawn else None
            drawn.add(way)
            points = np.array(sorted(map(point, group)))
            ax.plot(*points.T, color=colour, marker=marker, label=name, alpha=0.7)


def logarithmic(ax: Any, shown: Sequence[float]) -> None:
    """Makes both axes so, with the values that are shown on the horizontal one."""
    ax.set_xscale("log")
    ax.set_xticks(shown, tick_labels(shown))
    ax.set_xticks([], minor=True)
    ax.set_yscale("log")
    plain_numbers(ax.yaxis)
    ax.grid(alpha=0.3)


def told_apart(names: list[str]) -> list[str]:
    """Without what is in all of them; densities, batches and lengths spelled out."""
    parts = [name.split("_") for name in names]
    shared = set.intersection(*map(set, parts)) if len(names) > 1 else set()
    return [" ".join(_spelled(part) for part in name if part not in shared) for name in parts]


def _spelled(part: str) -> str:
    match = re.fullmatch(r"([dbt])([0-9.]+)", part)
    if match is None:
        return part
    kind, number = match.groups()
    if kind == "d":
        return f"({100 * float(number):g} %)"
    return f"batch {number}" if kind == "b" else f"{number} steps"


def tick_labels(values: Sequence[float]) -> list[str]:
    """On a logarithmic axis; empty where one would touch the one before it."""
    labels, last, least = [], 0.0, (values[-1] / values[0]) ** 0.07
    for x in values:
        labels.append("" if x < last * least else f"{x:.2g}" if x < 100 else f"{x:g}")
        last = x if labels[-1] else last
    return labels


def plain_numbers(axis: Any) -> None:
    """1, 2, 5, 10 instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
