"""Layers of one form in one loop of XLA, in which each is a step behind the one below it.

Step t of a layer needs step t of the layer below and its own step t - 1. So L layers take
T + L - 1 steps of a loop instead of L T, and a step has one product, batched over the layers:

    (L, b, k + h) by (L, k + h, m), [what the layer below had, what this one had] by [W; U]

Where a GPU waits for the start of kernels in each step, that takes about as long as one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.graph.alone import alone
from jaxsparse.recurrent.graph.operands import Operands, Results, dtype_of
from jaxsparse.recurrent.graph.wavefront_form import WavefrontForm
from jaxsparse.recurrent.graph.wavefront_operands import (
    Times,
    below_of,
    entering_of,
    given,
    pointwise,
    weights_of,
)
from jaxsparse.recurrent.products import parts_of, product

_UNROLLED = 8  # steps of the loop: a GPU waits for its control, too


def run_wavefront(
    form: WavefrontForm, x: Operands, states: Sequence[Any], params: dict[str, Any]
) -> list[Results]:
    """The results of a wavefront's nodes, of the states of those before them."""
    count, length, dtype = form.layers, params["length"], dtype_of(x)
    accumulator = accumulator_dtype(dtype)
    nodes = x.nodes[form.first : form.last + 1]
    b, h = nodes[0].carries[0].shape
    shape = count, b, h
    times = Times(count, length, params["reverse"])
    inputs, ahead, means, added = given(form, x, states, params, times)
    inputs = [*inputs, *added]
    one = form.alike.step
    step = alone(one, tuple(range(one.states)), tuple(range(one.products)), ahead, means)
    weights = _joined_weights(form, x, params)

    def body(before: Any, at: Any) -> Any:
        history, carries = before
        now, streams, entering = at
        apart = [state.reshape(count, b, -1, h) for state in history]
        operand = parts_of(apart[0], form.own[0]).reshape(count, b, -1)
        if form.below is not None:
            operand = jnp.concatenate([below_of(form, apart[0], entering), operand], -1)
        z = product(
            [weights],
            operand,
            sparse=False,
            transposed=params["transposed"],
            precision=params["precision"],
            implementation=None,
            out_dtype=accumulator,
            local=True,
        )
        products = {p: z[..., i * h : (i + 1) * h] for i, p in enumerate(form.fed)}
        for p, value in pointwise(form, apart, accumulator).items():
            products[p] = products[p] + value if p in products else value
        zero = jnp.zeros(shape, accumulator)
        arrays = [x.of_layers(stream, count) for x, stream in zip(inputs, streams, strict=True)]
        made = step(
            [products.get(p, zero) for p in range(step.products)],
            carries,
            [
                [jnp.broadcast_to(x[:, :, i].astype(accumulator), shape) for i in range(x.shape[2])]
                for x in arrays
            ],
        )
        # A layer that has not begun, or has ended, stays what it is, whatever it computes.
        runs = times.runs(now)[:, None, None]
        carries = [
            jnp.where(runs, new.astype(accumulator), old)
            for new, old in zip(made.carries, carries, strict=True)
        ]
        state = jnp.where(runs, jnp.concatenate(made.states, -1).astype(dtype), history[0])
        outputs = [
            jnp.concatenate(group, -1).astype(accumulator if wide else dtype)
            for group, wide in zip(made.outputs, step.wide_outputs, strict=True)
        ]
        return ((state, *history[:-1]), carries), (state, *outputs)

    state = jnp.stack([node.state.reshape(b, -1) for node in nodes])
    carries = [jnp.stack(leaves) for leaves in zip(*(node.carries for node in nodes), strict=True)]
    (_, last), every = jax.lax.scan(
        body,
        ((state, *[jnp.zeros_like(state)] * (form.history - 1)), carries),
        (
            jnp.arange(times.steps),
            [x.stream for x in inputs],
            entering_of(form, states, params, times),
        ),
        reverse=params["reverse"],
        unroll=_UNROLLED,
    )

    def of_layer(layer: int) -> Results:
        states, *outputs = (
            times.straight(array, layer).reshape(length, b, -1, h) for array in every
        )
        return Results(states, [leaf[layer] for leaf in last], outputs)

    return [of_layer(layer) for layer in range(count)]


def _joined_weights(form: WavefrontForm, x: Operands, params: dict[str, Any]) -> Any:
    """The matrices from below on top of layers' own: (L, k + h, m), or transposed.

    Both lead to all products that one of them leads to, with blocks of zeros.
    """
    rows, columns = (2, 1) if params["transposed"] else (1, 2)  # of states, of products
    own, below = weights_of(form, x, params)

    def spread(w: Any, products: tuple[int, ...]) -> Any:
        if products == form.fed:
            return w
        blocks = dict(zip(products, jnp.split(w, len(products), columns), strict=True))
        none = jnp.zeros_like(next(iter(blocks.values())))
        return jnp.concatenate([blocks.get(p, none) for p in form.fed], columns)

    own = spread(own, form.own[1])
    if form.below is None:
        return own
    return jnp.concatenate([spread(below, form.below[1]), own], rows)
