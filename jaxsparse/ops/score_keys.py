"""By what functions of scores are told apart: equal ones give equal compiled programs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxsparse.codegen.flatten import flatten, live
from jaxsparse.codegen.program import Constant, Equation, Operand, Program


def key_of(jaxprs: Iterable[ClosedJaxpr]) -> Hashable:
    """Equal for jaxprs that compute the same by the same equations, with equal constants.

    Nested calls are inlined first: the text of a jaxpr leaves out their constants.
    """
    return tuple(_of_program(live(flatten(jaxpr))) for jaxpr in jaxprs)


def has_rules(jaxpr: ClosedJaxpr) -> bool:
    """Whether derivatives may be other than those of the equations."""
    text = str(jaxpr)
    return "custom_jvp_call" in text or "custom_vjp_call" in text


def _of_program(program: Program) -> Hashable:
    numbers: dict[Operand, int] = {}

    def of_branch(branch: Program) -> tuple[Hashable, Hashable]:
        return tuple(map(of_equation, branch.equations)), tuple(map(of, branch.outputs))

    def of_equation(e: Equation) -> Hashable:
        values = tuple(map(of, (*e.operands, *e.results)))
        return e.primitive, values, _of_param(e.params), tuple(map(of_branch, e.branches))

    def of(operand: Operand) -> Hashable:
        if isinstance(operand, Constant):
            return _of_array(operand.value)
        number = numbers.setdefault(operand, len(numbers))
        return number, operand.dtype, operand.shape

    return (tuple(map(of, program.inputs)), *of_branch(program))


def _of_param(x: Any) -> Hashable:
    """A parameter of a primitive by its value; one without a hash equals no other."""
    if isinstance(x, Jaxpr):
        x = ClosedJaxpr(x, ())
    if isinstance(x, ClosedJaxpr):
        return key_of([x])
    if isinstance(x, dict):
        return tuple((name, _of_param(value)) for name, value in sorted(x.items()))
    if isinstance(x, tuple | list):
        return tuple(map(_of_param, x))
    if isinstance(x, np.ndarray | jax.Array):
        return _of_array(np.asarray(x))
    return (type(x), x) if _has_hash(x) else object()


def _has_hash(x: Any) -> bool:
    """Whether a hash is to be had: what is Hashable may hold what is not."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _of_array(x: np.ndarray) -> Hashable:
    return str(x.dtype), x.shape, x.tobytes()
