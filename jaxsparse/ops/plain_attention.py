"""Attention over a block mask, its tangent and its cotangent in plain jnp.

Keys are taken block by block, so that memory grows with the number of queries and not with the size
of the score matrix, in derivatives of any order too: each step is recomputed where its own
derivative is taken. Nothing is skipped: a mask costs what dense attention does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.block_mask.tiles import FULL, PARTIAL, STATES_AT, TileLists
from jaxsparse.block_mask.words import CELL, TILE, unpack
from jaxsparse.ops import dropout
from jaxsparse.ops.score_blocks import ScoreBlocks
from jaxsparse.ops.scores import Scores
from jaxsparse.precision import accumulator_dtype

_BLOCK = 2 * TILE  # keys that a step takes


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *operands: jax.Array,
    scale: float,
    scores: Scores | None = None,
    **_: Any,
) -> list[jax.Array]:
    """One out and lse, with the params of the primitive."""
    mask, extra = _split(operands, scores)
    products, blocks = _Scores(query, scale), _blocks(scores, extra, query, key)

    def step(carry: Any, block: _KeyBlock) -> Any:
        most, total, out = carry
        (k, v, *sliced), seen, number = block
        values = blocks.values(number, blocks.all, blocks.whole, sliced, products.dtype)
        s = jnp.where(seen, blocks.function(number, products.raw(k), *values), -jnp.inf)
        higher = jnp.maximum(most, jnp.max(s, axis=-1))
        shift = jnp.where(higher == -jnp.inf, 0, higher)
        p = jnp.where(seen, jnp.exp(s - shift[..., None]), 0)
        factor = jnp.exp(most - shift)
        weights = dropout.applied(p, blocks.multipliers(number, p.dtype)).astype(query.dtype)
        out = factor[..., None] * out + _product(weights, v, seen)
        return (higher, factor * total + jnp.sum(p, axis=-1), out), None

    rows = (*products.heads, query.shape[0])
    start = (
        jnp.full(rows, -jnp.inf, products.dtype),
        jnp.zeros(rows, products.dtype),
        jnp.zeros((*rows, value.shape[-1]), products.dtype),
    )
    arrays = (key, value, *blocks.sliced)
    (most, total, out), _ = _over_keys(step, start, arrays, mask, query.shape[0])
    empty = total == 0  # not where a score is NaN, which XLA's maximum may drop
    lse = jnp.where(empty, -jnp.inf, most + jnp.log(jnp.where(empty, 1, total)))
    out = out / jnp.where(empty, 1, total)[..., None]
    return [_by_queries(out).astype(query.dtype), lse]


def attention_tangent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *operands: jax.Array,
    scale: float,
    scores: Scores | None = None,
    **_: Any,
) -> list[jax.Array]:
    """One u and r (see `jaxsparse.ops.attention`), with the params of the primitive."""
    varied = () if scores is None else scores.varied
    behind = len(operands) - len(varied)
    *others, lse, d_query, d_key, d_value = operands[:behind]
    d_values = operands[behind:]
    mask, extra = _split(others, scores)
    products, along = _Scores(query, scale), _Scores(d_query, scale)
    blocks = _blocks(scores, extra, query, key)
    d_whole, d_sliced = (blocks.parts(varied, d_values, sliced=s) for s in (False, True))

    def step(carry: Any, block: _KeyBlock) -> Any:
        weighted, sums = carry
        (k, v, dk, dv, *sliced), seen, number = block
        sliced, d_sliced = sliced[: len(blocks.sliced)], sliced[len(blocks.sliced) :]
        values = blocks.values(number, blocks.all, blocks.whole, sliced, products.dtype)
        ds = along.raw(k) + products.raw(dk)
        d_values = blocks.values(number, varied, d_whole, d_sliced, products.dtype, varied=True)
        s, ds = blocks.derivative(number, products.raw(k), ds, values, d_values)
        p = _probabilities(jnp.where(seen, s, -jnp.inf), lse, seen)
        w = p * jnp.where(seen, ds, 0)
        multipliers = blocks.multipliers(number, p.dtype)
        weighted += _product(dropout.applied(w, multipliers), v, seen)
        weighted += _product(dropout.applied(p, multipliers), dv, seen)
        return (weighted, sums + jnp.sum(w, axis=-1)), None

    rows = (*products.heads, query.shape[0])
    start = (
        jnp.zeros((*rows, value.shape[-1]), products.dtype),
        jnp.zeros(rows, products.dtype),
    )
    arrays = (key, value, d_key, d_value, *blocks.sliced, *d_sliced)
    (weighted, sums), _ = _over_keys(step, start, arrays, mask, query.shape[0])
    return [_by_queries(weighted), sums]


def attention_cotangent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *operands: jax.Array,
    scale: float,
    scores: Scores | None = None,
    **_: Any,
) -> list[jax.Array]:
    """One ct of query, key, value and operands that vary, with the params of the primitive."""
    *others, lse, ct_out, ct_sums = operands
    mask, extra = _split(others, scores)
    products, weighing = _Scores(query, scale), _Scores(ct_out, 1.0)
    blocks = _blocks(scores, extra, query, key)
    queries, cts = (_by_heads(x) for x in (query, ct_out))

    def step(carry: Any, block: _KeyBlock) -> Any:
        ct_query, *ct_whole = carry
        (k, v, *sliced), seen, number = block
        values = blocks.values(number, blocks.all, blocks.whole, sliced, products.dtype)
        s, pull = blocks.pull(number, products.raw(k), sliced, values)
        p = _probabilities(jnp.where(seen, s, -jnp.inf), lse, seen)
        multipliers = blocks.multipliers(number, p.dtype)
        ct_scores = dropout.applied(weighing.raw(v), multipliers) + ct_sums[..., None]
        dp, of_whole, of_sliced = pull(jnp.where(seen, p * ct_scores, 0), seen)
        ct_query += _product(dp, k, seen)
        p = dropout.applied(p, multipliers)
        of_keys = (_product_over_queries(dp, queries, seen), _product_over_queries(p, cts, seen))
        sums = [a + b for a, b in zip(ct_whole, of_whole, strict=True)]
        return [ct_query, *sums], (*of_keys, *of_sliced)

    start = [jnp.zeros((*products.heads, *query.shape[::3]), products.dtype)]
    start += blocks.zeros(products.heads, products.dtype)
    arrays = (key, value, *blocks.sliced)
    (ct_query, *whole), of_blocks = _over_keys(step, start, arrays, mask, query.shape[0])
    ct_key, ct_value, *sliced = (_joined(x, key.shape[0]) for x in of_blocks)
    results = (scale * _by_queries(ct_query), scale * ct_key, ct_value)
    of_operands = blocks.merged(blocks.varied, whole, sliced)
    return [*(x.astype(query.dtype) for x in results), *of_operands]


def _split(
    operands: Sequence[jax.Array], scores: Scores | None
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """Those of the mask, and those of scores."""
    mask = len(operands) - (0 if scores is None else scores.count)
    return operands[:mask], operands[mask:]


def _blocks(
    scores: Scores | None, operands: Sequence[jax.Array], query: jax.Array, key: jax.Array
) -> ScoreBlocks:
    return ScoreBlocks(scores, operands, query.shape[0], key.shape[0], _BLOCK)


class _KeyBlock(NamedTuple):
    """Parts of arrays, which of the block's positions are stored, and its number."""

    arrays: list[jax.Array]
    seen: jax.Array
    number: jax.Array


class _Scores:
    """Scaled products of rows and keys, (groups, heads of each, queries, keys of a block)."""

    def __init__(self, rows: jax.Array, scale: float):
        self.rows = _by_heads(rows)
        self.heads = self.rows.shape[:2]
        self.dtype = accumulator_dtype(rows.dtype)
        self._scale = jnp.asarray(scale, self.dtype)

    def raw(self, keys: jax.Array) -> jax.Array:
        return self._scale * _einsum("grth,ugh->grtu", self.rows, keys, self.dtype)


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
    step: Callable[[Any, _KeyBlock], Any],
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
        return step(carry, _KeyBlock(of_arrays, seen.of(number), number))

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
