"""The steps of a stack: a layer's, and that of the stack's input."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.codegen.flatten import flatten, live, same_variable
from jaxsparse.recurrent.step import Arrays, CellStep, Results, Step


@dataclasses.dataclass(frozen=True)
class InputStep(Step):
    """The step of what comes from outside: its state is its input, another one the square."""

    passes_square: bool = False

    cell_name = name = "the input"
    products = carries = 0
    states = property(lambda self: 1 + self.passes_square)
    inputs = (1,)
    outputs = wide_carries = wide_outputs = ()

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        ((x,),) = inputs
        return Results([x, x * x] if self.passes_square else [x], [], [])


class Norm(NamedTuple):
    """A normalisation of what comes in."""

    kind: str  # "layer" or "rms"
    epsilon: float

    @property
    def statistics(self) -> int:
        """How many means it takes: of the features, if it is "layer", and of their squares."""
        return 2 if self.kind == "layer" else 1

    def of(self, x: Any, mask: Any = None) -> Any:
        """Features normalised, along the last axis; not where ``mask``, which fits x, is false."""
        if self.kind == "layer":
            x = x - jnp.mean(x, -1, keepdims=True)
        square = jnp.mean(x * x, -1, keepdims=True)
        if mask is not None:
            # The root of the padding's zeros has no derivative, where nothing is added to them.
            square = jnp.where(mask, square, 1)
        return x * jax.lax.rsqrt(square + self.epsilon)

    def factor(self, *means: Any) -> Any:
        """What it multiplies by, for these means."""
        square = means[-1]
        if self.kind == "layer":
            # By rounding it may be negative.
            square = jnp.maximum(square - means[0] * means[0], 0)
        return jax.lax.rsqrt(square + self.epsilon)


@dataclasses.dataclass(frozen=True)
class LayerStep(Step):
    """A cell's step in a stack.

    Products, in order: the recurrent gates; those gates of the input that do not share theirs (see
    ``slots``); what a skip adds to the output; means of what comes in and of its square, if that is
    normalised. The first state is the cell's; then come the output and its square, if they are
    passed on. Inputs: the gates of the input if they are no products, what the features' mean is
    multiplied by, the bias of the products, the parameters of each unit, the mask of steps that
    count, whether the carry is zero before this step and before the next one, and what the output
    is multiplied by, where there are such.

    A carry that is zero has a product of zero. A gate that has a sum of two products has no product
    of the state alone to set aside; so it is the step before that hands on zeros as its state.

    With a scale s and a shift v, the normalised input times W is, for a mean m and a variance q,

        (o diag(s) W - m (1 diag(s) W)) / sqrt(q + epsilon) + v W

    whose first product is an edge's, and the others are inputs: so no product waits for a mean.
    Where the edge's products are divided by the root already, they are ``scaled``, and share the
    products of the recurrent gates.
    """

    step: CellStep
    slots: tuple[int, ...]  # of each gate of the input, its product; none if they are an input
    norm: Norm | None
    resetting: bool
    dropping: bool  # the output is multiplied by an input
    skipping: bool  # a product is added to the output
    passes_output: bool
    passes_square: bool
    gives_output: bool
    scaled: bool = False

    cell_name = property(lambda self: self.step.cell_name)
    name = property(lambda self: self.step.name)
    carries = property(lambda self: self.step.carries)
    states = property(lambda self: 1 + self.passes_output + self.passes_square)
    outputs = property(lambda self: (1,) * self.gives_output)
    wide_carries = property(lambda self: self.step.wide_carries)
    wide_outputs = property(lambda self: (False,) * self.gives_output)

    @property
    def gates(self) -> int:
        """How many products are gates."""
        return max((self.step.products, *(slot + 1 for slot in self.slots)))

    @property
    def means(self) -> tuple[int, ...]:  # type: ignore[override]
        first = self.gates + self.skipping
        return tuple(range(first, first + (self.norm.statistics if self.norm else 0)))

    @property
    def products(self) -> int:  # type: ignore[override]
        return self.gates + self.skipping + len(self.means)

    @functools.cached_property
    def inputs(self) -> tuple[int, ...]:  # type: ignore[override]
        x, *rest = self.step.inputs
        if self.step.biased:
            rest[0] = self.gates
        return (
            *(x,) * (not self.slots),
            *(x,) * self._centres,
            *rest,
            *(2,) * self.resetting,
            *(1,) * self.dropping,
        )

    @property
    def bias(self) -> int | None:
        """Which of the inputs is that of the gates."""
        return (not self.slots) + self._centres if self.step.biased else None

    @property
    def _centres(self) -> bool:
        return self.norm is not None and self.norm.kind == "layer"

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        cell = self.step
        values = iter(inputs)
        x = None if self.slots else next(values)
        sums = next(values) if self._centres else []
        bias = next(values) if cell.biased else None
        of_cell = [next(values) for _ in cell.inputs[1 + cell.biased :]]
        mask = of_cell[-1][0] != 0 if cell.masked else None

        def counted(a: Any) -> Any:
            return a if mask is None else jnp.where(mask, a, 0)

        gates = list(products[: self.gates])
        means = [counted(products[i]) for i in self.means]
        if mask is not None and means:
            # The root of the padding's zeros has no derivative, where nothing is added to them.
            means[-1] = jnp.where(mask, means[-1], 1)
        if self.scaled:
            gates = self._centred(gates, means, sums)
        elif self.norm is not None:
            given = [counted(a) for a in gates[cell.products :]]
            gates[cell.products :] = self._normalised(given, means, sums)
        if bias is not None:
            gates = [a + b for a, b in zip(gates, bias, strict=True)]
        if x is None:
            x = [None if slot < cell.products else gates[slot] for slot in self.slots]
        if self.resetting:
            now, next_ = (a != 0 for a in next(values))
            carries = [jnp.where(now, 0, a) for a in carries]
        (state,), new, ((y,),) = cell.of_gates(x, gates[: cell.products], carries, *of_cell)
        if self.resetting:
            state = jnp.where(next_, 0, state)
        if self.dropping:
            y = counted(next(values)[0]) * y
        if self.skipping:
            y = y + counted(products[self.gates])
        states = [state, *[y] * self.passes_output]
        if self.passes_square:
            # The last state is the output: without one of its own it is the cell's state.
            states.append(states[-1] * states[-1])
        return Results(states, new, [[y]] * self.gives_output)

    def _normalised(self, gates: Arrays, means: Arrays, sums: Arrays) -> list[Any]:
        """Products by the scaled weights as those of what is normalised."""
        assert self.norm is not None
        factor = self.norm.factor(*means)
        if not self._centres:
            return [a * factor for a in gates]
        return [(a - means[0] * s) * factor for a, s in zip(gates, sums, strict=True)]

    def _centred(self, gates: Arrays, means: Arrays, sums: Arrays) -> list[Any]:
        """All gates less what the mean makes of those of the input."""
        assert self.norm is not None
        gates = list(gates)
        if self._centres:
            shift = means[0] * self.norm.factor(*means)
            for slot, s in zip(self.slots, sums, strict=True):
                gates[slot] = gates[slot] - shift * s
        return gates

    def in_place(self) -> LayerStep:
        """The step whose products are scaled, if there is a norm."""
        if self.norm is None:
            return self
        bare = dataclasses.replace(self.step, biased=False, masked=False)
        return dataclasses.replace(self, scaled=True, slots=slots_of(bare, joined_gates(bare)))

    def after_norm(self) -> LayerStep:
        """The step that takes products of what is normalised already."""
        return dataclasses.replace(self.in_place(), norm=None, scaled=False)

    def reads_state(self, inputs: Sequence[Any]) -> Any:
        if not self.step.masked:
            return True
        return inputs[len(inputs) - 1 - self.resetting - self.dropping] != 0


@functools.lru_cache(maxsize=1024)
def joined_gates(step: CellStep) -> tuple[bool, ...]:
    """For each gate of x, whether the cell reads it and that of r only as the sum of both.

    Args:
        step: of the cell, without a bias or a mask.
    """
    program = live(flatten(step.jaxpr))
    first = step.products + step.carries
    rs, xs = program.inputs[: step.products], program.inputs[first : first + step.gates]

    def only_added(x: Any, r: Any) -> bool:
        readers = [e for e in program.equations if x in e.operands or r in e.operands]
        return (
            x not in program.outputs
            and r not in program.outputs
            and bool(readers)
            and all(e.primitive == "add" and {*e.operands} == {x, r} for e in readers)
        )

    both = list(zip(xs, rs, strict=False))
    return tuple(i < len(both) and only_added(*both[i]) for i in range(step.gates))


def slots_of(step: CellStep, joined: Sequence[bool]) -> tuple[int, ...]:
    """The product of each gate of x: that of a gate of r, where both are joined, or its own."""
    slots, free = [], step.products
    for i, is_joined in enumerate(joined):
        slots.append(i if is_joined else free)
        free += not is_joined
    return tuple(slots)


@functools.lru_cache(maxsize=1024)
def gives_state(step: CellStep) -> bool:
    """Whether a cell's y is its state.

    Args:
        step: of the cell, without a mask.
    """
    return same_variable(step.jaxpr, 0, step.states + step.carries)
