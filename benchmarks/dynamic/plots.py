"""Pictures of dynamic networks: a figure over what a suite varies, or of each net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.dynamic.problems import SUITES
from benchmarks.dynamic.report import INPUTS, per_second, weight_megabytes
from benchmarks.panels import Panel
from benchmarks.published import DYNET, DYNET_SOURCE, KHORASANI, KHORASANI_SOURCE
from benchmarks.recurrent.plots import dots, lines, logarithmic
from benchmarks.recurrent.report import ways
from benchmarks.run import Row

# way -> colour and marker, the same in every picture; others one after another
STYLES: dict[str, tuple[Any, str]] = {
    "jaxsparse": ("C3", "o"),
    "jaxsparse, kernels": ("C1", "s"),
    "jaxsparse, one launch": ("C6", "X"),
    "levels by hand": ("C0", "D"),
    "our tiles by hand": ("C4", "p"),
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


class _Figure(NamedTuple):
    """What is drawn of a row, None where it has none; and its name."""

    value: Callable[[Row], float | None]
    name: str


_OF_SUITE = {
    "compile": _Figure(lambda row: row["compile_s"], "seconds of compilation"),
    "weight_loads": _Figure(weight_megabytes, f"MB of weights for {INPUTS} inputs"),
}
"""Where it is not examples a second. Every implementation is drawn: none is the fastest."""


def draw(ax: Any, panel: Panel) -> None:
    """A line for each way over what the suite varies, or a row of dots for each net."""
    suite = SUITES.get(panel.suite)
    unit = next(iter(panel.rows.values()))["unit"]
    figure = _OF_SUITE.get(panel.suite, _Figure(per_second, f"{unit} a second"))
    known = {
        key: {**row, "way": key[1]} if panel.suite in _OF_SUITE else row
        for key, row in panel.rows.items()
        if row["us"] and figure.value(row) is not None
    }
    panel = replace(panel, rows=known)
    if suite is None or suite.varies is None:
        dots(ax, panel, _styles(panel), figure.value, 0.6)  # type: ignore[arg-type]
        ax.set_xlabel(figure.name)
        return
    varies = suite.varies
    _lines(ax, panel, varies, figure.value)
    ax.set_xlabel(AXES[varies])
    ax.set_ylabel(figure.name)
    logarithmic(ax, sorted({row[varies] for row in known.values()}))


def _lines(ax: Any, panel: Panel, varies: str, value: Callable[[Row], Any]) -> None:
    def rest(row: Row) -> tuple[Any, ...]:
        return tuple(row[field] for field in ("model", *AXES) if field != varies)

    lines(ax, panel, _styles(panel), rest, lambda row: (row[varies], value(row)))
    recorded, source = _recorded(panel)
    if varies == "batch" and recorded:
        ax.plot(*np.array(recorded).T, "k--", marker="*", label=source)


def _recorded(panel: Panel) -> tuple[list[tuple[float, float]], str]:
    """Figures of others, by batch, and whose they are."""
    if panel.suite == "weight_loads":
        loads = KHORASANI["weight_loads"].items()
        return sorted((batch, float(text)) for batch, text in loads), KHORASANI_SOURCE
    if panel.passed not in ("training", "end_to_end"):
        return [], ""
    models = {row["model"] for row in panel.rows.values()}
    return sorted((b, rate) for (model, b), rate in DYNET.items() if model in models), DYNET_SOURCE
