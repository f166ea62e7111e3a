"""From a jaxpr to a program: nested calls are inlined, and what does nothing is left out.

Branches stay, so that only the one that is chosen is run.

What only passes a value on gives the value itself. Then equations that no result needs are dropped:
all that is checked, counted or printed is what remains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxsparse.codegen.operations import PRIMITIVES, Branches, Call, SameValue, Zero, kind
from jaxsparse.codegen.program import Constant, Equation, Operand, Program, Value, choice, used

_T = TypeVar("_T")


def flatten(jaxpr: ClosedJaxpr) -> Program:
    """The program of a jaxpr, with equations that no result needs."""
    equations: list[Equation] = []

    def inline(body: Jaxpr | ClosedJaxpr, arguments: Sequence[Operand]) -> list[Operand]:
        consts: Sequence[Any] = ()
        if isinstance(body, ClosedJaxpr):
            consts = body.consts
            body = body.jaxpr
        environment: dict[Any, Operand] = dict(zip(body.invars, arguments, strict=True))
        for variable, const in zip(body.constvars, consts, strict=True):
            environment[variable] = _constant(const, variable.aval)

        def read(atom: Any) -> Operand:
            if isinstance(atom, Literal):
                return _constant(atom.val, atom.aval)
            return environment[atom]

        for equation in body.eqns:
            results = apply(equation, [read(atom) for atom in equation.invars])
            environment.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in body.outvars]

    def apply(equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        name, params = equation.primitive.name, equation.params
        results = tuple(_value(variable.aval) for variable in equation.outvars)
        printed = PRIMITIVES.get(name)
        if isinstance(printed, Call):
            return inline(params[printed.param], operands)
        if isinstance(printed, Branches):
            return branch_off(operands[0], params["branches"], operands[1:], results)
        if name == "select_n":
            return [choose(operands[0], operands[1:], results[0])]
        if name == "convert_element_type" and (folded := _fold(operands[0], results[0])):
            return [folded]
        if isinstance(printed, Zero):
            return [Constant(np.zeros(results[0].shape, equation.outvars[0].aval.dtype))]
        if isinstance(printed, SameValue) and _all_same(operands, results):
            return operands
        emit(name, operands, results, params, bool(equation.effects))
        return results

    def branch_off(
        index: Operand, bodies: Sequence[Any], arguments: list[Operand], results: tuple[Value, ...]
    ) -> Sequence[Operand]:
        nonlocal equations
        if isinstance(index, Constant) and index.shape == ():
            return inline(_nearest(index, bodies), arguments)
        before, branches = equations, []
        for body in bodies:
            equations = []
            outputs = inline(body, arguments)
            branches.append(Program((), tuple(equations), tuple(outputs)))
        equations = before
        equations.append(choice(index, tuple(branches), results))
        # What is the same in all branches is none of their results.
        return [
            same[0] if all(x is same[0] for x in same) else result
            for *same, result in zip(*(b.outputs for b in branches), results, strict=True)
        ]

    def choose(index: Operand, cases: list[Operand], result: Value) -> Operand:
        if all(case is cases[0] for case in cases):
            return cases[0]
        if isinstance(index, Constant) and index.shape == ():
            return _nearest(index, cases)
        emit("select_n", [index, *cases], (result,))
        return result

    def emit(
        name: str,
        operands: Sequence[Operand],
        results: tuple[Value, ...],
        params: dict[str, Any] | None = None,
        effects: bool = False,
    ) -> None:
        equations.append(Equation(name, tuple(operands), results, params or {}, effects))

    inputs = tuple(_value(variable.aval) for variable in jaxpr.jaxpr.invars)
    outputs = inline(jaxpr, inputs)
    return Program(inputs, tuple(equations), tuple(outputs))


def live(program: Program) -> Program:
    """Without the equations that no result needs. What has an effect stays, to be complained of."""
    needed = set(program.outputs)
    kept = []
    for equation in reversed(program.equations):
        if equation.effects or needed.intersection(equation.results):
            kept.append(_live_choice(equation, needed) if equation.branches else equation)
            needed.update(kept[-1].operands)
    return dataclasses.replace(program, equations=tuple(reversed(kept)))


def _live_choice(equation: Equation, needed: set[Operand]) -> Equation:
    """A choice with the results that are needed, and its branches with what these need."""
    places = [i for i, x in enumerate(equation.results) if x in needed]
    branches = tuple(
        live(dataclasses.replace(branch, outputs=tuple(branch.outputs[i] for i in places)))
        for branch in equation.branches
    )
    return choice(equation.operands[0], branches, tuple(equation.results[i] for i in places))


def uses(jaxpr: ClosedJaxpr) -> list[bool]:
    """For each in-variable, whether an out-variable depends on it."""
    program = live(flatten(jaxpr))
    needed = used(program)
    return [value in needed for value in program.inputs]


def same_variable(jaxpr: ClosedJaxpr, i: int, j: int) -> bool:
    """Whether out-variables i and j are the same value, by whatever calls and copies it came."""
    outputs = flatten(jaxpr).outputs
    x, y = outputs[i], outputs[j]
    if isinstance(x, Constant) and isinstance(y, Constant):
        return x.dtype == y.dtype and x.shape == y.shape and x.value.tobytes() == y.value.tobytes()
    return x is y


def _nearest(index: Constant, cases: Sequence[_T]) -> _T:
    """The case of an index, which may be out of range."""
    return cases[min(max(int(index.value), 0), len(cases) - 1)]


def _value(aval: Any) -> Value:
    return Value(str(getattr(aval, "dtype", aval)), tuple(getattr(aval, "shape", ())))


def _constant(x: Any, aval: Any) -> Operand:
    if isinstance(x, jax.core.Tracer) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return _value(aval)  # nothing defines it, which `check` finds
    return Constant(np.asarray(x, dtype=aval.dtype))


def _all_same(operands: Sequence[Operand], results: Sequence[Value]) -> bool:
    return len(operands) == len(results) and all(
        x.shape == y.shape == () and x.dtype == y.dtype
        for x, y in zip(operands, results, strict=True)
    )


def _fold(operand: Operand, result: Value) -> Operand | None:
    """What a conversion gives without being computed: it changes nothing, or is of a constant.

    With 64-bit types enabled, Python's integers come as constants of a type that has no other use.
    """
    if operand.shape != ():
        return None
    if operand.dtype == result.dtype:
        return operand
    if not isinstance(operand, Constant) or kind(result) not in ("floats", "bools"):
        return None
    with np.errstate(all="ignore"):
        return Constant(operand.value.astype(jax.numpy.dtype(result.dtype)))
