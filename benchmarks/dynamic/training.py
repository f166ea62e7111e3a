"""Steps of training: gradients of a loss, and what is added to parameters.

The table of embeddings is read and written by rows: its gradient is that of the rows of a batch.
The optimizer is gradient descent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.dynamic.models import Params

RATE = 0.125
"""Small, so that what a step rounds does not grow in the next ones."""

Loss = Callable[[Params, Any, Any], tuple[Any, Any]]
"""(parameters but for the table, embedded words, batch) to the loss and logits."""


MOST_JOINED = 1 << 20
"""Numbers of a parameter that is updated with others; a larger one would gain nothing."""

_ALIGNMENT = 8  # numbers that a thread may take at a time

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["large", "joined", "rounded"],
    meta_fields=["shapes"],
)
@dataclasses.dataclass(frozen=True)
class State:
    """What steps of training change.

    An update of a small parameter takes a kernel of its own, which is a microsecond whatever it
    does. So they are one array. The largest come first, so that each begins where kernels of
    jaxsparse read it without a copy.

    Args:
        large: the table, and parameters of more than `MOST_JOINED` numbers, in float32.
        joined: the others.
        rounded: both but for the table, in the narrower dtype that a loss takes; None if it takes
            float32. An update writes both, so that no step has to round what the one before has
            added up.
        shapes: of what is joined, by names.
    """

    large: Params
    joined: Any
    rounded: tuple[Params, Any] | None
    shapes: Shapes

    @classmethod
    def of(cls, params: Params, dtype: Any) -> State:
        """Of parameters, for losses whose arrays have a dtype."""
        small = {n: x for n, x in without_table(params).items() if x.size <= MOST_JOINED}
        shapes = tuple((n, small[n].shape) for n in sorted(small, key=lambda n: -small[n].size))
        large = {n: x for n, x in params.items() if n not in small}
        joined = _joined(small, shapes)
        if joined.dtype == dtype:
            return cls(large, joined, None, shapes)
        return cls(large, joined, _rounded(large, joined, dtype), shapes)

    @property
    def params(self) -> Params:
        """The parameters by their names."""
        return self.large | _split(self.joined, self.shapes)

    @property
    def read(self) -> Params:
        """The parameters that a loss takes."""
        if self.rounded is None:
            return self.params
        large, joined = self.rounded
        return self.large | large | _split(joined, self.shapes)

    def added(self, grads: Any, words: Any, factor: float) -> State:
        """The state with so many times the gradients added."""
        (of_others, of_rows), names = grads, [name for name, _ in self.shapes]
        of_large = {n: g for n, g in of_others.items() if n not in names}
        large = added(self.large, (of_large, of_rows), words, factor)
        joined = self.joined + factor * _joined(of_others, self.shapes)
        if self.rounded is None:
            return State(large, joined, None, self.shapes)
        return State(large, joined, _rounded(large, joined, self.rounded[1].dtype), self.shapes)


def _joined(params: Params, shapes: Shapes) -> Any:
    """Parameters, or gradients of them, one behind another."""
    parts = [params[name].astype(jnp.float32).ravel() for name, _ in shapes]
    padding = -sum(x.size for x in parts) % _ALIGNMENT
    return jnp.concatenate([*parts, jnp.zeros((padding,), jnp.float32)])


def _split(joined: Any, shapes: Shapes) -> Params:
    ends = itertools.accumulate((math.prod(shape) for _, shape in shapes), initial=0)
    return {
        name: joined[begin:end].reshape(shape)
        for (name, shape), (begin, end) in zip(shapes, itertools.pairwise(ends), strict=True)
    }


def _rounded(large: Params, joined: Any, dtype: Any) -> tuple[Params, Any]:
    narrow = {name: x.astype(dtype) for name, x in without_table(large).items()}
    return narrow, joined.astype(dtype)


def embedded(params: Params, words: Any) -> Any:
    """Rows of the table, zeros for words of -1; None if there are no words."""
    if words is None:
        return None
    words = jnp.asarray(words)
    rows = params["table"].at[jnp.maximum(words, 0)].get(mode="promise_in_bounds")
    return jnp.where((words < 0)[:, None], 0, rows)


def _added_to_table(table: Any, rows: Any, words: Any, factor: float) -> Any:
    # Behind the table for -1, which would count from its end.
    row = jnp.where(jnp.asarray(words) < 0, len(table), words)
    return table.at[row].add(factor * rows, mode="drop")


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
        new["table"] = _added_to_table(params["table"], of_rows, words, factor)
    return {name: new[name] for name in params}
