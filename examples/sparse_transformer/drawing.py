"""The picture of a run, and the table of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure

from jaxsparse import Topology
from jaxsparse.nn import SparseAttention

from .model import Transformer, sample

MASK_CELLS = 256  # Of the triangle that stands for dense attention; more could not be seen.

# Table III of the paper, whose memory and throughput are those of the forward pass in float32. None
# is out of memory.
PAPER: dict[str, dict[str, Any]] = {
    "sparse": {
        "held_out": 3.77,
        "V100": {"tokens_per_second": 67_857, "gigabytes": 0.77},
        "GTX 1080": {"tokens_per_second": 32_039, "gigabytes": 0.88},
    },
    "dense": {
        "held_out": 3.76,
        "V100": {"tokens_per_second": 32_477, "gigabytes": 9.88},
        "GTX 1080": None,
    },
}


def complete_and_generate(model: Transformer, originals: np.ndarray, seed: int) -> dict[str, Array]:
    """Titled rows of images: the originals, their lower halves drawn, and drawn altogether."""
    sparse = isinstance(model.attention, SparseAttention)
    longest_row = model.attention.longest_row(originals.shape[1]) if sparse else None
    count, length = originals.shape
    known = np.zeros((2 * count, length), bool)
    known[:count, : model.size // 2 * model.size * 3] = True
    drawn = sample(model, np.tile(originals, (2, 1)), known, longest_row, jax.random.key(seed))
    completed, generated = jnp.split(drawn, 2)
    titles = ("held out", "lower half\ngenerated", "all\ngenerated")
    return dict(zip(titles, (originals, completed, generated), strict=True))


def draw(
    rows: dict[str, Array], size: int, topology: Topology | None, curve: list[dict[str, Any]]
) -> Figure:
    """Draws titled rows of images, given as tokens, above the mask and the loss curve."""
    images = np.stack(list(rows.values())).reshape(len(rows), -1, size, size, 3).astype(np.uint8)
    gap = max(1, size // 16)
    framed = np.pad(images, ((0, 0), (0, 0), (gap, gap), (gap, gap), (0, 0)), constant_values=255)
    figure = Figure(figsize=(11, 9), layout="constrained")
    axes = figure.subplot_mosaic([["images", "images"], ["mask", "loss"]])
    mosaic = framed.swapaxes(1, 2).reshape(len(rows) * framed.shape[2], -1, 3)
    axes["images"].imshow(mosaic, interpolation="nearest")
    axes["images"].set_xticks([])
    axes["images"].set_yticks((np.arange(len(rows)) + 0.5) * framed.shape[2], list(rows))
    axes["images"].spines[:].set_visible(False)
    if topology is None:
        length = 3 * size**2
        triangle = np.tri(min(length, MASK_CELLS))
        axes["mask"].imshow(triangle, extent=(0, length, length, 0), cmap="Greys")
        kind = "dense"
    else:
        topology.plot(ax=axes["mask"])
        kind = "sparse"
    axes["images"].set_title(f"Transformer with {kind} attention")
    axes["mask"].set_title("attention mask")
    for name in ("train", "held_out"):
        label = name.replace("_", " ")
        axes["loss"].plot([x["step"] for x in curve], [x[name] for x in curve], "o-", label=label)
    axes["loss"].set(xlabel="step", title="bits per dimension")
    axes["loss"].grid(alpha=0.3)
    axes["loss"].legend()
    return figure


def table(results: dict[str, dict[str, Any] | None], with_paper: bool) -> str:
    """The results of sparse and dense attention, None out of memory, and the paper's."""
    columns = results if with_paper else ()

    def row(title: str, form: str, get: Callable[[dict[str, Any]], float], text: str) -> list[str]:
        ours = (format(get(x), form) if x else "out of memory" for x in results.values())
        theirs = (text.format(**PAPER[x], **PAPER[x]["V100"]) for x in columns)
        return [title, *ours, *theirs]

    rows = [
        ["", *results, *(f"paper, {x}" for x in columns)],
        row("held out, bits/dim", ".3f", lambda x: x["curve"][-1]["held_out"], "{held_out}"),
    ]
    for name, speed, memory in (
        ("forward", "{tokens_per_second:,}", "{gigabytes}"),
        ("training", "", ""),
    ):
        rows += [
            row(f"{name}, tokens/s", ",.0f", lambda x, n=name: x[n]["tokens_per_second"], speed),
            row(f"{name}, peak GB", ".3f", lambda x, n=name: x[n]["peak_bytes"] / 1e9, memory),
        ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([x[0].ljust(widths[0]), *map(str.rjust, x[1:], widths[1:])]).rstrip()
        for x in rows
    )
    if not with_paper:
        footnote = "the paper's figures are for another model: --preset paper"
    else:
        gpu = PAPER["sparse"]["GTX 1080"]
        footnote = (
            "paper: Gale et al. 2020, Table III, 140,000 steps of 8 images of ImageNet, speed and "
            "memory on a V100 in float32. On a GTX 1080: sparse "
            f"{gpu['tokens_per_second']:,} tokens/s in {gpu['gigabytes']} GB, dense out of memory"
        )
    return "\n".join([*lines, footnote])
