"""One orientation of a topology: what is derived from it, and the check of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from jaxsparse import backend
from jaxsparse.batching import over_batch

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

    def padded(self, room: int) -> Pattern:
        """With room for more entries: padding, which stands behind all stored ones."""
        compact = self.compact_column_indices
        return self._replace(
            column_indices=_with_zeros_behind(self.column_indices, room),
            compact_column_indices=None if compact is None else _with_zeros_behind(compact, room),
        )


def checks_enabled() -> bool:
    """Whether ``JAXSPARSE_CHECK=1``: patterns are verified where used. Read when tracing."""
    return os.environ.get("JAXSPARSE_CHECK", "0") not in ("", "0")


def row_indices(row_offsets: jax.Array, nse: int) -> jax.Array:
    """The row of every stored entry of ``row_offsets (..., m + 1)``; m for padding."""

    def one(offsets: jax.Array) -> jax.Array:
        entries = jnp.arange(nse, dtype=jnp.int32)
        return (jnp.searchsorted(offsets, entries, side="right") - 1).astype(jnp.int32)

    return over_batch(one, row_offsets.ndim - 1, row_offsets)


def is_concrete(*arrays: Any) -> bool:
    """Whether these are arrays whose numbers are known: neither traced nor abstract."""
    return all(
        isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer) for x in arrays
    )


def to_device(tree: Any) -> Any:
    """Arrays of NumPy as arrays of JAX.

    Concrete also where a program is being traced: a pattern may be made in there and kept.
    """
    with jax.ensure_compile_time_eval():
        return jax.tree.map(jnp.asarray, tree)


def _with_zeros_behind(x: Any, room: int) -> Any:
    widths = [(0, 0)] * (x.ndim - 1) + [(0, room)]
    return to_device(np.pad(x, widths)) if is_concrete(x) else jnp.pad(x, widths)


def padded_permutation(permutation: Any, room: int) -> jax.Array:
    """With room for more entries, which stay in their place."""
    module: Any = np if is_concrete(permutation) else jnp
    batch, nse = permutation.shape[:-1], permutation.shape[-1]
    behind = module.arange(nse, nse + room, dtype=np.int32)
    parts = [module.asarray(permutation), module.broadcast_to(behind, (*batch, room))]
    padded: jax.Array = to_device(module.concatenate(parts, axis=-1))
    return padded


def transpose_is_missing(purpose: str) -> ValueError:
    """The error of what needs the transposed pattern of a topology that has none."""
    return ValueError(
        f"{purpose} needs a topology with its transposed pattern, got one that was made without: "
        "use topology.with_transpose()"
    )


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
    compact = columns.astype(np.uint16) if column_count <= COMPACT_COLUMNS else None
    return Pattern(offsets, columns, order, compact)


Orientations = tuple[Pattern, Pattern | None, Any]
"""A pattern, its transpose, and which entry of the pattern each entry of the transpose is.

The latter two are None where no transpose is wanted.
"""


def derive_on_host(
    row_offsets: np.ndarray, column_indices: np.ndarray, shape: tuple[int, int], transpose: bool
) -> Orientations:
    """Both orientations as arrays of NumPy; raises ValueError if the pattern is bad."""
    m, k = shape
    batch, nse = column_indices.shape[:-1], column_indices.shape[-1]
    columns = np.zeros_like(column_indices)  # whatever padding holds is replaced by 0
    for entry in np.ndindex(batch):
        offsets = row_offsets[entry]
        where = f" of pattern {entry}" if batch else ""
        _check_pattern(offsets, column_indices[entry], shape, where)
        columns[entry][: offsets[-1]] = column_indices[entry][: offsets[-1]]
    pattern = _pattern((row_offsets, columns, _row_order_on_host(row_offsets)), k)
    if not transpose:
        return pattern, None, None
    t_offsets = np.zeros((*batch, k + 1), np.int32)
    t_columns = np.zeros((*batch, nse), np.int32)
    permutation = np.zeros((*batch, nse), np.int32)
    for entry in np.ndindex(batch):
        t_offsets[entry], t_columns[entry], permutation[entry] = _transpose_on_host(
            row_offsets[entry], columns[entry], shape
        )
    transposed = _pattern((t_offsets, t_columns, _row_order_on_host(t_offsets)), m)
    return pattern, transposed, permutation


def inverse_on_host(permutation: Any) -> jax.Array:
    """The inverse of a permutation, of which numbers that are none are clamped, as in kernels.

    It is not for this function to report a damaged pattern.
    """
    nse = permutation.shape[-1]
    order = np.clip(np.asarray(permutation), 0, max(nse - 1, 0))
    inverse = np.zeros(order.shape, np.int32)
    for entry in np.ndindex(order.shape[:-1]):
        inverse[entry][order[entry]] = np.arange(nse, dtype=np.int32)
    on_device: jax.Array = to_device(inverse)
    return on_device


# ---- Derived arrays of traced patterns, in the program ----


def inverse_traced(permutation: jax.Array) -> jax.Array:
    """The inverse of a traced permutation."""
    iota = jnp.broadcast_to(jnp.arange(permutation.shape[-1]), permutation.shape)
    return jnp.put_along_axis(
        jnp.zeros_like(permutation), permutation, iota.astype(jnp.int32), axis=-1, inplace=False
    )


def derive_traced(
    row_offsets: Any, column_indices: Any, shape: tuple[int, int], transpose: bool
) -> Orientations:
    """As `derive_on_host`, in the program; what is out of range is clamped."""
    m, k = shape
    row_offsets, column_indices = jnp.asarray(row_offsets), jnp.asarray(column_indices)

    def row_order(offsets: jax.Array) -> jax.Array:
        return jnp.argsort(-jnp.diff(offsets), stable=True).astype(jnp.int32)

    def by_row(offsets: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
        stored = row_indices(offsets, columns.shape[-1]) < m
        return offsets, jnp.where(stored, columns, 0), row_order(offsets)

    def by_column(offsets: jax.Array, columns: jax.Array) -> tuple[Any, jax.Array]:
        nse = columns.shape[-1]
        rows = row_indices(offsets, nse)
        stored = rows < m
        # Entries lie row by row, so a stable sort by column leaves the rows of a column rising.
        keys = jnp.where(stored, columns, k).astype(jnp.int32)
        iota = jnp.arange(nse, dtype=jnp.int32)
        keys, t_columns, permutation = jax.lax.sort(
            (keys, jnp.where(stored, rows, 0), iota), num_keys=1
        )
        t_offsets = jnp.searchsorted(keys, jnp.arange(k + 1), side="left").astype(jnp.int32)
        return (t_offsets, t_columns, row_order(t_offsets)), permutation

    if checks_enabled():
        order = jnp.zeros((*row_offsets.shape[:-1], m), jnp.int32)
        row_offsets = checked(row_offsets, column_indices, order, columns=k)
    else:
        most = column_indices.shape[-1] if m and k else 0
        row_offsets = jax.lax.cummax(jnp.clip(row_offsets, 0, most), axis=row_offsets.ndim - 1)
        row_offsets = row_offsets.at[..., 0].set(0)
        column_indices = jnp.clip(column_indices, 0, max(k - 1, 0))
    rank = row_offsets.ndim - 1
    pattern = _pattern(over_batch(by_row, rank, row_offsets, column_indices), k)
    if not transpose:
        return pattern, None, None
    transposed, permutation = over_batch(by_column, rank, row_offsets, pattern.column_indices)
    return pattern, _pattern(transposed, m), permutation


def checked(
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

    checked: jax.Array = jax.lax.platform_dependent(
        row_offsets,
        column_indices,
        row_order,
        *permutation,
        cpu=check,
        cuda=check,
        default=lambda offsets, *_: offsets,
    )
    return checked
