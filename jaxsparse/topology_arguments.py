"""Checks of what a topology is made of."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.integers import INT32_MAX, integer


def check_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The two sizes of a matrix as Python ints."""
    try:
        m, k = (operator.index(size) for size in shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Topology: shape must be two integers (m, k), got {shape!r}") from error
    if not (0 <= m < INT32_MAX and 0 <= k < INT32_MAX):
        raise ValueError(f"Topology: sizes must be in [0, {INT32_MAX}), got {(m, k)}")
    return m, k


def check_arrays(row_offsets: Any, column_indices: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Both as arrays of int32 whose sizes fit; their numbers are not looked at."""
    row_offsets = _indices("row_offsets", row_offsets)
    column_indices = _indices("column_indices", column_indices)
    m = shape[0]
    if row_offsets.ndim < 1 or row_offsets.shape[-1] != m + 1:
        raise ValueError(
            f"Topology: row_offsets must have shape (..., {m + 1}) for {m} rows, "
            f"got {row_offsets.shape}"
        )
    if column_indices.ndim < 1 or column_indices.shape[:-1] != row_offsets.shape[:-1]:
        raise ValueError(
            f"Topology: column_indices must have shape (..., nse) with the batch dimensions of "
            f"row_offsets {row_offsets.shape[:-1]}, got {column_indices.shape}"
        )
    return row_offsets, column_indices


def _indices(name: str, array: Any) -> Any:
    """An int32 array, of NumPy unless it is traced; int64 is range-checked and cast."""
    if isinstance(array, jax.core.Tracer):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"Topology: {name} must be integers, got {array.dtype}")
        limits = jnp.iinfo(array.dtype)  # a bound that its own dtype can't hold would wrap around
        low, high = max(limits.min, -1), min(limits.max, INT32_MAX)
        return jnp.clip(array, low, high).astype(jnp.int32)
    array = np.asarray(array)
    if array.size == 0 and not np.issubdtype(array.dtype, np.integer):
        array = array.astype(np.int32)  # NumPy makes an empty list floating
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"Topology: {name} must be integers, got {array.dtype}")
    if array.size and (array.max() > INT32_MAX or array.min() < -INT32_MAX):
        raise ValueError(
            f"Topology: {name} must fit int32, got values from {array.min()} to {array.max()}"
        )
    return array.astype(np.int32)


def needed_room(nse: int | None) -> int:
    """The number of entries to have room for where a mask is traced."""
    if nse is None:
        raise ValueError(
            "Topology: under jit the number of stored entries must be given as nse=...; of a mask "
            "that depends on traced arrays, a layer takes the topology made so in its place"
        )
    return integer("Topology", "nse", nse, 0)


def pad_columns(offsets: np.ndarray, columns: np.ndarray, nse: int) -> np.ndarray:
    """The columns with padding entries up to nse."""
    size = integer("Topology", "nse", nse, 0)
    most = int(offsets[..., -1].max(initial=0))
    if size < most:
        raise ValueError(f"Topology: nse={size} is less than the {most} entries to store")
    padded = np.zeros((*columns.shape[:-1], size), columns.dtype)
    padded[..., :most] = columns[..., :most]
    return padded
