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
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxsparse.codegen.flatten import same_variable, uses
from jaxsparse.recurrent.cells import Cell, name_of

Arrays = Sequence[Any]


class Results(NamedTuple):
    """What a step computes."""

    states: list[Any]
    carries: list[Any]
    outputs: list[list[Any]]


def _grouped(flat: Arrays, sizes: Sequence[int]) -> list[list[Any]]:
    ends = np.cumsum(sizes)
    return [list(flat[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _flat(groups: Sequence[Arrays]) -> list[Any]:
    return [x for group in groups for x in group]


class Step:
    """The form of a step; see the module's docstring."""

    cell_name: str  # for messages
    name: str  # of a cell's step or a derivative of it, for messages
    products: int
    states: int
    carries: int
    inputs: tuple[int, ...]  # how many arrays each input has
    outputs: tuple[int, ...]

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
        products, carries, inputs = _grouped(
            arguments, (step.products, step.carries, sum(step.inputs))
        )
        results = step(products, carries, _grouped(inputs, step.inputs))
        return [*results.states, *results.carries, *_flat(results.outputs)]

    count = step.products + step.carries + sum(step.inputs)
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

    @functools.cached_property
    def outputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.step.outputs[i] for i in self.kept)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        states, new, outputs = self.step(products, carries, inputs)
        return Results(states, new, [outputs[i] for i in self.kept])

    def reads_state(self, inputs: Sequence[Any]) -> Any:
        return self.step.reads_state(inputs)


@functools.lru_cache(maxsize=1024)
def without_repeats(step: Step) -> tuple[Step, tuple[int | None, ...]]:
    """The step less the outputs that equal its states or other outputs, and where each one is.

    The place of an output is its index in what is kept, or None for the states. A cell's y is most
    often its state, and the cotangents of pre-activations are the states of an adjoint.
    """
    first = step.states + step.carries
    ends = [0, *np.cumsum(step.outputs).tolist()]

    def same(a: int, b: int, size: int) -> bool:
        """Whether results a, a + 1, ... are results b, b + 1, ..."""
        return all(same_variable(step.jaxpr, a + i, b + i) for i in range(size))

    kept: list[int] = []
    places: list[int | None] = []
    for i, size in enumerate(step.outputs):
        at = first + ends[i]
        twin = next(
            (k for k in kept if step.outputs[k] == size and same(first + ends[k], at, size)), None
        )
        if size == step.states and same(0, at, size):
            places.append(None)
        elif twin is not None:
            places.append(kept.index(twin))
        else:
            places.append(len(kept))
            kept.append(i)
    if len(kept) == len(step.outputs):
        return step, tuple(places)
    return Keeping(step, tuple(kept)), tuple(places)


class Saved(NamedTuple):
    """Which arguments of a step its derivative reads, beside its inputs."""

    products: tuple[int, ...]
    carries: tuple[int, ...]

    @property
    def sizes(self) -> int:
        """As how many inputs they come: the products are one."""
        return bool(self.products) + len(self.carries)


@dataclasses.dataclass(frozen=True)
class Saving(OfAnother):
    """A step that outputs what it got, too: some products, and some carries."""

    step: Step
    saved: Saved

    @functools.cached_property
    def outputs(self) -> tuple[int, ...]:  # type: ignore[override]
        products = [len(self.saved.products)] if self.saved.products else []
        return (*self.step.outputs, *products, *(1,) * len(self.saved.carries))

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        states, new, outputs = self.step(products, carries, inputs)
        extra = [[products[i] for i in self.saved.products]] if self.saved.products else []
        return Results(states, new, [*outputs, *extra, *([carries[i]] for i in self.saved.carries)])


@functools.lru_cache(maxsize=1024)
def _read_by_derivative(step: Step, active: tuple[int, ...]) -> list[list[bool]]:
    sizes = (step.products, step.carries, sum(step.inputs))
    avals = [v.aval for v in step.jaxpr.jaxpr.invars]
    moving = [True] * (sizes[0] + sizes[1]) + _flat(
        [[i in active] * size for i, size in enumerate(step.inputs)]
    )

    def derivative(primals: Arrays, tangents: Arrays) -> Any:
        def of_moving(*given: Any) -> Any:
            values = iter(given)
            every = [next(values) if m else x for x, m in zip(primals, moving, strict=True)]
            return jaxpr_as_fun(step.jaxpr)(*every)

        own = [x for x, moves in zip(primals, moving, strict=True) if moves]
        return jax.jvp(of_moving, own, list(tangents))[1]

    primals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    tangents = [x for x, moves in zip(primals, moving, strict=True) if moves]
    used = uses(jax.make_jaxpr(derivative)(primals, tangents))
    return _grouped(used[: len(primals)], sizes)


@dataclasses.dataclass(frozen=True)
class Tangent(OfAnother):
    """The derivative of a step in the direction of its products, its carries and some inputs.

    Linear in these. Inputs, in order: the step's own products and carries that it reads
    (``saved``), the step's own inputs that it reads (``read``), what is to be added to the tangent
    of the products if ``shifted`` (the change of the weights times the state), and the tangents of
    the ``active`` inputs.
    """

    step: Step
    active: tuple[int, ...]
    shifted: bool

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"the tangent of {self.step.name}"

    @functools.cached_property
    def linear(self) -> tuple[int, ...]:
        """The inputs in which it is linear, with products and carries."""
        first = self.saved.sizes + len(self.read)
        return tuple(range(first, first + self.shifted + len(self.active)))

    @functools.cached_property
    def inputs(self) -> tuple[int, ...]:  # type: ignore[override]
        step = self.step
        return (
            *(len(self.saved.products),) * bool(self.saved.products),
            *(1,) * len(self.saved.carries),
            *(step.inputs[i] for i in self.read),
            *(step.products,) * self.shifted,
            *(step.inputs[i] for i in self.active),
        )

    @functools.cached_property
    def saved(self) -> Saved:
        products, carries, _ = self._reads
        return Saved(
            tuple(i for i, read in enumerate(products) if read),
            tuple(i for i, read in enumerate(carries) if read),
        )

    @functools.cached_property
    def read(self) -> tuple[int, ...]:
        """The step's inputs whose values it reads."""
        _, _, inputs = self._reads
        return tuple(i for i, g in enumerate(_grouped(inputs, self.step.inputs)) if any(g))

    @functools.cached_property
    def _reads(self) -> list[list[bool]]:
        """Which of the step's products, carries and inputs the derivative depends on."""
        return _read_by_derivative(self.step, self.active)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        step, saved, read = self.step, self.saved, self.read
        values = iter(inputs)
        like = (products or carries or inputs[0])[0]
        zero = jnp.zeros_like(like)
        kept = dict(zip(saved.products, next(values) if saved.products else (), strict=True))
        own_products = [kept.get(i, zero) for i in range(step.products)]
        own_carries = [next(values)[0] if i in saved.carries else zero for i in range(step.carries)]
        own_inputs = [
            next(values) if i in read else [zero] * size for i, size in enumerate(step.inputs)
        ]
        shift = next(values) if self.shifted else None
        if shift is not None:
            products = [a + b for a, b in zip(products, shift, strict=True)]
        moves = [list(next(values)) for _ in self.active]

        # Other inputs are constants: a tangent of 0 times an infinite derivative would be NaN.
        def of_moving(products: Any, carries: Any, moving: Any) -> Any:
            every = dict(enumerate(own_inputs)) | dict(zip(self.active, moving, strict=True))
            return tuple(step(products, carries, [every[i] for i in range(len(own_inputs))]))

        _, tangents = jax.jvp(
            of_moving,
            (list(own_products), own_carries, [list(own_inputs[i]) for i in self.active]),
            (list(products), list(carries), moves),
        )
        return Results(*tangents)


@dataclasses.dataclass(frozen=True)
class Adjoint(OfAnother):
    """The transpose of a linear step, for the scan that runs the other way.

    The step is linear in its products, its carries and the inputs ``linear``. The adjoint's
    products are what reaches the step's states by the transposed weights; its states are the
    cotangents of the step's products. Inputs, in order: the step's other inputs, the cotangent of
    the states if ``states_used``, and those of the outputs ``used``. Outputs: the cotangents of the
    step's linear inputs.
    """

    step: Step
    linear: tuple[int, ...]
    states_used: bool
    used: tuple[int, ...]

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"the transpose of {self.step.name}"

    products = property(lambda self: self.step.states)
    states = property(lambda self: self.step.products)

    @functools.cached_property
    def fixed(self) -> tuple[int, ...]:
        """The step's inputs that it is not transposed by."""
        return tuple(i for i in range(len(self.step.inputs)) if i not in self.linear)

    @functools.cached_property
    def inputs(self) -> tuple[int, ...]:  # type: ignore[override]
        step = self.step
        return (
            *(step.inputs[i] for i in self.fixed),
            *(step.states,) * self.states_used,
            *(step.outputs[i] for i in self.used),
        )

    @functools.cached_property
    def outputs(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.step.inputs[i] for i in self.linear)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        step = self.step
        values = iter(inputs)
        fixed = {i: next(values) for i in self.fixed}
        states = list(products)
        if self.states_used:
            states = [a + b for a, b in zip(states, next(values), strict=True)]
        zero = jnp.zeros_like((*products, *carries, *_flat(inputs))[0])
        outputs = [
            list(next(values)) if i in self.used else [zero] * size
            for i, size in enumerate(step.outputs)
        ]

        def function(products: Any, carries: Any, linear: Any) -> Any:
            given = dict(zip(self.linear, linear, strict=True))
            every = [given[i] if i in given else list(fixed[i]) for i in range(len(step.inputs))]
            return tuple(step(products, carries, every))

        operands = (
            [zero] * step.products,
            [zero] * step.carries,
            [[zero] * step.inputs[i] for i in self.linear],
        )
        transposed = jax.linear_transpose(function, *operands)
        return Results(*transposed((states, list(carries), outputs)))
