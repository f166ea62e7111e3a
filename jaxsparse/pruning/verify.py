"""Whether pruned weights are still 0: a transformation after `prune` may have changed them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.pattern import checks_enabled
from jaxsparse.pruning.masks import is_masked_node
from jaxsparse.pruning.state import PruneState
from jaxsparse.pruning.targets import names_of

_REASON = (
    "something changed updates or parameters after prune: transformations go into it, as "
    "prune(optax.chain(...), ...), or before it in a chain"
)


def verify(params: Any, state: Any) -> None:
    """Raises unless every pruned weight is 0, or NaN.

    For a look at a run now and then, outside of ``jit``. With ``JAXSPARSE_CHECK=1`` every
    `prune` verifies the parameters that its ``update`` gets, also in a compiled program.

    Args:
        params: the parameters, also as Flax variables.
        state: the state of an optimizer with one `prune` in it or several, such as the
            ``opt_state`` of an ``nnx.Optimizer``.

    Raises:
        TypeError: if ``state`` holds no `PruneState`.
        ValueError: if pruned weights are not 0, with the names of the parameters.

    >>> import optax
    >>> from jaxsparse.pruning import one_shot, prune
    >>> params = {"kernel": jnp.array([[3.0, 1.0], [-4.0, 0.5]])}
    >>> tx = prune(optax.sgd(0.1), one_shot(0.5, step=1))
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> verify(optax.apply_updates(params, updates), state)
    >>> verify(params, state)
    Traceback (most recent call last):
        ...
    ValueError: verify: pruned weights must be 0, got others at 2 of 2 of kernel: something ...
    """
    masks = list(_masks_in(state))
    if not masks:
        raise TypeError(
            f"verify: state must hold a PruneState, got {type(state).__name__} without one"
        )
    for tree in masks:
        if message := _message(names_of(params), _counts(params, tree)):
            raise ValueError(f"verify: {message}")


def observe(params: Any, masks: Any) -> bool:
    """Warns where pruned weights are not 0, and returns whether it did, outside of ``jit``.

    In a program that is being traced it does nothing, or with ``JAXSPARSE_CHECK=1`` puts in a
    callback that raises. By default there is none, for JAX's persistent cache keeps no program
    that calls back.
    """
    if _is_traced((params, masks)) and not checks_enabled():
        return False
    names, counts = names_of(params), _counts(params, masks)
    if _is_traced(counts):  # also of concrete arrays, where a program is being traced
        if not checks_enabled():
            return False

        def stop(counts: Mapping[int, Any]) -> None:
            if message := _message(names, counts):
                raise ValueError(f"prune: {message}")

        jax.debug.callback(stop, counts)
        return False
    message = _message(names, counts)
    if message:
        warnings.warn(f"prune: {message}", stacklevel=3)
    return message is not None


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _masks_in(state: Any) -> Iterator[Any]:
    def is_prune_state(node: Any) -> bool:
        return isinstance(node, PruneState)

    for node in jax.tree.leaves(state, is_leaf=is_prune_state):
        if is_prune_state(node):
            yield node.masks
            yield from _masks_in(node.inner_state)


def _counts(params: Any, masks: Any) -> dict[int, tuple[Any, Any]]:
    """By the place of each parameter with a mask: pruned weights that are not 0, and all pruned."""
    leaves = jax.tree.leaves(params, is_leaf=is_masked_node)
    found: dict[int, tuple[Any, Any]] = {}
    place = 0
    for leaf, mask in zip(leaves, jax.tree.leaves(masks, is_leaf=is_masked_node), strict=True):
        if is_masked_node(leaf):
            continue
        if not is_masked_node(mask):
            # An infinite weight can't be brought to 0 by an addition, and becomes NaN.
            other = ~mask.astype(bool) & (leaf != 0) & (leaf == leaf)
            found[place] = jnp.sum(other), jnp.sum(~mask.astype(bool))
        place += 1
    return found


def _message(names: list[str], counts: Mapping[int, tuple[Any, Any]]) -> str | None:
    wrong = [
        f"{int(other)} of {int(pruned)} of {names[place]}"
        for place, (other, pruned) in counts.items()
        if np.any(other)
    ]
    return (
        f"pruned weights must be 0, got others at {', '.join(wrong)}: {_REASON}" if wrong else None
    )
