"""The pointwise part of a recurrent scan, and what differentiation makes of it.

A scan repeats two things: the recurrent product, which mixes units, and a step, which does not.
A step maps

    products (P arrays), carries (C arrays), inputs (arrays in groups)
        -> states (S arrays), carries, outputs (arrays in groups)

element by element. Its states are what the next step's product takes, its carries stay where they
are. A cell's step has one state and as many products as gates; its tangent has the same form, and
its adjoint too, with states and products in each other's place: so all three run on the same
machinery. Steps are values, equal if they mean the same, so that a program finds what it has
compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxsparse.codegen.flatten import same_variable
from jaxsparse.recurrent.cells import Cell, name_of

Arrays = Sequence[Any]


class Results(NamedTuple):
    """What a step computes."""

    states: list[Any]
    carries: list[Any]
    outputs: list[list[Any]]


def grouped(flat: Arrays, sizes: Sequence[int]) -> list[list[Any]]:
    ends = np.cumsum(sizes)
    return [list(flat[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def flat_groups(groups: Sequence[Arrays]) -> list[Any]:
    return [x for group in groups for x in group]


class Step:
    """The form of a step; see the module's docstring."""

    cell_name: str  # for messages
    name: str  # of a cell's step or a derivative of it, for messages
    products: int
    states: int
    carries: int  # of a row
    inputs: tuple[int, ...]  # how many arrays each input has
    outputs: tuple[int, ...]
    # Carries that a derivative is to read in the dtype that they have between steps, and outputs of
    # that dtype; others are rounded to that of the states.
    wide_carries: tuple[bool, ...]
    wide_outputs: tuple[bool, ...]
    means: tuple[int, ...] = ()  # products that are equal for all units, and not to be rounded
    # Of how many rows it takes the carries, and for how many it makes some; row by row. In a scan
    # over time it is the one before, and the next one.
    carry_rows: tuple[int, int] = (1, 1)
    # The input that is added to the products, one array to each, and has no other part in it.
    product_bias: int | None = None

    @property
    def carries_taken(self) -> int:
        return self.carries * self.carry_rows[0]

    @property
    def carries_made(self) -> int:
        return self.carries * self.carry_rows[1]

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        """Applies the step to arrays of one shape."""
        raise NotImplementedError

    def reads_state(self, inputs: Sequence[Any]) -> Any:
        """Where the step depends on the state before it: True, or booleans that broadcast.

        Elsewhere that state may be anything, NaN included.

        Args:
            inputs: one array for each input, (..., t, b, parts, h).
        """
        return True

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The step for one element: products, carries, inputs to states, carries, outputs."""
        return _traced(self)


@functools.lru_cache(maxsize=1024)
def _traced(step: Step) -> ClosedJaxpr:
    def flat(*arguments: Any) -> list[Any]:
        products, carries, inputs = grouped(
            arguments, (step.products, step.carries_taken, sum(step.inputs))
        )
        results = step(products, carries, grouped(inputs, step.inputs))
        return [*results.states, *results.carries, *flat_groups(results.outputs)]

    count = step.products + step.carries_taken + sum(step.inputs)
    # Where calls are not traced as calls, a transpose adds cotangents up in another order. Layers
    # whose steps were first traced here and there would be different programs.
    with jax.disable_jit(False):
        return jax.make_jaxpr(flat)(*[jax.ShapeDtypeStruct((), jnp.float32)] * count)


@dataclasses.dataclass(frozen=True)
class CellStep(Step):
    """A cell's step.

    Its inputs are the gates of the input, then the recurrent bias, the parameters of each unit and
    the mask of steps that count, where there are such. Where the mask is false the carry stays and
    y is 0. Its one output is y, if the cell has one.
    """

    cell: Cell
    gates: int  # of the input
    products: int
    tree: Any  # of the carry
    parameters: Any  # their tree, or None
    biased: bool
    masked: bool
    has_y: bool
    wide_carries: tuple[bool, ...]

    states = 1

    @property
    def cell_name(self) -> str:  # type: ignore[override]
        return name_of(self.cell)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"the cell {self.cell_name}"

    @property
    def outputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return (1,) * self.has_y

    @property
    def wide_outputs(self) -> tuple[bool, ...]:  # type: ignore[override]
        return (False,) * self.has_y

    @property
    def carries(self) -> int:  # type: ignore[override]
        return int(self.tree.num_leaves)

    @property
    def inputs(self) -> tuple[int, ...]:  # type: ignore[override]
        bias, mask = (self.products,) * self.biased, (1,) * self.masked
        own = () if self.parameters is None else (self.parameters.num_leaves,)
        return (self.gates, *bias, *own, *mask)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        values = iter(inputs)
        x, r = next(values), list(products)
        if self.biased:
            r = [a + b for a, b in zip(r, next(values), strict=True)]
        return self.of_gates(x, r, carries, *values)

    def of_gates(self, x: Arrays, r: Arrays, carries: Arrays, *rest: Arrays) -> Results:
        """What the cell makes of its gates; ``rest`` are the inputs after the bias.

        A gate of ``x`` is None where that of ``r`` is the sum of both: x + r is all that the cell
        reads of these.
        """
        own = [] if self.parameters is None else list(rest[0])
        before = list(carries)
        mask = rest[-1][0] != 0 if self.masked else None
        if mask is not None:
            # What stands in the padding, and what the cell makes of it, must not reach a
            # derivative, where 0 * NaN is NaN: so there is a choice on both sides of the cell.
            x, r, before, own = (
                [None if a is None else jnp.where(mask, a, 0) for a in group]
                for group in (x, r, before, own)
            )
        like = r[0]
        # To add -0 changes no number, 0 among them, and compilers know it.
        x = [jnp.full_like(like, -0.0) if a is None else a for a in x]
        arguments = [tuple(x), tuple(r), jax.tree.unflatten(self.tree, before)]
        if self.parameters is not None:
            arguments.append(jax.tree.unflatten(self.parameters, own))
        carry, y = self.cell(*arguments)
        # A cell may return constants.
        new, ys = (
            [jnp.broadcast_to(jnp.asarray(a, like.dtype), like.shape) for a in group]
            for group in (jax.tree.leaves(carry), [y] * self.has_y)
        )
        if mask is not None:
            new = [jnp.where(mask, a, b) for a, b in zip(new, carries, strict=True)]
            ys = [jnp.where(mask, y, 0) for y in ys]
        return Results([new[-1]], new, [ys] if ys else [])

    def reads_state(self, inputs: Sequence[Any]) -> Any:
        return inputs[-1] != 0 if self.masked else True


class OfAnother(Step):
    """A step made of another one, of the same form but for what it says itself."""

    step: Step
    cell_name = property(lambda self: self.step.cell_name)
    name = property(lambda self: self.step.name)
    products = property(lambda self: self.step.products)
    states = property(lambda self: self.step.states)
    carries = property(lambda self: self.step.carries)
    inputs = property(lambda self: self.step.inputs)
    outputs = property(lambda self: self.step.outputs)
    wide_carries = property(lambda self: self.step.wide_carries)
    wide_outputs = property(lambda self: self.step.wide_outputs)
    means = property(lambda self: self.step.means)
    carry_rows = property(lambda self: self.step.carry_rows)


@dataclasses.dataclass(frozen=True)
class Resetting(OfAnother):
    """A step that starts from zeros where one more input, its last, is not 0.

    The product of a state of zeros is zero, too, so this is pointwise. As in a `CellStep` that is
    masked, what is put aside reaches no derivative.
    """

    step: Step

    @functools.cached_property
    def inputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.step.inputs, 1)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        *own, (reset,) = inputs
        products, carries = (
            [jnp.where(reset != 0, 0, x) for x in group] for group in (products, carries)
        )
        return self.step(products, carries, own)

    def reads_state(self, inputs: Sequence[Any]) -> Any:
        *own, reset = inputs
        return (reset == 0) & self.step.reads_state(own)


@dataclasses.dataclass(frozen=True)
class Keeping(OfAnother):
    """A step with some of its outputs."""

    step: Step
    kept: tuple[int, ...]

    product_bias = property(lambda self: self.step.product_bias)

    @functools.cached_property
    def outputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.step.outputs[i] for i in self.kept)

    @property
    def wide_outputs(self) -> tuple[bool, ...]:  # type: ignore[override]
        return tuple(self.step.wide_outputs[i] for i in self.kept)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        states, new, outputs = self.step(products, carries, inputs)
        return Results(states, new, [outputs[i] for i in self.kept])

    def reads_state(self, inputs: Sequence[Any]) -> Any:
        return self.step.reads_state(inputs)


@functools.lru_cache(maxsize=1024)
def without_repeats(step: Step) -> tuple[Step, tuple[int | None, ...]]:
    """The step less the outputs that equal its states or other outputs, and where each one is.

    The place of an output is its index in what is kept, or None for the states. A cell's y is most
    often its state, and the cotangents of pre-activations are the states of an adjoint. Equal ones
    of another dtype are outputs of their own.
    """
    wide = step.wide_outputs
    first = step.states + step.carries_made
    ends = [0, *np.cumsum(step.outputs).tolist()]

    def same(a: int, b: int, size: int) -> bool:
        """Whether results a, a + 1, ... are results b, b + 1, ..."""
        return all(same_variable(step.jaxpr, a + i, b + i) for i in range(size))

    kept: list[int] = []
    places: list[int | None] = []
    for i, size in enumerate(step.outputs):
        at = first + ends[i]
        alike = (k for k in kept if (step.outputs[k], wide[k]) == (size, wide[i]))
        twin = next((k for k in alike if same(first + ends[k], at, size)), None)
        if size == step.states and not wide[i] and same(0, at, size):
            places.append(None)
        elif twin is not None:
            places.append(kept.index(twin))
        else:
            places.append(len(kept))
            kept.append(i)
    if len(kept) == len(step.outputs):
        return step, tuple(places)
    return Keeping(step, tuple(kept)), tuple(places)
