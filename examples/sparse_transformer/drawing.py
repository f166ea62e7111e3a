"""The picture: images, the attention mask, and the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jax import Array
from matplotlib.figure import Figure

from jaxsparse import Topology

from ..common.files import replacing

MASK_CELLS = 256  # Of the triangle that stands for dense attention; more could not be seen.


def draw(
    path: Path, rows: dict[str, Array], size: int, topology: Topology | None, curve: list[Any]
) -> None:
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
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120)
