"""Attention over a block mask, its tangent and its cotangent in plain jnp.

Keys are taken block by block, so that memory grows with the number of queries and not with the size
of the score matrix, in derivatives of any order too: each step is recomputed where its own
derivative is taken. Nothing is skipped: a mask costs what dense attention does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.block_mask.tiles import FULL, PARTIAL, STATES_AT, TileLists
from jaxsparse.block_mask.words import CELL, TILE, unpack
from jaxsparse.precision import accumulator_dtype

_BLOCK = 2 * TILE  # keys that a step takes


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *mask: jax.Array, scale: float, **_: Any
) -> list[jax.Array]:
    """One out and lse, with the params of the primitive."""
    scores = _Scores(query, scale)

    def step(carry: Any, block: Any) -> Any:
        most, total, out = carry
        (k, v), seen = block
        s = scores.of(k, seen)
        higher = jnp.maximum(most, jnp.max(s, axis=-1))
        shift = jnp.where(higher == -jnp.inf, 0, higher)
        p = jnp.where(seen, jnp.exp(s - shift[..., None]), 0)
        factor = jnp.exp(most - shift)
        out = factor[..., None] * out + _product(p.astype(query.dtype), v, seen)
        return (higher, factor * total + jnp.sum(p, axis=-1), out), None

    rows = (*scores.heads, query.shape[0])
    start = (
        jnp.full(rows, -jnp.inf, scores.dtype),
        jnp.zeros(rows, scores.dtype),
        jnp.zeros((*rows, value.shape[-1]), scores.dtype),
    )
    (most, total, out), _ = _over_keys(step, start, (key, value), mask, query.shape[0])
    empty = total == 0  # not where a score is NaN, which XLA's maximum may drop
    lse = jnp.where(empty, -jnp.inf, most + jnp.log(jnp.where(empty, 1, total)))
    out = out / jnp.where(empty, 1, total)[..., None]
    return [_by_queries(out).astype(query.dtype), lse]


def attention_tangent(
    query: jax.Array, key: jax.Array, value: jax.Array, *operands: jax.Array, scale: float, **_: Any
) -> list[jax.Array]:
    """One u and r (see `jaxsparse.ops.attention`), with the params of the primitive."""
    *mask, lse, d_query, d_key, d_value = operands
    scores, varied = _Scores(query, scale), _Scores(d_query, scale)

    def step(carry: Any, block: Any) -> Any:
        weighted, sums = carry
        (k, v, dk, dv), seen = block
        p = _probabilities(scores.of(k, seen), lse, seen)
        ds = jnp.where(seen, varied.raw(k) + scores.raw(dk), 0)
        w = p * ds
        weighted += _product(w, v, seen) + _product(p, dv, seen)
        return (weighted, sums + jnp.sum(w, axis=-1)), None

    rows = (*scores.heads, query.shape[0])
    start = (
        jnp.zeros((*rows, value.shape[-1]), scores.dtype),
        jnp.zeros(rows, scores.dtype),
    )
    blocks = (key, value, d_key, d_value)
    (weighted, sums), _ = _over_keys(step, start, blocks, mask, query.shape[0])
    return [_by_queries(weighted), sums]


def attention_cotangent(
    query: jax.Array, key: jax.Array, value: jax.Array, *operands: jax.Array, scale: float, **_: Any
) -> list[jax.Array]:
    """One ct of query, key and value, with the params of the primitive."""
    *mask, lse, ct_out, ct_sums = operands
    scores, weighing = _Scores(query, scale), _Scores(ct_out, 1.0)
    queries, cts = (_by_heads(x) for x in (query, ct_out))

    def step(ct_query: Any, block: Any) -> Any:
        (k, v), seen = block
        p = _probabilities(scores.of(k, seen), lse, seen)
        dp = jnp.where(seen, p * (weighing.raw(v) + ct_sums[..., None]), 0)
        ct_query += _product(dp, k, seen)
        of_keys = (_product_over_queries(dp, queries, seen), _product_over_queries(p, cts, seen))
        return ct_query, of_keys

    start = jnp.zeros((*scores.heads, *query.shape[::3]), scores.dtype)
    ct_query, of_blocks = _over_keys(step, start, (key, value), mask, query.shape[0])
    ct_key, ct_value = (_joined(x, key.shape[0]) for x in of_blocks)
    results = (scale * _by_queries(ct_query), scale * ct_key, ct_value)
    return [x.astype(query.dtype) for x in results]


class _Scores:
    """Scaled products of rows and keys, (groups, heads of each, queries, keys of a block)."""

    def __init__(self, rows: jax.Array, scale: float):
        self.rows = _by_heads(rows)
        self.heads = self.rows.shape[:2]
        self.dtype = accumulator_dtype(rows.dtype)
        self._scale = jnp.asarray(scale, self.dtype)

    def raw(self, keys: jax.Array) -> jax.Array:
        return self._scale * _einsum("grth,ugh->grtu", self.rows, keys, self.dtype)

    def of(self, keys: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(seen, self.raw(keys), -jnp.inf)


def _probabilities(scores: jax.Array, lse: jax.Array, seen: jax.Array) -> jax.Array:
    shift = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    return jnp.where(seen, jnp.exp(scores - shift), 0)


def _einsum(spec: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum(
        spec,
        a,
        b.astype(a.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def _by_heads(x: jax.Array) -> jax.Array:
    """From (queries, groups, heads of each, numbers) to heads first."""
    return jnp.moveaxis(x, 0, 2)


def _by_queries(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 0)


def _product(weights: jax.Array, x: jax.Array, seen: jax.Array) -> jax.Array:
    """Weights of (groups, heads, queries, keys) by x of (keys, groups, numbers).

    A weight is 0 where a key is not seen, and 0 * NaN would spread: what is not finite is left out
    of the product, and all numbers of a query that sees some of it are NaN.
    """
    dtype = accumulator_dtype(x.dtype)
    finite = jnp.isfinite(x)
    product = _einsum("grtu,uge->grte", weights, jnp.where(finite, x, 0), dtype)
    wrong = 1 - jnp.all(finite, axis=-1).astype(dtype)  # of keys and groups
    groups, heads = weights.shape[:2]
    seen = jnp.broadcast_to(seen, (groups, heads, *seen.shape[2:])).astype(dtype)
    sees_wrong = _einsum("grtu,ug->grt", seen, wrong, dtype) > 0
    return jnp.where(sees_wrong[..., None], jnp.nan, product)


def _product_over_queries(weights: jax.Array, rows: jax.Array, seen: jax.Array) -> jax.Array:
    """Transposed weights by rows of (groups, heads, queries, numbers), summed over a group's heads.

    The result is (keys, groups, numbers).
    """
    groups, heads, queries, keys = weights.shape
    seen = jnp.broadcast_to(seen, weights.shape)
    # One head, whose keys are the queries of all heads.
    joined = (
        jnp.moveaxis(x, -1, 1).reshape(groups, 1, keys, heads * queries) for x in (weights, seen)
    )
    weights, seen = joined
    rows = jnp.moveaxis(rows.reshape(groups, heads * queries, rows.shape[-1]), 0, 1)
    return jnp.moveaxis(_product(weights, rows, seen)[:, 0], 0, 1)


def _over_keys(
    step: Callable[[Any, Any], Any],
    start: Any,
    arrays: Sequence[jax.Array],
    mask: Sequence[jax.Array],
    queries: int,
) -> Any:
    """Scans over blocks of keys: of each, parts of the arrays and which positions are stored."""
    seen = _Positions(TileLists(*mask[: len(TileLists._fields)]), queries, arrays[0].shape[0])
    padding = seen.blocks * _BLOCK - arrays[0].shape[0]
    padded = (jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))) for x in arrays)
    parts = [x.reshape(seen.blocks, _BLOCK, *x.shape[1:]) for x in padded]

    def of_block(carry: Any, block: Any) -> Any:
        number, *of_arrays = block
        return step(carry, (of_arrays, seen.of(number)))

    return jax.lax.scan(jax.checkpoint(of_block), start, (jnp.arange(seen.blocks), *parts))


def _joined(blocks: jax.Array, keys: int) -> jax.Array:
    return blocks.reshape(blocks.shape[0] * blocks.shape[1], *blocks.shape[2:])[:keys]


class _Positions:
    """Which positions a block mask stores, by blocks of keys."""

    def __init__(self, lists: TileLists, queries: int, keys: int):
        self._queries = queries
        self.blocks = max(1, -(-keys // _BLOCK))
        self._bits = lists.bits
        # Of all tiles, listed or not: the states of cells, and where words of partial ones begin.
        size = (-(-queries // TILE), self.blocks * (_BLOCK // TILE))

        def spread(offsets: jax.Array, entries: jax.Array, bits_at: jax.Array) -> Any:
            number = jnp.arange(entries.shape[0], dtype=jnp.int32)
            row = jnp.searchsorted(offsets, number, side="right") - 1  # behind all: dropped
            place = (row, (entries & ((1 << STATES_AT) - 1)).astype(jnp.int32))
            states = entries >> STATES_AT
            empty = jnp.zeros(size, states.dtype)
            return (
                empty.at[place].set(states, mode="drop"),
                jnp.zeros(size, jnp.int32).at[place].set(bits_at, mode="drop"),
            )

        over_heads = jax.vmap(jax.vmap(spread))
        self._states, self._bits_at = over_heads(lists.offsets, lists.entries, lists.bits_at)

    def of(self, block: jax.Array) -> jax.Array:
        """Bool (groups or 1, heads or 1, queries, _BLOCK)."""
        tiles = _BLOCK // TILE
        states, at = (
            jax.lax.dynamic_slice_in_dim(x, block * tiles, tiles, axis=-1)
            for x in (self._states, self._bits_at)
        )
        shifts = jnp.arange(0, 8, 2, dtype=states.dtype)
        shifts = shifts.reshape(*(1,) * states.ndim, -1)
        cells = states[..., None] >> shifts & 3  # (groups, heads, down, across, cells of a tile)
        partial = (cells == PARTIAL).astype(jnp.int32)
        at = at[..., None] + jnp.cumsum(partial, axis=-1) - partial
        words = jax.vmap(jax.vmap(lambda bits, at: bits.at[at].get(mode="clip")))(self._bits, at)
        bits = unpack(words.reshape(-1, words.shape[-1])).reshape(*cells.shape, CELL, CELL)
        states = cells[..., None, None]
        stored = (states == FULL) | ((states == PARTIAL) & bits)
        groups, heads, down, across = stored.shape[:4]
        stored = stored.reshape(groups, heads, down, across, 2, 2, CELL, CELL)
        stored = stored.transpose(0, 1, 2, 4, 6, 3, 5, 7).reshape(
            groups, heads, down * TILE, across * TILE
        )
        return stored[:, :, : self._queries]
