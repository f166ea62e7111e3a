"""The NNX variable that holds a pattern, and the check of what a checkpoint brings back."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsparse.topology import Topology

T = TypeVar("T")


def verify(tree: T) -> T:
    """Checks every topology in a model, a state or any other pytree; returns the tree.

    For what comes from a checkpoint: kernels trust a pattern's arrays. ``nnx.update(model, state)``
    does it by itself, ``nnx.merge(graphdef, state)`` does not.

    Raises:
        ValueError: if a topology is corrupted, naming where it is and what is wrong.

    >>> from jaxsparse.nn import SparseLinear
    >>> model = SparseLinear(8, 4, sparsity=0.5, rngs=nnx.Rngs(0))
    >>> graphdef, state = nnx.split(model)
    >>> model = nnx.merge(graphdef, verify(state))
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        nnx.state(tree) if isinstance(tree, nnx.Module) else tree,
        is_leaf=lambda node: isinstance(node, Topology),
    )
    for path, leaf in leaves:
        if isinstance(leaf, Topology):
            try:
                leaf.verify()
            except ValueError as error:
                raise ValueError(f"verify: at {jax.tree_util.keystr(path)}: {error}") from error
    return tree


@nnx.register_variable_name("topology")
class TopologyVariable(nnx.Variable[Topology]):
    """Holds a layer's `jaxsparse.Topology`: an argument of jitted programs, and no parameter.

    ``nnx.update`` with a pattern from elsewhere, a checkpoint for instance, verifies it, unless the
    old one was deleted by donation or the new one is spread over several processes. Assignment and
    ``nnx.merge`` verify nothing: see :func:`verify`.

    Raises:
        ValueError: on such an update, if the pattern is corrupted or of another shape.
    """

    def update_from_state(self, variable_state: nnx.Variable[Topology]) -> None:
        old, new = self.get_raw_value(), variable_state.get_raw_value()
        if _is_foreign(old, new):
            if new.shape != old.shape:
                raise ValueError(
                    f"TopologyVariable: the pattern must have shape {old.shape}, got {new.shape}"
                )
            new.verify()
        super().update_from_state(variable_state)


def own_topology(topology: Topology) -> TopologyVariable:
    """A variable with arrays of its own: a donated layer must not delete its user's pattern.

    Nor may two layers on one pattern donate the same arrays.
    """
    return TopologyVariable(jax.tree.map(jnp.copy, topology))


def _is_foreign(old: Any, new: Any) -> bool:
    """Whether a concrete pattern comes from elsewhere than a program that took the old one.

    A program passes a pattern on as the same arrays or, where they were donated, as new ones.
    """
    before, after = jax.tree.leaves(old), jax.tree.leaves(new)
    if len(before) == len(after) and all(map(operator.is_, before, after)):
        return False
    concrete = all(isinstance(x, np.ndarray) or _is_here(x) for x in after)
    return concrete and not any(_is_concrete(x) and x.is_deleted() for x in before)


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_here(x: Any) -> bool:
    return _is_concrete(x) and x.is_fully_addressable
