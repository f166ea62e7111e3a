"""What can't be printed of a function, and why."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr

from jaxsparse.codegen.flatten import flatten, live
from jaxsparse.codegen.operations import (
    KINDS,
    PRIMITIVES,
    Call,
    SameValue,
    UnsupportedError,
    expression,
)
from jaxsparse.codegen.program import Equation, Program, Value, used


def check_pointwise(jaxpr: ClosedJaxpr, operation: str) -> None:
    """Raises ValueError if a jaxpr can't be printed, naming all that stands in the way.

    What no result needs is not looked at.

    Args:
        jaxpr: takes and returns scalars, float32 or bool.
        operation: what the message begins with, e.g. "recurrent.scan".
    """
    checked_program(jaxpr, operation)


def checked_program(
    jaxpr: ClosedJaxpr,
    operation: str,
    *,
    function: str = "cell",
    dtypes: Sequence[str] = ("float32", "bool"),
) -> Program:
    """The program of a jaxpr, without what no result needs; ValueError as `check_pointwise`.

    ``function`` is what it is called, and ``dtypes`` are those of scalars that it takes.
    """
    program = live(flatten(jaxpr))
    problems = [x.replace("the cell", f"the {function}") for x in _problems(program, dtypes)]
    if problems:
        raise ValueError(f"{operation}: " + "; ".join(problems))
    return program


def _problems(program: Program, dtypes: Sequence[str]) -> list[str]:
    problems = []
    equations = list(program.every_equation())
    unsupported = {equation.primitive for equation in equations} - set(PRIMITIVES)
    if unsupported:
        # What does nothing to a scalar is not what somebody looks for here.
        supported = [
            name for name, how in PRIMITIVES.items() if not isinstance(how, SameValue | Call)
        ]
        problems.append(
            f"the cell uses {_quoted(sorted(unsupported))}, which can't run inside the kernel; "
            f"supported are {', '.join(sorted(supported))}"
        )
    known = {*program.inputs, *(x for equation in equations for x in equation.results)}
    if any(isinstance(x, Value) and x not in known for x in used(program)):
        problems.append("the cell closes over a traced value or a random key: make it an input")
    for what, values in (("input", program.inputs), ("result", program.outputs)):
        for index, value in enumerate(values):
            if value.shape != ():
                problems.append(f"{what} {index} of the cell has shape {value.shape}, expected ()")
            if value.dtype not in dtypes:
                problems.append(f"{what} {index} of the cell is {value.dtype}, expected float32")

    # {problem: the primitives that have it}, in the order of the equations.
    shared: dict[str, dict[str, None]] = {}
    for equation in equations:
        values = (*equation.operands, *equation.results)
        found = [
            f"has values of shape {value.shape}, where all must be scalars,"
            for value in values
            if value.shape != ()
        ]
        if not found and equation.primitive not in unsupported:
            found = [
                f"has values of dtype {value.dtype}, which is none of {', '.join(KINDS)},"
                for value in values
                if value.dtype not in KINDS
            ] or _objection(equation)
        for problem in found:
            shared.setdefault(problem, {})[equation.primitive] = None
    return problems + [
        f"the cell {problem} in {_quoted(list(names))}" for problem, names in shared.items()
    ]


def _objection(equation: Equation) -> list[str]:
    if equation.branches:
        return []  # those that their equations meet with
    try:
        expression(equation, ["x"] * len(equation.operands))
    except UnsupportedError as error:
        return [f"has an equation {error}, which can't be printed,"]
    return []


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(", ".join(f"{name!r}" for name in names).rsplit(", ", 1))
