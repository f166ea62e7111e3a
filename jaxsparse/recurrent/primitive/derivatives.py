"""The tangent of a scan and its transpose, scans both."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind, undefined
from jaxsparse.recurrent.primitive.binding import scan_bind
from jaxsparse.recurrent.primitive.declaration import recurrent_scan_p
from jaxsparse.recurrent.primitive.operands import FULL, Operands, runs_of_order, split
from jaxsparse.recurrent.products import product, products_of_steps
from jaxsparse.recurrent.step import Adjoint, Saved, Saving, Tangent


def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """The rule of ``jax.jvp``: a scan that saves what its tangent reads, and its tangent."""
    step = params["step"]
    x, dx = split(primals, params), split(tangents, params)
    active = tuple(i for i, t in enumerate(dx.inputs) if not _is_zero(t))
    shifted = not _is_zero(dx.weights[0])
    if not shifted and not active and all(map(_is_zero, (dx.state, *dx.carries))):
        results = bind(recurrent_scan_p, *primals, **params)
        return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]

    tangent = Tangent(step, active, shifted)
    recompute = params["recompute"] and tangent.saved.products
    keep = Saved(tangent.saved.products and not recompute, tangent.saved.carries)
    states, carries, outputs = scan_bind(
        x,
        **{**params, "step": Saving(step, keep)},
    )
    outputs, extra = outputs[: len(step.outputs)], outputs[len(step.outputs) :]
    dtype = x.state.dtype
    options = {n: params[n] for n in ("sparse", "transposed", "precision", "implementation")}
    spans = params["spans"]
    own_spans = (
        *(FULL,) * tangent.saved.sizes,
        *(spans[i] for i in tangent.read),
        *(FULL,) * shifted,
        *(spans[i] for i in active),
    )

    def linear(weights: Any, before: Any, saved: Any, read: Any, dweights: Any, rest: Any) -> Any:
        if recompute:
            saved = [products_of_steps(weights, before, step.products, dtype, options), *saved]
        shift = []
        if dweights is not None:
            moved = (dweights, *weights[1:])
            shift = [products_of_steps(moved, before, step.products, dtype, options)]
        dstate, dcarries, dinputs = rest
        return scan_bind(
            Operands(weights, dstate, dcarries, (*saved, *read, *shift, *dinputs)),
            **{**params, "step": tangent, "spans": own_spans},
        )

    before = _before(states, x.state, params["reversed"]) if shifted or recompute else None
    dstates, dcarries, doutputs = (jax.checkpoint(linear) if recompute else linear)(
        x.weights,
        before,
        extra,
        [x.inputs[i] for i in tangent.read],
        dx.weights[0] if shifted else None,
        (
            _instantiated(dx.state),
            tuple(map(_instantiated, dx.carries)),
            [dx.inputs[i] for i in active],
        ),
    )
    return [states, *carries, *outputs], [dstates, *dcarries, *doutputs]


def transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
    """The rule of transposition: a scan of the adjoint, the other way in time."""
    step = params["step"]
    weights, state, carries, inputs = split(operands, params)
    if any(map(undefined, weights)):
        raise ValueError("recurrent.scan: it is not linear in its weights")
    ct_states, *rest = cotangents
    ct_carries, ct_outputs = rest[: step.carries], rest[step.carries :]
    if all(map(_is_zero, cotangents)):
        return [None] * len(operands)
    linear = tuple(i for i, x in enumerate(inputs) if undefined(x))
    used = tuple(i for i, ct in enumerate(ct_outputs) if not _is_zero(ct))
    adjoint = Adjoint(step, linear, not _is_zero(ct_states), used)

    def aval(x: Any) -> Any:
        return x.aval if undefined(x) else jax.typeof(x)

    shape = aval(state).shape
    zeros = jnp.zeros((*shape[:-2], step.products, shape[-1]), aval(state).dtype)
    backwards = tuple(map(operator.not_, params["reversed"]))
    states, carries_out, outputs = scan_bind(
        Operands(
            weights,
            zeros,
            tuple(map(_instantiated, ct_carries)),
            (
                *(inputs[i] for i in adjoint.fixed),
                *([ct_states] if adjoint.states_used else []),
                *(ct_outputs[i] for i in used),
            ),
        ),
        **{
            **params,
            "step": adjoint,
            "transposed": not params["transposed"],
            "reversed": backwards,
            "spans": (
                *(params["spans"][i] for i in adjoint.fixed),
                *(FULL,) * (adjoint.states_used + len(used)),
            ),
        },
    )

    def summed(ct: Any, x: Any) -> Any:
        """The cotangent of an operand of its own shape and dtype: summed where it repeats."""
        if not undefined(x):
            return None
        axes = tuple(
            i for i, (a, b) in enumerate(zip(ct.shape, x.aval.shape, strict=True)) if a != b
        )
        ct = jnp.sum(ct.astype(accumulator_dtype(ct.dtype)), axes, keepdims=True) if axes else ct
        return ct.astype(x.aval.dtype)

    ct_state = None
    if undefined(state):
        # The adjoint's last states, which no further step has taken, by the transposed weights.
        options = {n: params[n] for n in ("sparse", "precision", "implementation")}
        ends = [
            states[..., own, 0 if back else -1, :, :, :] for own, back in runs_of_order(backwards)
        ]
        last = jnp.concatenate(ends, -4)
        z = product(
            weights,
            last.reshape(*last.shape[:-2], -1),
            transposed=not params["transposed"],
            out_dtype=accumulator_dtype(last.dtype),
            **options,
        )
        ct_state = summed(z.reshape(*z.shape[:-1], step.states, shape[-1]), state)
    given = dict(zip(linear, outputs, strict=True))
    return [
        *[None] * len(weights),
        ct_state,
        *(summed(ct, x) for ct, x in zip(carries_out, carries, strict=True)),
        *(summed(given[i], x) if i in given else None for i, x in enumerate(inputs)),
    ]


def _before(states: Any, first: Any, reversed: tuple[bool, ...]) -> Any:
    """Every step's state before it: (..., d, t, b, S, h) of the states after it and the first."""

    def shifted(states: Any, first: Any, backwards: bool) -> Any:
        first = jnp.broadcast_to(first, (*states.shape[:-4], *first.shape[-3:]))
        first = jnp.expand_dims(first, -4)
        if backwards:
            return jnp.concatenate([states[..., 1:, :, :, :], first], -4)
        return jnp.concatenate([first, states[..., :-1, :, :, :]], -4)

    parts = [
        shifted(states[..., own, :, :, :, :], first[..., own, :, :, :], backwards)
        for own, backwards in runs_of_order(reversed)
    ]
    return jnp.concatenate(parts, -5) if len(parts) > 1 else parts[0]


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _instantiated(tangent: Any) -> Any:
    return ad.instantiate_zeros(tangent)
