"""Functions of scores and dropout where attention is composed: by the entries of a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.batching import over_batch
from jaxsparse.ops.scores import Scores, evaluate, of_function


class ScoreEntries:
    """What happens to scores (..., groups, heads of each, entries)."""

    def __init__(
        self,
        scores: Scores | None,
        operands: Sequence[jax.Array],
        row_offsets: jax.Array,
        column_indices: jax.Array,
    ):
        self._scores = scores or Scores()
        self._operands = self._scores.split(operands)
        self._offsets, self._columns = row_offsets, column_indices

    @property
    def has_function(self) -> bool:
        return self._scores.function is not None

    def function(self, scores: jax.Array) -> jax.Array:
        """The function of them."""
        return self._of(scores, self._scores.axes, self._operands.values)

    def derivative(
        self, scores: jax.Array, d_scores: jax.Array, d_values: Sequence[jax.Array]
    ) -> jax.Array:
        """The function's derivative along tangents of scores and of the varied operands."""
        if not self.has_function:
            return d_scores
        at = self._widened(scores)
        along = [d.astype(x.dtype) for x, d in zip(at, d_values, strict=True)]
        at = [jnp.broadcast_to(x, d.shape) for x, d in zip(at, along, strict=True)]
        derivative: jax.Array
        _, derivative = jax.jvp(self._of_varied, (scores, *at), (d_scores, *along))
        return derivative

    def pull(self, scores: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The cotangents of scores and of the varied operands, from that of the function."""
        if not self.has_function:
            return cotangent, []
        batch = cotangent.shape[:-3]
        wide = (
            jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :])) for x in self._widened(scores)
        )
        _, pull = jax.vjp(self._of_varied, scores, *wide)
        of_scores, *of_operands = pull(cotangent)
        return of_scores, of_operands

    def multipliers(self, dtype: Any) -> jax.Array | None:
        """Of probabilities; None: all are 1."""
        if not self._scores.dropout:
            return None
        return self._operands.multipliers(*self._positions(), dtype)

    def _widened(self, scores: jax.Array) -> list[jax.Array]:
        """The varied operands, widened, in the dtype of scores."""
        rank, queries = scores.ndim - 3, self._offsets.shape[-1] - 1
        heads = (scores.shape[-3], scores.shape[-2])
        return [
            self._scores.widened(i, self._operands.values[i], heads, queries, rank).astype(
                scores.dtype
            )
            for i in self._scores.varied
        ]

    def _of_varied(self, scores: jax.Array, *varied: jax.Array) -> jax.Array:
        axes, values = list(self._scores.axes), list(self._operands.values)
        for i, x in zip(self._scores.varied, varied, strict=True):
            axes[i], values[i] = self._scores.varied_axes(i), x
        return self._of(scores, axes, values)

    def _of(self, scores: jax.Array, axes: Sequence[str], values: Sequence[jax.Array]) -> jax.Array:
        assert self._scores.function is not None
        picked = (self._picked(of, x) for of, x in zip(axes, values, strict=True))
        wide = [of_function(x, scores.dtype) for x in picked]
        return evaluate(self._scores.function, scores, *self._positions(), *wide)

    def _places(self) -> tuple[jax.Array, jax.Array]:
        """The row and the column of each entry; padding behind the entries is in the last row."""
        entries = jnp.arange(self._columns.shape[-1], dtype=jnp.int32)
        last = max(self._offsets.shape[-1] - 2, 0)

        def rows(offsets: jax.Array) -> jax.Array:
            row = jnp.searchsorted(offsets, entries, side="right") - 1
            return jnp.clip(row, 0, last).astype(jnp.int32)

        of_entries = over_batch(rows, self._offsets.ndim - 1, self._offsets)
        return of_entries, self._columns.astype(jnp.int32)

    def _positions(self) -> tuple[jax.Array, jax.Array]:
        return self._operands.positions(*self._places())

    def _picked(self, axes: str, x: jax.Array) -> jax.Array:
        """Of each entry the value of an operand that is indexed so."""
        rows, columns = self._places()
        rank = self._columns.ndim - 1
        if "d" in axes:
            queries = self._offsets.shape[-1] - 1
            at = [rows - columns + x.shape[-1] - queries]
        else:
            at = [place for axis, place in (("t", rows), ("s", columns)) if axis in axes]
        if not at:
            return x[..., None]

        def pick(x: jax.Array, *at: jax.Array) -> jax.Array:
            return x.at[at].get(mode="clip")

        return over_batch(pick, rank, x, *at)
