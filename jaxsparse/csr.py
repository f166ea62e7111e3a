"""Sparse matrices in compressed sparse rows."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from jaxsparse.topology import Topology, same_pattern


class CSR:
    """A sparse matrix: values at the stored positions of a topology.

    A pytree whose leaves are the values and the topology's integer arrays, so it passes through
    jit, vmap, scan and checkpoints; `jaxsparse.grad` differentiates it with respect to its values.

    ``a @ x`` and ``x @ a`` are sparse-dense products; ``a.T``, ``-a``, ``a * 2``, ``a / 2`` and
    sums of matrices on one pattern are sparse.

    Args:
        values: ``(..., nse)``; values behind the last stored entry are padding and ignored.
        topology: the stored positions; its batch dimensions must broadcast with those of the
            values.

    Raises:
        TypeError: if ``topology`` is no Topology.
        ValueError: if there is not one value for each stored entry, or batch dimensions differ.

    >>> import jax.numpy as jnp
    >>> a = CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> a @ jnp.array([1.0, 10.0])
    Array([20.,  3.], dtype=float32)
    >>> (a + 2 * a).T.todense()
    Array([[0., 9.],
           [6., 0.]], dtype=float32)
    """

    values: jax.Array
    topology: Topology

    __slots__ = ("topology", "values")
    __array_ufunc__ = None  # NumPy arrays leave `x @ a` and `x * a` to this class

    def __init__(self, values: Any, topology: Topology):
        if not isinstance(topology, Topology):
            raise TypeError(f"CSR: topology must be a Topology, got {type(topology).__name__}")
        if not isinstance(values, jax.Array):
            values = jnp.asarray(values)
        if values.ndim < 1 or values.shape[-1] != topology.nse:
            raise ValueError(
                f"CSR: values must have shape (..., {topology.nse}), one for each stored entry, "
                f"got {values.shape}"
            )
        try:
            jnp.broadcast_shapes(values.shape[:-1], topology.batch_shape)
        except ValueError:
            raise ValueError(
                f"CSR: batch dimensions of values {values.shape[:-1]} and topology "
                f"{topology.batch_shape} must broadcast"
            ) from None
        self.values = values
        self.topology = topology

    @classmethod
    def _from_parts(cls, values: Any, topology: Any) -> CSR:
        matrix = object.__new__(cls)
        matrix.values = values
        matrix.topology = topology
        return matrix

    # ---- Making one ----

    @classmethod
    def fromdense(cls, x: Any, mask: Any = None, nse: int | None = None) -> CSR:
        """The entries of a dense matrix at a mask, by default those that are not 0.

        Differentiable in ``x``. A batch ``(..., m, k)`` gives a batch of patterns, padded to the
        longest.

        Args:
            x: ``(..., m, k)``.
            mask: array ``(..., m, k)`` of bool, or of 0 and 1, whose batch dimensions broadcast, or
                a Topology.
            nse: room for so many entries, padding included. Needed under jit, where what does not
                fit is left out, or reported if ``JAXSPARSE_CHECK=1`` is set.

        Raises:
            ValueError: for shapes that don't fit, and if ``nse`` is too small or missing under jit.

        >>> CSR.fromdense(np.eye(3), nse=4).topology.nnz
        3
        """
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
            raise ValueError(
                f"CSR.fromdense: nse must be that of the topology, {mask.nse}, got {nse}"
            )
        topology = mask if isinstance(mask, Topology) else Topology.from_mask(mask, nse=nse)
        return cls(_gather(x, topology), topology)

    @classmethod
    def from_scipy(cls, matrix: Any) -> CSR:
        """From any SciPy sparse matrix or array; duplicates are summed, columns sorted."""
        matrix = scipy.sparse.csr_array(matrix, copy=True)
        matrix.sum_duplicates()
        return cls(matrix.data, Topology(matrix.indptr, matrix.indices, matrix.shape))

    @classmethod
    def from_bcsr(cls, matrix: jsparse.BCSR) -> CSR:
        """From a `jax.experimental.sparse.BCSR` without dense dimensions."""
        if matrix.n_dense:
            raise ValueError(f"CSR.from_bcsr: needs n_dense = 0, got {matrix.n_dense}")
        return cls(matrix.data, Topology(matrix.indptr, matrix.indices, matrix.shape[-2:]))

    @classmethod
    def from_bcoo(cls, matrix: jsparse.BCOO) -> CSR:
        """From a concrete two-dimensional `jax.experimental.sparse.BCOO`; duplicates are summed.

        Raises:
            ValueError: if it has batch or dense dimensions.
        """
        if matrix.n_batch or matrix.n_dense or matrix.ndim != 2:
            raise ValueError(
                f"CSR.from_bcoo: needs two sparse dimensions alone, got {matrix.n_batch} batch, "
                f"{matrix.n_sparse} sparse and {matrix.n_dense} dense"
            )
        rows, columns = np.asarray(matrix.indices).T
        stored = (rows < matrix.shape[0]) & (columns < matrix.shape[1])  # BCOO pads out of range
        data = np.asarray(matrix.data)[stored]
        if _is_16_bit_float(data):  # which SciPy does not know
            data = data.astype(np.float32)
        coordinates = (rows[stored], columns[stored])
        summed = scipy.sparse.coo_array((data, coordinates), shape=matrix.shape)
        return cls.from_scipy(summed).astype(matrix.dtype)

    # ---- What it is ----

    @property
    def shape(self) -> tuple[int, int]:
        """(m, k), without batch dimensions."""
        return self.topology.shape

    @property
    def dtype(self) -> Any:
        """That of the values."""
        return self.values.dtype

    @property
    def nse(self) -> int:
        """Stored entries, padding included: static."""
        return self.topology.nse

    def __str__(self) -> str:
        return f"CSR {self.dtype} on {self.topology}"

    def __repr__(self) -> str:
        values = f"{getattr(self.values, 'dtype', '')}{list(getattr(self.values, 'shape', ()))}"
        return f"CSR(values={values}, topology={self.topology!r})"

    # ---- To something else ----

    def todense(self) -> jax.Array:
        """The dense matrix ``(..., m, k)``."""
        m, k = self.shape

        def scatter(values: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
            dense = jnp.zeros((m, k), self.dtype)
            if not dense.size:  # a scatter into nothing can't be differentiated
                return dense
            return dense.at[rows, columns].add(values, mode="drop")  # padding has row m

        return _over_batch(scatter, self)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.csr_array` of one concrete matrix; 16-bit floats become float32."""
        offsets, columns = self.topology._arrays("to_scipy")
        values = np.asarray(self.values)
        if values.ndim != 1:
            raise ValueError(f"CSR.to_scipy: needs one matrix, got values of shape {values.shape}")
        if _is_16_bit_float(values):
            values = values.astype(np.float32)
        nnz = offsets[-1]
        return scipy.sparse.csr_array((values[:nnz], columns[:nnz], offsets), shape=self.shape)

    def to_bcsr(self) -> jsparse.BCSR:
        """A `jax.experimental.sparse.BCSR`, with padding cut off if the matrix is concrete."""
        topology = self.topology
        parts = (self.values, topology.column_indices, topology.row_offsets)
        if not topology.batch_shape and not isinstance(topology.row_offsets, jax.core.Tracer):
            nnz = topology.nnz
            parts = (self.values[..., :nnz], topology.column_indices[:nnz], topology.row_offsets)
        batch = jnp.broadcast_shapes(*(x.shape[:-1] for x in parts))
        data, indices, offsets = (jnp.broadcast_to(x, (*batch, x.shape[-1])) for x in parts)
        return jsparse.BCSR((data, indices, offsets), shape=(*batch, *self.shape))

    def to_bcoo(self) -> jsparse.BCOO:
        """A `jax.experimental.sparse.BCOO`."""
        return self.to_bcsr().to_bcoo()

    def astype(self, dtype: Any) -> CSR:
        """The same matrix with values of another dtype."""
        return CSR(self.values.astype(dtype), self.topology)

    # ---- Arithmetic ----

    @property
    def T(self) -> CSR:
        """The transposed matrix: its values are gathered, its pattern is there already."""
        permutation = self.topology.permutation
        if permutation.ndim == 1:
            values = self.values[..., permutation]
        else:
            batch = jnp.broadcast_shapes(self.values.shape[:-1], permutation.shape[:-1])
            values = jnp.take_along_axis(
                jnp.broadcast_to(self.values, (*batch, self.nse)),
                jnp.broadcast_to(permutation, (*batch, self.nse)),
                axis=-1,
            )
        return CSR(values, self.topology.T)

    def __matmul__(self, x: Any) -> Any:
        if not _is_dense(x):
            return NotImplemented
        return _product(self, x, transpose=False, dense_on_left=False)

    def __rmatmul__(self, x: Any) -> Any:
        if not _is_dense(x):
            return NotImplemented
        return _product(self, x, transpose=True, dense_on_left=True)

    def __mul__(self, factor: Any) -> Any:
        if not _is_scalar(factor):
            return NotImplemented
        return CSR(self.values * factor, self.topology)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if not _is_scalar(divisor):
            return NotImplemented
        return CSR(self.values / divisor, self.topology)

    def __neg__(self) -> CSR:
        return CSR(-self.values, self.topology)

    def __add__(self, other: Any) -> Any:
        return _combine(operator.add, self, other)

    def __sub__(self, other: Any) -> Any:
        return _combine(operator.sub, self, other)


def _flatten(matrix: CSR) -> Any:
    names = ("values", "topology")
    return [(jax.tree_util.GetAttrKey(n), getattr(matrix, n)) for n in names], None


jax.tree_util.register_pytree_with_keys(
    CSR, _flatten, lambda _, children: CSR._from_parts(*children)
)
jax.export.register_pytree_node_serialization(
    CSR,
    serialized_name="jaxsparse.CSR",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)


def _is_dense(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _is_16_bit_float(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2


def _is_scalar(x: Any) -> bool:
    return (
        isinstance(x, numbers.Number) or (_is_dense(x) and x.ndim == 0) or isinstance(x, np.generic)
    )


def _product(a: CSR, x: Any, *, transpose: bool, dense_on_left: bool) -> jax.Array:
    from jaxsparse.ops import matmul  # it is built on this class

    if x.ndim == 0:
        raise ValueError("matmul: a scalar is no operand of @, use *")
    vector = x.ndim == 1
    if vector:
        x = x[None, :] if dense_on_left else x[:, None]
    y = matmul.product("matmul", a, x, transpose=transpose, dense_on_left=dense_on_left)
    return y.squeeze(-2 if dense_on_left else -1) if vector else y


def _combine(function: Any, a: CSR, b: Any) -> Any:
    if not isinstance(b, CSR):
        return NotImplemented
    if not same_pattern(a.topology, b.topology):
        raise ValueError(
            f"CSR: only matrices on one pattern can be added, got {a.topology!r} and {b.topology!r}"
        )
    return CSR(function(a.values, b.values), a.topology)


def _over_batch(function: Any, a: CSR) -> jax.Array:
    """function(values, rows, columns) of one matrix, over all batch dimensions."""
    parts = (a.values, a.topology.row_indices(), a.topology.column_indices)
    batch = jnp.broadcast_shapes(*(x.shape[:-1] for x in parts))
    for _ in batch:
        function = jax.vmap(function)
    return function(*(jnp.broadcast_to(x, (*batch, x.shape[-1])) for x in parts))


def _gather(x: jax.Array, topology: Topology) -> jax.Array:
    """The entries of a dense matrix (..., m, k) at a topology; 0 at padding."""

    def gather(x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return x.at[rows, columns].get(mode="fill", fill_value=0)

    batch = jnp.broadcast_shapes(x.shape[:-2], topology.batch_shape)
    if not x.size:  # nothing to gather from
        return jnp.zeros((*batch, topology.nse), x.dtype)
    x = jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
    parts = (topology.row_indices(), topology.column_indices)
    for _ in batch:
        gather = jax.vmap(gather)
    return gather(x, *(jnp.broadcast_to(p, (*batch, p.shape[-1])) for p in parts))
