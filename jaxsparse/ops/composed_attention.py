"""Attention over a pattern, its tangent and its cotangent, composed of products and a softmax.

What runs where no kernel takes a call by the block mask, and the pattern is known: work and memory
grow with the number of stored positions. All three take the operands of `jaxsparse.ops.attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops import dropout
from jaxsparse.ops.arguments import operands_of_pattern
from jaxsparse.ops.bilinear import sddmm_p, spmm_p
from jaxsparse.ops.score_entries import ScoreEntries
from jaxsparse.ops.scores import Scores
from jaxsparse.ops.sparse_softmax import sparse_softmax_p
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind_local

# How products and softmaxes are bound: where this stands for a kernel, on one device.
BindProducts = Callable[..., list[jax.Array]]
_IN_PLACE: BindProducts = functools.partial(bind_local, implementation=None, variant=None)


def attention(
    *operands: jax.Array,
    columns: int | None,
    scale: float,
    scores: Scores | None = None,
    bind_products: BindProducts = _IN_PLACE,
    **_params: Any,
) -> list[jax.Array]:
    """Out and lse."""
    query, key, value, *mask = operands
    pattern = _Pattern(mask, columns, scores, bind_products)
    s, p = pattern.probabilities(query, key, scale)
    weights = pattern.kept(p).astype(query.dtype)
    out = pattern.product(weights, _shared_heads(value), query.dtype)
    # Of each entry s - log p is the row's lse: so is their mean by weights p.
    terms = jnp.where(p > 0, p * (s - jnp.log(jnp.where(p > 0, p, 1))), p)
    lse = pattern.sums(terms)
    return [_by_queries(out), jnp.where(pattern.is_empty(p), -jnp.inf, lse)]


def attention_tangent(
    *operands: jax.Array,
    columns: int | None,
    scale: float,
    scores: Scores | None = None,
    bind_products: BindProducts = _IN_PLACE,
    **_params: Any,
) -> list[jax.Array]:
    """U and r."""
    varied = 0 if scores is None else len(scores.varied)
    operands, d_values = operands[: len(operands) - varied], operands[len(operands) - varied :]
    query, key, value, *mask, _, d_query, d_key, d_value = operands
    pattern = _Pattern(mask, columns, scores, bind_products)
    _, p = pattern.probabilities(query, key, scale)
    ds = scale * (pattern.scores(d_query, key) + pattern.scores(query, d_key))
    ds = pattern.derivative(scale * pattern.scores(query, key), ds, d_values)
    wide = p.dtype
    weighted = pattern.product(pattern.kept(p * ds), _shared_heads(value), wide)
    weighted += pattern.product(pattern.kept(p), _shared_heads(d_value), wide)
    return [_by_queries(weighted), pattern.sums(p * ds)]


def attention_cotangent(
    *operands: jax.Array,
    columns: int | None,
    scale: float,
    scores: Scores | None = None,
    bind_products: BindProducts = _IN_PLACE,
    **_params: Any,
) -> list[jax.Array]:
    """The cotangents of query, key and value, and of operands that vary."""
    query, key, value, *mask, _, ct_out, ct_sums = operands
    pattern = _Pattern(mask, columns, scores, bind_products)
    _, p = pattern.probabilities(query, key, scale)
    dp = p * (pattern.kept(pattern.scores(ct_out, value)) + pattern.of_rows(ct_sums))
    dp, of_operands = pattern.pull(scale * pattern.scores(query, key), dp)
    dp = scale * dp
    ct_query = pattern.product(dp, _shared_heads(key), query.dtype)
    ct_key = pattern.product(dp, _by_heads(query), p.dtype, transpose=True)
    ct_value = pattern.product(pattern.kept(p), _by_heads(ct_out), p.dtype, transpose=True)
    # Summed over the heads of a group, then keys first.
    of_keys = (jnp.moveaxis(jnp.sum(x, -3), -2, -3).astype(query.dtype) for x in (ct_key, ct_value))
    return [_by_queries(ct_query), *of_keys, *of_operands]


class _Pattern:
    """Products by matrices on a pattern, whose values are (..., groups, heads, entries)."""

    def __init__(
        self,
        mask: list[jax.Array],
        columns: int | None,
        scores: Scores | None,
        bind_products: BindProducts,
    ):
        behind = len(mask) - (0 if scores is None else scores.count)
        mask, extra = mask[:behind], mask[behind:]
        self._columns = columns
        self._bind = functools.partial(bind_products, columns=columns)
        self._arrays = mask[-len(operands_of_pattern(columns)) :]
        self._entries = ScoreEntries(scores, extra, *self._arrays[:2])

    def is_empty(self, p: jax.Array) -> jax.Array:
        """Of which rows no probability is greater than 0."""
        offsets = self._arrays[0]
        empty = offsets[..., 1:] == offsets[..., :-1]
        if not self._entries.has_function:
            return empty
        return empty | (self.sums((p > 0).astype(p.dtype)) == 0)

    def probabilities(
        self, query: jax.Array, key: jax.Array, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        """Scores and their softmax."""
        raw = self.scores(query, key)
        if not self._entries.has_function:
            (p,) = self._bind(sparse_softmax_p, raw, *self._arrays, scale=scale)
            return scale * raw, p
        scores = self._entries.function(scale * raw)
        # A function may take all of a row's scores to -infinity: of these there is no softmax.
        none = scores == -jnp.inf
        least = jnp.finfo(scores.dtype).min / 2
        (p,) = self._bind(
            sparse_softmax_p, jnp.where(none, least, scores), *self._arrays, scale=1.0
        )
        return scores, jnp.where(none, 0, p)

    def derivative(
        self, scores: jax.Array, d_scores: jax.Array, d_values: Sequence[jax.Array]
    ) -> jax.Array:
        return self._entries.derivative(scores, d_scores, d_values)

    def pull(self, scores: jax.Array, cotangent: jax.Array) -> Any:
        return self._entries.pull(scores, cotangent)

    def kept(self, values: jax.Array) -> jax.Array:
        """Values without those of probabilities that are dropped."""
        return dropout.applied(values, self._entries.multipliers(values.dtype))

    def scores(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        return self._sampled(_by_heads(rows), _shared_heads(keys.astype(rows.dtype)))

    def of_rows(self, numbers: jax.Array) -> jax.Array:
        """For every entry the number of its row."""
        ones = jnp.ones((*(1,) * (numbers.ndim - 1), self._size(), 1), numbers.dtype)
        return self._sampled(numbers[..., None], ones)

    def sums(self, values: jax.Array) -> jax.Array:
        """Of each row's entries."""
        ones = jnp.ones((*(1,) * (values.ndim - 1), self._size(), 1), values.dtype)
        return self.product(values, ones, values.dtype)[..., 0]

    def product(
        self, values: jax.Array, x: jax.Array, out_dtype: Any, *, transpose: bool = False
    ) -> jax.Array:
        """Of values, in their dtype, by x (..., groups, heads, keys, n)."""
        (out,) = self._bind(
            spmm_p,
            values,
            *self._arrays,
            x.astype(values.dtype),
            transpose=transpose,
            dense_on_left=False,
            out_dtype=values.dtype,
            precision=None,
        )
        return out.astype(out_dtype)

    def _size(self) -> int:
        if self._columns is not None:
            return self._columns
        return self._arrays[3].shape[-1] - 1

    def _sampled(self, x: jax.Array, y: jax.Array) -> jax.Array:
        wide = accumulator_dtype(x.dtype)
        return self._bind(sddmm_p, x, y, *self._arrays, scaled=False, out_dtype=wide)[0]


def _by_heads(x: jax.Array) -> jax.Array:
    """From (..., queries, groups, heads, numbers) to heads first."""
    return jnp.moveaxis(x, -4, -2)


def _by_queries(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, -2, -4)


def _shared_heads(x: jax.Array) -> jax.Array:
    """From (..., keys, groups, numbers) to (..., groups, 1, keys, numbers)."""
    return jnp.moveaxis(x, -3, -2)[..., None, :, :]
