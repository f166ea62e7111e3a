"""Where the nonzeros of a sparse matrix are."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from jaxsparse import backend, display, masks

INT32_MAX = 2**31 - 1
COMPACT_COLUMNS = 2**16  # below this an index fits 16 bits


class Pattern(NamedTuple):
    """One orientation of a topology, with what kernels want to know of it.

    Attributes:
        row_offsets: int32 ``(..., m + 1)``; row i's entries are ``row_offsets[i]`` to
            ``row_offsets[i + 1]``, and entries from ``row_offsets[m]`` on are padding.
        column_indices: int32 ``(..., nse)``.
        row_order: int32 ``(..., m)``, rows by falling length, so that work handed out in this order
            balances (the row swizzle of Gale et al. 2020).
        compact_column_indices: the indices in unsigned 16 bits where they fit, else None.
    """

    row_offsets: jax.Array
    column_indices: jax.Array
    row_order: jax.Array
    compact_column_indices: jax.Array | None

    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What an operation's primitive takes: offsets, the narrowest indices, the row order."""
        compact = self.compact_column_indices
        return (
            self.row_offsets,
            self.column_indices if compact is None else compact,
            self.row_order,
        )


def checks_enabled() -> bool:
    """Whether ``JAXSPARSE_CHECK=1``: patterns are verified where used. Read when tracing."""
    return os.environ.get("JAXSPARSE_CHECK", "0") not in ("", "0")


class Topology:
    """The stored positions of an (m, k) sparse matrix: compressed sparse rows without values.

    A pytree of int32 arrays with static ``shape``. It is separate from the values so that a new
    pattern with as many entries needs no new compilation, and so that what is derived from a
    pattern is made
    once: the rows by falling length, the transposed pattern with the permutation that carries
    values over, and 16-bit indices. The constructor makes these, on the host for concrete arrays
    and in the program for traced ones; no operation or gradient ever sorts. Leading dimensions, the
    same for both arrays, are a batch of patterns with equal numbers of stored entries.

    Args:
        row_offsets: integers ``(..., m + 1)``, starting at 0 and not falling.
        column_indices: integers ``(..., nse)``; within a row they rise. Entries from
            ``row_offsets[..., m]`` on are padding: every operation ignores them.
        shape: ``(m, k)``.

    Raises:
        ValueError: if the structure is bad, naming the row and the values. Under ``jax.jit`` the
            values are not known: they are clamped into range, so that nothing reads out of bounds,
            or reported when the program runs if ``JAXSPARSE_CHECK=1`` is set.

    >>> topology = Topology([0, 2, 2, 3], [0, 2, 1], (3, 4))
    >>> topology.nnz, topology.sparsity
    (3, 0.75)
    >>> print(topology)
    Topology of shape (3, 4), 3 stored, 75.0 % sparse
    ┌────┐
    │█ █ │
    │    │
    │ █  │
    └────┘
    """

    pattern: Pattern
    transposed_pattern: Pattern
    permutation: jax.Array  # entry e of the transposed pattern is entry permutation[e] of this one
    shape: tuple[int, int]

    __slots__ = ("pattern", "permutation", "shape", "transposed_pattern")

    def __init__(self, row_offsets: Any, column_indices: Any, shape: Sequence[int]):
        self.shape = _check_shape(shape)
        row_offsets = _check_indices("row_offsets", row_offsets)
        column_indices = _check_indices("column_indices", column_indices)
        m = self.shape[0]
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
        traced = isinstance(row_offsets, jax.core.Tracer) or isinstance(
            column_indices, jax.core.Tracer
        )
        derive = _derive_traced if traced else _derive_on_host
        self.pattern, self.transposed_pattern, self.permutation = derive(
            row_offsets, column_indices, self.shape
        )

    @classmethod
    def _from_parts(
        cls, pattern: Any, transposed_pattern: Any, permutation: Any, shape: tuple[int, int]
    ) -> Topology:
        topology = object.__new__(cls)
        topology.pattern = pattern
        topology.transposed_pattern = transposed_pattern
        topology.permutation = permutation
        topology.shape = shape
        return topology

    @classmethod
    def from_mask(
        cls,
        mask: Callable[[Any, Any], Any] | Any,
        shape: Sequence[int] | None = None,
        nse: int | None = None,
    ) -> Topology:
        """The stored positions of a mask.

        Args:
            mask: a mask function (``jaxsparse.masks``), or a boolean array ``(..., m, k)``.
            shape: ``(m, k)``; may be left out for an array.
            nse: room for so many entries, padding included. Needed where the mask is traced.

        Raises:
            ValueError: if the mask stores more than ``nse`` positions, or ``nse`` is missing under
                jit.

        >>> from jaxsparse import masks
        >>> Topology.from_mask(masks.band(2) & masks.causal(), (4, 4)).nnz
        7
        """
        if callable(mask):
            if shape is None:
                raise ValueError("Topology.from_mask: a mask function needs a shape (m, k)")
            shape = _check_shape(shape)
            try:
                return cls(*_pad(*masks.nonzero(mask, shape), nse), shape)
            except jax.errors.TracerArrayConversionError:
                return cls(*masks.nonzero_traced(mask, shape, _needed(nse)), shape)
        mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
        if mask.ndim < 2:
            raise ValueError(f"Topology.from_mask: needs an array (..., m, k), got {mask.shape}")
        shape = _check_shape(mask.shape[-2:] if shape is None else shape)
        if tuple(mask.shape[-2:]) != shape:
            raise ValueError(f"Topology.from_mask: mask {mask.shape} does not have shape {shape}")
        if isinstance(mask, jax.core.Tracer):
            size = _needed(nse)

            def one(dense: jax.Array) -> Any:
                return masks.nonzero_traced(lambda r, c: dense[r, c], shape, size)

            for _ in range(mask.ndim - 2):
                one = jax.vmap(one)
            offsets, columns = one(mask.astype(bool))
            return cls(offsets, columns, shape)
        dense = np.asarray(mask).astype(bool)
        batch = dense.shape[:-2]
        offsets = np.zeros((*batch, shape[0] + 1), np.int64)
        np.cumsum(dense.sum(-1), -1, out=offsets[..., 1:])
        most = int(offsets[..., -1].max(initial=0))
        columns = np.zeros((*batch, most), np.int32)
        for entry in np.ndindex(batch):
            columns[entry][: offsets[entry][-1]] = np.nonzero(dense[entry])[1]
        return cls(*_pad(offsets, columns, nse), shape)

    @property
    def row_offsets(self) -> jax.Array:
        """int32 ``(..., m + 1)``."""
        return self.pattern.row_offsets

    @property
    def column_indices(self) -> jax.Array:
        """int32 ``(..., nse)``."""
        return self.pattern.column_indices

    @property
    def nse(self) -> int:
        """Stored entries of each pattern, padding included: static."""
        return self.pattern.column_indices.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions of a batch of patterns; () for one."""
        return self.pattern.column_indices.shape[:-1]

    @property
    def nnz(self) -> Any:
        """Stored entries, padding not counted: an int, an array for a batch, traced under jit."""
        if isinstance(self.row_offsets, jax.core.Tracer):
            return self.row_offsets[..., -1]
        nnz = np.asarray(self.row_offsets)[..., -1]  # on the host: a constant of a traced function
        return nnz if nnz.ndim else int(nnz)

    @property
    def sparsity(self) -> Any:
        """Share of positions that are not stored; 0 for an empty shape."""
        size = self.shape[0] * self.shape[1]
        return 1 - self.nnz / size if size else 0.0

    @property
    def T(self) -> Topology:
        """The transposed topology: what is derived changes places, nothing is sorted."""
        iota = jnp.broadcast_to(jnp.arange(self.nse, dtype=jnp.int32), self.permutation.shape)
        inverse = jnp.put_along_axis(
            jnp.zeros_like(self.permutation), self.permutation, iota, axis=-1, inplace=False
        )
        m, k = self.shape
        return Topology._from_parts(self.transposed_pattern, self.pattern, inverse, (k, m))

    def row_indices(self) -> jax.Array:
        """The row of every stored entry, int32 ``(..., nse)``; m for padding."""
        return row_indices(self.row_offsets, self.nse)

    def operands(self) -> tuple[jax.Array, ...]:
        """What an operation's primitive takes: both patterns' three arrays and the permutation.

        They are checked first if ``JAXSPARSE_CHECK=1``.
        """
        m, k = self.shape
        rows, transposed = self.pattern.operands(), self.transposed_pattern.operands()
        if checks_enabled():
            rows = (_checked(*rows, columns=k), *rows[1:])
            transposed = (
                _checked(*transposed, self.permutation, columns=m),
                *transposed[1:],
            )
        return (*rows, *transposed, self.permutation)

    def plot(self, *, ax: Any = None, title: str | None = None) -> Any:
        """Draws the pattern's density with matplotlib and returns the axes."""
        return display.plot(*self._arrays("plot"), self.shape, ax=ax, title=title)

    def _arrays(self, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self.row_offsets, jax.core.Tracer) or self.batch_shape:
            raise ValueError(f"Topology.{purpose}: needs one concrete pattern")
        return np.asarray(self.row_offsets), np.asarray(self.column_indices)

    def __str__(self) -> str:
        if not isinstance(self.row_offsets, jax.Array) or isinstance(
            self.row_offsets, jax.core.Tracer
        ):
            return repr(self)
        if self.batch_shape:
            return f"Topology of shape {self.shape}, batch {self.batch_shape}, nse {self.nse}"
        padding = f", {self.nse - self.nnz} padding" if self.nse != self.nnz else ""
        head = (
            f"Topology of shape {self.shape}, {self.nnz} stored{padding}, "
            f"{100 * self.sparsity:.1f} % sparse"
        )
        return f"{head}\n{display.grid(*self._arrays('__str__'), self.shape)}"

    def __repr__(self) -> str:
        leaf = self.pattern.column_indices if isinstance(self.pattern, Pattern) else None
        return f"Topology(shape={self.shape}, column_indices={getattr(leaf, 'shape', leaf)})"


def _flatten(topology: Topology) -> Any:
    names = ("pattern", "transposed_pattern", "permutation")
    children = [(jax.tree_util.GetAttrKey(n), getattr(topology, n)) for n in names]
    return children, topology.shape


jax.tree_util.register_pytree_with_keys(
    Topology,
    _flatten,
    lambda shape, parts: Topology._from_parts(*parts, shape),  # type: ignore
)


def same_pattern(a: Topology, b: Topology) -> bool:
    """Whether two topologies are known to store the same positions."""
    if a is b:
        return True
    if a.shape != b.shape or a.nse != b.nse or a.batch_shape != b.batch_shape:
        return False
    pairs = ((a.row_offsets, b.row_offsets), (a.column_indices, b.column_indices))
    if all(x is y for x, y in pairs):
        return True
    if any(isinstance(x, jax.core.Tracer) for pair in pairs for x in pair):
        raise ValueError(
            "whether two traced patterns are equal is not known: build both on one Topology"
        )
    return all(np.array_equal(x, y) for x, y in pairs)


def _check_shape(shape: Sequence[int]) -> tuple[int, int]:
    try:
        m, k = (operator.index(size) for size in shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Topology: shape must be two integers (m, k), got {shape!r}") from error
    if not (0 <= m < INT32_MAX and 0 <= k < INT32_MAX):
        raise ValueError(f"Topology: sizes must be in [0, {INT32_MAX}), got {(m, k)}")
    return m, k


def _check_indices(name: str, array: Any) -> Any:
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


def _needed(nse: int | None) -> int:
    if nse is None:
        raise ValueError(
            "Topology: under jit the number of stored entries must be given as nse=..."
        )
    return operator.index(nse)


def _pad(offsets: np.ndarray, columns: np.ndarray, nse: int | None) -> tuple[Any, Any]:
    """Appends padding entries up to nse."""
    if nse is None:
        return offsets, columns
    size = operator.index(nse)
    most = int(offsets[..., -1].max(initial=0))
    if size < most:
        raise ValueError(f"Topology: nse={size} is less than the {most} entries to store")
    padded = np.zeros((*columns.shape[:-1], size), columns.dtype)
    padded[..., :most] = columns[..., :most]
    return offsets, padded


def row_indices(row_offsets: jax.Array, nse: int) -> jax.Array:
    """The row of every stored entry of ``row_offsets (..., m + 1)``; m for padding."""

    def one(offsets: jax.Array) -> jax.Array:
        entries = jnp.arange(nse, dtype=jnp.int32)
        return (jnp.searchsorted(offsets, entries, side="right") - 1).astype(jnp.int32)

    for _ in range(row_offsets.ndim - 1):
        one = jax.vmap(one)
    return one(row_offsets)


# ---- Derived arrays of concrete patterns, on the host ----


def _check_pattern(
    offsets: np.ndarray, columns: np.ndarray, shape: tuple[int, int], where: str
) -> None:
    """Raises ValueError at the first row whose structure is bad."""
    k, nse = shape[1], columns.shape[-1]
    if offsets[0] != 0:
        raise ValueError(f"Topology: row_offsets{where} must start at 0, got {offsets[0]}")
    falling = np.flatnonzero(np.diff(offsets) < 0)
    if falling.size:
        row = falling[0]
        raise ValueError(
            f"Topology: row_offsets{where} must not fall, "
            f"got {offsets[row]} then {offsets[row + 1]} at row {row}"
        )
    nnz = int(offsets[-1])
    if nnz > nse:
        raise ValueError(
            f"Topology: row_offsets{where} end at {nnz}, beyond the {nse} column indices"
        )
    stored = columns[:nnz]

    def row_of(entry: int) -> int:
        return int(np.searchsorted(offsets, entry, side="right")) - 1

    outside = np.flatnonzero((stored < 0) | (stored >= k))
    if outside.size:
        entry = int(outside[0])
        raise ValueError(
            f"Topology: row {row_of(entry)}{where} has column {stored[entry]}, "
            f"out of range for {k} columns"
        )
    if nnz > 1:
        rises = np.diff(stored) > 0
        first = offsets[1:-1]
        rises[first[(first > 0) & (first < nnz)] - 1] = True  # a new row begins
        bad = np.flatnonzero(~rises)
        if bad.size:
            entry = int(bad[0])
            pair = stored[entry : entry + 2].tolist()
            what = "duplicate" if pair[0] == pair[1] else "unsorted"
            raise ValueError(f"Topology: row {row_of(entry)}{where} has {what} columns {pair}")


def _transpose_on_host(
    offsets: np.ndarray, columns: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    nse, nnz = columns.shape[-1], int(offsets[-1])
    entries = np.arange(nnz, dtype=np.int32)
    # SciPy transposes by counting, in linear time.
    transposed = scipy.sparse.csr_array((entries, columns[:nnz], offsets), shape=shape).tocsc()
    indices = np.zeros(nse, np.int32)
    indices[:nnz] = transposed.indices
    permutation = np.arange(nse, dtype=np.int32)  # padding stays in its place
    permutation[:nnz] = transposed.data
    return transposed.indptr.astype(np.int32), indices, permutation


def _row_order_on_host(offsets: np.ndarray) -> np.ndarray:
    return np.argsort(-np.diff(offsets), axis=-1, kind="stable").astype(np.int32)


def _pattern(arrays: Sequence[Any], column_count: int) -> Pattern:
    """From offsets, column indices and row order."""
    offsets, columns, order = arrays
    compact = jnp.asarray(columns.astype(np.uint16)) if column_count <= COMPACT_COLUMNS else None
    return Pattern(jnp.asarray(offsets), jnp.asarray(columns), jnp.asarray(order), compact)


def _derive_on_host(
    row_offsets: np.ndarray, column_indices: np.ndarray, shape: tuple[int, int]
) -> tuple[Pattern, Pattern, jax.Array]:
    m, k = shape
    batch, nse = column_indices.shape[:-1], column_indices.shape[-1]
    columns = np.zeros_like(column_indices)  # whatever padding holds is replaced by 0
    t_offsets = np.zeros((*batch, k + 1), np.int32)
    t_columns = np.zeros((*batch, nse), np.int32)
    permutation = np.zeros((*batch, nse), np.int32)
    for entry in np.ndindex(batch):
        offsets = row_offsets[entry]
        where = f" of pattern {entry}" if batch else ""
        _check_pattern(offsets, column_indices[entry], shape, where)
        columns[entry][: offsets[-1]] = column_indices[entry][: offsets[-1]]
        t_offsets[entry], t_columns[entry], permutation[entry] = _transpose_on_host(
            offsets, columns[entry], shape
        )
    return (
        _pattern((row_offsets, columns, _row_order_on_host(row_offsets)), k),
        _pattern((t_offsets, t_columns, _row_order_on_host(t_offsets)), m),
        jnp.asarray(permutation),
    )


# ---- Derived arrays of traced patterns, in the program ----


def _derive_traced(
    row_offsets: jax.Array, column_indices: jax.Array, shape: tuple[int, int]
) -> tuple[Pattern, Pattern, jax.Array]:
    m, k = shape
    row_offsets, column_indices = jnp.asarray(row_offsets), jnp.asarray(column_indices)

    def derive(offsets: Any, columns: Any) -> tuple[Any, Any, jax.Array]:
        nse = columns.shape[-1]
        rows = row_indices(offsets, nse)
        stored = rows < m
        columns = jnp.where(stored, columns, 0)
        # Entries lie row by row, so a stable sort by column leaves the rows of a column rising.
        keys = jnp.where(stored, columns, k).astype(jnp.int32)
        iota = jnp.arange(nse, dtype=jnp.int32)
        keys, t_columns, permutation = jax.lax.sort(
            (keys, jnp.where(stored, rows, 0), iota), num_keys=1
        )
        t_offsets = jnp.searchsorted(keys, jnp.arange(k + 1), side="left").astype(jnp.int32)
        orders = [
            jnp.argsort(-jnp.diff(x), stable=True).astype(jnp.int32) for x in (offsets, t_offsets)
        ]
        return (offsets, columns, orders[0]), (t_offsets, t_columns, orders[1]), permutation

    if checks_enabled():
        order = jnp.zeros((*row_offsets.shape[:-1], m), jnp.int32)
        row_offsets = _checked(row_offsets, column_indices, order, columns=k)
    else:
        most = column_indices.shape[-1] if m and k else 0
        row_offsets = jax.lax.cummax(jnp.clip(row_offsets, 0, most), axis=row_offsets.ndim - 1)
        row_offsets = row_offsets.at[..., 0].set(0)
        column_indices = jnp.clip(column_indices, 0, max(k - 1, 0))
    for _ in range(row_offsets.ndim - 1):
        derive = jax.vmap(derive)
    by_row, by_column, permutation = derive(row_offsets, column_indices)
    return _pattern(by_row, k), _pattern(by_column, m), permutation


def _checked(
    row_offsets: jax.Array,
    column_indices: jax.Array,
    row_order: jax.Array,
    *permutation: jax.Array,
    columns: int,
) -> jax.Array:
    """row_offsets behind a check of the pattern: the program stops with an error if it is bad."""
    batch = jnp.broadcast_shapes(row_offsets.shape[:-1], column_indices.shape[:-1])
    row_offsets = jnp.broadcast_to(row_offsets, (*batch, row_offsets.shape[-1]))

    def check(*operands: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call(
            backend.target_name("check_topology"),
            (
                jax.ShapeDtypeStruct(row_offsets.shape, jnp.int32),
                jax.ShapeDtypeStruct((2,), jnp.uint32),
            ),
            vmap_method="sequential",
        )
        return call(*operands, columns=columns)[0]

    return jax.lax.platform_dependent(
        row_offsets,
        column_indices,
        row_order,
        *permutation,
        cpu=check,
        cuda=check,
        default=lambda offsets, *_: offsets,
    )
