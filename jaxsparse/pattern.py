"""One orientation of a topology: what is derived from it, and the check of it."""

from __future__ import annotations

import math
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
TILE = 64  # rows and columns of a tile on tensor cores: kTileSize in ffi/types.h
_MOST_STARTS = 2**30  # places of which fit 32 bits
NO_STARTS = (1,)  # none would be an array of size 0, which JAX 0.11 can not compile in a shard_map


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


def tile_starts_shape(shape: tuple[int, int], nse: int) -> tuple[int, ...]:
    """(tiles down, tiles across + 1, TILE), or NO_STARTS where there'd be over two for each entry.

    Those are matrices that are too sparse or too narrow for tensor cores.
    """
    m, k = shape
    sizes = (-(-m // TILE), -(-k // TILE) + 1, TILE)
    return sizes if 0 < math.prod(sizes) <= min(2 * nse, _MOST_STARTS) else NO_STARTS


def checks_enabled() -> bool:
    """Whether ``JAXSPARSE_CHECK=1``: patterns are verified where used. Read when tracing."""
    return os.environ.get("JAXSPARSE_CHECK", "0") not in ("", "0")


def row_indices(row_offsets: jax.Array, nse: int) -> jax.Array:
    """The row of every stored entry of ``row_offsets (..., m + 1)``; m for padding."""

    def one(offsets: jax.Array) -> jax.Array:
        entries = jnp.arange(nse, dtype=jnp.int32)
        return (jnp.searchsorted(offsets, entries, side="right") - 1).astype(jnp.int32)

    return over_batch(one, row_offsets.ndim - 1, row_offsets)


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


def _tile_starts_on_host(
    offsets: np.ndarray, columns: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """As `tile_starts` says."""
    sizes = tile_starts_shape(shape, columns.shape[-1])
    if len(sizes) == 1:
        return np.zeros(sizes, np.int32)
    m, (down, ends, _) = shape[0], sizes
    rows, stored = np.repeat(np.arange(m), np.diff(offsets)), columns[: offsets[-1]]
    counts = np.bincount(rows * ends + stored // TILE + 1, minlength=m * ends)
    starts = np.zeros((down * TILE, ends), np.int32)
    starts[:m] = offsets[:-1, None] + np.cumsum(counts.reshape(m, ends), axis=1)
    return starts.reshape(down, TILE, ends).swapaxes(1, 2).reshape(-1)


def _pattern(arrays: Sequence[Any], column_count: int) -> Pattern:
    """From offsets, column indices and row order."""
    offsets, columns, order = arrays
    compact = jnp.asarray(columns.astype(np.uint16)) if column_count <= COMPACT_COLUMNS else None
    return Pattern(jnp.asarray(offsets), jnp.asarray(columns), jnp.asarray(order), compact)


def derive_on_host(
    row_offsets: np.ndarray, column_indices: np.ndarray, shape: tuple[int, int]
) -> tuple[Pattern, Pattern, jax.Array, jax.Array]:
    m, k = shape
    batch, nse = column_indices.shape[:-1], column_indices.shape[-1]
    columns = np.zeros_like(column_indices)  # whatever padding holds is replaced by 0
    t_offsets = np.zeros((*batch, k + 1), np.int32)
    t_columns = np.zeros((*batch, nse), np.int32)
    permutation = np.zeros((*batch, nse), np.int32)
    starts = np.zeros((*batch, math.prod(tile_starts_shape(shape, nse))), np.int32)
    for entry in np.ndindex(batch):
        offsets = row_offsets[entry]
        where = f" of pattern {entry}" if batch else ""
        _check_pattern(offsets, column_indices[entry], shape, where)
        columns[entry][: offsets[-1]] = column_indices[entry][: offsets[-1]]
        t_offsets[entry], t_columns[entry], permutation[entry] = _transpose_on_host(
            offsets, columns[entry], shape
        )
        starts[entry] = _tile_starts_on_host(offsets, columns[entry], shape)
    # Concrete also where a program is being traced: a pattern may be made in there and kept.
    with jax.ensure_compile_time_eval():
        return (
            _pattern((row_offsets, columns, _row_order_on_host(row_offsets)), k),
            _pattern((t_offsets, t_columns, _row_order_on_host(t_offsets)), m),
            jnp.asarray(permutation),
            jnp.asarray(starts),
        )


def transpose_on_host(
    transposed: Pattern, permutation: jax.Array, shape: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """The inverse of a permutation, and the starts of tiles of the transposed pattern.

    ``shape`` is that of the transposed pattern. Of a damaged pattern indices are clamped, as in
    kernels: it is not for this function to report it.
    """
    batch, nse = permutation.shape[:-1], permutation.shape[-1]
    order = np.clip(np.asarray(permutation), 0, max(nse - 1, 0))
    columns = np.clip(np.asarray(transposed.column_indices), 0, max(shape[1] - 1, 0))
    offsets = np.maximum.accumulate(np.clip(np.asarray(transposed.row_offsets), 0, nse), axis=-1)
    inverse = np.zeros(order.shape, np.int32)
    starts = np.zeros((*batch, math.prod(tile_starts_shape(shape, nse))), np.int32)
    for entry in np.ndindex(batch):
        inverse[entry][order[entry]] = np.arange(nse, dtype=np.int32)
        starts[entry] = _tile_starts_on_host(offsets[entry], columns[entry], shape)
    with jax.ensure_compile_time_eval():
        return jnp.asarray(inverse), jnp.asarray(starts)


# ---- Derived arrays of traced patterns, in the program ----


def tile_starts(
    row_offsets: jax.Array, column_indices: jax.Array, shape: tuple[int, int]
) -> jax.Array:
    """Where the entries of each row in each tile begin, int32 ``(..., starts)``.

    Of TILE rows at a time, for each tile of TILE columns, and for the end, one number for each row.
    A row whose columns do not rise has no entries in any tile, and in the end the complement.
    """
    m, sizes = shape[0], tile_starts_shape(shape, column_indices.shape[-1])

    def one(offsets: jax.Array, columns: jax.Array) -> jax.Array:
        down, ends, _ = sizes
        rows = row_indices(offsets, columns.shape[-1])  # padding's is m, which is dropped
        places = rows * ends + columns.astype(jnp.int32) // TILE + 1
        places = jnp.where(rows < m, places, m * ends)
        counts = jnp.zeros(m * ends, jnp.int32).at[places].add(1, mode="drop").reshape(m, ends)
        begins = offsets[:-1, None]
        falls = (rows[1:] == rows[:-1]) & (columns[1:] <= columns[:-1])
        falling = jnp.zeros(m, bool).at[rows[1:]].max(falls, mode="drop")[:, None]
        starts = jnp.where(falling, begins, begins + jnp.cumsum(counts, axis=1))
        starts = starts.at[:, -1:].set(jnp.where(falling, ~offsets[1:, None], starts[:, -1:]))
        starts = jnp.zeros((down * TILE, ends), jnp.int32).at[:m].set(starts)
        return starts.reshape(down, TILE, ends).swapaxes(1, 2).reshape(-1)

    if len(sizes) == 1:
        return jnp.zeros((*row_offsets.shape[:-1], *sizes), jnp.int32)
    return over_batch(one, row_offsets.ndim - 1, row_offsets, column_indices)


def transpose_traced(
    transposed: Pattern, permutation: jax.Array, shape: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """As `transpose_on_host`, of traced patterns."""
    iota = jnp.broadcast_to(jnp.arange(permutation.shape[-1]), permutation.shape)
    inverse = jnp.put_along_axis(
        jnp.zeros_like(permutation), permutation, iota.astype(jnp.int32), axis=-1, inplace=False
    )
    return inverse, tile_starts(transposed.row_offsets, transposed.column_indices, shape)


def derive_traced(
    row_offsets: jax.Array, column_indices: jax.Array, shape: tuple[int, int]
) -> tuple[Pattern, Pattern, jax.Array, jax.Array]:
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
        row_offsets = checked(row_offsets, column_indices, order, columns=k)
    else:
        most = column_indices.shape[-1] if m and k else 0
        row_offsets = jax.lax.cummax(jnp.clip(row_offsets, 0, most), axis=row_offsets.ndim - 1)
        row_offsets = row_offsets.at[..., 0].set(0)
        column_indices = jnp.clip(column_indices, 0, max(k - 1, 0))
    by_row, by_column, permutation = over_batch(
        derive, row_offsets.ndim - 1, row_offsets, column_indices
    )
    starts = tile_starts(by_row[0], by_row[1], shape)
    return _pattern(by_row, k), _pattern(by_column, m), permutation, starts


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
