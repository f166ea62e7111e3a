"""What pruning keeps between updates, and the master copy that is in it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxsparse.pruning.masks import map_masked

T = TypeVar("T")


class PruneState(NamedTuple):
    """State of `prune`.

    ``masks`` and ``pruned_weights`` are trees like the parameters, sharded as they are, with
    ``optax.MaskedNode()`` for parameters that are not pruned.

    Args:
        step: updates so far, int32.
        masks: bool, True where a weight is kept.
        pruned_weights: the values that pruned weights have by now; 0 where a weight is kept.
        inner_state: that of the optimizer within.
    """

    step: jax.Array
    masks: Any
    pruned_weights: Any
    inner_state: Any


def dense_parameters(params: T, state: PruneState) -> T:
    """The master copy: kept weights as the parameters have them, pruned ones as the state does.

    >>> import optax
    >>> from jaxsparse.pruning import one_shot, prune
    >>> params = {"kernel": jnp.array([[3.0, 1.0], [-4.0, 0.5]])}
    >>> tx = prune(optax.sgd(0.0), one_shot(0.5, step=1))
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> params["kernel"], dense_parameters(params, state)["kernel"]
    (Array([[ 3.,  0.],
           [-4.,  0.]], dtype=float32), Array([[ 3. ,  1. ],
           [-4. ,  0.5]], dtype=float32))
    """
    dense: T = map_masked(
        lambda mask, kept, pruned: jnp.where(mask, kept, pruned),
        lambda x, _: x,
        state.masks,
        params,
        state.pruned_weights,
    )
    return dense
