"""Steps of training: gradients of a loss, and what is added to parameters.

The table of embeddings is read and written by rows: its gradient is that of the rows of a batch.
The optimizer is gradient descent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.dynamic.models import Params

RATE = 0.125
"""Small, so that what a step rounds does not grow in the next ones."""

Loss = Callable[[Params, Any, Any], tuple[Any, Any]]
"""(parameters but for the table, embedded words, batch) to the loss and logits."""


class State(NamedTuple):
    """What steps of training change.

    Args:
        params: in float32.
        rounded: all but the table, in the narrower dtype that a loss takes; empty if there is none.
            An update writes both, so that no step has to round what the one before has added up.
    """

    params: Params
    rounded: Params

    @classmethod
    def of(cls, params: Params, dtype: Any) -> State:
        """Of parameters, for losses whose arrays have a dtype."""
        others = without_table(params).items()
        return cls(params, {name: x.astype(dtype) for name, x in others if x.dtype != dtype})

    @property
    def read(self) -> Params:
        """The parameters that a loss takes."""
        return self.params | self.rounded


def embedded(params: Params, words: Any) -> Any:
    """Rows of the table, zeros for words of -1; None if there are no words."""
    if words is None:
        return None
    words = jnp.asarray(words)
    rows = params["table"].at[jnp.maximum(words, 0)].get(mode="promise_in_bounds")
    return jnp.where((words < 0)[:, None], 0, rows)


def _row(params: Params, words: Any) -> Any:
    """Behind the table for -1, which would count from its end."""
    return jnp.where(jnp.asarray(words) < 0, len(params["table"]), words)


def without_table(params: Params) -> Params:
    """All but the table."""
    return {name: x for name, x in params.items() if name != "table"}


def gradients(loss: Loss, params: Params, words: Any, batch: Any) -> tuple[Any, Any]:
    """The loss, and gradients of parameters and of the embedded words."""
    made = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, _), grads = made(without_table(params), embedded(params, words), batch)
    return value, grads


def added(params: Params, grads: Any, words: Any, factor: float) -> Params:
    """Parameters with so many times the gradients added."""
    of_others, of_rows = grads
    new = {
        name: params[name] + factor * g.astype(params[name].dtype) for name, g in of_others.items()
    }
    if words is not None:
        row = _row(params, words)
        new["table"] = params["table"].at[row].add(factor * of_rows, mode="drop")
    return {name: new[name] for name in params}
