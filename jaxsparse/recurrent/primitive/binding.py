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
    """Under explicit axes: a batch that is cut in some operands is cut in all.

    A carry of zeros is replicated where a user's program makes it, beside inputs that are sharded.
    """
    of_batch = [(operands.state, -3), *((x, -2) for x in operands.carries)]
    of_batch += [(x, -3) for x, own in zip(operands.inputs, spans, strict=True) if "b" in own]
    shardings = [(jax.typeof(x).sharding, axis) for x, axis in of_batch]
    cut = [(s.mesh, s.spec[axis]) for s, axis in shardings if s.spec[axis] is not None]
    if not cut or len(cut) == len(of_batch):
        return operands
    mesh, axes = cut[0]

    def like_the_others(x: Any, axis: int) -> Any:
        spec = list(jax.typeof(x).sharding.spec)
        if spec[axis] is not None:
            return x
        spec[axis] = axes
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return Operands(
        operands.weights,
        like_the_others(operands.state, -3),
        tuple(like_the_others(x, -2) for x in operands.carries),
        tuple(
            like_the_others(x, -3) if "b" in own else x
            for x, own in zip(operands.inputs, spans, strict=True)
        ),
    )
