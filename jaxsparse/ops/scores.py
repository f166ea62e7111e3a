"""What becomes of scores on their way to probabilities: a static parameter of attention.

A function of scores, whose operands and offsets of positions are operands of the primitives, and
dropout of probabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.ops import dropout
from jaxsparse.ops.score_functions import ScoreFunction

# What the axes of an operand behind those of heads are called in signatures; distances are t + u -
# 1, which these can't say.
_DIMENSIONS = {"t": "t", "s": "u", "d": "w"}


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores become probabilities.

    An operand of the function is *varied* where its tangent or its cotangent is wanted. Such a
    tangent or cotangent is indexed by the operand's *varied axes*: heads, and columns, distances or
    rows; those of the operand if rows and columns are among them. Either way it has a value for
    each group of heads, so that groups may lie on different devices. An array is *widened* when it
    is broadcast to them.

    Attributes:
        function: of scores; None: they stay as they are.
        axes: of each operand of the function, in the order of `score_functions.AXES`.
        has_offsets: whether positions begin elsewhere than at 0.
        dropout: whether probabilities are dropped.
        varied: the numbers of the varied operands.
    """

    function: ScoreFunction | None = None
    axes: tuple[str, ...] = ()
    has_offsets: bool = False
    dropout: bool = False
    varied: tuple[int, ...] = ()

    def operands(self) -> tuple[tuple[str, str], ...]:
        """Names and dimensions of operands of primitives."""
        heads = ("g r" if "n" in axes else "1 1" for axes in self.axes)
        return (
            *((f"score_{i}", _spec(self.axes[i], of)) for i, of in enumerate(heads)),
            *((("position_offsets", "2"),) if self.has_offsets else ()),
            *((("seeds", "g r"), ("dropout_rate", "")) if self.dropout else ()),
        )

    def variations(self, prefix: str) -> tuple[tuple[str, str], ...]:
        """The same of tangents or cotangents of the varied operands."""
        axes = {i: self.varied_axes(i) for i in self.varied}
        heads = {i: "g r" if "n" in of else "g 1" for i, of in axes.items()}
        return tuple((f"{prefix}_score_{i}", _spec(axes[i], heads[i])) for i in self.varied)

    def varied_axes(self, i: int) -> str:
        """The varied axes of an operand.

        Heads with rows, columns or distances are what kernels sum cotangents by; what is summed
        further, over rows or heads, is summed by whoever asked for the cotangent.
        """
        axes = self.axes[i]
        if {"t", "s"} <= {*axes}:
            return axes
        return "nd" if "d" in axes else "ns" if "s" in axes else "nt"

    def widened(
        self, i: int, x: jax.Array, heads: tuple[int, int], queries: int, batch_rank: int = 0
    ) -> jax.Array:
        """An operand, or its tangent, broadcast to its varied axes."""
        groups, per_group = heads
        axes, own = self.varied_axes(i), self.axes[i]
        if axes == "nt" and "t" not in own:
            x = x[..., None]
        rest = (queries,) if axes == "nt" else x.shape[batch_rank + 2 :]
        of_group = per_group if "n" in axes else 1
        return jnp.broadcast_to(x, (*x.shape[:batch_rank], groups, of_group, *rest))

    @property
    def count(self) -> int:
        """How many operands there are."""
        return len(self.axes) + self.has_offsets + 2 * self.dropout

    def split(self, arrays: Sequence[jax.Array]) -> ScoreOperands:
        """The operands by what they are."""
        left = list(arrays)
        values = [left.pop(0) for _ in self.axes]
        offsets = left.pop(0) if self.has_offsets else None
        seeds, rate = (left.pop(0), left.pop(0)) if self.dropout else (None, None)
        return ScoreOperands(values, offsets, seeds, rate)

    def __str__(self) -> str:
        said = [] if self.function is None else [str(self.function)]
        said += [f"operand by {' '.join(axes) or 'nothing'}" for axes in self.axes]
        said += ["offsets"] if self.has_offsets else []
        return ", ".join([*said, *(["dropout"] if self.dropout else [])])

    __repr__ = __str__


def _spec(axes: str, heads: str) -> str:
    return " ".join([heads, *(_DIMENSIONS[a] for a in axes if a in _DIMENSIONS)])


class ScoreOperands(NamedTuple):
    """Arrays of heads (groups or 1, heads of each or 1, ...), after batch dimensions if any."""

    values: list[jax.Array]
    offsets: jax.Array | None
    seeds: jax.Array | None
    rate: jax.Array | None

    def positions(self, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Int32 positions of places in queries and keys."""
        if self.offsets is None:
            return rows, columns
        missing = rows.ndim - (self.offsets.ndim - 1)
        begin = jnp.expand_dims(self.offsets, tuple(range(-1 - missing, -1)))
        return rows + begin[..., 0], columns + begin[..., 1]

    def multipliers(self, rows: jax.Array, columns: jax.Array, dtype: Any) -> jax.Array | None:
        """Of probabilities at positions, whose leading dimensions are those of heads."""
        if self.seeds is None or self.rate is None:
            return None
        missing = max(rows.ndim, columns.ndim) - self.seeds.ndim
        seeds = self.seeds.reshape(*self.seeds.shape, *(1,) * missing)
        rate = self.rate.reshape(*self.rate.shape, *(1,) * (seeds.ndim - self.rate.ndim))
        return dropout.multipliers(seeds, rows, columns, rate, dtype)


def evaluate(
    function: ScoreFunction,
    scores: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    *values: jax.Array,
) -> jax.Array:
    """The function at each score; the others have the rank of scores, and sizes that broadcast."""
    arrays = (scores, rows, columns, *values)
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    mapped: Any = function
    for axis in reversed(range(len(shape))):
        varies = [0 if x.shape[axis] != 1 else None for x in arrays]
        if any(v is not None for v in varies):
            mapped = jax.vmap(mapped, varies)
    squeezed = (jnp.squeeze(x, tuple(d for d, n in enumerate(x.shape) if n == 1)) for x in arrays)
    result: jax.Array = mapped(*squeezed)
    return result.reshape(shape)


def of_function(x: jax.Array, dtype: Any) -> jax.Array:
    """Values as a function gets them: floating ones in the dtype of scores."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
