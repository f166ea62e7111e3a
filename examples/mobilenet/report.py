"""The tables and the picture: accuracy against frames per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]


class Summary(NamedTuple):
    """What is shown of a result."""

    text: str
    accuracies: dict[str, list[float]]  # Of each model, in %.
    title: str


def as_text(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of columns, the first one aligned left."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        texts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "  ".join(texts).rstrip()

    return "\n".join(map(line, (heading, *rows)))


def accuracies_of(trained: Rows) -> dict[str, list[float]]:
    """The accuracies of all seeds, by model."""
    result: dict[str, list[float]] = {}
    for row in trained:
        result.setdefault(row["model"], []).append(100 * row["accuracy"])
    return result


def table_of_training(trained: Rows, measured: Rows) -> str:
    """Accuracy and frames/s of each model in each form: the columns of the paper's table IV."""
    accuracies = accuracies_of(trained)
    rows = []
    for found in measured:
        values = accuracies[found["model"]]
        rows.append(
            [
                found["model"],
                f"{np.mean(values):.2f}",
                f"{min(values):.2f} to {max(values):.2f}",
                *speed_of(found),
            ]
        )
    return as_text(["model", "accuracy %", "of seeds", *SPEED], rows)


def table_of_paper(measured: Rows, figures: dict[str, tuple[float, int]]) -> str:
    """Frames/s of the paper's models, beside the paper's own figures."""
    rows = []
    for found in measured:
        accuracy, frames = figures[found["model"]]
        rows.append([found["model"], f"{accuracy:.1f}", f"{frames:,}", *speed_of(found)])
    return as_text(["model", "ImageNet % (paper)", "V100 frames/s (paper)", *SPEED], rows)


def table_of_ratios(found: Rows) -> str:
    """Frames/s of sparse models over those of dense ones that are as accurate."""
    columns = list(dict.fromkeys(name for each in found for name in each["ratios"]))
    rows = [
        [
            f"{each['sparse']} over {each['dense']}",
            each["platform"],
            str(each["batch"]),
            *(f"{each['ratios'][x]:.2f}" if x in each["ratios"] else "" for x in columns),
            f"{each['paper']:.2f}",
        ]
        for each in found
    ]
    return as_text(["at equal accuracy", "on", "batch", *columns, "V100 (paper)"], rows)


def line_of(found: dict[str, Any]) -> str:
    """A row that was just measured."""
    low, high = found["quartiles"]
    return (
        f"{found['model']} in {found['form'].partition(' ')[2]} on {found['platform']}, batch "
        f"{found['batch']}: {found['frames_per_second']:,.0f} frames/s ({low:,.0f} to {high:,.0f})"
    )


SPEED = ("computed in", "on", "batch", "frames/s", "quartiles", "by the clock", "MB")


def speed_of(found: dict[str, Any]) -> list[str]:
    """The cells of `SPEED`."""
    low, high = found["quartiles"]
    return [
        found["form"].partition(" ")[2],
        found["platform"],
        str(found["batch"]),
        f"{found['frames_per_second']:,.0f}",
        f"{low:,.0f} to {high:,.0f}",
        f"{found['by_the_clock']:,.0f}",
        f"{found['megabytes']:.2f}",
    ]


def draw(points: Rows, accuracies: dict[str, list[float]], title: str) -> Figure:
    """Accuracy against frames/s, a panel for each device and batch, a line for each form."""
    panels = list(dict.fromkeys((x["platform"], x["batch"]) for x in points))
    figure = Figure(figsize=(1 + 4.2 * len(panels), 4.2), layout="constrained")
    figure.suptitle(title)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (platform, batch) in zip(all_axes, panels, strict=True):
        here = [x for x in points if (x["platform"], x["batch"]) == (platform, batch)]
        for form in dict.fromkeys(x["form"] for x in here):
            line = [x for x in here if x["form"] == form]
            line.sort(key=lambda x: float(np.mean(accuracies[x["model"]])))
            values = [accuracies[x["model"]] for x in line]
            means = [float(np.mean(each)) for each in values]
            spread = [
                [mean - min(each) for mean, each in zip(means, values, strict=True)],
                [max(each) - mean for mean, each in zip(means, values, strict=True)],
            ]
            axes.errorbar(
                [x["frames_per_second"] for x in line],
                means,
                yerr=spread,
                marker="o" if form.startswith("sparse") else "s",
                linestyle="-" if form.startswith("sparse") else "--",
                capsize=2,
                label=form,
            )
        axes.set_xscale("log")
        axes.set_xlabel(f"frames/s on {platform}, batch {batch}")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    all_axes[0].set_ylabel("accuracy, %")
    return figure
