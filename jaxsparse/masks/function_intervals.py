"""Interval arithmetic on mask functions that users write, by the programs that JAX makes of them.

Integers of 32 bits and bool are followed through what mask functions mostly consist of:
comparisons, logic, sums, differences, products, quotients by constants, and entries of tables.
Whatever else there is gives any value of its type. A function that JAX can't trace is undecided
everywhere.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxsparse.masks.intervals import Interval, Truth, look_up

_Values = list[Any]  # an Interval, a Truth, a _Table or None, of which nothing is known


class _Table:
    """An array that a function has from outside."""

    def __init__(self, xp: Any, array: Any):
        self.xp, self.array = xp, array


def truth_of_function(function: Callable[..., Any], rows: Interval, columns: Interval) -> Truth:
    """Whether a mask function holds somewhere in each cell, and everywhere."""
    xp = rows.xp
    position = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    try:
        program = jax.make_jaxpr(function)(position, position)
    except Exception:  # Where it is evaluated, what it raises gets to the user.
        return Truth.unknown(xp)
    shapes = [getattr(aval, "shape", None) for aval in program.out_avals]
    results = _run(xp, program.jaxpr, [_Table(xp, x) for x in program.consts], [rows, columns])
    if shapes not in ([()], [(1, 1)]) or not isinstance(result := _known(results[0]), Truth):
        return Truth.unknown(xp)
    return result


def divisors_of_function(function: Callable[..., Any]) -> frozenset[int]:
    """The positive constants of which a mask function takes remainders."""
    position = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    try:
        program = jax.make_jaxpr(function)(position, position)
    except Exception:  # as above
        return frozenset()
    divisors = (
        equation.invars[1].val
        for equation in program.jaxpr.eqns
        if "rem" in (equation.primitive.name, str(equation.params.get("name"))[:3])
        and len(equation.invars) == 2
        and isinstance(equation.invars[1], Literal)
    )
    return frozenset(int(divisor) for divisor in divisors if divisor > 0)


def _run(xp: Any, jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> _Values:
    environment = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return _Table(xp, np.asarray(atom.val, getattr(atom.aval, "dtype", None)))
        return environment[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        results = _apply(xp, equation, operands)
        environment.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(xp: Any, equation: Any, operands: _Values) -> _Values:
    name, params = equation.primitive.name, equation.params
    unknown = [_unknown(xp, getattr(variable.aval, "dtype", None)) for variable in equation.outvars]
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name in ("jit", "pjit", "closed_call", "custom_jvp_call") and inner is not None:
        if (divided := _divided(equation, inner, operands)) is not None:
            return [divided]
        if isinstance(inner, ClosedJaxpr):
            consts = [_Table(xp, x) for x in inner.consts]
            return _run(xp, inner.jaxpr, consts, operands)
        return unknown
    if name == "gather":
        entry = _gathered(params, *operands)
        return unknown if entry is None else [entry]
    rule = _RULES.get(name)
    known = [_known(x) for x in operands]
    if rule is None or len(unknown) != 1 or unknown[0] is None or any(x is None for x in known):
        return unknown
    result = rule(params, *known)
    return [unknown[0] if result is None else result]


def _unknown(xp: Any, dtype: Any) -> Any:
    """Any value of a type, or None for a type that is not followed."""
    if dtype == np.bool_:
        return Truth.unknown(xp)
    return Interval.unknown(xp) if dtype == np.int32 else None


def _known(value: Any) -> Any:
    """A value as an Interval or a Truth; of a table what its entries are in, or None."""
    if not isinstance(value, _Table):
        return value
    xp, array = value.xp, value.array
    dtype = getattr(array, "dtype", None)
    unknown = _unknown(xp, dtype)
    traced = isinstance(array, jax.core.Tracer)
    if unknown is None or array.size == 0 or (traced and xp is np):
        return unknown
    array = xp.asarray(array)
    if dtype == np.bool_:
        return Truth(xp, xp.any(array), xp.all(array))
    return Interval(xp, xp.min(array), xp.max(array))


def _constant(value: Any) -> int | None:
    """The integer that an operand is, if it is known while the rule is applied."""
    if isinstance(value, _Table):
        array = value.array
        concrete = not isinstance(array, jax.core.Tracer) and np.size(array) == 1
        return int(np.asarray(array).item()) if concrete and array.dtype == np.int32 else None
    if isinstance(value, Interval) and not isinstance(value.low, jax.core.Tracer):
        low, high = np.asarray(value.low), np.asarray(value.high)
        if low.size == 1 and high.size == 1 and low.item() == high.item():
            return int(low.item())
    return None


# ---- What mask functions call ----


@functools.lru_cache(maxsize=64)
def _reference(function: str, avals: tuple[Any, ...]) -> str:
    program = jax.make_jaxpr(getattr(jnp, function))(*avals)
    equations = program.jaxpr.eqns
    return str(equations[0].params.get("jaxpr")) if len(equations) == 1 else ""


def _divided(equation: Any, inner: Any, operands: _Values) -> Interval | None:
    """What // and % of jax.numpy give, for a positive constant: their parts say less."""
    name = equation.params.get("name")
    if name not in ("floor_divide", "remainder") or len(operands) != 2:
        return None
    dividend, divisor = _known(operands[0]), _constant(operands[1])
    if not isinstance(dividend, Interval) or divisor is None or divisor < 1:
        return None
    avals = tuple(
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type)
        for x in equation.invars
    )
    if str(inner) != _reference(name, avals):  # a function of the user's, of that name
        return None
    return dividend // divisor if name == "floor_divide" else dividend % divisor


def _gathered(params: Any, table: Any, places: Any) -> Any:
    """An entry of a vector, by a place that the function computes."""
    numbers, mode = params["dimension_numbers"], params["mode"]
    modes = jax.lax.GatherScatterMode
    if (
        not (isinstance(table, _Table) and isinstance(places, Interval))
        or (isinstance(table.array, jax.core.Tracer) and table.xp is np)
        or (table.array.ndim, table.array.size > 0) != (1, True)
        or table.array.dtype not in (np.int32, np.bool_)
        or mode not in (modes.PROMISE_IN_BOUNDS, modes.CLIP)
        or numbers.offset_dims
        or tuple(numbers.start_index_map) != (0,)
        or tuple(params["slice_sizes"]) != (1,)
    ):
        return None
    entry = look_up(table.array, places)
    if table.array.dtype == np.int32:
        return entry
    return Truth(table.xp, entry.high > 0, entry.low > 0)


# ---- Rules: of the equation's parameters and its operands, or None where nothing is known ----


def _integers(compute: Callable[..., Any]) -> Callable[..., Any]:
    def rule(params: Any, *operands: Any) -> Any:
        return compute(*operands) if all(isinstance(x, Interval) for x in operands) else None

    return rule


def _truths(compute: Callable[..., Any]) -> Callable[..., Any]:
    def rule(params: Any, *operands: Any) -> Any:
        return compute(*operands) if all(isinstance(x, Truth) for x in operands) else None

    return rule


def _same(params: Any, operand: Any, *more: Any) -> Any:
    return operand if not more else None


def _quotient(x: Interval, y: Interval) -> Interval | None:
    """Division that rounds towards 0."""
    divisor, xp = _constant(y), x.xp
    if divisor is None or divisor < 1:
        return None
    return x.monotone(lambda v: v // divisor + xp.where((v < 0) & (v % divisor != 0), 1, 0))


def _remainder(x: Interval, y: Interval) -> Interval | None:
    """The remainder of that, which has the sign of the dividend."""
    divisor, xp = _constant(y), x.xp
    if divisor is None or divisor < 1:
        return None
    floored, positive = x % divisor, x.low >= 0
    low = xp.maximum(xp.minimum(x.low, 0), 1 - divisor)
    high = xp.minimum(xp.maximum(x.high, 0), divisor - 1)
    where = xp.where
    return Interval(xp, where(positive, floored.low, low), where(positive, floored.high, high))


def _shifted_right(x: Interval, y: Interval) -> Interval | None:
    bits = _constant(y)
    return x.monotone(lambda v: v >> bits) if bits is not None and 0 <= bits < 32 else None


def _shifted_left(x: Interval, y: Interval) -> Interval | None:
    bits = _constant(y)
    return x * (1 << bits) if bits is not None and 0 <= bits < 30 else None


def _squared(x: Interval) -> Interval:
    return abs(x) * abs(x)


def _equal(params: Any, x: Any, y: Any) -> Any:
    if isinstance(x, Truth) and isinstance(y, Truth):
        return ~(x ^ y)
    return x == y if isinstance(x, Interval) and isinstance(y, Interval) else None


def _unequal(params: Any, x: Any, y: Any) -> Any:
    equal = _equal(params, x, y)
    return None if equal is None else ~equal


def _selected(params: Any, which: Any, *cases: Any) -> Any:
    return which.select(*cases) if isinstance(which, Truth) and len(cases) == 2 else None


def _converted(params: Any, x: Any) -> Any:
    dtype = params["new_dtype"]
    if isinstance(x, Truth):
        if dtype != np.int32:
            return x if dtype == np.bool_ else None
        return Interval(x.xp, *(x.xp.asarray(bound).astype(np.int32) for bound in (x.must, x.may)))
    if dtype == np.bool_:
        return x != 0
    return x if dtype == np.int32 else None


_RULES: dict[str, Callable[..., Any]] = {
    "add": _integers(operator.add),
    "sub": _integers(operator.sub),
    "mul": _integers(operator.mul),
    "neg": _integers(operator.neg),
    "abs": _integers(operator.abs),
    "min": _integers(Interval.minimum),
    "max": _integers(Interval.maximum),
    "clamp": _integers(lambda low, x, high: low.maximum(x).minimum(high)),
    "sign": _integers(lambda x: x.monotone(x.xp.sign)),
    "square": _integers(_squared),
    "integer_pow": lambda params, x: _squared(x) if params["y"] == 2 else None,
    "div": _integers(_quotient),
    "rem": _integers(_remainder),
    "shift_right_arithmetic": _integers(_shifted_right),
    "shift_left": _integers(_shifted_left),
    "lt": _integers(operator.lt),
    "le": _integers(operator.le),
    "gt": _integers(operator.gt),
    "ge": _integers(operator.ge),
    "eq": _equal,
    "ne": _unequal,
    "and": _truths(operator.and_),
    "or": _truths(operator.or_),
    "xor": _truths(operator.xor),
    "not": _truths(operator.invert),
    "select_n": _selected,
    "convert_element_type": _converted,
    # What moves or repeats values, of which each is in the same bounds:
    **dict.fromkeys(
        (
            "broadcast_in_dim",
            "reshape",
            "squeeze",
            "expand_dims",
            "transpose",
            "copy",
            "stop_gradient",
        ),
        _same,
    ),
}
