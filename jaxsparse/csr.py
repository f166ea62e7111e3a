"""Sparse matrices in compressed sparse rows."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse as jsparse

from jaxsparse import csr_formats, csr_tree, entrywise
from jaxsparse.entrywise import is_dense
from jaxsparse.ops.arguments import check_values
from jaxsparse.ops.multiply import multiply
from jaxsparse.packed import Packed
from jaxsparse.topology import Topology


class CSR:
    """A sparse matrix: values at the stored positions of a topology.

    A pytree, so it passes through jit, grad, vmap and scan. On a static topology, which is what
    concrete arrays make, its only leaf is ``values``: derivatives, optimizers and
    ``jax.tree.map`` work as for an array, and the pattern stays. On a dynamic topology, see
    :class:`Topology`, the pattern's integer arrays are leaves too; `jaxsparse.grad` differentiates
    such a matrix with respect to its values.

    ``a @ x`` and ``x @ a`` are sparse-dense products. ``a.T``, ``-a``, ``abs(a)``, ``a * x`` and
    ``a / x`` of numbers and of dense arrays that broadcast to the matrix (``a * x[:, None]`` scales
    rows), ``a + b``, ``a - b``, ``a[rows]``, and comparisons that are False where nothing is stored
    (``a != 0``) are sparse. Sums of matrices on different patterns, and ``a[rows]``, need concrete
    patterns.

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
    __hash__ = None  # type: ignore[assignment]  # as of any array
    __iter__ = None

    def __init__(self, values: Any, topology: Topology):
        if not isinstance(topology, Topology):
            raise TypeError(f"CSR: topology must be a Topology, got {type(topology).__name__}")
        if not isinstance(values, jax.Array):
            values = jnp.asarray(values)
        check_values("CSR", "values", values, topology)
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
            TypeError: for a matrix that is sparse already.
            ValueError: for shapes that don't fit, and if ``nse`` is too small or missing under jit.

        >>> CSR.fromdense(np.eye(3), nse=4).topology.nnz
        3
        """
        if _is_sparse(x):
            raise TypeError(
                "CSR.fromdense: needs a dense array, got a sparse matrix: use CSR.from_scipy, "
                f"from_bcsr or from_bcoo; got {type(x).__name__}"
            )
        return cls(*csr_formats.of_dense(x, mask, nse))

    @classmethod
    def from_coo(
        cls, rows: Any, columns: Any, values: Any, shape: Any, *, nse: int | None = None
    ) -> CSR:
        """From coordinates in any order; entries at one position are summed.

        Differentiable in ``values``. Under jit the coordinates may be traced: so a program takes
        another graph at each step without a new compilation.

        Args:
            rows: integers ``(entries,)``.
            columns: integers ``(entries,)``.
            values: ``(..., entries)``.
            shape: ``(m, k)``.
            nse: room for so many entries, padding included, which makes the pattern dynamic. By
                default as many as there are positions or, for traced coordinates, as coordinates.

        Raises:
            ValueError: for shapes that don't fit, and for concrete coordinates outside the matrix
                or more of them than ``nse``. Traced ones are left out there.

        >>> CSR.from_coo([1, 0, 1], [0, 1, 0], [1.0, 2.0, 3.0], (2, 2)).todense()
        Array([[0., 2.],
               [4., 0.]], dtype=float32)
        """
        return cls(*csr_formats.of_coordinates(rows, columns, values, shape, nse))

    @classmethod
    def from_scipy(cls, matrix: Any) -> CSR:
        """From any SciPy sparse matrix or array; duplicates are summed, columns sorted."""
        return cls(*csr_formats.of_scipy(matrix))

    @classmethod
    def from_bcsr(cls, matrix: jsparse.BCSR) -> CSR:
        """From a `jax.experimental.sparse.BCSR` without dense dimensions."""
        return cls(*csr_formats.of_bcsr(matrix))

    @classmethod
    def from_bcoo(cls, matrix: jsparse.BCOO) -> CSR:
        """From a two-dimensional `jax.experimental.sparse.BCOO`; duplicates are summed.

        Under jit it keeps the BCOO's ``nse``.

        Raises:
            ValueError: if it has batch or dense dimensions.
        """
        return cls(*csr_formats.of_bcoo(matrix))

    @classmethod
    def from_packed(cls, packed: Packed) -> CSR:
        """From a `Packed` matrix: on the pattern that it was packed from, if it is trainable.

        Else on the places that it stores, which must be known; with cells of 0 or 2 on none that
        hold 0.
        """
        topology = packed.topology
        if topology is None:
            topology = Topology.from_mask(packed.stored())
        return cls.fromdense(packed.todense(), topology)

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

    @property
    def ndim(self) -> int:
        """2: batch dimensions do not count, as in ``shape``."""
        return 2

    @property
    def size(self) -> int:
        """Positions, stored or not: m k."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the values and of all arrays of the pattern."""
        return sum(x.nbytes for x in jax.tree.leaves((self.values, self.topology)))

    def block_until_ready(self) -> CSR:
        """Waits for the values, and the pattern if it is dynamic; returns the matrix."""
        ready: CSR = jax.block_until_ready(self)
        return ready

    def __str__(self) -> str:
        return f"CSR {self.dtype} on {self.topology}"

    def __repr__(self) -> str:
        values = f"{getattr(self.values, 'dtype', '')}{list(getattr(self.values, 'shape', ()))}"
        return f"CSR(values={values}, topology={self.topology!r})"

    # ---- To something else ----

    def todense(self) -> jax.Array:
        """The dense matrix ``(..., m, k)``."""
        return csr_formats.to_dense(self)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.csr_array` of one concrete matrix; 16-bit floats become float32."""
        return csr_formats.to_scipy(self)

    def to_bcsr(self) -> jsparse.BCSR:
        """A `jax.experimental.sparse.BCSR`, with padding cut off if the matrix is concrete."""
        return csr_formats.to_bcsr(self)

    def to_bcoo(self) -> jsparse.BCOO:
        """A `jax.experimental.sparse.BCOO`."""
        return self.to_bcsr().to_bcoo()

    def pack(
        self,
        dtype: Any = None,
        *,
        cell: int | None = None,
        parts: int | None = None,
        columns: int | None = None,
        trainable: bool = False,
        repackable: bool = False,
    ) -> Packed:
        """The same matrix laid out for products with few columns on a GPU; see `Packed`.

        Args:
            dtype: of the numbers, bfloat16 or float16; by default that of the values. With int8 or
                float8_e4m3fn (``jnp.float8_e4m3fn``) each row has a scale, the largest of its
                magnitudes over 127 or 448, and its numbers are rounded to multiples of that, or to
                those times a number of e4m3: the nearest. That saves memory; products are
                faster than in 16 bits with one column of x alone, and ``cell=0``.
            cell: how places of numbers are stored. With 1 or 2, so many neighbours in a row are
                stored together, and a bit tells whether they are: for products on tensor cores
                with up to 128 columns. With 0 each number has its gap behind the one before, in 4
                bits, and lanes of a GPU walk over stored numbers alone: for 1 to 8 columns, as the
                time grows with their number. By default 2 for matrices that are more than 82 %
                sparse, or that store both of nearly all pairs, as ``structure="pairs"`` of
                `pruning.make_masks` has them, else 1; see ``columns``. 8 bits have no
                cells of 2.
            parts: into how many the columns are cut, at most 8, or at least one for each 8192
                columns with gaps; by default what lets the blocks of an H200 end together.
            columns: how many columns of x products will mostly have, where ``cell`` is None: up to
                8, cell 0 is taken if it is predicted to be faster on an H200. Products with any
                other number of columns are right, too.
            trainable: whether to keep the pattern, and where each number comes from: for
                `Packed.repack`, and for gradients of the numbers at the pattern alone. That takes
                several times the bytes of the numbers. Numbers of 8 bits have no gradients.
            repackable: whether to keep that for `Packed.repack`; in 16 bits the same as
                ``trainable``. Numbers of 8 bits can be repackable, not trainable.

        Raises:
            ValueError: if the pattern is traced, a batch of patterns, or stores a column of a row
                twice; for values of a batch, of a wider dtype or that are not floating; for
                options that don't exist, or that exclude one another: 8 bits and ``trainable`` or
                ``cell=2``.

        >>> import jax.numpy as jnp
        >>> packed = CSR.fromdense(jnp.eye(512)).pack(jnp.bfloat16)
        >>> packed.shape, packed.dtype, packed.cell
        ((512, 512), dtype(bfloat16), 2)
        """
        return Packed.of(
            self.values,
            self.topology,
            dtype=dtype,
            cell=cell,
            parts=parts,
            columns=columns,
            trainable=trainable,
            repackable=repackable,
        )

    def astype(self, dtype: Any) -> CSR:
        """The same matrix with values of another dtype."""
        return self.with_values(self.values.astype(dtype))

    def with_values(self, values: jax.Array, topology: Topology | None = None) -> CSR:
        """Other values on the same pattern, or on the one that is given.

        >>> import jax.numpy as jnp
        >>> CSR.fromdense(jnp.eye(2)).with_values(jnp.array([2.0, 3.0])).todense()
        Array([[2., 0.],
               [0., 3.]], dtype=float32)
        """
        return CSR(values, self.topology if topology is None else topology)

    # ---- Arithmetic ----

    @property
    def T(self) -> CSR:
        """The transposed matrix: its values are gathered, its pattern is there already.

        Raises:
            ValueError: if the topology was made without its transpose.
        """
        self.topology.check_transpose("CSR.T")
        topology = self.topology.T  # first: it knows whether there are positions
        return CSR(entrywise.permuted(self.values, self.topology.permutation), topology)

    def __matmul__(self, x: Any) -> Any:
        return _product(self, x, transpose=False, dense_on_left=False)

    def __rmatmul__(self, x: Any) -> Any:
        return _product(self, x, transpose=True, dense_on_left=True)

    def __mul__(self, factor: Any) -> Any:
        return entrywise.scale(operator.mul, self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return entrywise.scale(operator.truediv, self, divisor)

    def __neg__(self) -> CSR:
        return self.with_values(-self.values)

    def __abs__(self) -> CSR:
        return self.with_values(jnp.abs(self.values))

    def __add__(self, other: Any) -> Any:
        return entrywise.add(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:  # what sum() begins with
            return self
        return entrywise.add(operator.add, self, other)

    def __sub__(self, other: Any) -> Any:
        return entrywise.add(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return entrywise.add(operator.sub, self, other)

    def sum(self, axis: int | None = None) -> jax.Array:
        """The sum of all entries, or of each column's (axis 0) or row's (axis 1): dense.

        >>> import jax.numpy as jnp
        >>> CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 1.0]])).sum(1)
        Array([2., 4.], dtype=float32)
        """
        return entrywise.sum_over(self, axis)

    def diagonal(self) -> jax.Array:
        """The entries (i, i) as a dense array ``(..., min(m, k))``."""
        return entrywise.diagonal(self)

    def __getitem__(self, rows: Any) -> CSR:
        return entrywise.take_rows(self, rows)

    # ---- What Python and NumPy ask ----

    def __eq__(self, other: Any) -> Any:
        return entrywise.compare("==", self, other)

    def __ne__(self, other: Any) -> Any:
        return entrywise.compare("!=", self, other)

    def __lt__(self, other: Any) -> Any:
        return entrywise.compare("<", self, other)

    def __le__(self, other: Any) -> Any:
        return entrywise.compare("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return entrywise.compare(">", self, other)

    def __ge__(self, other: Any) -> Any:
        return entrywise.compare(">=", self, other)

    def __bool__(self) -> bool:
        raise ValueError(
            "CSR: the truth value of a matrix is ambiguous: use a.values.any() or a.values.all()"
        )

    def __len__(self) -> int:
        raise TypeError(
            "CSR: the length of a sparse matrix is ambiguous: use a.shape[0] for its rows, a.nse "
            "for its entries"
        )

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            "CSR: a sparse matrix is no array of NumPy: use a.todense() or a.to_scipy()"
        )

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.dot and len(args) == 2:
            return args[0] @ args[1]
        raise TypeError(
            f"CSR: numpy.{function.__name__} takes no sparse matrix: use its methods, jaxsparse's "
            "functions or a.todense()"
        )


csr_tree.register(CSR)


def check_csr(operation: str, a: Any) -> None:
    """Raises TypeError if ``a`` is no CSR matrix."""
    if not isinstance(a, CSR):
        raise TypeError(f"{operation}: a must be a CSR matrix, got {type(a).__name__}")


def _is_sparse(x: Any) -> bool:
    return scipy.sparse.issparse(x) or isinstance(x, jsparse.JAXSparse | CSR)


def _product(a: CSR, x: Any, *, transpose: bool, dense_on_left: bool) -> Any:
    if _is_sparse(x):
        raise TypeError(
            "matmul: takes a sparse and a dense matrix, got two sparse ones: write one of them "
            "out (b.todense())"
        )
    if not is_dense(x):
        return NotImplemented
    if x.ndim == 0:
        raise ValueError("matmul: a scalar is no operand of @, use *")
    vector = x.ndim == 1
    if vector:
        x = x[None, :] if dense_on_left else x[:, None]
    y = multiply("matmul", a, x, transpose=transpose, dense_on_left=dense_on_left)
    return y.squeeze(-2 if dense_on_left else -1) if vector else y
