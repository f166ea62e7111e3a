"""The language model: an embedding, recurrent layers, and a softmax over the vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxsparse.nn import RNN, GRUCell, LSTMCell, RecurrentStack, to_flax

CELLS = {"lstm": LSTMCell, "gru": GRUCell}


class CharRNN(nnx.Module):
    """Predicts each token from those before it."""

    def __init__(
        self,
        vocabulary: int,
        *,
        cell: str,
        hidden: int,
        layers: int,
        embedding: int,
        dtype: Any,
        seed: int,
    ):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(vocabulary, embedding, dtype=dtype, rngs=rngs)
        widths = [embedding, *[hidden] * (layers - 1)]
        self.stack = RecurrentStack(
            [RNN(CELLS[cell](width, hidden, dtype=dtype, rngs=rngs)) for width in widths]
        )
        self.head = nnx.Linear(hidden, vocabulary, dtype=dtype, rngs=rngs)

    def initialize_carries(self, batch: int) -> Any:
        """The state before the first token, of each layer."""
        return tuple(
            layer.cell.initialize_carry((batch, layer.cell.in_features))
            for layer in self.stack.layers
        )

    def __call__(self, tokens: Array, carries: Any) -> tuple[Any, Array]:
        """The state after tokens (batch, length), and the logits of the token after each."""
        carries, y = self.stack(self.embedded(tokens), initial_carry=carries, return_carry=True)
        return carries, self.head(y).astype(jnp.float32)

    def embedded(self, tokens: Array) -> Array:
        """A row of the embedding for each token, taken by a product.

        The gradient of a lookup adds up the rows of equal tokens, on a GPU one after the other and
        in no fixed order; there are few tokens and each is frequent.
        """
        table = self.embed.embedding.get_value().astype(self.embed.dtype)
        chosen = jax.nn.one_hot(tokens, len(table), dtype=table.dtype)
        return jnp.matmul(chosen, table, precision=jax.lax.Precision.HIGHEST)


def with_flax_layers(model: CharRNN) -> CharRNN:
    """A copy of a model whose recurrent layers are those of Flax, which are a jax.lax.scan."""
    copy = nnx.clone(model)
    copy.stack.layers = nnx.List([to_flax(layer) for layer in copy.stack.layers])
    return copy
