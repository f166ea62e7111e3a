"""Prints a pointwise function, a jaxpr of scalars, as CUDA device code.

A kernel runs the pointwise part of a user's function between its products: the jaxpr is printed as
statements that NVRTC compiles with the kernel, and of branches only the one that is chosen is run.
Values are named in the order of their equations, so the text depends on the jaxpr alone and can
serve as a key.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxsparse.codegen.operations import C_TYPES, Expression, expression
from jaxsparse.codegen.program import Constant, Equation, Operand, Program


class Source(NamedTuple):
    """Where an input of a printed function is read."""

    name: str  # what the printed code calls its value
    place: str  # an expression of the value's type, or of type float: a bool is not 0


def print_pointwise(
    program: Program,
    sources: Sequence[Source],
    targets: Sequence[str | None],
    instead: Mapping[str, Expression] = MappingProxyType({}),
) -> list[str]:
    """Prints a program of scalars as statements.

    Equal programs give equal text. Names are those of the sources, and v0, v1, ...

    Args:
        program: one that `check.checked_program` made.
        sources: of every input. Only what is used is read, before anything is written.
        targets: of every result the place that it is written to, of type float, where true is 1; or
            None if it is not.
        instead: expressions of primitives that are to be printed otherwise.
    """
    stores = [
        (target, operand)
        for operand, target in zip(program.outputs, targets, strict=True)
        if target is not None
    ]
    read = {operand for _, operand in stores}
    read.update(operand for equation in program.equations for operand in equation.operands)

    names: dict[Operand, str] = {}
    numbers = itertools.count()
    lines = []
    for value, source in zip(program.inputs, sources, strict=True):
        if value in read:
            names[value] = source.name
            test = " != 0.0f" if value.dtype == "bool" else ""
            lines.append(f"const {C_TYPES[value.dtype]} {source.name} = {source.place}{test};")

    def text(operand: Operand) -> str:
        return _literal(operand) if isinstance(operand, Constant) else names[operand]

    def statements(equations: Sequence[Equation]) -> list[str]:
        printed = []
        for equation in equations:
            for result in equation.results:
                names[result] = f"v{next(numbers)}"
            if equation.branches:
                printed += choice(equation)
                continue
            (result,) = equation.results
            value_of = expression(equation, [text(x) for x in equation.operands], instead)
            printed.append(f"const {C_TYPES[result.dtype]} {names[result]} = {value_of};")
        return printed

    def choice(equation: Equation) -> list[str]:
        # Of an index out of range the nearest branch is run, as XLA does.
        index, *others, _ = text(equation.operands[0]), *range(len(equation.branches))
        tests = [f"if ({index} <= {i}) {{" for i in others]
        printed = [f"{C_TYPES[result.dtype]} {names[result]};" for result in equation.results]
        for i, branch in enumerate(equation.branches):
            printed.append(("} else " if i else "") + (tests[i] if i < len(tests) else "{"))
            printed += [f"  {line}" for line in statements(branch.equations)]
            for result, operand in zip(equation.results, branch.outputs, strict=True):
                printed.append(f"  {names[result]} = {text(operand)};")
        return [*printed, "}"]

    lines += statements(program.equations)
    for target, operand in stores:
        converted = " ? 1.0f : 0.0f" if operand.dtype == "bool" else ""
        lines.append(f"{target} = {text(operand)}{converted};")
    return lines


def _literal(constant: Constant) -> str:
    value = constant.value
    if constant.dtype == "bool":
        return "true" if value else "false"
    if constant.dtype == "uint32":
        return f"{int(value)}u"
    if constant.dtype == "int32":
        # There are no negative literals, and 2147483648 is no int.
        if int(value) == -(2**31):
            return "(-2147483647 - 1)"
        return f"({int(value)})" if value < 0 else str(int(value))
    return _float_literal(np.float32(value))


def _float_literal(value: np.float32) -> str:
    """A float that every compiler reads as exactly this one."""
    if not np.isfinite(value):
        return f"ops::FromBits({value.view(np.uint32):#010x}u)"
    decimal = repr(float(value))
    # Where few digits say it exactly, they are the easiest to read; others are hexadecimal, since
    # their decimal digits would have to be rounded.
    text = decimal if re.fullmatch(r"-?\d{1,6}\.\d{1,4}", decimal) else _hexadecimal(float(value))
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def _hexadecimal(value: float) -> str:
    return re.sub(r"\.?0*p", "p", value.hex())
