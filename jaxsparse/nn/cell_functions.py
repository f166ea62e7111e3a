"""The pointwise functions of recurrent cells, with any gate and activation functions."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse import recurrent
from jaxsparse.recurrent.cells import Cell

Function = Callable[[Any], Any]

# A cell is found again by its functions. Without a bound, functions that are made anew for each
# layer, and all that they refer to, would be kept for ever.
_CELLS = 1024


@functools.lru_cache(maxsize=_CELLS)
def residual_rnn(activation_fn: Function) -> Cell:
    """The simple cell that adds its state."""

    def cell(x: Any, r: Any, h: Any) -> tuple[Any, Any]:
        (x,), (r,) = x, r
        h = activation_fn(x + r + h)
        return h, h

    return _named(cell, "residual RNN", activation_fn)


@functools.lru_cache(maxsize=_CELLS)
def gru(gate_fn: Function, activation_fn: Function) -> Cell:
    """`recurrent.GRU` for the usual functions: its kernels are then those of other users."""
    if (gate_fn, activation_fn) == (nnx.sigmoid, nnx.tanh):
        return recurrent.GRU

    def cell(x: Any, r: Any, h: Any) -> tuple[Any, Any]:
        (x_reset, x_update, x_new), (r_reset, r_update, r_new) = x, r
        reset = gate_fn(x_reset + r_reset)
        update = gate_fn(x_update + r_update)
        new = activation_fn(x_new + reset * r_new)
        h = new + update * (h - new)
        return h, h

    return _named(cell, "GRU", gate_fn, activation_fn)


@functools.lru_cache(maxsize=_CELLS)
def lstm(gate_fn: Function, activation_fn: Function) -> Cell:
    """`recurrent.LSTM` for the usual functions."""
    if (gate_fn, activation_fn) == (nnx.sigmoid, nnx.tanh):
        return recurrent.LSTM

    def cell(x: Any, r: Any, carry: Any) -> tuple[Any, Any]:
        i, f, g, o = (a + b for a, b in zip(x, r, strict=True))
        c, _ = carry
        c = gate_fn(f) * c + gate_fn(i) * activation_fn(g)
        h = gate_fn(o) * activation_fn(c)
        return (c, h), h

    return _named(cell, "LSTM", gate_fn, activation_fn)


def _named(cell: Any, kind: str, *functions: Function) -> Cell:
    """The cell under the name that errors give it."""
    cell.__name__ = f"{kind}({', '.join(map(_name, functions))})"
    named: Cell = cell
    return named


def check_function(operation: str, name: str, function: Any) -> None:
    """Raises TypeError or ValueError unless a gate or activation function can be part of a cell.

    Args:
        operation: the layer that errors name.
        name: its option.
        function: what was given.
    """
    if not callable(function):
        raise TypeError(
            f"{operation}: {name} must be a function without parameters, "
            f"got {type(function).__name__}"
        )
    if not isinstance(function, Hashable):
        raise TypeError(f"{operation}: {name} must be hashable, {type(function).__name__} is not")
    _check_hashable_function(operation, name, function)


@functools.lru_cache(maxsize=_CELLS)
def _check_hashable_function(operation: str, name: str, function: Any) -> None:
    """The checks that take long, once for a function: a cell's calls ask for them, too."""
    check_stateless(operation, name, function)
    _check_constants(operation, name, function, _SCALAR)


def check_stateless(operation: str, name: str, function: Any) -> None:
    """Raises TypeError for a function with parameters: a compiled cell would keep their values."""
    held = _state_held_by(function)
    if held is not None:
        kind = type(held).__name__
        got = kind if held is function else f"{_name(function)}, which refers to a {kind}"
        raise TypeError(f"{operation}: {name} must be a function without parameters, got {got}")


_STATEFUL = (nnx.Module, nnx.Variable)


def _state_held_by(function: Any) -> Any:
    """A module or variable that a function is bound to or refers to, or None."""
    seen = {}
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _STATEFUL):
            return value
        if id(value) not in seen:
            seen[id(value)] = value  # what lives on keeps its id to itself
            waiting += _referred_to(value)
    return None


def _referred_to(value: Any) -> list[Any]:
    """What a function or container refers to.

    Of a function's globals only modules and variables count: the functions among them lead from
    jnp alone all through JAX.
    """
    if isinstance(value, type):
        return []
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        attributes = getattr(value.__self__, "__dict__", {}).values()
        return [*attributes, value.__func__, value.__self__]
    if inspect.isfunction(value):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        used = {i.argval for i in dis.get_instructions(value) if i.opname == "LOAD_GLOBAL"}
        found = [value.__globals__.get(name) for name in used]
        return [*defaults, *_closure(value), *(x for x in found if isinstance(x, _STATEFUL))]
    # What jax.jit and its like return has the function that it wraps among its attributes.
    return list(getattr(value, "__dict__", {}).values()) if callable(value) else []


def _closure(function: Any) -> list[Any]:
    held = []
    for cell in function.__closure__ or ():
        # A variable that is not assigned yet has no contents.
        with contextlib.suppress(ValueError):
            held.append(cell.cell_contents)
    return held


_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def _check_constants(operation: str, name: str, function: Any, *operands: Any) -> None:
    """Raises ValueError for a function of arrays other than its operands, naming it."""
    try:
        jaxpr = jax.make_jaxpr(function)(*operands)
    except Exception:
        return  # The scan of `check_cell` says what fails.
    for constant in jaxpr.consts:
        traced = isinstance(constant, jax.core.Tracer)
        if traced or jnp.shape(constant) != ():
            raise ValueError(
                f"{operation}: {name} must be a function of its operands and constant scalars, got "
                f"{_name(function)}, which uses a {'traced' if traced else 'constant'} array of "
                f"shape {jnp.shape(constant)}"
            )


def _name(function: Any) -> str:
    """How errors name a function."""
    if isinstance(function, functools.partial):
        return f"partial({_name(function.func)})"
    if inspect.ismethod(function):
        return f"{type(function.__self__).__name__}.{function.__name__}"
    return getattr(function, "__name__", repr(function))


def check_cell(operation: str, function: Cell, gates: int, carry_like: Any) -> None:
    """What is wrong with a cell's function shows here, not at the first call: a scan of no step."""
    check_stateless(operation, "function", function)
    x = (_SCALAR,) * gates
    carry = jax.tree.map(lambda _: _SCALAR, carry_like)
    _check_constants(operation, "function", function, x, x, carry)
    one = jax.ShapeDtypeStruct((0, 1), jnp.float32)
    _, y = jax.eval_shape(
        functools.partial(recurrent.scan, function),
        jax.ShapeDtypeStruct((1, gates), jnp.float32),
        jax.tree.map(lambda _: one, carry_like),
        jax.ShapeDtypeStruct((0, 0, gates), jnp.float32),
    )
    if y is None:
        raise TypeError(f"{operation}: function must return an array as y, got None")
