"""What all operations share: checks and shapes of arguments, and the operands of a pattern."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
)
"""Both orientations of a pattern and what joins them, as ``Topology.operands`` gives them."""

ROWS = tuple(name for name, _ in PATTERN[:3])
STARTS = PATTERN[7][0]
TRANSPOSED = tuple(name for name, _ in (*PATTERN[3:7], *PATTERN[:2]))  # and where values are stored

_FLOATS = {jnp.dtype(t) for t in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16)}
_EXACT = (None, jax.lax.Precision.HIGHEST, "highest", "float32")


def check_floating(operation: str, **arrays: Any) -> Any:
    """The common dtype of the arrays; raises TypeError if it is not a supported floating type."""
    dtypes = {x.dtype for x in arrays.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else jnp.result_type(*arrays.values())
    if dtype not in _FLOATS:
        got = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise TypeError(f"{operation}: needs float32, float64, bfloat16 or float16, got {got}")
    return dtype


def promoted(*dtypes: Any) -> Any:
    """The dtype that holds all numbers of these, also where JAX is set to promote none unasked."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def accumulator_dtype(dtype: Any) -> Any:
    """What sums of numbers of a dtype are taken in: float32, or float64 for float64."""
    return promoted(dtype, jnp.float32)


def check_precision(operation: str, precision: Any) -> None:
    """Raises ValueError unless float32 is to be exact: for one call there is no other way yet."""
    if precision not in _EXACT:
        raise ValueError(
            f"{operation}: precision must be None or HIGHEST (never TF32), got {precision!r}"
        )


def result_dtype(operation: str, dtype: Any, preferred_element_type: Any) -> Any:
    """The dtype of a product: that of its operands, or float32 for 16-bit ones if preferred."""
    if preferred_element_type is None:
        return dtype
    preferred = jnp.dtype(preferred_element_type)
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
    pattern_rank = len(topology.batch_shape)
    ranks = [x.ndim - core for x, core in zip(arrays, core_ranks, strict=True)]
    batch_rank = max(pattern_rank, *ranks)

    def pad(x: jax.Array, rank: int) -> jax.Array:
        return x if rank == batch_rank else jnp.expand_dims(x, tuple(range(batch_rank - rank)))

    return (
        [pad(x, rank) for x, rank in zip(arrays, ranks, strict=True)],
        [pad(x, pattern_rank) for x in pattern],
    )


def as_array(operation: str, name: str, x: Any, rank: int) -> jax.Array:
    """An operand as a JAX array of at least so many dimensions, or TypeError or ValueError."""
    if not isinstance(x, jax.Array):
        if not isinstance(x, np.ndarray | np.generic | float | int | list | tuple):
            raise TypeError(f"{operation}: {name} must be an array, got {type(x).__name__}")
        x = jnp.asarray(x)
    if x.ndim < rank:
        raise ValueError(
            f"{operation}: {name} must have at least {rank} dimensions, got shape {x.shape}"
        )
    return x
