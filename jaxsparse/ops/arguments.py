"""Checks and shapes that the public functions of all operations share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_FLOATS = tuple(jnp.dtype(t) for t in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16))
_EXACT = (None, jax.lax.Precision.HIGHEST, "highest", "float32")


def check_floating(operation: str, **arrays: Any) -> Any:
    """The common dtype of the arrays; raises TypeError if it is not a supported floating type."""
    dtypes = [x.dtype for x in arrays.values()]
    dtype = dtypes[0] if all(d == dtypes[0] for d in dtypes) else jnp.result_type(*arrays.values())
    if dtype not in _FLOATS:
        got = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise TypeError(f"{operation}: needs float32, float64, bfloat16 or float16, got {got}")
    return jnp.dtype(dtype)


def check_precision(operation: str, precision: Any) -> None:
    """Raises ValueError unless exact multiply-adds are asked for: there are no others yet."""
    if precision not in _EXACT:
        raise ValueError(
            f"{operation}: precision must be None or HIGHEST (products are exact FMA), "
            f"got {precision!r}"
        )


def result_dtype(operation: str, dtype: Any, preferred_element_type: Any) -> Any:
    """The dtype of a product's result: that of its operands, or float32 for 16-bit ones if preferred."""
    if preferred_element_type is None:
        return dtype
    preferred = jnp.dtype(preferred_element_type)
    if preferred == dtype or (preferred == np.float32 and dtype.itemsize == 2):
        return preferred
    raise ValueError(
        f"{operation}: preferred_element_type must be {dtype} or, for 16-bit operands, float32, "
        f"got {preferred}"
    )


def pad_batch(array: jax.Array, core_rank: int, batch_rank: int) -> jax.Array:
    """Leading dimensions of size 1 up to batch_rank."""
    missing = batch_rank - (array.ndim - core_rank)
    return jnp.expand_dims(array, tuple(range(missing))) if missing else array


def as_array(operation: str, name: str, x: Any, rank: int) -> jax.Array:
    """x as a JAX array of at least so many dimensions; raises TypeError or ValueError."""
    if not isinstance(x, jax.Array):
        if not isinstance(x, np.ndarray | np.generic | float | int | list | tuple):
            raise TypeError(f"{operation}: {name} must be an array, got {type(x).__name__}")
        x = jnp.asarray(x)
    if x.ndim < rank:
        raise ValueError(
            f"{operation}: {name} must have at least {rank} dimensions, got shape {x.shape}"
        )
    return x
