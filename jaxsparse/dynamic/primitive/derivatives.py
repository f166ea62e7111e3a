"""The tangent of a scan over graphs, and its transpose: scans both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxsparse.dynamic.primitive.binding import scan_bind
from jaxsparse.dynamic.primitive.declaration import dynamic_scan_p
from jaxsparse.dynamic.primitive.operands import (
    FULL,
    Operands,
    joined_results,
    split,
    split_results,
)
from jaxsparse.dynamic.primitive.row_products import (
    bias_of_products,
    products_of_rows,
    sum_of_rows,
)
from jaxsparse.primitive import bind, undefined
from jaxsparse.recurrent.primitive.derivatives import (
    instantiated,
    is_zero,
    summed_to_operand,
    wide_inputs,
)
from jaxsparse.recurrent.products import parts_of
from jaxsparse.recurrent.step_derivatives import Adjoint, Saving, Tangent


def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """The rule of ``jax.jvp``: a scan that saves what its tangent reads, and its tangent."""
    step = params["step"]
    x, dx = split(primals, params), split(tangents, params)
    active = tuple(i for i, t in enumerate(dx.inputs) if not is_zero(t))
    shifted = not is_zero(dx.weights)
    bias = bias_of_products(x.inputs, active, params) if shifted else None
    active = tuple(i for i in active if i != bias)
    first = () if x.state is None else (dx.state, *dx.carries)
    if not shifted and not active and all(map(is_zero, first)):
        results = bind(dynamic_scan_p, *primals, **params)
        return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]

    tangent = Tangent(step, active, shifted)
    recompute = params["recompute"] and bool(tangent.saved.products)
    keep = tangent.saved._replace(products=()) if recompute else tangent.saved
    made = scan_bind(x, **{**params, "step": Saving(step, keep)})
    outputs, saved = made.outputs[: len(step.outputs)], made.outputs[len(step.outputs) :]
    spans = params["spans"]
    own_spans = (
        *(FULL,) * tangent.saved.sizes,
        *(spans[i] for i in tangent.read),
        *(FULL,) * shifted,
        *(spans[i] for i in active),
    )

    def of_all(weights: Any, states: Any, bias: Any = None) -> Any:
        return products_of_rows(weights, x.words, states, x.state, params, bias)

    def linear(
        weights: Any, states: Any, saved: Any, read: Any, dweights: Any, dbias: Any, rest: Any
    ) -> Any:
        if recompute:
            again, _ = of_all(weights, states)
            saved = [parts_of(again, tangent.saved.products), *saved]
        shift, reached = [], None
        if dweights is not None:
            # The children's states are gathered in the gradient, not kept. Nothing else gathers
            # them, so there is no other result that XLA could keep instead.
            gathering = jax.checkpoint(of_all, prevent_cse=False)
            of_rows, reached = gathering(dweights, states, dbias)
            shift = [of_rows]
        first, dinputs = rest
        state, carries = (None, ()) if first is None else (first[0], tuple(first[1:]))
        moved = Operands(weights, x.words, state, carries, (*saved, *read, *shift, *dinputs))
        results = scan_bind(moved, **{**params, "step": tangent, "spans": own_spans})
        if reached is not None:
            results = results._replace(reached=results.reached + reached)
        return joined_results(results)

    dresults = (jax.checkpoint(linear) if recompute else linear)(
        x.weights,
        made.states,
        saved,
        [x.inputs[i] for i in tangent.read],
        dx.weights if shifted else None,
        None if bias is None else dx.inputs[bias],
        (
            [instantiated(t) for t in first] or None,
            [dx.inputs[i] for i in active],
        ),
    )
    return joined_results(made._replace(outputs=outputs)), dresults


def transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
    """The rule of transposition: a scan of the other form, of the transposed step."""
    step, emits = params["step"], params["emits"]
    x = split(operands, params)
    if undefined(x.weights):
        raise ValueError("dynamic.scan: it is not linear in its weights")
    if all(map(is_zero, cotangents)):
        return [None] * len(operands)
    ct = split_results(cotangents, params)
    linear = tuple(i for i, a in enumerate(x.inputs) if undefined(a))
    used = tuple(i for i, c in enumerate(ct.outputs) if not is_zero(c))
    # Where the scan gathers, the carries of all rows are results. Where it emits, those that
    # reached given rows are: their cotangents are the first carries of the transpose.
    carries = () if emits else tuple(i for i, c in enumerate(ct.carries) if not is_zero(c))
    wide = wide_inputs(x.inputs, linear, params["spans"], jnp.dtype(params["dtype"]))
    adjoint = Adjoint(step, linear, not is_zero(ct.states), used, wide, carries)
    state, first = (
        (instantiated(ct.reached), map(instantiated, ct.carries)) if emits else (None, ())
    )
    made = scan_bind(
        Operands(
            x.weights,
            x.words,
            None if state is None else state.astype(params["dtype"]),
            tuple(first),
            (
                *(x.inputs[i] for i in adjoint.fixed),
                *([ct.states] if adjoint.states_used else []),
                *(jnp.expand_dims(ct.carries[i], -2) for i in carries),
                *(ct.outputs[i] for i in used),
            ),
        ),
        **{
            **params,
            "step": adjoint,
            "emits": not emits,
            "spans": (
                *(params["spans"][i] for i in adjoint.fixed),
                *(FULL,) * (adjoint.states_used + len(carries) + len(used)),
            ),
        },
    )
    given = dict(zip(linear, made.outputs, strict=True))
    if params["implementation"] != "xla":
        given |= {i: sum_of_rows(given[i]) for i in linear if "r" not in params["spans"][i]}
    inputs = [
        summed_to_operand(given[i], a) if i in given else None for i, a in enumerate(x.inputs)
    ]
    if emits:
        return [None, None, *inputs]
    of_first = zip((made.reached, *made.carries), (x.state, *x.carries), strict=True)
    return [None, None, *(summed_to_operand(c, a) for c, a in of_first), *inputs]
