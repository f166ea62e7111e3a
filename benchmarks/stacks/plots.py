"""Pictures of stacks: throughput over what a suite varies, or milliseconds of each stack."""

from __future__ import annotations

from typing import Any

from benchmarks.panels import Panel
from benchmarks.recurrent.plots import dots, lines, logarithmic
from benchmarks.run import Row
from benchmarks.stacks.ladder import RUNGS
from benchmarks.stacks.problems import SUITES
from benchmarks.stacks.report import teraflops

# way -> colour and marker, the same in every picture; rungs from light to dark
STYLES: dict[str, tuple[Any, str]] = {
    "jaxsparse": ("C3", "o"),
    "jaxsparse, layer by layer": ("C1", "s"),
    "jaxsparse, forced": ("C8", "."),
    "jaxsparse, the batch over 2 devices": ("C3", "P"),
    "jaxsparse, the layers over 2 devices": ("C3", "p"),
    "jax.lax.scan, layer by layer": ("C0", "D"),
    "jax.lax.scan, wavefront": ("C9", "d"),
    "flax.nnx.RNN": ("C5", "*"),
    "jax.experimental.rnn": ("C6", "X"),
    "cuDNN by PyTorch": ("C2", "v"),
    "cuDNN, forced": ("C4", "^"),
    **{
        f"{rung}{launched}": (str(0.85 - 0.06 * at), marker)
        for launched, marker in (("", "1"), (", graph", "2"))
        for at, rung in enumerate(RUNGS)
    },
}

# what a suite varies -> the axis' label
AXES = {"hidden": "units", "batch": "batch"}


def draw(ax: Any, panel: Panel) -> None:
    """Lines over what the suite varies, or a row of dots for each stack."""
    suite = SUITES.get(panel.suite)
    if suite is None or suite.varies is None:
        dots(ax, panel, STYLES, lambda row: row["us"] / 1e3, 0.6)
        ax.set_xlabel("milliseconds")
    else:
        _lines(ax, panel, suite.varies)


def _lines(ax: Any, panel: Panel, varies: str) -> None:
    """A line for each way and each of what does not vary along it."""

    def rest(row: Row) -> tuple[Any, ...]:
        return tuple(
            row[field]
            for field in ("cell", "layers", "batch", "hidden", "length", "state_dtype")
            if field != varies
        )

    lines(ax, panel, STYLES, rest, lambda row: (row[varies], teraflops(row)))
    ax.set_xlabel(AXES[varies])
    ax.set_ylabel("TFLOP/s")
    logarithmic(ax, sorted({row[varies] for row in panel.rows.values()}))
