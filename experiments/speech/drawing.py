"""The picture: error rates against skip and depth, and while training."""

from __future__ import annotations

from collections import Counter
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .report import PAPER


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draws the models of the commonest depth by skip, those of the commonest skip by depth."""
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    skips, depths, curves = figure.subplots(1, 3)
    depth = Counter(row["layers"] for row in rows).most_common(1)[0][0]
    # A skip that occurs in several depths; without skips is one, too, if there is no other.
    skip = Counter(row["skip"] for row in rows if row["skip"]).most_common(1)
    skip = skip[0][0] if skip else 0
    _draw_rates(skips, [row for row in rows if row["layers"] == depth], "skip")
    skips.set(title=f"{depth} layers", xlabel="skip, in layers (0: none)")
    _draw_rates(depths, [row for row in rows if row["skip"] == skip], "layers")
    depths.set(title=f"skips of {skip}" if skip else "no skips", xlabel="layers")
    _draw_curves(curves, rows)
    return figure


def _draw_rates(ax: Any, rows: list[dict[str, Any]], key: str) -> None:
    rows = sorted(rows, key=lambda row: row[key])
    for i, (rate, label) in enumerate((("cer", "characters"), ("wer", "words"))):
        places = [row[key] for row in rows]
        ax.plot(places, [100 * row[rate] for row in rows], "-", color=f"C{i}", label=label)
        for row in rows:
            values = [100 * run[rate] for run in row["runs"]]
            ax.plot([row[key]] * len(values), values, "o", color=f"C{i}", alpha=0.6)
    paper = [(row[key], PAPER[row["name"]]) for row in rows if row["name"] in PAPER]
    if paper:
        label = "words, the paper's data"
        ax.plot(*zip(*paper, strict=True), "x--", color="grey", label=label)
    ax.set(ylabel="error rate, %", ylim=(0, None))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(alpha=0.3)
    ax.legend()


def _draw_curves(ax: Any, rows: list[dict[str, Any]]) -> None:
    """A line for each run, in one colour for each model."""
    shades = matplotlib.colormaps["viridis"]
    for i, row in enumerate(rows):
        label = row["name"]
        for run in row["runs"]:
            curve = run["curve"]
            if not curve:  # Diverged.
                continue
            colour = shades(0.95 * i / max(1, len(rows) - 1))
            steps, rates = [x["step"] for x in curve], [100 * x["cer"] for x in curve]
            ax.plot(steps, rates, color=colour, label=label)
            label = None  # One entry in the legend.
    ax.set(xlabel="step", ylabel="error rate, %", title="characters, while training")
    ax.set_ylim(0, 110)
    ax.grid(alpha=0.3)
    if ax.lines:
        ax.legend(title="layers:skip", fontsize="small")
