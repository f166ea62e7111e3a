"""A node's step as that of a scan of its own, what other nodes give it being one of its inputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxsparse.recurrent.graph.alike import StateOf, own_states
from jaxsparse.recurrent.step import Arrays, OfAnother, Results, Step


@dataclasses.dataclass(frozen=True)
class Alone(OfAnother):
    """A step whose product is that of one edge, from its own states of the step before.

    Its states are those that the edge reads, its products those that the edge leads to. One more
    input has what is to be added to the products ``ahead``, another one what is the same for all
    units, to ``added_means``; one more output has the other states, but those of them that are
    squares of states: `in_order` makes these.
    """

    step: Step
    read: tuple[int, ...]  # states
    fed: tuple[int, ...]  # products
    ahead: tuple[int, ...]  # products
    added_means: tuple[int, ...]  # products
    squares: tuple[tuple[int, int], ...] = ()  # states, each with the one that it is the square of

    products = property(lambda self: len(self.fed))
    states = property(lambda self: len(self.read))
    means = ()

    @property
    def _groups(self) -> list[tuple[int, ...]]:
        return [group for group in (self.ahead, self.added_means) if group]

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        """The states that the edge does not read, and that are no squares of others."""
        left_out = {*self.read, *dict(self.squares)}
        return tuple(i for i in range(self.step.states) if i not in left_out)

    @functools.cached_property
    def inputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.step.inputs, *map(len, self._groups))

    @functools.cached_property
    def outputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.step.outputs, *(len(self.others),) * bool(self.others))

    @functools.cached_property
    def wide_outputs(self) -> tuple[bool, ...]:  # type: ignore[override]
        return (*self.step.wide_outputs, *(False,) * bool(self.others))

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        given: dict[int, Any] = dict(zip(self.fed, products, strict=True))
        count = len(self.step.inputs)
        inputs, added = inputs[:count], inputs[count:]
        for group, arrays in zip(self._groups, added, strict=True):
            for p, x in zip(group, arrays, strict=True):
                given[p] = given[p] + x if p in given else x
        zero = jnp.zeros_like(products[0])  # where no edge leads to
        states, new, outputs = self.step(
            [given.get(p, zero) for p in range(self.step.products)], carries, inputs
        )
        others = [[states[i] for i in self.others]] if self.others else []
        return Results([states[i] for i in self.read], new, [*outputs, *others])


def alone(
    step: Step,
    read: tuple[int, ...],
    fed: tuple[int, ...],
    ahead: tuple[int, ...],
    means: tuple[int, ...],
    *,
    squares: Mapping[int, int] | None = None,
) -> Step:
    """The step as `Alone` makes it, or itself if that changes nothing.

    ``squares``: states that are squares, with what they are the squares of, of those not in
    ``read``.
    """
    whole = read == tuple(range(step.states)) and fed == tuple(range(step.products))
    if whole and not (ahead or means):
        return step
    not_read = tuple((i, of) for i, of in (squares or {}).items() if i not in read)
    return Alone(step, read, fed, ahead, means, not_read)


def in_order(step: Alone, read: Any, others: Sequence[Any]) -> Any:
    """All states of a step, (..., S, h), of those that its edge reads and the others, if any."""
    together = jnp.concatenate([read, *others], -2) if others else read
    places, squares = (*step.read, *step.others), dict(step.squares)
    return own_states(
        together,
        [StateOf(places.index(squares.get(i, i)), i in squares) for i in range(step.step.states)],
    )
