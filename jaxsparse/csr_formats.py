"""CSR matrices from and to other formats: dense arrays, coordinates, SciPy's and JAX's own.

A matrix of another format becomes values and their topology, of which `CSR` is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from jaxsparse import coordinates, entrywise
from jaxsparse.integers import integer
from jaxsparse.topology import Topology
from jaxsparse.topology_arguments import check_shape

if TYPE_CHECKING:
    from jaxsparse.csr import CSR

Parts = tuple[Any, Topology]
"""Values and topology."""


def of_dense(x: Any, mask: Any, nse: int | None) -> Parts:
    """The values ``(..., nse)`` and the topology of `CSR.fromdense`."""
    x = jnp.asarray(x)
    if x.ndim < 2:
        raise ValueError(f"CSR.fromdense: needs an array (..., m, k), got shape {x.shape}")
    mask = x != 0 if mask is None else mask
    shape = mask.shape if isinstance(mask, Topology) else np.shape(mask)
    if shape[-2:] != x.shape[-2:]:
        raise ValueError(
            f"CSR.fromdense: mask of shape {shape} must have the last dimensions of {x.shape}"
        )
    if isinstance(mask, Topology) and nse not in (None, mask.nse):
        raise ValueError(f"CSR.fromdense: nse must be that of the topology, {mask.nse}, got {nse}")
    topology = mask if isinstance(mask, Topology) else Topology.from_mask(mask, nse=nse)
    if x.shape[-2:] != topology.shape:
        raise ValueError(f"CSR.fromdense: needs a matrix {topology.shape}, got {x.shape}")
    # The pattern of a derivative would reach the compiled function without its positions.
    return _entries(x, topology.as_dynamic()), topology


@jax.jit
def _entries(x: jax.Array, topology: Topology) -> jax.Array:
    """The entries of a dense matrix (..., m, k) at a topology; 0 at padding."""
    return entrywise.at_entries(x, topology, fill=0)


def of_coordinates(rows: Any, columns: Any, values: Any, shape: Any, nse: int | None) -> Parts:
    """The values ``(..., nse)`` and the topology of `CSR.from_coo`."""
    shape = check_shape(shape)
    values = jnp.asarray(values)
    traced = any(isinstance(x, jax.core.Tracer) for x in (rows, columns))
    module: Any = jnp if traced else np
    rows, columns = module.asarray(rows), module.asarray(columns)
    if rows.ndim != 1 or rows.shape != columns.shape or values.shape[-1:] != rows.shape:
        raise ValueError(
            "CSR.from_coo: rows, columns and values must have shapes (entries,), (entries,) "
            f"and (..., entries), got {rows.shape}, {columns.shape} and {values.shape}"
        )
    for name, x in ("rows", rows), ("columns", columns):
        if x.size and not module.issubdtype(x.dtype, module.integer):
            raise ValueError(f"CSR.from_coo: {name} must be integers, got {x.dtype}")
    if traced:
        size = rows.size if nse is None else integer("CSR.from_coo", "nse", nse, 0)
        compressed = coordinates.compress_traced(rows, columns, shape, size)
        topology = Topology(compressed.row_offsets, compressed.column_indices, shape)
    else:
        for name, x, limit in ("row", rows, shape[0]), ("column", columns, shape[1]):
            outside = np.flatnonzero((x < 0) | (x >= limit))
            if outside.size:
                raise ValueError(
                    f"CSR.from_coo: entry {outside[0]} has {name} {x[outside[0]]}, out of "
                    f"range for {limit} {name}s"
                )
        compressed = coordinates.compress_on_host(rows, columns, shape)
        topology = Topology.with_room(compressed.row_offsets, compressed.column_indices, shape, nse)
    return coordinates.sum_into_entries(values, compressed.entries, topology.nse), topology


def of_scipy(matrix: Any) -> Parts:
    """The values ``(nse,)`` and the topology of `CSR.from_scipy`."""
    matrix = scipy.sparse.csr_array(matrix, copy=True)
    matrix.sum_duplicates()
    return matrix.data, Topology(matrix.indptr, matrix.indices, matrix.shape)


def of_bcsr(matrix: jsparse.BCSR) -> Parts:
    """The values ``(..., nse)`` and the topology of `CSR.from_bcsr`."""
    if matrix.n_dense:
        raise ValueError(f"CSR.from_bcsr: needs n_dense = 0, got {matrix.n_dense}")
    return matrix.data, Topology(matrix.indptr, matrix.indices, matrix.shape[-2:])


def of_bcoo(matrix: jsparse.BCOO) -> Parts:
    """The values ``(nse,)`` and the topology of `CSR.from_bcoo`."""
    if matrix.n_batch or matrix.n_dense or matrix.ndim != 2:
        raise ValueError(
            f"CSR.from_bcoo: needs two sparse dimensions alone, got {matrix.n_batch} batch, "
            f"{matrix.n_sparse} sparse and {matrix.n_dense} dense"
        )
    rows, columns = matrix.indices[:, 0], matrix.indices[:, 1]
    if isinstance(rows, jax.core.Tracer):
        return of_coordinates(rows, columns, matrix.data, matrix.shape, None)
    indices = np.asarray(matrix.indices)
    stored = np.flatnonzero((indices < matrix.shape).all(-1))  # BCOO pads out of range
    rows, columns = indices[stored].T
    return of_coordinates(rows, columns, matrix.data[stored], matrix.shape, None)


def to_dense(a: CSR) -> jax.Array:
    """The dense array ``(..., m, k)`` of `CSR.todense`."""
    m, k = a.shape

    def scatter(values: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        dense = jnp.zeros((m, k), a.dtype)
        if not dense.size:  # a scatter into nothing can't be differentiated
            return dense
        entries = dense.at[rows, columns]  # padding has row m
        if a.dtype == bool:
            return entries.set(values, mode="drop")
        return entries.add(values, mode="drop")

    return entrywise.of_each_matrix(a, scatter)


def to_scipy(a: CSR) -> Any:
    """The `scipy.sparse.csr_array` ``(m, k)`` of `CSR.to_scipy`."""
    offsets, columns = a.topology.concrete_arrays("CSR.to_scipy")
    if a.values.ndim != 1 or isinstance(a.values, jax.core.Tracer):
        raise ValueError(f"CSR.to_scipy: needs one concrete matrix, got values {a.values.shape}")
    values = np.asarray(a.values)
    if jnp.issubdtype(values.dtype, jnp.floating) and values.dtype.itemsize == 2:
        values = values.astype(np.float32)
    nnz = offsets[-1]
    return scipy.sparse.csr_array((values[:nnz], columns[:nnz], offsets), shape=a.shape)


def to_bcsr(a: CSR) -> jsparse.BCSR:
    """The BCSR ``(..., m, k)`` of `CSR.to_bcsr`."""
    topology = a.topology
    topology.check_positions()
    parts = (a.values, topology.column_indices, topology.row_offsets)
    if not topology.batch_shape and not isinstance(topology.row_offsets, jax.core.Tracer):
        nnz = topology.nnz
        parts = (a.values[..., :nnz], topology.column_indices[:nnz], topology.row_offsets)
    batch = jnp.broadcast_shapes(*(x.shape[:-1] for x in parts))
    data, indices, offsets = (jnp.broadcast_to(x, (*batch, x.shape[-1])) for x in parts)
    return jsparse.BCSR((data, indices, offsets), shape=(*batch, *a.shape))
