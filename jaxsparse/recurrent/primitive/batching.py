"""Batching: more sequences make a larger batch; more weights, one scan each."""

from __future__ import annotations

from typing import Any

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
    size = next(x.shape[axis] for x, axis in zip(operands, dims, strict=True) if axis is not None)
    values = split(operands, params)

    def folded(x: Any, axis: int | None, place: int, repeats: bool) -> Any:
        """The mapped axis behind the batch, which is `place` from the end, and one with it.

        Behind it, so that a sharded batch stays sharded.
        """
        if axis is None and repeats:
            return x
        x = batching.bdim_at_front(x, axis, size)
        rows = x.ndim - place - 1
        x = jnp.moveaxis(x, 0, rows + 1)
        if repeats:
            x = jnp.broadcast_to(x, (*x.shape[:rows], count, *x.shape[rows + 1 :]))
        return x.reshape(*x.shape[:rows], count * size, *x.shape[rows + 2 :])

    state_axis = axes.state
    rows = values.state.shape
    count = (rows if state_axis is None else rows[:state_axis] + rows[state_axis + 1 :])[-3]
    spans = tuple(
        own if axis is None or "b" in own else "".join(d for d in FULL if d == "b" or d in own)
        for own, axis in zip(params["spans"], axes.inputs, strict=True)
    )
    results = bind(
        recurrent_scan_p,
        *values.weights,
        folded(values.state, axes.state, 3, False),
        *(folded(x, a, 2, False) for x, a in zip(values.carries, axes.carries, strict=True)),
        *(
            folded(x, a, 3, "b" not in own)
            for x, a, own in zip(values.inputs, axes.inputs, params["spans"], strict=True)
        ),
        **{**params, "spans": spans},
    )
    unfolded, at = [], []
    for i, x in enumerate(results):
        rows = x.ndim - (2 if 1 <= i <= step.carries else 3)
        unfolded.append(x.reshape(*x.shape[:rows], count, size, *x.shape[rows + 1 :]))
        at.append(rows + 1)
    return unfolded, at
