"""The language model, how a pruned one becomes a sparse one, and text drawn from it.

It has an embedding, recurrent layers, and a softmax over the vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxsparse import CSR, Topology
from jaxsparse.nn import RNN, GRUCell, LSTMCell, RecurrentStack, SparseLinear, pack, unpack
from jaxsparse.pruning import SparsityTable, sparsify

CELLS = {"lstm": LSTMCell, "gru": GRUCell}
DEFAULT_STRUCTURE = "row_balanced"  # Of masks: equally many weights in each row.
MEASURING_SECONDS = 0.02  # Of each recurrent layer, when it becomes sparse.

Path = tuple[Any, ...]  # Of a layer in the model.


class Hidden(NamedTuple):
    """The recurrent layers of a model."""

    units: int
    density: float = 1.0
    structure: str | None = None  # Of the masks; None until the options name one, and if dense.

    @property
    def name(self) -> str:
        """As --hidden has it, without the default structure."""
        parts = [f"{self.units}"]
        if self.density < 1:
            parts.append(f"{self.density:g}")
        if self.structure not in (None, DEFAULT_STRUCTURE):
            parts.append(self.structure)
        return ":".join(parts)

    def with_structure(self, default: str) -> Hidden:
        """The same, pruned to a default structure if it names none."""
        return self if self.density == 1 else self._replace(structure=self.structure or default)


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


def to_sparse(model: CharRNN, batch: int, length: int) -> tuple[CharRNN, SparsityTable]:
    """A model that stores the weights that are not 0, and what that did to each layer."""
    inputs = (jnp.zeros((batch, length), jnp.int32), model.initialize_carries(batch))
    sparse, table = sparsify(
        model,
        inputs,
        where="stack/layers/*",
        faster_only=False,  # The table says whether it is.
        seconds=MEASURING_SECONDS,
    )
    unpack(sparse)  # Each user has a batch size of its own.
    return sparse, table


def packed(model: CharRNN, batch: int) -> CharRNN:
    """A copy that is laid out for a GPU, where there is one and the layout fits it."""
    copy = nnx.clone(model)
    try:
        pack(copy, batch=batch)
    except ValueError:  # The scans take the dense form, or the plain path.
        return nnx.clone(model)
    return copy


def topologies_of(model: nnx.Module) -> dict[Path, Topology]:
    """The pattern of each sparse layer, by the path of the layer."""
    return {
        tuple(path): layer.topology[...]
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, SparseLinear)
    }


def gather(tree: Any, topologies: dict[Path, Topology]) -> Any:
    """What belongs to stored weights, of each tree like the dense parameters in a tree."""

    def values(kernel: Array, topology: Topology) -> Array:
        return CSR.fromdense(kernel.T, topology).values

    return _convert(tree, topologies, "kernel", "values", values)


def scatter(tree: Any, topologies: dict[Path, Topology]) -> Any:
    """The inverse of :func:`gather`: zeros belong to weights that are not stored."""

    def kernel(values: Array, topology: Topology) -> Array:
        return CSR(values, topology).todense().T

    return _convert(tree, topologies, "values", "kernel", kernel)


def _convert(tree: Any, topologies: dict[Path, Topology], old: str, new: str, function: Any) -> Any:
    def convert(node: Any) -> Any:
        if not isinstance(node, nnx.State):
            return node
        flat = dict(nnx.to_flat_state(node))
        for path, topology in topologies.items():
            variable = flat.pop((*path, old))
            flat[(*path, new)] = nnx.Param(function(variable.get_value(), topology))
        return nnx.from_flat_state(flat)

    return jax.tree.map(convert, tree, is_leaf=lambda node: isinstance(node, nnx.State))


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _sample(
    graph: nnx.GraphDef, state: Any, prompt: Array, length: int, temperature: float, key: Array
) -> Array:
    model = nnx.merge(graph, state)

    def step(carry: Any, step_key: Array) -> tuple[Any, Array]:
        carries, logits = carry
        # The limit of low temperatures is the likeliest token.
        drawn = (
            jax.random.categorical(step_key, logits / temperature)
            if temperature
            else jnp.argmax(logits, -1)
        )
        carries, after = model(drawn[:, None], carries)
        return (carries, after[:, 0]), drawn[0]

    carries, logits = model(prompt[None], model.initialize_carries(1))
    return jax.lax.scan(step, (carries, logits[:, -1]), jax.random.split(key, length))[1]


def sample(
    model: CharRNN, prompt: np.ndarray, *, length: int, temperature: float, seed: int
) -> np.ndarray:
    """Draws tokens after a prompt; lower temperatures make the likely ones likelier."""
    graph, state = nnx.split(model)
    return np.asarray(
        _sample(graph, state, jnp.asarray(prompt), length, temperature, jax.random.key(seed))
    )
