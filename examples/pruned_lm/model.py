"""The language model, its forms in 16 bits with other weights, and text written by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxsparse import masks
from jaxsparse.nn import PackedLinear, SparseAttention, SparseLinear, drop_transposes
from jaxsparse.pruning import SparsityTable, sparsify

from ..common.transformer import Block, Caches, decode, dense_attention, empty_caches

PRUNED = "blocks/*/kernel"  # The linear layers of all blocks; embeddings stay dense.
LINEAR_LAYERS = ("qkv", "merge", "expand", "contract")  # Of a block.
MEASURING_SECONDS = 0.02  # Of each layer, where the fastest form of each is kept.


class GPT(nnx.Module):
    """Predicts each token from those before it, as GPT-2 does.

    Its blocks are pre-norm, its activation is GELU, positions are learned, and the embedding of
    tokens is the last layer, too.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        context: int,
        layers: int,
        heads: int,
        hidden: int,
        dtype: Any,
        param_dtype: Any = jnp.float32,
        seed: int = 0,
    ):
        rngs = nnx.Rngs(seed)
        self.context, self.heads, self.hidden, self.dtype = context, heads, hidden, dtype
        options = {"dtype": dtype, "param_dtype": param_dtype}
        small = nnx.initializers.normal(0.02)
        self.token = nnx.Embed(vocabulary, hidden, embedding_init=small, **options, rngs=rngs)
        self.position = nnx.Embed(context, hidden, embedding_init=small, **options, rngs=rngs)
        self.blocks = nnx.List(
            [Block(hidden, heads, 4 * hidden, rngs=rngs, **options) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(hidden, **options, rngs=rngs)

    def embed(self, tokens: Array, positions: Array) -> Array:
        """The features that the first block gets."""
        return self.token(tokens) + self.position(positions)

    def predict(self, x: Array) -> Array:
        """The logits of the token after each position, in float32."""
        return self.token.attend(self.norm(x)).astype(jnp.float32)

    def __call__(self, tokens: Array) -> Array:
        """The logits (batch, length, vocabulary) of the token after each of (batch, length)."""
        x = self.embed(tokens, jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, dense_attention)
        return self.predict(x)

    def empty_caches(self, batch: int) -> Caches:
        """Room for the keys and values of all positions."""
        return empty_caches(
            len(self.blocks), batch, self.context, self.heads, self.hidden, self.dtype
        )

    def step(self, tokens: Array, caches: Caches, position: Any) -> tuple[Array, Caches]:
        """The logits of the token after one position, of tokens (batch,), and its caches."""
        x = self.embed(tokens[:, None], jnp.asarray(position)[None])
        x, caches = decode(self.blocks, x, caches, position, SparseAttention(masks.causal()))
        return self.predict(x)[:, 0], caches


# ---- Forms of a trained model, for inference ----


def in_16_bits(model: GPT, dtype: Any) -> GPT:
    """A model that holds and computes everything in 16 bits, but for its logits."""
    graph, _ = nnx.split(
        nnx.eval_shape(
            lambda: GPT(
                model.token.num_embeddings,
                context=model.context,
                layers=len(model.blocks),
                heads=model.heads,
                hidden=model.hidden,
                dtype=dtype,
                param_dtype=dtype,
            )
        )
    )
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))


def with_layers(model: GPT, convert: Callable[[nnx.Linear], nnx.Module]) -> GPT:
    """A copy of a model with other layers in the place of the pruned ones."""
    copy = nnx.clone(model)
    for block in copy.blocks:
        for name in LINEAR_LAYERS:
            setattr(block, name, convert(getattr(block, name)))
    drop_transposes(copy)
    return copy


def packed(model: GPT, batch: int) -> GPT:
    """A copy with the weights that are not 0, packed for so many rows of inputs."""

    def pack(layer: nnx.Linear) -> PackedLinear:
        return PackedLinear.from_sparse(SparseLinear.from_dense(layer), columns=batch)

    return with_layers(model, pack)


# Of a model that decodes so many texts at once.
FORMS: dict[str, Callable[[GPT, int], GPT]] = {
    "dense": lambda model, batch: model,
    "CSR": lambda model, batch: with_layers(model, SparseLinear.from_dense),
    "packed": packed,
}


def fastest(model: GPT, batch: int) -> tuple[GPT, SparsityTable]:
    """The fastest form of each layer for a step that decodes, and what was measured."""
    tokens, caches = jnp.zeros(batch, jnp.int32), model.empty_caches(batch)
    result, table = sparsify(
        model,
        (tokens, caches),
        call=lambda model, tokens, caches: model.step(tokens, caches, 0),
        packed=True,
        seconds=MEASURING_SECONDS,
    )
    drop_transposes(result)
    return result, table


# ---- Text ----


@functools.partial(jax.jit, static_argnums=0)
def write(
    graph: nnx.GraphDef, state: Any, tokens: Array, known: Array, temperature: Array, key: Array
) -> Array:
    """Draws the tokens (batch, length) that are not ``known`` (length,), in order.

    One step for each position, with the keys and values of the positions before it in a cache.

    Args:
        graph, state: the model's, by ``nnx.split``.
        tokens: of which the first ones, at least one, are known.
        known: which are.
        temperature: lower ones make likely tokens likelier.
        key: of what is drawn.
    """
    model = nnx.merge(graph, state)
    batch, length = tokens.shape

    def step(carry: tuple[Array, Caches], inputs: Any) -> Any:
        token, caches = carry
        position, given, is_known, step_key = inputs
        logits, caches = model.step(token, caches, position)
        drawn = jax.random.categorical(step_key, logits / temperature)
        token = jnp.where(is_known, given, drawn.astype(given.dtype))
        return (token, caches), token

    inputs = (jnp.arange(length - 1), tokens.T[1:], known[1:], jax.random.split(key, length - 1))
    _, rest = jax.lax.scan(step, (tokens[:, 0], model.empty_caches(batch)), inputs)
    return jnp.concatenate([tokens[:, :1], rest.T], 1)
