"""A program of scalars: a jaxpr without nested calls."""

from __future__ import annotations

import dataclasses
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
    """What computes values; its primitive is none that is a call."""

    primitive: str
    operands: tuple[Operand, ...]
    results: tuple[Value, ...]
    params: dict[str, Any]
    effects: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A jaxpr without nested calls."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Operand, ...]
