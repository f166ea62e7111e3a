"""Attention of new queries to a cache of keys and values, of which their rows see some."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import masks
from jaxsparse.block_mask import BlockMask
from jaxsparse.block_mask.cell_states import states_of
from jaxsparse.block_mask.from_lengths import MOST_QUERIES
from jaxsparse.block_mask.tiles import EMPTY
from jaxsparse.block_mask.words import CELL
from jaxsparse.masks.expression import as_mask
from jaxsparse.ops.padded_heads import fits_decode
from jaxsparse.ops.sparse_attention import sparse_attention
from jaxsparse.pattern import is_concrete
from jaxsparse.topology import Topology

# The keys of a row are gathered if they are at most one in so many: a gathered key is read,
# written and read again.
_GATHER_ONE_IN = 4
_STRIP = 64  # Rows of cells whose states are looked at at a time.


@dataclasses.dataclass(frozen=True)
class Cached:
    """What a layer that decodes hands to its attention in the place of a mask.

    So the projections, and all else that stands before and behind attention, stay Flax's.
    """

    layer: Any
    mask: Any

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Writes new keys and values to the layer's cache, and attends to it."""
        layer = self.layer
        cached_key, cached_value, index = layer.cached_key, layer.cached_value, layer.cache_index
        if cached_key is None or cached_value is None or index is None:
            raise ValueError("Autoregressive cache not initialized, call ``init_cache`` first.")
        *batch, length, groups, features = cached_key.shape
        t = query.shape[-3]
        expected = (*batch, t, groups, features)
        if key.shape != expected or not 1 <= t <= length:
            raise ValueError(
                f"Autoregressive cache shape error, expected key shape {expected} for {t} queries, "
                f"at least 1 and at most {length}, instead got {key.shape}."
            )
        start = index[...]
        for cache, new in (cached_key, key), (cached_value, value):
            # As Flax's, a full cache is written at its end: the start of the slice is clamped.
            new = new.astype(cache.dtype)
            cache[...] = jax.lax.dynamic_update_slice_in_dim(cache[...], new, start, -3)
        index[...] = start + t
        attend = layer.attention_fn.decode
        caches = cached_key[...], cached_value[...]
        out: jax.Array = attend(query, *caches, start, self.mask, longest_row=layer.longest_row)
        return out


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pattern: Any,
    row: Any,
    written: Any,
    *,
    longest_row: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of the queries of rows ``row`` to ``row + T - 1`` of a pattern.

    Several queries, as of a prompt, take the kernels of `sparse_attention`, which hold no scores.
    So does one query where there is a kernel for it, which reads the tiles of keys that have some
    to be seen: on CPUs, and in 16 bits on GPUs. Else plain JAX serves it: it gathers the keys of
    the row where they are few, or attends to the whole cache with the row as a mask.

    Args:
        query: ``(..., T, N, H)``.
        key: the cache, ``(..., S, K, H)``; K divides N.
        value: the shape of ``key``.
        pattern: a mask function, or a topology, block mask or array of bool of S columns, or a
            batch of them, ``(N,)``, ``(..., 1)``, or ``(..., N)``.
        row: an integer, which may be traced.
        written: how many keys there are; none behind them is seen. May be traced.
        longest_row: the most keys that a row stores; None if that is not known. Rows of a topology
            may be longer after all: then the whole cache is read.
        implementation: that of `sparse_attention`; "xla" takes plain JAX for one query.

    Returns:
        ``(..., T, N, H)``, of the query's dtype; zeros for a query that sees no key.

    Raises:
        ValueError: for a batch of patterns that does not fit.
    """
    *batch, t, n, _ = query.shape
    length = key.shape[-3]
    query, key, value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))

    of_heads = functools.partial(_of_heads, batch=tuple(batch), n=n)

    def by_kernel() -> jax.Array:
        seen = _for_kernel(pattern, row, t, written, length, of_heads)
        keys, values = (x.astype(query.dtype) for x in (key, value))
        out: jax.Array = sparse_attention(query, keys, values, seen, implementation=implementation)
        return out

    def to_whole_cache() -> jax.Array:
        seen = _rows(pattern, row, 1, written, length)
        return _attend(query, key, value, of_heads(seen, 2))

    def to_row(columns: jax.Array, stored: jax.Array) -> jax.Array:
        at, seen = (of_heads(x, 1) for x in (columns, stored))
        keys, values = (_gather(x, at, n) for x in (key, value))
        # What stands for padding may be NaN. Of the whole cache that would be a copy.
        values = jnp.where(seen.swapaxes(1, 2)[..., None], values, 0)
        return _attend(query, keys, values, seen[:, :, None])

    def in_plain_jax() -> jax.Array:
        if not longest_row or longest_row * _GATHER_ONE_IN > length:
            return to_whole_cache()
        columns, stored, fits = _columns(pattern, row, written, length, longest_row)
        if fits is None:
            return to_row(columns, stored)
        out: jax.Array = jax.lax.cond(fits, lambda: to_row(columns, stored), to_whole_cache)
        return out

    has_kernel_on_gpus = fits_decode(query.dtype, (query.shape[-1], value.shape[-1]))
    on_gpu = by_kernel if has_kernel_on_gpus else in_plain_jax
    if t > 1 or implementation == "cpu":
        out = by_kernel()
    elif implementation is None:
        out = jax.lax.platform_dependent(cpu=by_kernel, cuda=on_gpu, default=in_plain_jax)
    elif implementation == "cuda":
        out = on_gpu()
    else:
        out = in_plain_jax()
    return out.reshape(*batch, t, n, -1)


def longest_row(pattern: Any, length: int) -> int | None:
    """The most keys that one query sees of those up to its own, rounded up; None if not known.

    Rounded so that programs can be the same for similar patterns.

    Args:
        pattern: a mask function, a topology, or None.
        length: of the cache.
    """
    if isinstance(pattern, Topology):
        if not is_concrete(pattern.row_offsets):
            return None
        most = int(np.diff(np.asarray(pattern.row_offsets)).max(initial=0))
        return -(-most // CELL) * CELL
    return None if pattern is None else _longest_row_of_mask(pattern, length)


@functools.lru_cache(maxsize=32)
def _longest_row_of_mask(mask: Callable[[Any, Any], Any], length: int) -> int:
    """By intervals of cells, as all positions would take long to evaluate."""
    past = as_mask(mask) & masks.causal()
    cells, most = -(-length // CELL), 0
    for begin in range(0, cells, _STRIP):
        rows = range(begin, min(begin + _STRIP, cells))
        states = states_of(np, past, rows, range(cells), (length, length))
        most = max(most, int(np.count_nonzero(states != EMPTY, axis=1).max()))
    return most * CELL


# ---- The rows of a pattern ----


def _rows(pattern: Any, row: Any, t: int, written: Any, length: int) -> jax.Array:
    """Some rows of a pattern, bool ``(..., T, S)``."""
    columns = jnp.arange(length, dtype=jnp.int32)
    rows: jax.Array
    if isinstance(pattern, Topology):
        rows = _rows_of_topology(pattern, row, t)
    elif isinstance(pattern, BlockMask):
        rows = pattern.to_dense()
    elif not callable(pattern):
        rows = jnp.asarray(pattern)
    else:
        mask = as_mask(pattern)
        last = np.array(length - 1, np.int32)
        mask._check_positions(last, last)
        try:
            rows = jnp.asarray(mask(row + jnp.arange(t, dtype=jnp.int32)[:, None], columns[None]))
        except jax.errors.JAXTypeError:  # a function of NumPy, which takes no traced row
            rows = _rows_of_topology(_topology_of(mask, length), row, t)
    seen: jax.Array = rows & (columns < written)
    return seen


def _for_kernel(
    pattern: Any, row: Any, t: int, written: Any, length: int, of_heads: Callable[..., jax.Array]
) -> Topology | BlockMask | jax.Array:
    """The same as `sparse_attention` wants it, without the array in between where that can be."""
    if t == 1 and isinstance(pattern, Topology):
        room = min(length, pattern.nse)
        columns, stored, _ = _columns(pattern, row, written, length, room)
        count = jnp.sum(stored, axis=-1)  # of the first ones, as columns rise
        offsets = jnp.stack([jnp.zeros_like(count), count], axis=-1)
        return Topology(of_heads(offsets, 1), of_heads(columns, 1), (1, length), transpose=False)
    if callable(pattern):
        diagonals = as_mask(pattern)._diagonals
        if t <= MOST_QUERIES and diagonals is not None and diagonals.right == 0:
            left = diagonals.left
            window = None if left is None else left + 1
            # None behind the last query's own is seen: all of these are written.
            return BlockMask.from_lengths(row + t, (t, length), causal=True, window=window)
        mask = masks.offset(pattern, rows=row) & masks.padding(written)
        try:
            return BlockMask.from_mask(mask, (t, length))
        except jax.errors.JAXTypeError:  # as above
            pass
    return of_heads(_rows(pattern, row, t, written, length), 2)


@functools.lru_cache(maxsize=32)
def _topology_of(mask: Callable[[Any, Any], Any], length: int) -> Topology:
    return Topology.from_mask(mask, (length, length), transpose=False)


def _rows_of_topology(topology: Topology, row: Any, t: int) -> jax.Array:
    k, nse = topology.shape[1], topology.nse

    def one(offsets: jax.Array, columns: jax.Array) -> jax.Array:
        at = offsets[row] + jnp.arange(min(nse, t * k), dtype=jnp.int32)
        of_entry = jnp.searchsorted(offsets, at, side="right") - 1 - row
        rows = jnp.where(at < offsets[row + t], of_entry, t)
        columns = columns.at[at].get(mode="fill", fill_value=0)
        return jnp.zeros((t, k), bool).at[rows, columns].set(True, mode="drop")

    rows: jax.Array = jnp.vectorize(one, signature="(m),(e)->(t,k)")(
        topology.row_offsets, topology.column_indices
    )
    return rows


def _columns(
    pattern: Any, row: Any, written: Any, length: int, room: int
) -> tuple[jax.Array, jax.Array, Any]:
    """The columns of a row ``(..., room)``, which of them are stored, and whether that is all.

    The last is None where it is certain.
    """
    if not isinstance(pattern, Topology):
        seen = _rows(pattern, row, 1, written, length)[0]
        (columns,) = jnp.nonzero(seen, size=room, fill_value=0)
        return columns, jnp.arange(room) < jnp.sum(seen), None
    begin, end = (pattern.row_offsets[..., i, None] for i in (row, row + 1))
    at = begin + jnp.arange(room, dtype=jnp.int32)
    columns = jnp.take_along_axis(pattern.column_indices, at, axis=-1, mode="clip")
    return columns, (at < end) & (columns < written), jnp.max(end - begin) <= room


def _of_heads(x: jax.Array, trailing: int, batch: tuple[int, ...], n: int) -> jax.Array:
    """An array of each pattern as one of sequences and heads, ``(B or 1, N or 1, ...)``."""
    split = x.ndim - trailing
    leading, rest = x.shape[:split], x.shape[split:]
    if leading in ((), (1,)) or (leading == (n,) and leading != batch):
        return x.reshape(1, *(leading or (1,)), *rest)
    *sequences, heads = leading
    fits: Sequence[Any] = (batch, (1,) * len(batch))
    if tuple(sequences) not in fits or heads not in (1, n):
        raise ValueError(
            f"SparseAttention: a batch of patterns must be ({n},), one for each head, "
            f"{(*batch, 1)}, one for each sequence, or {(*batch, n)}, got {leading}"
        )
    return x.reshape(math.prod(sequences), heads, *rest)


# ---- Attention of one query ----


def _gather(x: jax.Array, columns: jax.Array, n: int) -> jax.Array:
    """The positions ``(B or 1, N or 1, L)`` of a cache, as ``(B, L, K or N, H)``."""
    size, groups = x.shape[0], x.shape[2]
    if columns.shape[:2] == (1, 1):  # the longest slices
        return jnp.take(x, columns[0, 0], axis=1, mode="clip")
    sequences = jnp.arange(size)[:, None]
    if columns.shape[1] == 1:
        return x.at[sequences, columns[:, 0]].get(mode="clip")
    group = jnp.arange(n) // (n // groups)
    return x.at[sequences[..., None], columns.swapaxes(1, 2), group].get(mode="clip")


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention with a mask ``(B or 1, N or 1, 1, S)``; zeros where nothing is seen."""
    key, value = (x.astype(query.dtype) for x in (key, value))
    out = jax.nn.dot_product_attention(query, key, value, mask=seen)
    sees = jnp.any(seen, axis=-1).swapaxes(1, 2)
    return jnp.where(sees[..., None], out, 0)
