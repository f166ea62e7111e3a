"""The Transformer with sparse attention, its dense twin, and images drawn from it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxsparse import Topology, masks
from jaxsparse.nn import SparseAttention

from ..common.transformer import Attend, Block, decode, empty_caches

START = 256  # The token before the first byte; a byte is its own token.

# Section VII-C of the paper, by the names of the options.
PAPER_SIZES = {"size": 64, "layers": 3, "heads": 8, "hidden": 1024, "filter": 4096}
PAPER_SIZES |= {"band": 256, "sparsity": 0.95}


def make_topology(size: int, band: int, sparsity: float, seed: int) -> Topology:
    """The paper's mask: a band, and older positions that are the likelier the nearer."""
    length = 3 * size**2
    older = masks.random(sparsity, length, band_width=band, seed=seed)
    return Topology.from_mask((masks.band(band) | older) & masks.causal(), (length, length))


def smooth_codes(key: Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> Array:
    """Initializes an embedding of bytes by sine waves, so that near values start out alike.

    The model need not learn the order of 256 brightnesses first, which shortens training a lot.
    """
    values, features = shape
    octave, phase = jax.random.uniform(key, (2, features))
    waves = 2 ** (6 * octave - 1) * jnp.arange(values)[:, None] / 256 + phase
    return jnp.sin(2 * jnp.pi * waves).astype(dtype) / math.sqrt(2)


class Transformer(nnx.Module):
    """Predicts each byte of an image from the bytes before it."""

    def __init__(
        self,
        attention: Attend,
        *,
        size: int,
        layers: int,
        heads: int,
        hidden: int,
        mlp: int,
        dtype: Any,
        seed: int,
    ):
        rngs = nnx.Rngs(seed)
        self.attention = attention
        self.size, self.hidden, self.dtype = size, hidden, dtype
        small = nnx.initializers.normal(0.5)
        self.byte = nnx.Embed(
            START + 1, hidden, embedding_init=smooth_codes, dtype=dtype, rngs=rngs
        )
        self.row = nnx.Embed(size, hidden, embedding_init=small, dtype=dtype, rngs=rngs)
        self.column = nnx.Embed(size, hidden, embedding_init=small, dtype=dtype, rngs=rngs)
        self.channel = nnx.Embed(3, hidden, embedding_init=small, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(hidden, heads, mlp, dtype, rngs) for _ in range(layers)])
        # In float32, as the softmax is. The zero scale starts from the uniform guess.
        self.norm = nnx.LayerNorm(hidden, scale_init=nnx.initializers.zeros, rngs=rngs)
        self.head = nnx.Embed(256, hidden, embedding_init=smooth_codes, rngs=rngs)

    def embed(self, previous: Array, position: Array) -> Array:
        """Embeds the previous byte and the place in the image of the one to predict."""
        pixel, channel = jnp.divmod(position, 3)
        row, column = jnp.divmod(pixel, self.size)
        return self.byte(previous) + self.row(row) + self.column(column) + self.channel(channel)

    def predict(self, x: Array) -> Array:
        """The logits of the next byte."""
        return self.head.attend(self.norm(x))

    def __call__(self, tokens: Array) -> Array:
        """The logits (batch, length, 256) of all bytes, each from the tokens before it."""
        previous = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        x = self.embed(previous, jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.attention)
        return self.predict(x)


@nnx.jit(static_argnames="longest_row")
def sample(
    model: Transformer, tokens: Array, known: Array, longest_row: int | None, key: Array
) -> Array:
    """Draws the tokens that are not ``known``, in order.

    The keys and values of past positions are cached. Each new one reads those its row of the mask
    stores, ``longest_row`` at most, so a whole image costs about as much as one pass over it. None
    is for dense attention, which reads them all.
    """
    batch, length = tokens.shape
    layers, heads = len(model.blocks), model.blocks[0].heads
    caches = empty_caches(layers, batch, length, heads, model.hidden, model.dtype)
    sparse = isinstance(model.attention, SparseAttention)
    attention = model.attention if sparse else SparseAttention(masks.causal())

    def step(carry: Any, inputs: Any) -> Any:
        previous, caches = carry
        position, given, is_known, step_key = inputs
        x = model.embed(previous[:, None], position[None])
        x, caches = decode(model.blocks, x, caches, position, attention, longest_row)
        drawn = jax.random.categorical(step_key, model.predict(x)[:, 0])
        token = jnp.where(is_known, given, drawn)
        return (token, caches), token

    start = (jnp.full(batch, START), caches)
    inputs = (jnp.arange(length), tokens.T, known.T, jax.random.split(key, length))
    return jax.lax.scan(step, start, inputs)[1].T
