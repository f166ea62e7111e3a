"""Drawing images from the model, byte by byte."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxsparse import Topology

from .model import START, Transformer


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
