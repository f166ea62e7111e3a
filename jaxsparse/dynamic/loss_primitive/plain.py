"""The losses of rows without a kernel: two scans, and the heads between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxsparse.batching import over_batch
from jaxsparse.dynamic.heads import cotangents_of_logits, count_labels, logits_of, losses_of
from jaxsparse.dynamic.loss_primitive.operands import Results, joined_results, split
from jaxsparse.dynamic.loss_primitive.steps import steps_of
from jaxsparse.dynamic.primitive import Operands, scan_bind
from jaxsparse.primitive import bind, bind_local
from jaxsparse.recurrent.step import Keeping


def plain_losses(*operands: Any, **params: Any) -> list[Any]:
    """The results on one device, for each entry of batch dimensions."""
    compute = functools.partial(_losses, binder=bind_local, **params)
    return over_batch(compute, operands[1].ndim - 1, *operands)


def losses_by_scans(*operands: Any, **params: Any) -> list[Any]:
    """The same, in a program that may be differentiated and cut over devices."""
    compute = functools.partial(_losses, binder=bind, **params)
    return over_batch(compute, operands[1].ndim - 1, *operands)


def states_by_scan(x: Any, params: dict[str, Any]) -> Any:
    """The states of the computed rows, (rows, 1, h)."""
    made = scan_bind(
        Operands(x.weights, x.words, x.state, x.carries, x.inputs),
        **_of_scan(params),
        step=Keeping(params["step"], ()),
        emits=False,
        spans=params["spans"],
        variant=params["variant"],
    )
    return made.states


def labelled_rows(x: Any, states: Any) -> Any:
    """The states of all rows, leaves first: (all rows, h); 0 of rows without a label.

    What is in padding, as NaN, must not reach gradients, where it is multiplied by 0.
    """
    rows = jnp.concatenate([x.state[:, 0], states[:, 0]])
    return jnp.where((x.labels == -1)[:, None], 0, rows)


def _of_scan(params: dict[str, Any]) -> dict[str, Any]:
    """The params of a scan's primitive that both passes share."""
    shared = {n: params[n] for n in ("form", "dtype", "precision", "implementation")}
    return {**shared, "recompute": False}


def _losses(*operands: Any, binder: Callable[..., Any], **params: Any) -> list[Any]:
    x, spans = split(operands, params), params["spans"]
    steps = steps_of(params["step"], params["active"], params["wide"])
    options = {**_of_scan(params), "binder": binder, "variant": None}
    made = scan_bind(
        Operands(x.weights, x.words, x.state, x.carries, x.inputs),
        **options,
        step=steps.saving,
        emits=False,
        spans=spans,
    )
    rows = labelled_rows(x, made.states)
    logits = logits_of(rows, x.head_weights, x.head_bias, params["precision"])
    total = jnp.sum(losses_of(logits, x.labels))
    of_logits = cotangents_of_logits(logits, x.labels)
    of_states = logits_of(
        of_logits, x.head_weights.T, jnp.zeros((), of_logits.dtype), params["precision"]
    )
    leaves = params["form"].leaves
    inputs = steps.inputs(made.outputs, x.inputs, of_states[leaves:, None])
    back = scan_bind(
        Operands(x.weights, x.words, None, (), tuple(inputs)),
        **options,
        step=steps.adjoint,
        emits=True,
        spans=steps.spans(spans),
    )
    return joined_results(
        Results(
            jnp.sum(of_logits, 0),
            jnp.stack([total, count_labels(x.labels, logits.dtype)]),
            of_logits,
            of_states[:leaves, None],
            made.states,
            back.states,
            back.reached,
            back.carries,
            back.outputs,
        )
    )
