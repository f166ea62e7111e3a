"""The tables and the pictures of what was measured."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"dense": "C7", "CSR": "C1", "packed": "C0", "fastest": "C2"}


def percent(sparsity: float) -> str:
    """A sparsity as text, or that there is none."""
    return f"{100 * sparsity:g} %" if sparsity else "dense"


def rows_of(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured, a row for each form of each model."""
    return [
        {"sparsity": model["sparsity"], "form": form, **measured}
        for model in models
        for form, measured in model["forms"].items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Sparsity, form, and what each row has of perplexity, speed and bytes."""
    most = max(row["bytes"] for row in rows if row["form"] == "dense")
    headings = ["sparsity", "form", "perplexity", "ms a step", "tokens/s", "MB", "of dense"]
    headings += ["packed by"]
    cells = [
        [
            percent(row["sparsity"]),
            row["form"],
            f"{row['perplexity']:.3f}" if "perplexity" in row else "",
            f"{row['milliseconds']:.3f}" if "milliseconds" in row else "",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['bytes'] / 1e6:,.2f}",
            f"{row['bytes'] / most:.0%}",
            row.get("packed_by", ""),
        ]
        for row in rows
    ]
    columns = [column for column in zip(headings, *cells, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in zip(*columns, strict=True)
    )


def draw(models: list[dict[str, Any]], pruning: tuple[int, int]) -> Figure:
    """Draws learning curves, and perplexity, speed and size of the forms by sparsity."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    curves, speeds, sizes = figure.subplots(1, 3)
    for i, model in enumerate(models):
        points = [(x["step"], x["held_out"]) for x in model["curve"]]
        steps, losses = zip(*points, strict=True)
        curves.plot(steps, losses, color=f"C{i}", label=percent(model["sparsity"]))
    curves.axvspan(*pruning, alpha=0.12, color="grey", linewidth=0, label="masks change")
    curves.set(title="held out, nats per token", xlabel="step")
    curves.grid(alpha=0.3)
    curves.legend()
    rows = rows_of(models)
    draw_bars(speeds, rows, "tokens_per_second", 1, "tokens/s of decoding")
    draw_bars(sizes, rows, "bytes", 1e-6, "MB of the model")
    return figure


def draw_shapes(title: str, rows: list[dict[str, Any]]) -> Figure:
    """Draws the speed and the size of all forms by sparsity."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    speeds, sizes = figure.subplots(1, 2)
    figure.suptitle(title)
    draw_bars(speeds, rows, "tokens_per_second", 1, "tokens/s of its products")
    draw_bars(sizes, rows, "bytes", 1e-9, "GB of weights")
    return figure


def draw_bars(ax: Axes, rows: list[dict[str, Any]], name: str, scale: float, title: str) -> None:
    """Draws a bar for each form at each sparsity, of what the rows have by a name."""
    sparsities = sorted({row["sparsity"] for row in rows})
    forms = [form for form in COLOURS if any(row["form"] == form for row in rows)]
    width = 0.8 / len(forms)
    for i, form in enumerate(forms):
        bars = [
            (sparsities.index(row["sparsity"]) + (i - (len(forms) - 1) / 2) * width, row[name])
            for row in rows
            if row["form"] == form
        ]
        places, heights = zip(*bars, strict=True)
        ax.bar(places, [scale * x for x in heights], width, color=COLOURS[form], label=form)
    ax.set_xticks(range(len(sparsities)), [percent(x) for x in sparsities])
    ax.set(title=title, xlabel="sparsity")
    ax.grid(axis="y", alpha=0.3)
    ax.legend()
