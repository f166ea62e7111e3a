"""A program of scalars: a jaxpr whose nested calls are inlined, but for choices of branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """What a function is given or an equation computes: one object, under however many names."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An array, as a rule a scalar, that is known when the program is printed."""

    value: np.ndarray

    @property
    def dtype(self) -> str:
        return str(self.value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


Operand = Value | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """What computes values; its primitive is none that is a call.

    ``branches`` are those of a choice: its first operand says which of them is run, whose outputs
    the results are; the others are all that a branch reads.
    """

    primitive: str
    operands: tuple[Operand, ...]
    results: tuple[Value, ...]
    params: dict[str, Any]
    effects: bool
    branches: tuple[Program, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A jaxpr without nested calls, or a branch of one, which has no inputs of its own."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Operand, ...]

    def every_equation(self) -> Iterator[Equation]:
        """Its equations, and those of branches."""
        for equation in self.equations:
            yield equation
            for branch in equation.branches:
                yield from branch.every_equation()


def used(program: Program) -> set[Operand]:
    """What equations take or the program returns, but for what is only used within a branch."""
    return {*program.outputs, *(x for equation in program.equations for x in equation.operands)}


def choice(
    index: Operand,
    branches: tuple[Program, ...],
    results: tuple[Value, ...],
) -> Equation:
    """The equation that runs one of the branches."""
    read: dict[Operand, None] = {}
    for branch in branches:
        made = {x for equation in branch.equations for x in equation.results}
        taken = (x for equation in branch.equations for x in equation.operands)
        read.update(dict.fromkeys(x for x in (*taken, *branch.outputs) if x not in made))
    values = (x for x in read if isinstance(x, Value))
    effects = any(equation.effects for branch in branches for equation in branch.equations)
    return Equation("cond", (index, *values), results, {}, effects, branches)
