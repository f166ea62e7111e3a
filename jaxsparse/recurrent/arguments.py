"""What the public functions of scans are given, checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.ops.arguments import as_array, check_floating
from jaxsparse.recurrent.cells import Cell

_PRECISIONS = {
    None: None,
    "highest": jax.lax.Precision.HIGHEST,
    "float32": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "default": jax.lax.Precision.DEFAULT,
    "tensorfloat32": jax.lax.Precision.DEFAULT,
}


class Direction:
    """The checked operands of one direction."""

    def __init__(
        self,
        operation: str,
        side: str,
        cell: Cell,
        recurrent: Any,
        carry: Any,
        xs: Any,
        bias: Any,
        parameters: Any,
    ):
        if not callable(cell):
            raise TypeError(f"{operation}: cell must be a function, got {type(cell).__name__}")
        try:
            hash(cell)
        except TypeError:
            raise TypeError(
                f"{operation}: cell must be hashable, {type(cell).__name__} is not"
            ) from None
        self.xs = _array(operation, f"{side}xs", xs, 3)
        self.length, b, width = self.xs.shape
        self.sparse = isinstance(recurrent, CSR)
        if self.sparse:
            recurrent.topology.check_transpose(f"{operation}: {side}recurrent")
            self.recurrent = recurrent
            self.heads = 1
            rows, h = recurrent.shape
            if recurrent.topology.batch_shape or recurrent.values.ndim != 1:
                raise ValueError(
                    f"{operation}: {side}recurrent must be one matrix, got values of shape "
                    f"{recurrent.values.shape}: use jax.vmap"
                )
            expected = "a CSR matrix (gates * h, h)"
        else:
            self.recurrent = _array(operation, f"{side}recurrent", recurrent, 2, 3)
            *heads, d, width_of_head = self.recurrent.shape
            self.heads = heads[0] if heads else 1
            h, rows = self.heads * d, self.heads * width_of_head
            if self.heads == 1:
                self.recurrent = self.recurrent.reshape(h, rows)
            expected = "(h, gates * h), (heads, d, gates * d), or a CSR matrix (gates * h, h)"
        if h == 0 or rows == 0 or rows % h:
            raise ValueError(
                f"{operation}: {side}recurrent must be {expected}, got shape "
                f"{tuple(self.recurrent.shape)}"
            )
        if width == 0 or width % h:
            raise ValueError(
                f"{operation}: the last dimension of {side}xs must be gates * h, for recurrent "
                f"weights of shape {tuple(self.recurrent.shape)} a multiple of {h}, got {width}"
            )
        self.h, self.gates, self.dtype = h, rows // h, self.xs.dtype
        self.input_gates = width // h
        leaves, self.tree = jax.tree.flatten(carry)
        if not leaves:
            raise ValueError(f"{operation}: {side}carry must have a leaf: the state, its last one")
        self.carry = [_array(operation, f"{side}carry", x, 2) for x in leaves]
        for x in self.carry:
            if x.shape != (b, h):
                raise ValueError(
                    f"{operation}: the leaves of {side}carry must have shape (B, h) = {(b, h)}, "
                    f"got {x.shape}"
                )
        values = self.recurrent.values if self.sparse else self.recurrent
        check_floating(operation, recurrent=values)
        check_floating(operation, xs=self.xs)
        for i, x in enumerate(self.carry):
            check_floating(operation, **{f"carry {i}": x})
        self.bias: Any = None
        if bias is not None:
            self.bias = _array(operation, f"{side}recurrent_bias", bias, 1)
            check_floating(operation, recurrent_bias=self.bias)
            if self.bias.shape != (rows,):
                raise ValueError(
                    f"{operation}: {side}recurrent_bias must have shape {(rows,)}, "
                    f"got {self.bias.shape}"
                )
        own, self.parameter_tree = jax.tree.flatten(parameters)
        self.parameters = [_array(operation, f"{side}parameters", x, 1) for x in own]
        for x in self.parameters:
            check_floating(operation, parameters=x)
            if x.shape != (h,):
                raise ValueError(
                    f"{operation}: the leaves of {side}parameters must have shape (h,) = {(h,)}, "
                    f"got {x.shape}"
                )
        self.cell = cell

    @property
    def form(self) -> Any:
        """What the two directions of one scan must share."""
        carries = [x.dtype.name for x in self.carry]
        values = self.recurrent.values if self.sparse else self.recurrent
        return (
            self.xs.shape,
            self.h,
            self.heads,
            self.gates,
            self.dtype.name,
            str(self.tree),
            carries,
            "CSR" if self.sparse else "dense",
            values.dtype.name,
            self.bias is not None,
            str(self.parameter_tree),
        )


def check_precision(operation: str, precision: Any) -> Any:
    """The `jax.lax.Precision` that is asked for, or None; ValueError if there is no such."""
    if isinstance(precision, jax.lax.Precision):
        return precision
    if not isinstance(precision, str | None) or precision not in _PRECISIONS:
        raise ValueError(
            f"{operation}: precision must be a jax.lax.Precision or one of {list(_PRECISIONS)}, "
            f"got {precision!r}"
        )
    return _PRECISIONS[precision]


def counted_steps(operation: str, seq_lengths: Any, length: int, b: int) -> Any:
    """Which steps count, (T, B), or None if all do."""
    if seq_lengths is None:
        return None
    lengths = _array(operation, "seq_lengths", seq_lengths, 1)
    if lengths.shape != (b,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{operation}: seq_lengths must be {b} integers, got {lengths.dtype} of shape "
            f"{lengths.shape}"
        )
    # Of any width: neither may T wrap in their dtype, nor they in int32.
    longest = min(jnp.iinfo(lengths.dtype).max, jnp.iinfo(jnp.int32).max)
    lengths = jnp.clip(lengths, 0, int(longest)).astype(jnp.int32)
    return jnp.arange(length, dtype=jnp.int32)[:, None] < lengths[None]


def _array(operation: str, name: str, x: Any, *ranks: int) -> jax.Array:
    array = as_array(operation, name, x, ranks[0])
    if array.ndim not in ranks:
        raise ValueError(
            f"{operation}: {name} must have {' or '.join(map(str, ranks))} dimensions, got shape "
            f"{array.shape}: use jax.vmap"
        )
    return array
