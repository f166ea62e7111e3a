"""Layers of one form in one loop of XLA, in which each is a step behind the one below it.

Step t of a layer needs step t of the layer below and its own step t - 1. So L layers take
T + L - 1 steps of a loop instead of L T, and a step has one product, batched over the layers:

    (L, b, k + h) by (L, k + h, m), [what the layer below had, what this one had] by [W; U]

Where a GPU waits for the start of kernels in each step, that takes about as long as one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.graph.alone import alone
from jaxsparse.recurrent.graph.edges import Edge
from jaxsparse.recurrent.graph.operands import Operands, Results, dtype_of
from jaxsparse.recurrent.graph.plain import added_ahead
from jaxsparse.recurrent.graph.wavefront_form import Ends, Term, Wavefront
from jaxsparse.recurrent.products import parts_of, product
from jaxsparse.recurrent.step import Step

_UNROLLED = 8  # steps of the loop: a GPU waits for its control, too


def run_wavefront(
    form: Wavefront, x: Operands, states: Sequence[Any], params: dict[str, Any]
) -> list[Results]:
    """The results of a wavefront's nodes, of the states of those before them."""
    count, length, dtype = form.layers, params["length"], dtype_of(x)
    accumulator = accumulator_dtype(dtype)
    nodes = x.nodes[form.first : form.last + 1]
    b, h = nodes[0].carries[0].shape
    times = _Times(count, length, params["reverse"])
    step, inputs = _inputs(form, x, states, params, times)
    weights = _weights(form, x, params)
    entering = None
    if form.entering is not None:
        edge = params["edges"][form.entering]
        entering = times.skewed(parts_of(states[edge.source], edge.states), 0)
        entering = entering.reshape(*entering.shape[:2], -1)

    def part(state: Any, indices: Sequence[int]) -> Any:
        """Some of the states (L, b, S h) of all layers."""
        return parts_of(state.reshape(count, b, -1, h), indices).reshape(count, b, -1)

    def below_of(state: Any, at: Any) -> Any:
        """What each layer takes of the one below; the lowest takes what comes from outside."""
        assert form.below is not None
        below = part(state, form.below[0])
        lowest = jnp.zeros_like(below[0]) if at is None else at.astype(below.dtype)
        return jnp.concatenate([lowest[None], below[:-1]])

    def body(before: Any, given: Any) -> Any:
        history, carries = before
        now, streams, at = given
        own = part(history[0], form.own[0])
        z = product(
            [weights],
            own if form.below is None else jnp.concatenate([below_of(history[0], at), own], -1),
            sparse=False,
            transposed=params["transposed"],
            precision=params["precision"],
            implementation=None,
            out_dtype=accumulator,
            local=True,
        )
        products = {p: z[..., i * h : (i + 1) * h] for i, p in enumerate(form.fed)}
        for term, targets in form.terms.items():
            source = history[term.lag - 1].reshape(count, b, -1, h)
            _add(products, term, targets, source, accumulator)
        zero = jnp.zeros((count, b, h), accumulator)
        groups = [
            of_input.arrays(stream, (count, b, h), accumulator)
            for of_input, stream in zip(inputs, streams, strict=True)
        ]
        made = step([products.get(p, zero) for p in range(step.products)], carries, groups)
        # A layer that has not begun, or has ended, stays what it is, whatever it computes.
        first = times.offsets[:, None, None]
        runs = (now >= first) & (now < first + length)
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
        (jnp.arange(times.steps), [x.stream for x in inputs], entering),
        reverse=params["reverse"],
        unroll=_UNROLLED,
    )

    def of_layer(layer: int) -> Results:
        states, *outputs = (
            times.straight(array, layer).reshape(length, b, -1, h) for array in every
        )
        return Results(states, [leaf[layer] for leaf in last], outputs)

    return [of_layer(layer) for layer in range(count)]


class _Times(NamedTuple):
    """When layers take their steps: step t of layer l is number t + offset of the loop.

    Where time runs backwards the loop does, too.
    """

    layers: int
    length: int
    reverse: bool

    @property
    def steps(self) -> int:
        return self.length + self.layers - 1

    def offset(self, layer: int) -> int:
        return self.layers - 1 - layer if self.reverse else layer

    @property
    def offsets(self) -> Any:
        return jnp.array([self.offset(layer) for layer in range(self.layers)])

    def skewed(self, x: Any, layer: int) -> Any:
        """An array (t, ...) of a layer by the loop's steps, zeros where it takes none."""
        first = self.offset(layer)
        around = first, self.layers - 1 - first
        return jnp.pad(x, [around, *[(0, 0)] * (x.ndim - 1)])

    def straight(self, x: Any, layer: int) -> Any:
        """A layer's own steps, (t, ...), of an array (steps, layers, ...)."""
        first = self.offset(layer)
        return x[first : first + self.length, layer]


class _Input(NamedTuple):
    """An input of all layers, of which neighbouring ones have one, and zeros the others."""

    first: int  # layer that has one
    fixed: Any  # (layers, b, parts, h), b or h being 1 where it repeats; None if steps differ
    stream: Any  # (steps, layers, b, parts, h), or None

    def arrays(self, at: Any, shape: tuple[int, ...], dtype: Any) -> list[Any]:
        """The arrays (L, b, h) of a step of the loop, of its part of the stream."""
        x = self.fixed if at is None else at
        after = shape[0] - self.first - x.shape[0]
        if self.first or after:
            x = jnp.pad(x, [(self.first, after), *[(0, 0)] * 3])
        return [jnp.broadcast_to(x[:, :, p].astype(dtype), shape) for p in range(x.shape[2])]


def _input(of_layers: Sequence[Any], times: _Times) -> _Input:
    """An input of all layers, of each one's own (t, b, parts, h), t, b or h being 1; or None."""
    having = [layer for layer, x in enumerate(of_layers) if x is not None]
    first, end = having[0], having[-1] + 1
    own = [of_layers[layer] for layer in having]
    shape = jnp.broadcast_shapes(*(x.shape for x in own))
    none = jnp.zeros(shape, own[0].dtype)
    arrays = [none if x is None else jnp.broadcast_to(x, shape) for x in of_layers[first:end]]
    if shape[0] == 1:
        return _Input(first, jnp.stack([x[0] for x in arrays]), None)
    skewed = [times.skewed(x, first + i) for i, x in enumerate(arrays)]
    return _Input(first, None, jnp.stack(skewed, 1))


def _inputs(
    form: Wavefront, x: Operands, states: Sequence[Any], params: dict[str, Any], times: _Times
) -> tuple[Step, list[_Input]]:
    """The step of all layers, which takes what comes from outside as inputs, and its inputs."""
    run = range(form.first, form.last + 1)
    dtype = dtype_of(x)
    outside: dict[str, dict[int, list[tuple[Edge, Any]]]] = {
        kind: {n: [] for n in run} for kind in ("ahead", "means")
    }
    for e, (edge, w) in enumerate(zip(params["edges"], x.weights, strict=True)):
        if edge.target in run and edge.source < form.first and e != form.entering:
            outside["means" if edge.kind == "mean" else "ahead"][edge.target].append((edge, w))
    fed = {
        kind: tuple(
            sorted({p for into in group.values() for edge, _ in into for p in edge.products})
        )
        for kind, group in outside.items()
    }
    one = form.alike.step
    step = alone(
        one, tuple(range(one.states)), tuple(range(one.products)), fed["ahead"], fed["means"]
    )
    inputs = [
        _input(
            [
                None if (place := own[i]) is None else x.nodes[n].inputs[place]
                for n, own in zip(run, form.alike.inputs, strict=True)
            ],
            times,
        )
        for i in range(len(one.inputs))
    ]
    # Means are the same for all units; variances come of their differences.
    for kind, of_type in (("ahead", dtype), ("means", accumulator_dtype(dtype))):
        if fed[kind]:
            added = [
                added_ahead(into, states, params["units"][n], of_type, params, fed[kind]).values
                for n, into in outside[kind].items()
            ]
            inputs.append(_input(added, times))
    return step, inputs


def _weights(form: Wavefront, x: Operands, params: dict[str, Any]) -> Any:
    """The matrices of all layers, (L, k, m), or transposed as those of edges are."""
    h, transposed = params["units"][form.first], params["transposed"]
    rows, columns = (1, 0) if transposed else (0, 1)  # of states, of products
    edges = params["edges"]

    def spread(w: Any, ends: Ends) -> Any:
        """A matrix to all products that some matrix leads to."""
        if ends[1] == form.fed:
            return w
        blocks = dict(zip(ends[1], jnp.split(w, len(ends[1]), columns), strict=True))
        nothing = jnp.zeros_like(next(iter(blocks.values())))
        return jnp.concatenate([blocks.get(p, nothing) for p in form.fed], columns)

    def of_layer(n: int) -> Any:
        found = {
            edge.delay: w[0]
            for e, (edge, w) in enumerate(zip(edges, x.weights, strict=True))
            if edge.target == n
            and edge.kind == "dense"
            and (edge.source >= form.first or e == form.entering)
        }
        own = spread(found[1], form.own)
        if form.below is None:
            return own
        shape = [0, 0]
        shape[rows], shape[columns] = len(form.below[0]) * h, len(form.below[1]) * h
        below = spread(found.get(0, jnp.zeros(shape, own.dtype)), form.below)
        return jnp.concatenate([below, own], rows)

    return jnp.stack([of_layer(n) for n in range(form.first, form.last + 1)])


def _add(
    products: dict[int, Any], term: Term, targets: tuple[int, ...], source: Any, dtype: Any
) -> None:
    """Adds what layers take pointwise of those ``term.lag`` below: of states (L, b, S, h)."""
    of_states, to_products = term.ends
    count = source.shape[0]
    for state, p in zip(of_states, to_products, strict=True):
        value = source[:, :, state].astype(dtype)
        if term.kind == "mean":
            value = jnp.broadcast_to(jnp.mean(value, -1, keepdims=True), value.shape)
        value = jnp.pad(value[: count - term.lag], [(term.lag, 0), (0, 0), (0, 0)])
        if targets != tuple(range(term.lag, count)):
            has = jnp.array([layer in targets for layer in range(count)])
            value = jnp.where(has[:, None, None], value, 0)
        products[p] = products[p] + value if p in products else value
