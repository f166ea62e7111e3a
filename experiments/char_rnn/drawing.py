"""The picture: scores against size and density, learning curves, and speed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from examples.char_rnn.model import DEFAULT_STRUCTURE
from examples.common.program import replacing

from .report import streams
from .throughput import FORMS, PROGRAMS

BITS = "bits per character, held out"
# The marker and the line of dense models (None) and of those pruned to a structure.
STYLES = {None: "o-", "row_balanced": "s--", "unstructured": "^:", "refilled": "v-."}
FORM_COLOURS = dict(zip(FORMS, ("grey", "C0", "C1"), strict=True))
# The line, and the inside of its markers if it is not of the form's colour.
PROGRAM_STYLES = dict(zip(PROGRAMS, (("-", {}), ("--", {"mfc": "white"})), strict=True))
NAME_SIZE = 8  # Of what is written beside points, in points.


def draw(path: Path, results: list[dict[str, Any]], pruning: tuple[int, int]) -> None:
    """Draws the results; ``pruning`` are the first and the last step that prune."""
    figure = Figure(figsize=(14.5, 9), layout=ConstrainedLayoutEngine(w_pad=0.1))
    above, below = figure.subfigures(2)
    units = sorted({x["hidden"] for x in results})
    shades = matplotlib.colormaps["plasma"]
    colours = {h: shades(0.85 * i / max(1, len(units) - 1)) for i, h in enumerate(units)}
    size, density, curves = above.subplots(1, 3)
    _draw_size(size, results, colours)
    _draw_density(density, results, colours)
    _draw_curves(curves, results, colours, pruning)
    _legend(above, _score_handles(results, colours))
    batches = sorted(results[0]["tokens_per_second"], key=int, reverse=True)
    for ax, batch in zip(below.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        _draw_speed(ax, results, batch)
    _legend(below, _speed_handles(results))
    # Names are moved apart once all else is in its place.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    _name_sizes(size, results)
    _name_curves(curves, results, colours)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=85, pil_kwargs={"optimize": True})


def _draw_size(ax: Any, results: list[dict[str, Any]], colours: dict[int, Any]) -> None:
    """Dense and sparse models at their effective units: one above another is equally large."""
    dense = sorted((x for x in results if x["structure"] is None), key=lambda x: x["hidden"])
    # A line joins dense models alone: sparse ones of other units are no series.
    ax.plot(
        [x["effective_units"] for x in dense],
        [x["bits_per_character"] for x in dense],
        color="grey",
        zorder=1,
    )
    for x in results:
        _mark(ax, x["effective_units"], x, colours)
    # Sizes of dense models first: they are round.
    _log_axis(ax, [x["effective_units"] for x in (*dense, *results)], "{:.0f}")
    ax.margins(x=0.15, y=0.12)  # Room for the names.
    ax.set(xlabel="effective units: of a dense layer with as many recurrent weights", ylabel=BITS)
    ax.set_title("Scores by number of weights")
    ax.grid(alpha=0.3)


def _draw_density(ax: Any, results: list[dict[str, Any]], colours: dict[int, Any]) -> None:
    """One line for each number of units and each structure, to the dense model of these units."""
    for units, colour in colours.items():
        alike = sorted((x for x in results if x["hidden"] == units), key=lambda x: x["density"])
        for structure in sorted({x["structure"] for x in alike} - {None}):
            line = [x for x in alike if x["structure"] in (None, structure)]
            ax.plot(
                [100 * x["density"] for x in line],
                [x["bits_per_character"] for x in line],
                STYLES[structure][1:],
                color=colour,
                zorder=1,
            )
        for x in alike:
            _mark(ax, 100 * x["density"], x, colours)
    _log_axis(ax, sorted({100 * x["density"] for x in results}), "{:.3g}")
    ax.set(xlabel="density: % of the weights that are kept", ylabel=BITS)
    ax.set_title("Scores by density, lines of equal units")
    ax.grid(alpha=0.3)


def _draw_curves(
    ax: Any, results: list[dict[str, Any]], colours: dict[int, Any], pruning: tuple[int, int]
) -> None:
    for x in results:
        steps, scores = _curve(x)
        ax.plot(steps, scores, STYLES[x["structure"]], color=colours[x["hidden"]], markersize=4)
    ax.axvspan(*pruning, alpha=0.1, color="grey", linewidth=0)
    ax.text(
        sum(pruning) / 2,
        0.98,
        "masks change",
        transform=ax.get_xaxis_transform(),
        ha="center",
        va="top",
        fontsize=NAME_SIZE,
    )
    last = max(_curve(x)[0][-1] for x in results)
    ax.set_xlim(0, 1.35 * last)  # Room for the names.
    ax.set_xticks([x for x in MaxNLocator(6).tick_values(0, last) if x <= last])
    ax.set_yscale("log")
    ax.margins(y=0.1)
    ax.yaxis.set(major_locator=MaxNLocator(7), minor_locator=NullLocator())
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.set(xlabel="step", ylabel=BITS)
    ax.set_title("Scores while training")
    ax.grid(alpha=0.3)


def _draw_speed(ax: Any, results: list[dict[str, Any]], batch: str) -> None:
    """What each form processes by number of units; a line goes through the mean of these units."""
    ratios = []
    for program, (dashes, inside) in PROGRAM_STYLES.items():
        speeds = [(x["hidden"], x["tokens_per_second"][batch][program]) for x in results]
        for form, colour in FORM_COLOURS.items():
            points = sorted((units, speed[form]) for units, speed in speeds if form in speed)
            if not points:
                continue
            ax.plot(*zip(*points, strict=True), "os"[form == "sparse"], color=colour, **inside)
            if form != "sparse":  # Sparse models of different densities are no series.
                means = [(k, _mean(y for _, y in g)) for k, g in groupby(points, lambda x: x[0])]
                ax.plot(*zip(*means, strict=True), dashes, color=colour, zorder=1)
        gains = [speed["dense"] / speed["jax.lax.scan"] for _, speed in speeds]
        ratios.append(f"{program} {min(gains):.1f} to {max(gains):.1f}")
    _log_axis(ax, sorted({x["hidden"] for x in results}), "{:.0f}")
    ax.set_yscale("log")
    ax.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
    ax.yaxis.set_major_formatter(EngFormatter())
    ax.set(xlabel="units", ylabel="tokens per second")
    title = f"{streams(batch)}: speed of dense over that of {FORMS[0]}"
    ax.set_title(f"{title}\n{', '.join(ratios)}", fontsize="medium")
    ax.grid(alpha=0.3)


def _name_sizes(ax: Any, results: list[dict[str, Any]]) -> None:
    """Names sparse models, those of one size one above the other, and below the line dense ones."""
    order = sorted(results, key=lambda x: (round(x["effective_units"]), x["bits_per_character"]))
    middle = ax.transAxes.transform((0.6, 0))[0]
    options = {"textcoords": "offset points", "fontsize": NAME_SIZE}
    options["path_effects"] = [withStroke(linewidth=2, foreground="white")]
    for _, alike in groupby(order, key=lambda x: round(x["effective_units"])):
        alike = [(x, (x["effective_units"], x["bits_per_character"])) for x in alike]
        for x, point in alike:
            if x["structure"] is None:
                ax.annotate(_name(x), point, (-8, -6), ha="center", va="top", **options)
        sparse = [(x, point) for x, point in alike if x["structure"] is not None]
        places = _apart(ax, [point for _, point in sparse])
        for (x, point), place in zip(sparse, places, strict=True):
            structure = "" if x["structure"] == DEFAULT_STRUCTURE else f", {x['structure']}"
            side = -1 if ax.transData.transform(point)[0] > middle else 1
            ax.annotate(
                _name(x) + structure,
                point,
                (7 * side, place),
                ha="right" if side < 0 else "left",
                va="center",
                **options,
            )


def _name_curves(ax: Any, results: list[dict[str, Any]], colours: dict[int, Any]) -> None:
    """Names all models beside the ends of their curves."""
    order = sorted(results, key=lambda x: x["bits_per_character"])
    points = [tuple(values[-1] for values in _curve(x)) for x in order]
    for x, point, place in zip(order, points, _apart(ax, points), strict=True):
        ax.annotate(
            _name(x),
            point,
            (18, place),
            textcoords="offset points",
            va="center",
            fontsize=NAME_SIZE,
            arrowprops={"arrowstyle": "-", "color": colours[x["hidden"]], "linewidth": 0.6},
        )


def _apart(ax: Any, points: list[tuple[float, float]]) -> list[float]:
    """How many points above theirs names stand, given from below, so that they do not overlap."""
    if not points:
        return []
    at = ax.transData.transform(points)[:, 1] * 72 / ax.figure.dpi
    gap = 1.25 * NAME_SIZE
    # Neighbours that would be out of order share their mean: the least sum of squared shifts.
    groups: list[tuple[float, int]] = []
    for i, y in enumerate(at):
        mean, count = y - gap * i, 1
        while groups and groups[-1][0] > mean:
            other, others = groups.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        groups.append((mean, count))
    places = [mean for mean, count in groups for _ in range(count)]
    return [place + gap * i - y for i, (place, y) in enumerate(zip(places, at, strict=True))]


def _mark(ax: Any, place: float, result: dict[str, Any], colours: dict[int, Any]) -> None:
    marker = STYLES[result["structure"]][0]
    ax.plot(place, result["bits_per_character"], marker, color=colours[result["hidden"]])


def _name(result: dict[str, Any]) -> str:
    if result["structure"] is None:
        return str(result["hidden"])
    return f"{result['hidden']}, {100 * result['density']:.3g} %"


def _curve(result: dict[str, Any]) -> tuple[list[int], list[float]]:
    curve = result["curve"][1:]  # The first point is the guess of an untrained model.
    return [x["step"] for x in curve], [x["held_out"] for x in curve]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _log_axis(ax: Any, values: list[float], form: str) -> None:
    """A logarithmic x axis with ticks at values, in their order, that are not too close."""
    least = 0.12 * math.log(max(values) / min(values))
    ticks: list[float] = []
    for value in values:
        if all(abs(math.log(value / tick)) >= max(least, 0.01) for tick in ticks):
            ticks.append(value)
    ax.set_xscale("log")
    ax.set_xticks(ticks, [form.format(tick) for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def _score_handles(results: list[dict[str, Any]], colours: dict[int, Any]) -> list[Any]:
    units = [Patch(color=colour, label=f"{h} units") for h, colour in colours.items()]
    found = {x["structure"] for x in results}
    return units + [
        Line2D([], [], color="black", marker=style[0], linestyle=style[1:], label=name or "dense")
        for name, style in STYLES.items()
        if name in found
    ]


def _speed_handles(results: list[dict[str, Any]]) -> list[Any]:
    found = [form for form in FORMS if form != "sparse" or any(x["structure"] for x in results)]
    forms = [Patch(color=FORM_COLOURS[form], label=form) for form in found]
    return forms + [
        Line2D([], [], color="black", marker="o", linestyle=dashes, label=program, **inside)
        for program, (dashes, inside) in PROGRAM_STYLES.items()
    ]


def _legend(figure: Any, handles: list[Any]) -> None:
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
