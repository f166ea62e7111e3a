"""A pruned model as a sparse one, and what belongs to its parameters in either form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxsparse import CSR, Topology, explain
from jaxsparse.nn import SparseLinear, pack, unpack
from jaxsparse.pruning import SparsityTable, sparsify

from .model import CharRNN

MEASURING_SECONDS = 0.02  # Of each recurrent layer.

Path = tuple[Any, ...]


def to_sparse(model: CharRNN, batch: int, length: int) -> tuple[CharRNN, SparsityTable]:
    """A model that stores the weights that are not 0, and what that did to each layer."""
    inputs = (jnp.zeros((batch, length), jnp.int32), model.initialize_carries(batch))
    sparse, table = sparsify(
        model,
        inputs,
        where="stack/layers/*",
        faster_only=False,  # Whether it is faster is what the comparison shows.
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


def scans_of(model: CharRNN, batch: int, length: int) -> str:
    """How the recurrent scans of a model's forward pass run on a GPU."""
    graph, state = nnx.split(model)

    def apply(state: Any, tokens: Array, carries: Any) -> Any:
        return nnx.merge(graph, state)(tokens, carries)

    tokens = jnp.zeros((batch, length), jnp.int32)
    explanation = explain(apply, state, tokens, model.initialize_carries(batch))
    return "\n".join(str(call) for call in explanation if call.operation == "recurrent_scan")


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
