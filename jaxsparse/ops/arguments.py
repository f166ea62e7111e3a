"""What all operations share: checks and shapes of arguments, and the operands of a pattern."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.batching import align_batch
from jaxsparse.topology import Topology

PATTERN = (
    ("row_offsets", "m+1"),
    ("column_indices", "e"),
    ("row_order", "m"),
    ("transposed_row_offsets", "k+1"),
    ("transposed_column_indices", "e"),
    ("transposed_row_order", "k"),
    ("permutation", "e"),
    ("tile_starts", "tiles"),
    ("row_cuts", "cuts"),
    ("transposed_row_cuts", "transposed_cuts"),
)
"""Operands of a pattern: both orientations, what joins them, layouts, and cuts of both."""

ROWS_ALONE = (*PATTERN[:3], *PATTERN[7:9])
"""The same of a topology without its transpose."""

ROWS = tuple(name for name, _ in PATTERN[:3])
TRANSPOSED_ROWS = tuple(name for name, _ in PATTERN[3:6])
STARTS = PATTERN[7][0]
CUTS, TRANSPOSED_CUTS = (name for name, _ in PATTERN[8:])
TRANSPOSED = tuple(name for name, _ in (*PATTERN[3:7], *PATTERN[:2]))  # and where values are stored


def check_values(operation: str, name: str, values: jax.Array, topology: Topology) -> None:
    """Raises a ValueError unless there is one for each entry, of batches that broadcast."""
    if values.ndim < 1 or values.shape[-1] != topology.nse:
        raise ValueError(
            f"{operation}: {name} must have shape (..., {topology.nse}), one for each stored "
            f"entry, got {values.shape}"
        )
    try:
        jnp.broadcast_shapes(values.shape[:-1], topology.batch_shape)
    except ValueError:
        raise ValueError(
            f"{operation}: batch dimensions of {name} {values.shape[:-1]} and topology "
            f"{topology.batch_shape} must broadcast"
        ) from None


def columns_alone(topology: Topology) -> int | None:
    """``columns``, a param of every primitive that takes a pattern.

    It is k for a pattern without its transpose, whose arrays do not tell it, and None for others.
    """
    return None if topology.has_transpose else topology.shape[1]


def operands_of_pattern(columns: int | None) -> tuple[tuple[str, str], ...]:
    """Names and dimensions of a pattern's operands, as ``Topology.operands`` gives them."""
    return PATTERN if columns is None else ROWS_ALONE


def matrix_shape(pattern: Sequence[Any], columns: int | None) -> tuple[int, int]:
    """(m, k) of the matrix whose pattern these operands are."""
    if columns is None:
        row_offsets, _, _, transposed_row_offsets, *_ = pattern
        columns = transposed_row_offsets.shape[-1] - 1
    else:
        row_offsets, *_ = pattern
    return row_offsets.shape[-1] - 1, columns


_FLOATS = {jnp.dtype(t) for t in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16)}


def check_floating(operation: str, **arrays: Any) -> Any:
    """The common dtype of the arrays; raises TypeError if it is not a supported floating type."""
    dtypes = {x.dtype for x in arrays.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.result_type(*arrays.values())
    if dtype not in _FLOATS:
        got = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise TypeError(f"{operation}: needs float32, float64, bfloat16 or float16, got {got}")
    return dtype


def as_precision(operation: str, precision: Any) -> jax.lax.Precision | None:
    """How exact a float32 product must be at least; of a pair, one for each operand, the higher.

    Raises ValueError for anything else, such as a dot algorithm: that says how a product is
    computed, which no sparse kernel can follow.
    """
    if precision is None:
        return None
    pair = precision if isinstance(precision, tuple | list) else (precision,)
    names = [p for p in pair if isinstance(p, str | jax.lax.Precision)]
    try:
        if len(names) == len(pair) <= 2:
            return max(map(jax.lax.Precision, names), key=lambda p: int(p.value))
    except ValueError:
        pass  # a string that names none
    raise ValueError(
        f"{operation}: precision must be None, a jax.lax.Precision, its name or a pair of these, "
        f"got {precision!r}"
    )


def result_dtype(operation: str, dtype: Any, preferred_element_type: Any) -> Any:
    """The dtype of a product: that of its operands, or float32 for 16-bit ones if preferred."""
    if preferred_element_type is None:
        return dtype
    preferred = jax.dtypes.canonicalize_dtype(preferred_element_type)
    if preferred == dtype or (preferred == np.float32 and dtype.itemsize == 2):
        return preferred
    raise ValueError(
        f"{operation}: preferred_element_type must be {dtype} or, for 16-bit operands, float32, "
        f"got {preferred}"
    )


def align(
    dense: Iterable[jax.Array], core_ranks: Sequence[int], dtype: Any, topology: Topology
) -> tuple[list[jax.Array], Sequence[jax.Array]]:
    """Floating operands in one dtype and a pattern's arrays, all with as many batch dimensions."""
    arrays = [x if x.dtype == dtype else x.astype(dtype) for x in dense]
    pattern = topology.operands()
    aligned = align_batch([*arrays, *pattern], [*core_ranks, *[1] * len(pattern)])
    return aligned[: len(arrays)], aligned[len(arrays) :]


def as_array(operation: str, name: str, x: Any, rank: int) -> jax.Array:
    """An operand as a JAX array of at least so many dimensions, or TypeError or ValueError."""
    if not isinstance(x, jax.Array):
        if not isinstance(x, np.ndarray | np.generic | float | int | list | tuple):
            raise TypeError(f"{operation}: {name} must be an array, got {type(x).__name__}")
        x = jnp.asarray(x)
    array: jax.Array = x
    if array.ndim < rank:
        raise ValueError(
            f"{operation}: {name} must have at least {rank} dimensions, got shape {array.shape}"
        )
    return array


def as_scale(operation: str, scale: Any) -> float | jax.Array:
    """A number, by which kernels multiply, as a float; other real numbers as an array."""
    if isinstance(scale, numbers.Real):
        return float(scale)
    scales = as_array(operation, "scale", scale, 0)
    if not (
        jnp.issubdtype(scales.dtype, jnp.floating) or jnp.issubdtype(scales.dtype, jnp.integer)
    ):
        raise TypeError(f"{operation}: scale must be a real number or array, got {scales.dtype}")
    return scales
