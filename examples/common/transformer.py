"""Transformer layers, for whole sequences and for one position at a time on a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxsparse.nn import SparseAttention

Attend = Callable[[Array, Array, Array], Array]
Caches = list[list[Array]]  # The keys and the values of each layer.


def dense_attention(query: Array, key: Array, value: Array) -> Array:
    """Attention of every position to itself and to all before it."""
    features = query.shape[-1]
    fused = query.dtype.itemsize == 2 and features % 8 == 0 and features <= 128
    implementation = "cudnn" if fused and jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


class Block(nnx.Module):
    """A pre-norm Transformer layer, which leaves to its caller how queries meet keys and values.

    So training, on whole sequences, and sampling, token by token on a cache, share the layer.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        mlp: int,
        dtype: Any,
        rngs: nnx.Rngs,
        param_dtype: Any = jnp.float32,
    ):
        self.heads = heads
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention_norm = nnx.LayerNorm(hidden, **options)
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, **options)
        self.merge = nnx.Linear(hidden, hidden, **options)
        self.mlp_norm = nnx.LayerNorm(hidden, **options)
        self.expand = nnx.Linear(hidden, mlp, **options)
        self.contract = nnx.Linear(mlp, hidden, **options)

    def __call__(self, x: Array, attend: Attend) -> Array:
        qkv = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3 * self.heads, -1)
        query, key, value = jnp.split(qkv, 3, axis=2)  # Each (batch, length, heads, features).
        x = x + self.merge(attend(query, key, value).reshape(x.shape))
        return x + self.contract(nnx.gelu(self.expand(self.mlp_norm(x))))


def empty_caches(
    layers: int, batch: int, length: int, heads: int, hidden: int, dtype: Any
) -> Caches:
    """Room for the keys and values of so many positions."""
    empty = jnp.zeros((batch, length, heads, hidden // heads), dtype)
    return [[empty, empty] for _ in range(layers)]


def decode(
    blocks: Sequence[Block],
    x: Array,
    caches: Caches,
    position: Any,
    attention: SparseAttention,
    longest_row: int | None = None,
) -> tuple[Array, Caches]:
    """One position ``(batch, 1, hidden)`` through layers, and the caches with it.

    Args:
        blocks: the layers.
        x: the position's features.
        caches: of all positions before it.
        position: its number; may be traced.
        attention: which positions it sees.
        longest_row: of those, where ``attention`` can't tell: see `SparseAttention.decode`.
    """
    new_caches: Caches = []

    def attend(query: Array, *new: Array) -> Array:  # The new key and value.
        pairs = zip(caches[len(new_caches)], new, strict=True)
        cache = [old.at[:, position].set(x[:, 0]) for old, x in pairs]
        new_caches.append(cache)
        return attention.decode(query, *cache, position, longest_row=longest_row)

    for block in blocks:
        x = block(x, attend)
    return x, new_caches
