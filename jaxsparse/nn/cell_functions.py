"""The pointwise functions of recurrent cells, with any gate and activation functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse import recurrent
from jaxsparse.recurrent.cells import Cell

Function = Callable[[Any], Any]


@functools.cache
def residual_rnn(activation_fn: Function) -> Cell:
    """The simple cell that adds its state."""

    def cell(x: Any, r: Any, h: Any) -> tuple[Any, Any]:
        (x,), (r,) = x, r
        h = activation_fn(x + r + h)
        return h, h

    return _named(cell, "residual RNN", activation_fn)


@functools.cache
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


@functools.cache
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
    cell.__name__ = f"{kind}({', '.join(getattr(f, '__name__', repr(f)) for f in functions)})"
    return cell


def check_function(operation: str, name: str, function: Any) -> None:
    """Raises TypeError unless a cell can be made of a gate or activation function."""
    if isinstance(function, nnx.Module) or not callable(function):
        raise TypeError(
            f"{operation}: {name} must be a function without parameters, "
            f"got {type(function).__name__}"
        )
    if not isinstance(function, Hashable):
        raise TypeError(f"{operation}: {name} must be hashable, {type(function).__name__} is not")


def check_cell(function: Cell, gates: int, carry_like: Any) -> None:
    """What is wrong with a cell's function shows here, not at the first call: a scan of no step."""
    one = jax.ShapeDtypeStruct((0, 1), jnp.float32)
    jax.eval_shape(
        functools.partial(recurrent.scan, function),
        jax.ShapeDtypeStruct((1, gates), jnp.float32),
        jax.tree.map(lambda _: one, carry_like),
        jax.ShapeDtypeStruct((0, 0, gates), jnp.float32),
    )
