"""Binds a scan: without outputs that repeat, its batch cut alike in all operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.primitive import bind
from jaxsparse.recurrent.primitive.declaration import recurrent_scan_p
from jaxsparse.recurrent.primitive.operands import Operands
from jaxsparse.recurrent.step import without_repeats


def scan_bind(operands: Operands, **params: Any) -> tuple[Any, list[Any], list[Any]]:
    """Binds the primitive; returns the states, the last carries and the outputs."""
    weights, state, carries, inputs = _with_batch_cut_alike(operands, params["spans"])
    step, places = without_repeats(params["step"])
    results = bind(recurrent_scan_p, *weights, state, *carries, *inputs, **{**params, "step": step})
    states, outputs = results[0], results[1 + step.carries :]
    return (
        states,
        list(results[1 : 1 + step.carries]),
        [states if place is None else outputs[place] for place in places],
    )


def _with_batch_cut_alike(operands: Operands, spans: Sequence[str]) -> Operands:
    carries, inputs = len(operands.carries), operands.inputs
    axes = (-3, *(-2,) * carries, *(-3 if "b" in own else None for own in spans))
    state, *rest = cut_alike((operands.state, *operands.carries, *inputs), axes)
    return Operands(operands.weights, state, tuple(rest[:carries]), tuple(rest[carries:]))


def cut_alike(arrays: Sequence[Any], axes: Sequence[int | None]) -> Sequence[Any]:
    """Under explicit axes: a batch that is cut in some arrays is cut in all that have one.

    A carry of zeros is replicated where a user's program makes it, beside inputs that are sharded.

    Args:
        arrays: operands.
        axes: which axis of each is the batch; None where it has none.
    """
    pairs = list(zip(arrays, axes, strict=True))
    shardings = [(jax.typeof(x).sharding, axis) for x, axis in pairs if axis is not None]
    cut = [(s.mesh, s.spec[axis]) for s, axis in shardings if s.spec[axis] is not None]
    if not cut or len(cut) == len(shardings):
        return arrays
    mesh, names = cut[0]

    def like_the_others(x: Any, axis: int | None) -> Any:
        spec = list(jax.typeof(x).sharding.spec)
        if axis is None or spec[axis] is not None:
            return x
        spec[axis] = names
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return [like_the_others(x, axis) for x, axis in pairs]
