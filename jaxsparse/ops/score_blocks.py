"""Functions of scores and dropout in the plain form: by blocks of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.scores import Scores, evaluate, of_function


class ScoreBlocks:
    """What happens to scores (groups, heads of each, queries, keys of a block).

    Operands that are indexed by keys are cut into blocks, others are not: `sliced` are the former,
    keys first, and `whole` the latter.
    """

    def __init__(
        self,
        scores: Scores | None,
        operands: Sequence[jax.Array],
        queries: int,
        keys: int,
        block: int,
    ):
        self._scores = scores or Scores()
        self._operands = self._scores.split(operands)
        self._queries, self._keys, self._block = queries, keys, block
        self.all = range(len(self._scores.axes))
        self.varied = self._scores.varied
        self._is_sliced = ["s" in axes for axes in self._scores.axes]
        self.whole = self.parts(self.all, self._operands.values, sliced=False)
        self.sliced = self.parts(self.all, self._operands.values, sliced=True)

    def parts(
        self, which: Sequence[int], values: Sequence[jax.Array], *, sliced: bool
    ) -> list[jax.Array]:
        """Of values of these operands, those that are cut into blocks, or the others."""
        chosen = [x for i, x in zip(which, values, strict=True) if self._is_sliced[i] == sliced]
        return [jnp.moveaxis(x, -1, 0) for x in chosen] if sliced else chosen

    def merged(
        self, which: Sequence[int], whole: Sequence[jax.Array], sliced: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The inverse of `parts`, of both."""
        left = {False: list(whole), True: [jnp.moveaxis(x, 0, -1) for x in sliced]}
        return [left[self._is_sliced[i]].pop(0) for i in which]

    def values(
        self,
        number: jax.Array,
        which: Sequence[int],
        whole: Sequence[jax.Array],
        sliced: Sequence[jax.Array],
        dtype: Any,
        *,
        varied: bool = False,
    ) -> list[jax.Array]:
        """Of these operands what a block of scores meets, in shapes that broadcast to it.

        ``varied``: they are widened.
        """

        def spread(i: int, x: jax.Array) -> jax.Array:
            axes = self._scores.varied_axes(i) if varied else self._scores.axes[i]
            if "d" in axes:
                return self._by_distance(x, number)
            x = x if "t" in axes else jnp.expand_dims(x, -2 if "s" in axes else -1)
            return x if "s" in axes else x[..., None]

        arrays = self.merged(which, whole, sliced)
        return [of_function(spread(i, x), dtype) for i, x in zip(which, arrays, strict=True)]

    def function(self, number: jax.Array, scores: jax.Array, *values: jax.Array) -> jax.Array:
        if self._scores.function is None:
            return scores
        rows, columns = self._positions(number)
        return evaluate(self._scores.function, scores, rows, columns, *values)

    def derivative(
        self,
        number: jax.Array,
        scores: jax.Array,
        d_scores: jax.Array,
        values: Sequence[jax.Array],
        d_values: Sequence[jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """The function, and its derivative along tangents of scores and of varied operands."""

        def of(scores: jax.Array, *varied: jax.Array) -> jax.Array:
            return self.function(number, scores, *self._with(values, varied))

        named = zip((values[i] for i in self.varied), d_values, strict=True)
        pairs = [jnp.broadcast_arrays(*pair) for pair in named]
        at, along = (tuple(pair[i] for pair in pairs) for i in range(2))
        return jax.jvp(of, (scores, *at), (d_scores, *along))

    def pull(
        self,
        number: jax.Array,
        scores: jax.Array,
        sliced: Sequence[jax.Array],
        values: Sequence[jax.Array],
    ) -> tuple[jax.Array, Callable[[jax.Array, jax.Array], Any]]:
        """The function, and what takes its cotangent to that of scores and of `varied` operands.

        These are `whole` ones and `sliced` ones, with all groups. What is not seen adds nothing,
        whatever the function's derivative is there.
        """
        dtype = scores.dtype
        at = self.merged(self.all, self.whole, sliced)
        wide = [self._widened(i, at[i], scores.shape, dtype) for i in self.varied]
        whole, cut = (self.parts(self.varied, wide, sliced=s) for s in (False, True))

        def spread(whole: Any, cut: Any) -> list[jax.Array]:
            spread_out = self.values(number, self.varied, whole, cut, dtype, varied=True)
            return [jnp.broadcast_to(x, scores.shape) for x in spread_out]

        def of(scores: jax.Array, *varied: jax.Array) -> jax.Array:
            return self.function(number, scores, *self._with(values, varied))

        everywhere, back = jax.vjp(spread, whole, cut)
        result, pull = jax.vjp(of, scores, *everywhere)

        def pulled(cotangent: jax.Array, seen: jax.Array) -> Any:
            of_scores, *others = (jnp.where(seen, x, 0) for x in pull(cotangent))
            return of_scores, *back(others)

        return result, pulled

    def zeros(self, heads: tuple[int, ...], dtype: Any) -> list[jax.Array]:
        """Sums of cotangents of the `varied` operands that are not cut, before the first block."""
        at = self._operands.values
        wide = [self._widened(i, at[i], heads, dtype) for i in self.varied]
        return [jnp.zeros_like(x) for x in self.parts(self.varied, wide, sliced=False)]

    def _widened(self, i: int, x: jax.Array, heads: tuple[int, ...], dtype: Any) -> jax.Array:
        return self._scores.widened(i, x, (heads[0], heads[1]), self._queries).astype(dtype)

    def _with(self, values: Sequence[jax.Array], varied: Sequence[jax.Array]) -> list[jax.Array]:
        of = dict(zip(self.varied, varied, strict=True))
        return [of.get(i, x) for i, x in enumerate(values)]

    def multipliers(self, number: jax.Array, dtype: Any) -> jax.Array | None:
        """Of probabilities; None: all are 1."""
        return self._operands.multipliers(*self._positions(number), dtype)

    def _positions(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = jnp.arange(self._queries, dtype=jnp.int32)[None, None, :, None]
        first = (number * self._block).astype(jnp.int32)
        columns = first + jnp.arange(self._block, dtype=jnp.int32)
        return self._operands.positions(rows, columns[None, None, None])

    def _by_distance(self, x: jax.Array, number: jax.Array) -> jax.Array:
        """From (groups, heads, distances) to the block's rows and columns.

        Without a gather, whose derivative would add up in any order: diagonals of squares are rows
        of arrays that are one number narrower.
        """
        block, down = self._block, -(-self._queries // self._block)
        behind = down * block - self._queries + 1
        x = jnp.pad(x, ((0, 0), (0, 0), (block, behind)))
        # Of the first row and the last column on; columns are turned round below.
        begin = self._keys - number * block
        part = jax.lax.dynamic_slice_in_dim(x, begin, (down + 1) * block, axis=-1)
        squares = part.reshape(*x.shape[:2], down + 1, block)
        lines = jnp.concatenate([squares[..., :-1, :], squares[..., 1:, :]], -1)[..., :-1]
        repeated = jnp.broadcast_to(
            lines[..., None, :], (*lines.shape[:-1], block, lines.shape[-1])
        )
        flat = repeated.reshape(*lines.shape[:-1], block * lines.shape[-1])
        flat = jnp.pad(flat, ((0, 0),) * (flat.ndim - 1) + ((0, block),))
        skewed = flat.reshape(*lines.shape[:-1], block, 2 * block)[..., :block]
        rows = jnp.flip(skewed, -1).reshape(*x.shape[:2], down * block, block)
        return rows[..., : self._queries, :]
