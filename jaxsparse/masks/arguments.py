"""Checks of what masks are made of, and the form in which masks keep arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsparse.integers import INT32_MAX, integer


class Table:
    """A concrete array of integers in a mask, which compares, hashes and prints by its content."""

    __slots__ = ("array",)

    def __init__(self, array: npt.ArrayLike):
        self.array = np.asarray(array, np.int32)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return repr(tuple(self.array.tolist()) if self.array.ndim else int(self.array))


def traced_or_integer(operation: str, name: str, value: Any, minimum: int) -> Table | jax.Array:
    """An integer that may be traced, in which case its range is not checked."""
    if not isinstance(value, jax.core.Tracer):
        return Table(integer(operation, name, value, minimum))
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.ndim:
        got = f"{value.dtype} {value.shape}"
        raise TypeError(f"{operation}: {name} must be one integer, got a traced {got}")
    return clipped_to_int32(value)


def clipped_to_int32(values: jax.Array) -> jax.Array:
    """Traced integers of any dtype as int32, in which none wraps around."""
    limits = jnp.iinfo(values.dtype)  # A bound that their own dtype can't hold would.
    low, high = max(limits.min, -INT32_MAX), min(limits.max, INT32_MAX)
    return jnp.clip(values, low, high).astype(jnp.int32)


def traced_or_integers(operation: str, name: str, values: Any) -> Any:
    """A sequence of integers that may be traced, in which case their range is not checked."""
    traced = isinstance(values, jax.core.Tracer)
    array: Any = values if traced else np.asarray(values)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int32)  # NumPy makes an empty list floating
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{operation}: {name} must be integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{operation}: {name} must be 1-D, got shape {array.shape}")
    return array
