"""What differentiation makes of a step: what it keeps, its tangent, its adjoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jaxsparse.codegen.flatten import uses
from jaxsparse.recurrent.step import Arrays, OfAnother, Results, Step, flat_groups, grouped


class Saved(NamedTuple):
    """Which arguments of a step its derivative reads, beside its inputs."""

    products: tuple[int, ...]
    means: tuple[int, ...]  # products that are these
    carries: tuple[int, ...]

    @property
    def sizes(self) -> int:
        """As how many inputs they come: the products are one, and the means."""
        return bool(self.products) + bool(self.means) + len(self.carries)


@dataclasses.dataclass(frozen=True)
class Saving(OfAnother):
    """A step that outputs what it got, too: some products, and some carries, but no means."""

    step: Step
    saved: Saved

    @functools.cached_property
    def outputs(self) -> tuple[int, ...]:  # type: ignore[override]
        products = [len(self.saved.products)] if self.saved.products else []
        return (*self.step.outputs, *products, *(1,) * len(self.saved.carries))

    @property
    def wide_outputs(self) -> tuple[bool, ...]:  # type: ignore[override]
        carries = (self.step.wide_carries[i % self.step.carries] for i in self.saved.carries)
        return (*self.step.wide_outputs, *(False,) * bool(self.saved.products), *carries)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        states, new, outputs = self.step(products, carries, inputs)
        extra = [[products[i] for i in self.saved.products]] if self.saved.products else []
        return Results(states, new, [*outputs, *extra, *([carries[i]] for i in self.saved.carries)])

    def reads_state(self, inputs: Sequence[Any]) -> Any:
        return self.step.reads_state(inputs)


@functools.lru_cache(maxsize=1024)
def _read_by_derivative(step: Step, active: tuple[int, ...]) -> list[list[bool]]:
    sizes = (step.products, step.carries_taken, sum(step.inputs))
    avals = [v.aval for v in step.jaxpr.jaxpr.invars]
    moving = [True] * (sizes[0] + sizes[1]) + flat_groups(
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
    return grouped(used[: len(primals)], sizes)


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
            *(len(group) for group in (self.saved.products, self.saved.means) if group),
            *(1,) * len(self.saved.carries),
            *(step.inputs[i] for i in self.read),
            *(step.products,) * self.shifted,
            *(step.inputs[i] for i in self.active),
        )

    @functools.cached_property
    def saved(self) -> Saved:
        products, carries, _ = self._reads
        return Saved(
            tuple(i for i, read in enumerate(products) if read and i not in self.step.means),
            tuple(i for i, read in enumerate(products) if read and i in self.step.means),
            tuple(i for i, read in enumerate(carries) if read),
        )

    @functools.cached_property
    def read(self) -> tuple[int, ...]:
        """The step's inputs whose values it reads."""
        _, _, inputs = self._reads
        return tuple(i for i, g in enumerate(grouped(inputs, self.step.inputs)) if any(g))

    @functools.cached_property
    def _reads(self) -> list[list[bool]]:
        """Which of the step's products, carries and inputs the derivative depends on."""
        return _read_by_derivative(self.step, self.active)

    def __call__(self, products: Arrays, carries: Arrays, inputs: Sequence[Arrays]) -> Results:
        step, saved, read = self.step, self.saved, self.read
        values = iter(inputs)
        like = (products or carries or inputs[0])[0]
        zero = jnp.zeros_like(like)
        kept: dict[int, Any] = {}
        for group in (saved.products, saved.means):
            kept |= dict(zip(group, next(values) if group else (), strict=True))
        own_products = [kept.get(i, zero) for i in range(step.products)]
        own_carries = [
            next(values)[0] if i in saved.carries else zero for i in range(step.carries_taken)
        ]
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
    the states if ``states_used``, those of the carries ``carries_used`` and those of the outputs
    ``used``. Outputs: the cotangents of the step's linear inputs, those in the dtype of its carries
    that are ``wide``.
    """

    step: Step
    linear: tuple[int, ...]
    states_used: bool
    used: tuple[int, ...]
    wide: tuple[bool, ...]
    carries_used: tuple[int, ...] = ()  # which carries of all rows are results, and have cotangents

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"the transpose of {self.step.name}"

    products = property(lambda self: self.step.states)
    states = property(lambda self: self.step.products)
    wide_outputs = property(lambda self: self.wide)
    carry_rows = property(lambda self: self.step.carry_rows[::-1])
    means = ()

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
            *(1,) * len(self.carries_used),
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
        cotangents = list(carries)
        for i in self.carries_used:
            cotangents[i] = cotangents[i] + next(values)[0]
        zero = jnp.zeros_like((*products, *carries, *flat_groups(inputs))[0])
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
            [zero] * step.carries_taken,
            [[zero] * step.inputs[i] for i in self.linear],
        )
        transposed = jax.linear_transpose(function, *operands)
        return Results(*transposed((states, cotangents, outputs)))
