"""Arithmetic on the entries of sparse matrices: scaling, sums, comparisons, order, rows."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.batching import align_batch, over_batch
from jaxsparse.topology import Topology
from jaxsparse.topology_key import same_pattern

if TYPE_CHECKING:
    from jaxsparse.csr import CSR


def is_dense(x: Any) -> bool:
    """Whether x is an array of NumPy or JAX."""
    return isinstance(x, jax.Array | np.ndarray)


def is_scalar(x: Any) -> bool:
    """Whether x is one number: of Python, NumPy or JAX."""
    return (
        isinstance(x, numbers.Number) or (is_dense(x) and x.ndim == 0) or isinstance(x, np.generic)
    )


def at_entries(x: jax.Array, topology: Topology, fill: Any) -> jax.Array:
    """The entries of a dense matrix ``(..., m or 1, k or 1)`` or ``(k,)`` at stored positions.

    A dimension of size 1 is broadcast, as NumPy does. Padding gets the value ``fill``.
    """
    m, k = topology.shape
    matrix = x[None] if x.ndim == 1 else x
    if matrix.shape[-2] not in (1, m) or matrix.shape[-1] not in (1, k):
        raise ValueError(
            f"CSR: an array that is multiplied entry by entry must broadcast to (..., {m}, {k}), "
            f"got shape {x.shape}"
        )
    batch = jnp.broadcast_shapes(matrix.shape[:-2], topology.batch_shape)
    if not matrix.size:  # nothing to gather from
        return jnp.full((*batch, topology.nse), fill, x.dtype)
    rows, columns = topology.row_indices, topology.column_indices
    stored = rows < m
    if matrix.shape[-2] == 1:
        rows = jnp.where(stored, 0, 1)
    if matrix.shape[-1] == 1:
        columns = jnp.zeros_like(columns)

    def gather(matrix: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return matrix.at[rows, columns].get(mode="fill", fill_value=fill)

    operands = align_batch([matrix, rows, columns], [2, 1, 1])
    return over_batch(gather, len(batch), *operands)


def of_each_matrix(a: CSR, function: Callable[..., jax.Array]) -> jax.Array:
    """``function(values, rows, columns)`` of each matrix of a batch."""
    parts = (a.values, a.topology.row_indices, a.topology.column_indices)
    operands = align_batch(parts, [1, 1, 1])
    return over_batch(function, operands[0].ndim - 1, *operands)


def shared_topology(a: CSR, b: CSR) -> Topology | None:
    """The pattern of two matrices on one, with its positions where either has them; else None."""
    if not same_pattern(a.topology, b.topology):
        return None
    return a.topology if a.topology.has_positions else b.topology


def scale(function: Callable[[Any, Any], Any], a: CSR, factor: Any) -> Any:
    """``function(a, factor)`` of a product or quotient, at the stored positions."""
    if isinstance(factor, type(a)):
        topology = shared_topology(a, factor)
        if topology is None:
            raise ValueError(
                "CSR: matrices that are multiplied or divided entry by entry must be on one "
                f"pattern, got {a.topology!r} and {factor.topology!r}"
            )
        return a.with_values(function(a.values, factor.values), topology)
    if is_scalar(factor):
        return a.with_values(function(a.values, factor))
    if is_dense(factor):
        factor = at_entries(jnp.asarray(factor), a.topology, fill=1)
        return a.with_values(function(a.values, factor))
    return NotImplemented


def add(function: Callable[[Any, Any], Any], a: CSR, b: Any) -> Any:
    """``function(a, b)``, a sum or difference, on the union of two patterns."""
    if is_dense(b) or is_scalar(b):
        raise TypeError(
            "CSR: the sum with a number or a dense array is no sparse matrix: write "
            f"a.todense() + x; got {type(b).__name__}"
        )
    if not isinstance(b, type(a)):
        return NotImplemented
    if not a.shape == b.shape:
        raise ValueError(
            f"CSR: matrices that are added must have one shape, got {a.shape}, {b.shape}"
        )
    shared = shared_topology(a, b)
    if shared is not None:
        return a.with_values(function(a.values, b.values), shared)
    topology, of_a, of_b = _union(a.topology, b.topology)
    batch = jnp.broadcast_shapes(a.values.shape[:-1], b.values.shape[:-1])
    dtype = jnp.result_type(a.values, b.values)

    def spread(values: jax.Array, entries: np.ndarray) -> jax.Array:
        values = values[..., : entries.size].astype(dtype)  # without padding
        return jnp.zeros((*batch, topology.nse), dtype).at[..., entries].set(values)

    return a.with_values(function(spread(a.values, of_a), spread(b.values, of_b)), topology)


def _union(a: Topology, b: Topology) -> tuple[Topology, np.ndarray, np.ndarray]:
    """The union of two concrete patterns, and the entry in it of each entry of either."""
    keys = [_keys(topology) for topology in (a, b)]
    union, entries = np.unique(np.concatenate(keys), return_inverse=True)
    m, k = a.shape
    offsets = np.searchsorted(union, np.arange(m + 1, dtype=np.int64) * k)
    transpose = a.has_transpose and b.has_transpose
    topology = Topology(offsets, union % max(k, 1), (m, k), transpose=transpose)
    if not (a.static and b.static):
        topology = topology.as_dynamic()
    return topology, entries[: keys[0].size], entries[keys[0].size :]


def _keys(topology: Topology) -> np.ndarray:
    """The stored positions as rising numbers."""
    offsets, columns = topology.concrete_arrays("the sum of two patterns")
    rows = np.repeat(np.arange(topology.shape[0], dtype=np.int64), np.diff(offsets))
    keys: np.ndarray = rows * topology.shape[1] + columns[: rows.size]
    return keys


_COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def compare(symbol: str, a: CSR, b: Any) -> Any:
    """A boolean matrix on the pattern of a, where positions that are not stored compare False."""
    function = _COMPARISONS[symbol]
    # By its attributes, which a Flax variable that holds a matrix has too: left to itself, that one
    # would answer `!=` by `==`, which raises.
    sparse = hasattr(b, "topology") and hasattr(b, "values")
    if not (sparse or is_dense(b) or is_scalar(b)):
        return NotImplemented
    told = is_scalar(b) and not isinstance(b, jax.core.Tracer)
    if told and not function(0, b):
        return a.with_values(function(a.values, b))
    if sparse and not function(0, 0):
        shared = shared_topology(a, b)
        if shared is not None:
            return a.with_values(function(a.values, b.values), shared)
    raise TypeError(
        f"CSR: {symbol} holds, or may hold, where nothing is stored, so the result is no sparse "
        "matrix: compare a.values or a.todense()"
    )


def sum_over(a: CSR, axis: int | None) -> jax.Array:
    """The sum of all entries, or of those of each column (axis 0 or -2) or row (1 or -1)."""
    if axis not in (None, 0, 1, -1, -2):
        raise ValueError(f"CSR.sum: axis must be None, 0, 1, -1 or -2, got {axis!r}")
    m, k = a.shape
    values = a.values.astype(jnp.int32) if a.dtype == bool else a.values
    if axis is None:
        stored = a.topology.row_indices < m
        return jnp.sum(jnp.where(stored, values, 0), axis=-1)
    by_row = axis in (1, -1)
    size = m if by_row else k

    def one(values: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        places = rows if by_row else jnp.where(rows < m, columns, k)
        return jnp.zeros(size, values.dtype).at[places].add(values, mode="drop")

    return of_each_matrix(a.with_values(values), one)


def diagonal(a: CSR) -> jax.Array:
    """The entries (i, i), ``(..., min(m, k))``; 0 where none is stored."""
    size = min(a.shape)

    def one(values: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        places = jnp.where(rows == columns, rows, size)
        zeros = jnp.zeros(size, values.dtype)
        if values.dtype == bool:
            return zeros.at[places].max(values, mode="drop")
        return zeros.at[places].add(values, mode="drop")

    return of_each_matrix(a, one)


@jax.jit
def permuted(values: jax.Array, permutation: jax.Array) -> jax.Array:
    """The values ``(..., nse)`` of the transposed matrix, in its order.

    ``permutation``: ``(nse,)`` or ``(..., nse)``.
    """
    if permutation.ndim == 1:
        return values[..., permutation]
    batch = jnp.broadcast_shapes(values.shape[:-1], permutation.shape[:-1])
    nse = permutation.shape[-1]
    values, permutation = (jnp.broadcast_to(x, (*batch, nse)) for x in (values, permutation))
    return jnp.take_along_axis(values, permutation, axis=-1)


def take_rows(a: CSR, key: Any) -> CSR:
    """The rows that a slice, an array of row numbers or a boolean array of m names."""
    if key is Ellipsis:  # as a Flax variable that holds a matrix asks for its value
        return a
    if isinstance(key, jax.core.Tracer):
        raise TypeError(f"CSR: rows that are taken must be known, got a traced {key.aval}")
    array = None if isinstance(key, slice | tuple) else np.asarray(key)
    if isinstance(key, tuple) or (array is not None and array.ndim != 1):
        raise TypeError(
            "CSR: rows are taken by a slice or by an array of row numbers, a[2:3] or a[rows]; "
            f"columns by a.T[...].T; got {key!r}"
        )
    if array is not None and not array.size and array.dtype.kind == "f":
        array = array.astype(np.int32)  # NumPy makes an empty list floating
    if array is not None and array.dtype.kind not in "biu":
        raise TypeError(f"CSR: row numbers must be integers, got {array.dtype}")
    offsets, columns = a.topology.concrete_arrays("taking rows")
    rows = np.arange(a.shape[0])[key if array is None else array]
    lengths = np.diff(offsets)[rows]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if rows.size else 0
    # The entries of the rows, one run after another.
    entries = np.arange(total) + np.repeat(offsets[rows] - (ends - lengths), lengths)
    topology = Topology(
        np.concatenate([[0], ends]),
        columns[entries],
        (rows.size, a.shape[1]),
        transpose=a.topology.has_transpose,
    )
    if not a.topology.static:
        topology = topology.as_dynamic()
    return a.with_values(jnp.take(a.values, entries, axis=-1), topology)
