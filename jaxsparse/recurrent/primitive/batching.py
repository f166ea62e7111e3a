"""Batching: more sequences make a larger batch; more weights, one scan each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.interpreters import batching

from jaxsparse.primitive import batch, bind
from jaxsparse.recurrent.primitive.declaration import recurrent_scan_p
from jaxsparse.recurrent.primitive.operands import FULL, split


def batching_rule(operands: Any, dims: Any, **params: Any) -> Any:
    """The rule of ``vmap``: the mapped axis joins the batch, unless weights are mapped."""
    step = params["step"]
    axes = split(dims, params)
    if any(axis is not None for axis in axes.weights):
        return batch(recurrent_scan_p, operands, dims, **params)
    values = split(operands, params)
    rows = Rows.of(operands, dims, values.state, axes.state)
    results = bind(
        recurrent_scan_p,
        *values.weights,
        rows.folded(values.state, axes.state, 3),
        *(rows.folded(x, a, 2) for x, a in zip(values.carries, axes.carries, strict=True)),
        *(
            rows.folded(x, a, 3, repeats="b" not in own)
            for x, a, own in zip(values.inputs, axes.inputs, params["spans"], strict=True)
        ),
        **{**params, "spans": mapped_spans(params["spans"], axes.inputs)},
    )
    pairs = [rows.unfolded(x, 2 if 1 <= i <= step.carries else 3) for i, x in enumerate(results)]
    return [list(part) for part in zip(*pairs, strict=True)]


def mapped_spans(spans: Sequence[str], axes: Sequence[int | None]) -> tuple[str, ...]:
    """The spans of inputs, of which those that are mapped no longer repeat along the batch."""
    return tuple(
        own if axis is None or "b" in own else "".join(d for d in FULL if d == "b" or d in own)
        for own, axis in zip(spans, axes, strict=True)
    )


class Rows(NamedTuple):
    """A batch that a mapped axis joins, behind it: so a sharded batch stays sharded."""

    batch: int  # its size
    mapped: int  # that of the axis

    @classmethod
    def of(cls, operands: Any, dims: Any, one: Any, mapped: int | None) -> Rows:
        """Of operands, ``one`` of which is (..., b, parts, h) but for its mapped axis."""
        pairs = zip(operands, dims, strict=True)
        size = next(x.shape[axis] for x, axis in pairs if axis is not None)
        shape = one.shape
        own = shape if mapped is None else shape[:mapped] + shape[mapped + 1 :]
        return cls(own[-3], size)

    def folded(self, x: Any, axis: int | None, place: int, repeats: bool = False) -> Any:
        """An operand whose batch, `place` from the end, has the mapped axis in it.

        One that is not mapped and repeats along the batch still does.
        """
        if axis is None and repeats:
            return x
        x = batching.bdim_at_front(x, axis, self.mapped)
        rows = x.ndim - place - 1
        x = jnp.moveaxis(x, 0, rows + 1)
        if repeats:
            x = jnp.broadcast_to(x, (*x.shape[:rows], self.batch, *x.shape[rows + 1 :]))
        return x.reshape(*x.shape[:rows], self.batch * self.mapped, *x.shape[rows + 2 :])

    def unfolded(self, x: Any, place: int) -> tuple[Any, int]:
        """A result with the mapped axis apart, and which axis that is."""
        rows = x.ndim - place
        return x.reshape(*x.shape[:rows], self.batch, self.mapped, *x.shape[rows + 1 :]), rows + 1
