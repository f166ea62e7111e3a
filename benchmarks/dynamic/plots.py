"""Pictures of dynamic networks: graphs a second over what a suite varies, or of each net."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.dynamic.problems import SUITES
from benchmarks.dynamic.report import per_second
from benchmarks.panels import Panel
from benchmarks.published import DYNET, DYNET_SOURCE
from benchmarks.recurrent.plots import dots, lines, logarithmic
from benchmarks.recurrent.report import ways
from benchmarks.run import Row

# way -> colour and marker, the same in every picture; others one after another
STYLES: dict[str, tuple[Any, str]] = {
    "jaxsparse": ("C3", "o"),
    "jaxsparse, kernels": ("C1", "s"),
    "levels by hand": ("C0", "D"),
    "loop, JAX's gradient": ("C9", "d"),
    "padded, jax.lax.scan": ("C5", "^"),
    "padded, jaxsparse": ("C8", "P"),
    "PyTorch by levels": ("C2", "v"),
}
AXES = {"batch": "batch", "hidden": "units"}


def _styles(panel: Panel) -> dict[str, tuple[Any, str]]:
    others = (way for way in ways(panel) if way not in STYLES)
    more = {way: (f"C{i % 10}", "x") for i, way in enumerate(others)}
    return {**STYLES, **more}


def draw(ax: Any, panel: Panel) -> None:
    """A line for each way over what the suite varies, or a row of dots for each net."""
    suite = SUITES.get(panel.suite)
    unit = next(iter(panel.rows.values()))["unit"]
    if suite is None or suite.varies is None:
        dots(ax, panel, _styles(panel), per_second, 0.6)
        ax.set_xlabel(f"{unit} a second")
        return
    varies = suite.varies
    _lines(ax, panel, varies)
    ax.set_xlabel(AXES[varies])
    ax.set_ylabel(f"{unit} a second")
    logarithmic(ax, sorted({row[varies] for row in panel.rows.values()}))


def _lines(ax: Any, panel: Panel, varies: str) -> None:
    def rest(row: Row) -> tuple[Any, ...]:
        return tuple(row[field] for field in ("model", *AXES) if field != varies)

    lines(ax, panel, _styles(panel), rest, lambda row: (row[varies], per_second(row)))
    first = next(iter(panel.rows.values()))
    recorded = sorted((b, rate) for (model, b), rate in DYNET.items() if model == first["model"])
    if varies == "batch" and panel.passed in ("training", "end_to_end") and recorded:
        ax.plot(*np.array(recorded).T, "k--", marker="*", label=DYNET_SOURCE)
