"""The picture: the learning curve, and a tree with what is predicted at each of its rows."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxsparse import dynamic

from .data import Dataset

LEAVES = 12  # Of the tree that is drawn, or as near as there is.
SIGNS = ("\N{MINUS SIGN}\N{MINUS SIGN}", "\N{MINUS SIGN}", "0", "+", "++")  # Of sentiments.
SCORES = {"rows": "all rows", "roots": "roots", "binary": "roots, positive or negative"}


def typical(graphs: dynamic.Graphs) -> int:
    """A tree that is neither too small nor too large to look at."""
    tree = np.repeat(np.arange(len(graphs)), graphs.lengths)
    leaves = np.bincount(tree[graphs.levels == 0], minlength=len(graphs))
    return int(np.abs(leaves - LEAVES).argmin())


def draw(
    title: str, curve: list[dict[str, Any]], best: int, dataset: Dataset, tree: Any, found: Any
) -> Figure:
    """Draws loss and accuracy by epoch, and a tree of one graph with its predicted classes."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "accuracy"], ["tree", "tree"]], height_ratios=(1, 2))
    figure.suptitle(title)
    for name in ("train", "held_out"):
        points = [(i, x[name]) for i, x in enumerate(curve) if x[name] is not None]
        axes["loss"].plot(*zip(*points, strict=True), "o-", label=name.replace("_", " "))
    axes["loss"].set(title="loss, nats per labelled row", ylim=(0, None))
    for name, label in SCORES.items():
        if name in curve[0]:
            axes["accuracy"].plot([100 * x[name] for x in curve], "o-", label=label)
    axes["accuracy"].set(title="held out, right, %", ylim=(0, 103))
    for name in ("loss", "accuracy"):
        axes[name].axvline(best, color="grey", linestyle=":", label="best epoch")
        axes[name].set(xlabel="epoch")
        axes[name].grid(alpha=0.3)
        axes[name].legend()
    draw_tree(axes["tree"], dataset, tree, found)
    return figure


def positions(tree: dynamic.Graphs) -> np.ndarray:
    """Where rows stand: leaves side by side in their order, others above the middle of theirs."""
    places = np.zeros((len(tree.children), 2))
    places[:, 1] = tree.levels
    leaves = 0

    def place(row: int) -> float:
        nonlocal leaves
        below = [place(child) for child in tree.children[row] if child >= 0]
        places[row, 0] = np.mean(below) if below else leaves
        leaves += not below
        return float(places[row, 0])

    place(int(tree.roots[0]))
    return places


def draw_tree(ax: Axes, dataset: Dataset, tree: dynamic.Graphs, found: np.ndarray) -> None:
    """Draws the classes of the rows of a tree; where one is wrong, the right one beside it."""
    places, labels, words = positions(tree), tree.channel("label"), word_of_rows(tree)
    sentiment = dataset.neutral is not None
    names = SIGNS if sentiment else dataset.classes
    colours = matplotlib.colormaps["RdYlGn"](np.linspace(0.1, 0.9, len(names)))
    for row, (x, y) in enumerate(places):
        for child in tree.children[row]:
            if child >= 0:
                ax.plot(*zip((x, y), places[child], strict=True), color="grey", zorder=1)
        is_wrong = labels[row] >= 0 and found[row] != labels[row]
        ax.scatter(
            x,
            y,
            450,
            color=colours[found[row]] if sentiment else "white",
            edgecolors="red" if is_wrong else "grey",
            linewidths=2 if is_wrong else 1,
            zorder=2,
        )
        write(ax, names[found[row]], (x, y))
        if is_wrong:
            write(ax, names[labels[row]], (x, y), (18, 12), color="red")
        if tree.levels[row] > 0:
            write(ax, words[row], (x, y), (0, -22), fontsize="large")
        elif sentiment:
            write(ax, words[row], (x, y), (4, -14), rotation=45, ha="right", va="top")
    wrong = int(((labels >= 0) & (found != labels)).sum())
    ax.set_title(f"{len(found)} rows of a tree that it did not see, {wrong} wrong (red)")
    ax.margins(0.05, 0.15)
    ax.axis("off")


def write(
    ax: Axes, text: str, at: tuple[float, float], shift: tuple[int, int] = (0, 0), **style: Any
) -> None:
    """Writes a text at a row, shifted by so many points."""
    style = {"ha": "center", "va": "center", "zorder": 3} | style
    ax.annotate(text, at, shift, textcoords="offset points", **style)


def word_of_rows(tree: dynamic.Graphs) -> list[str]:
    """The word of each row that has one, else nothing; a word that is not known is a ?."""
    known = (*(tree.vocabulary or ()), "?")
    numbers = tree.channel("word")
    if "operator" in {channel.name for channel in tree.channels}:
        numbers = np.maximum(numbers, tree.channel("operator"))
    return [known[number] if number >= 0 else "" for number in numbers]
