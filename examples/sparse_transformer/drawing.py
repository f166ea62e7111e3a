"""Images drawn from the model, byte by byte, and the picture that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from matplotlib.figure import Figure

from jaxsparse import Topology

from ..common.program import replacing
from .model import START, Transformer

MASK_CELLS = 256  # Of the triangle that stands for dense attention; more could not be seen.


def padded_rows(topology: Topology) -> tuple[Array, Array]:
    """The columns of every row, padded to a rectangle, and where they are no padding."""
    lengths = np.diff(np.asarray(topology.row_offsets))
    stored = np.arange(lengths.max()) < lengths[:, None]
    columns = np.zeros(stored.shape, np.int32)
    columns[stored] = np.asarray(topology.column_indices)[: topology.nnz]
    return jnp.asarray(columns), jnp.asarray(stored)


@nnx.jit
def sample(
    model: Transformer, tokens: Array, known: Array, rows: tuple[Array, Array] | None, key: Array
) -> Array:
    """Draws the tokens that are not ``known``, in order.

    ``rows`` are from :func:`padded_rows`, or None for dense attention. The keys and values of past
    positions are cached. Each new one reads those its row of the topology names, so a whole image
    costs about as much as one pass over it.
    """
    batch, length = tokens.shape
    heads = model.blocks[0].heads
    empty = jnp.zeros((batch, length, heads, model.hidden // heads), model.dtype)

    def step(carry: Any, inputs: Any) -> Any:
        previous, caches = carry
        position, row, given, is_known, step_key = inputs
        new_caches: list[Array] = []

        def attend(query: Array, key: Array, value: Array) -> Array:
            cache = caches[len(new_caches)].at[:, :, position].set(jnp.stack([key, value])[:, :, 0])
            new_caches.append(cache)
            if row is None:
                stored = jnp.arange(length) <= position
            else:
                columns, stored = row
                cache = cache[:, :, columns]
            return jax.nn.dot_product_attention(query, *cache, mask=stored[None, None, None])

        x = model.embed(previous[:, None], position[None])
        for block in model.blocks:
            x = block(x, attend)
        drawn = jax.random.categorical(step_key, model.predict(x)[:, 0])
        token = jnp.where(is_known, given, drawn)
        return (token, new_caches), token

    start = (jnp.full(batch, START), [jnp.stack([empty, empty])] * len(model.blocks))
    inputs = (jnp.arange(length), rows, tokens.T, known.T, jax.random.split(key, length))
    return jax.lax.scan(step, start, inputs)[1].T


def complete_and_generate(
    model: Transformer, originals: np.ndarray, rows: tuple[Array, Array] | None, seed: int
) -> dict[str, Array]:
    """Titled rows of images: the originals, their lower halves drawn, and drawn altogether."""
    count, length = originals.shape
    known = np.zeros((2 * count, length), bool)
    known[:count, : model.size // 2 * model.size * 3] = True
    drawn = sample(model, np.tile(originals, (2, 1)), known, rows, jax.random.key(seed))
    completed, generated = jnp.split(drawn, 2)
    titles = ("held out", "lower half\ngenerated", "all\ngenerated")
    return dict(zip(titles, (originals, completed, generated), strict=True))


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
