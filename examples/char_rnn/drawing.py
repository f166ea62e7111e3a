"""The picture: scores against density and size, learning curves, and speed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..common.files import replacing
from .throughput import FORMS, PROGRAMS

BITS = "bits per character, held out"
# The marker and the line of dense models (None) and of those pruned to a structure.
STYLES = {None: "o-", "row_balanced": "s--", "unstructured": "^:", "refilled": "v-."}


def draw(path: Path, results: list[dict[str, Any]], pruning: tuple[int, int]) -> None:
    """Draws the results; ``pruning`` are the first and the last step that prune."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplot_mosaic([["density", "size"], ["curves", "speed"]])
    _draw_density(axes["density"], results)
    _draw_size(axes["size"], results)
    _draw_curves(axes["curves"], results, pruning)
    _draw_speed(axes["speed"], results)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120)


def _draw_density(ax: Any, results: list[dict[str, Any]]) -> None:
    """One line for each number of units and each structure, to the dense model of these units."""
    for i, units in enumerate(sorted({x["hidden"] for x in results})):
        alike = [x for x in results if x["hidden"] == units]
        found = {x["structure"] for x in alike} - {None}
        for structure in sorted(found) or [None]:
            line = [x for x in alike if x["structure"] in (None, structure)]
            line.sort(key=lambda x: x["density"])
            densities = [100 * x["density"] for x in line]
            style, label = STYLES[structure], f"{units} units, {structure or 'dense'}"
            scores = [x["bits_per_character"] for x in line]
            ax.plot(densities, scores, style, color=f"C{i}", label=label)
    ax.set_xscale("log")
    ticks = sorted({100 * x["density"] for x in results})
    ax.set_xticks(ticks, [f"{tick:.3g} %" for tick in ticks])
    ax.minorticks_off()
    ax.set(xlabel="density", ylabel=BITS)
    ax.grid(alpha=0.3)
    ax.legend()


def _draw_size(ax: Any, results: list[dict[str, Any]]) -> None:
    """Dense and sparse models at their effective units: one above another is equally large."""
    for structure, style in STYLES.items():
        chosen = [x for x in results if x["structure"] == structure]
        chosen.sort(key=lambda x: x["effective_units"])
        points = [(x["effective_units"], x["bits_per_character"]) for x in chosen]
        # A line joins dense models alone: sparse ones of other units are no series.
        style = style if structure is None else style[0]
        if points:
            ax.plot(*zip(*points, strict=True), style, label=structure or "dense")
    order = sorted(results, key=lambda x: (x["effective_units"], -x["bits_per_character"]))
    for _, alike in itertools.groupby(order, key=lambda x: round(x["effective_units"])):
        for i, result in enumerate(alike):
            # One below the other, as models of equal size may score alike. The marker shows the
            # structure.
            place = (6, 8 - 11 * i)
            point = (result["effective_units"], result["bits_per_character"])
            name = result["name"].removesuffix(f":{result['structure']}")
            ax.annotate(name, point, textcoords="offset points", xytext=place)
    ax.margins(0.15)  # Room for the names.
    ax.set(xlabel="effective units: of a dense layer with as many weights", ylabel=BITS)
    ax.grid(alpha=0.3)
    ax.legend()


def _draw_curves(ax: Any, results: list[dict[str, Any]], pruning: tuple[int, int]) -> None:
    for result in results:
        curve = result["curve"][1:]  # The first point is the guess of an untrained model.
        style = STYLES[result["structure"]]
        steps, scores = [x["step"] for x in curve], [x["held_out"] for x in curve]
        ax.plot(steps, scores, style, label=result["name"], markersize=4)
    ax.axvspan(*pruning, alpha=0.1, color="grey", label="pruned every half epoch")
    ax.set(xlabel="step", ylabel=BITS)
    ax.grid(alpha=0.3)
    ax.legend()


def _draw_speed(ax: Any, results: list[dict[str, Any]]) -> None:
    """Groups of bars: of each model what its forms process, at the largest batch."""
    batch = max(results[0]["tokens_per_second"], key=int)
    width = 0.8 / (len(FORMS) * len(PROGRAMS))
    for i, program in enumerate(PROGRAMS):
        for j, form in enumerate(FORMS):
            measured = [
                (place, speed)
                for place, result in enumerate(results)
                if (speed := result["tokens_per_second"][batch][program].get(form)) is not None
            ]
            if not measured:
                continue
            places, speeds = map(np.array, zip(*measured, strict=True))
            ax.bar(
                places + (i * len(FORMS) + j - 2.5) * width,
                speeds,
                width,
                color=f"C{j}",
                alpha=1 if program == "inference" else 0.5,
                label=f"{form}, {program}",
            )
    ax.set_yscale("log")
    names = [x["name"].replace(":", "\n") for x in results]
    ax.set_xticks(range(len(results)), names, fontsize="small")
    ax.set(ylabel=f"tokens per second, {batch} streams")
    ax.grid(alpha=0.3, axis="y")
    ax.legend(fontsize="small", ncols=2)
