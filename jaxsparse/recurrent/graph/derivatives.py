"""The tangent of a graph and its transpose, graphs both.

In the tangent every node that moves is its step's tangent, and edges stay. The transpose runs the
other way in time and through the nodes; each is its step's adjoint, and edges turn round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxsparse.batching import over_batch
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind, undefined
from jaxsparse.recurrent.graph.binding import graph_bind
from jaxsparse.recurrent.graph.declaration import recurrent_graph_p
from jaxsparse.recurrent.graph.edges import Edge, added_up, edge_products
from jaxsparse.recurrent.graph.operands import (
    OfNode,
    Operands,
    Results,
    dtype_of,
    flat_results,
    recurrent_nodes,
    split,
    split_results,
    with_batch,
)
from jaxsparse.recurrent.primitive.derivatives import (
    instantiated,
    is_zero,
    summed_to_operand,
    wide_inputs,
)
from jaxsparse.recurrent.primitive.operands import FULL
from jaxsparse.recurrent.step import Step
from jaxsparse.recurrent.step_derivatives import Adjoint, Saving, Tangent


def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """The rule of ``jax.jvp``: a graph that saves what its tangent reads, and its tangent."""
    nodes, edges, spans = params["nodes"], params["edges"], params["spans"]
    x, dx = split(primals, params), split(tangents, params)
    moved = [len(w) > 0 and not is_zero(w[0]) for w in dx.weights]
    changed = _changed_nodes(nodes, edges, dx, moved)
    if not changed:
        values = bind(recurrent_graph_p, *primals, **params)
        return values, [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in values]

    keeping = list(nodes)
    for n, tangent in changed.items():
        saved = tangent.saved._replace(means=())
        if params["recompute"]:
            saved = saved._replace(products=())
        if saved.sizes:
            keeping[n] = Saving(nodes[n], saved)
    results = graph_bind(x, **{**params, "nodes": tuple(keeping)})
    extra = {n: results[n].outputs[len(nodes[n].outputs) :] for n in changed}
    results = [
        r._replace(outputs=r.outputs[: len(step.outputs)])
        for r, step in zip(results, nodes, strict=True)
    ]
    recomputed = params["recompute"] and any(t.saved.products for t in changed.values())

    def linear(weights: Any, sources: Any, saved: Any, read: Any, dweights: Any, moves: Any) -> Any:
        dtype = dtype_of(x)
        sums = functools.partial(_sums, x=x, params=params, sources=sources, dtype=dtype)
        of_nodes, own_spans = [], []
        for n, tangent in changed.items():
            into = {e: edge for e, edge in enumerate(edges) if edge.target == n}
            own, of_products = list(saved[n]), tangent.saved.products
            if tangent.saved.means:
                # For each unit a copy, or made again: of the states, whatever else is kept.
                wide = accumulator_dtype(dtype)
                means = sums(into, weights, tangent.saved.means, dtype=wide)
                own.insert(bool(of_products) and not params["recompute"], means[..., :1])
            if of_products and params["recompute"]:
                own.insert(0, sums(into, weights, of_products))
            into = {e: edge for e, edge in into.items() if moved[e]}
            shift = []
            if into:
                with_moved = {e: (dweights[e], *weights[e][1:]) for e in into}
                shift = [sums(into, with_moved, range(nodes[n].products))]
            dstate, dcarries, dinputs = moves[n]
            of_nodes.append(OfNode(dstate, dcarries, (*own, *read[n], *shift, *dinputs)))
            own_spans.append(
                (
                    *(FULL,) * bool(of_products),
                    *("tb",) * bool(tangent.saved.means),
                    *(FULL,) * len(tangent.saved.carries),
                    *(spans[n][i] for i in tangent.read),
                    *(FULL,) * tangent.shifted,
                    *(spans[n][i] for i in tangent.active),
                )
            )
        kept, of_changed = _edges_between(list(changed), edges)
        return graph_bind(
            Operands(tuple(weights[e] for e in kept), tuple(of_nodes)),
            **{
                **params,
                "nodes": tuple(changed.values()),
                "edges": of_changed,
                "units": tuple(params["units"][n] for n in changed),
                "spans": tuple(own_spans),
            },
        )

    firsts = [node.state for node in x.nodes]
    slopes = (jax.checkpoint(linear) if recomputed else linear)(
        x.weights,
        list(zip([r.states for r in results], firsts, strict=True)),
        extra,
        {n: [x.nodes[n].inputs[i] for i in tangent.read] for n, tangent in changed.items()},
        {e: dx.weights[e][0] for e in range(len(edges)) if moved[e]},
        {
            n: OfNode(
                None if node.state is None else instantiated(node.state),
                tuple(map(instantiated, node.carries)),
                tuple(node.inputs[i] for i in changed[n].active),
            )
            for n, node in enumerate(dx.nodes)
            if n in changed
        },
    )
    values = flat_results(nodes, results)
    every = iter(slopes)
    dresults = [next(every) if n in changed else None for n in range(len(nodes))]
    return values, [
        ad.Zero(jax.typeof(value).to_tangent_aval()) if slope is None else slope
        for value, slope in zip(values, flat_results(nodes, dresults), strict=True)
    ]


def _changed_nodes(
    nodes: Sequence[Step], edges: Sequence[Edge], dx: Operands, moved: Sequence[bool]
) -> dict[int, Tangent]:
    """The nodes whose results have a tangent, and their steps' tangents."""
    changed: dict[int, Tangent] = {}
    for n, (step, (state, carries, inputs)) in enumerate(zip(nodes, dx.nodes, strict=True)):
        active = tuple(i for i, t in enumerate(inputs) if not is_zero(t))
        shifted = any(moved[e] for e, edge in enumerate(edges) if edge.target == n)
        own = shifted or active or not all(map(is_zero, carries))
        own = own or not (state is None or is_zero(state))
        if own or any(edge.source in changed for edge in edges if edge.target == n):
            changed[n] = Tangent(step, active, shifted)
    return changed


def _edges_between(
    chosen: Sequence[int], edges: Sequence[Edge]
) -> tuple[list[int], tuple[Edge, ...]]:
    """The edges that join chosen nodes: their places, and themselves by the nodes' new places."""
    place = {n: i for i, n in enumerate(chosen)}
    kept = [e for e, edge in enumerate(edges) if edge.source in place and edge.target in place]
    return kept, tuple(edges[e].moved(place) for e in kept)


def _sums(
    into: dict[int, Edge],
    weights: Any,
    products: Sequence[int],
    *,
    x: Operands,
    params: dict[str, Any],
    sources: Any,
    dtype: Any,
) -> Any:
    """What edges give some products of their target at every step: (..., t, b, products, h)."""
    options = {name: params[name] for name in ("transposed", "precision", "implementation")}

    def term(e: int, edge: Edge) -> tuple[Edge, Callable[[Any], Any]]:
        step, inputs = params["nodes"][edge.target], x.nodes[edge.target].inputs

        def of_edge(weights: Any, states: Any, first: Any, *, dtype: Any) -> Any:
            if edge.delay:
                states = _before(states, first, params["reverse"])
            # States that a step does not read have no part in the gradient of the weights, where a
            # NaN in them would meet a cotangent of 0.
            if (reads := step.reads_state(inputs)) is not True:
                states = jnp.where(reads, states, 0)
            units = params["units"][edge.target]
            return _edge_products(edge, weights, states, units, dtype, **options)

        def made(dtype: Any) -> Any:
            # States are kept once, whatever reads them: those of the step before, and arrays of
            # other shapes, are made again.
            computed = jax.checkpoint(functools.partial(of_edge, dtype=dtype), prevent_cse=False)
            return computed(weights[e], *sources[edge.source])

        return edge, made

    return added_up([term(*item) for item in into.items()], products, dtype, rounded=True)


def _before(states: Any, first: Any, reverse: bool) -> Any:
    """Every step's states before it, (..., t, b, S, h), of the states after it and the first."""
    *rows, _, b, parts, h = states.shape
    first = jnp.broadcast_to(jnp.expand_dims(first, -4), (*rows, 1, b, parts, h))
    if reverse:
        return jnp.concatenate([states[..., 1:, :, :, :], first], -4)
    return jnp.concatenate([first, states[..., :-1, :, :, :]], -4)


def _edge_products(
    edge: Edge, weights: Sequence[Any], states: Any, units: int, dtype: Any, **options: Any
) -> Any:
    """`edge_products` of every entry of mapped operands: (..., t, b, products, h)."""

    def of_entry(states: Any, *weights: Any) -> Any:
        return edge_products(edge, weights, states, units, dtype, **options)

    return over_batch(of_entry, states.ndim - 4, states, *weights)


def transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
    """The rule of transposition: the graph of adjoints, the other way in time."""
    nodes, edges, spans = params["nodes"], params["edges"], params["spans"]
    x = split(operands, params)
    if any(undefined(w) for of_edge in x.weights for w in of_edge):
        raise ValueError("recurrent.stack_scan: it is not linear in its weights")
    given = split_results(cotangents, params)
    adjoints = _adjoints(x, given, params)
    if not adjoints:
        return [None] * len(operands)
    recurrent = recurrent_nodes(edges)
    of_nodes, own_spans = [], []
    for n, adjoint in adjoints.items():
        ct, units = given[n], params["units"][n]
        state = None
        if n in recurrent:
            shape = _aval(x.nodes[n].state).shape
            dtype = _aval(x.nodes[n].state).dtype
            state = jnp.zeros((*shape[:-2], nodes[n].products, units), dtype)
        inputs = (
            *(x.nodes[n].inputs[i] for i in adjoint.fixed),
            *([ct.states] if adjoint.states_used else []),
            *(ct.outputs[i] for i in adjoint.used),
        )
        of_nodes.append(OfNode(state, tuple(map(instantiated, ct.carries)), inputs))
        fixed = (spans[n][i] for i in adjoint.fixed)
        own_spans.append((*fixed, *(FULL,) * (adjoint.states_used + len(adjoint.used))))
    kept, turned = _edges_between(
        [len(nodes) - 1 - n for n in adjoints], [edge.turned(len(nodes)) for edge in edges]
    )
    results = graph_bind(
        Operands(tuple(x.weights[e] for e in kept), tuple(of_nodes)),
        **{
            **params,
            "nodes": tuple(adjoints.values()),
            "edges": turned,
            "units": tuple(params["units"][n] for n in adjoints),
            "spans": tuple(own_spans),
            "transposed": not params["transposed"],
            "reverse": not params["reverse"],
        },
    )
    of_node = dict(zip(adjoints, results, strict=True))
    answers = []
    for n, node in enumerate(x.nodes):
        if n not in adjoints:
            answers.append(
                OfNode(node.state, (None,) * len(node.carries), (None,) * len(node.inputs))
            )
            continue
        outputs = dict(zip(adjoints[n].linear, of_node[n].outputs, strict=True))
        answers.append(
            OfNode(
                node.state,
                tuple(map(summed_to_operand, of_node[n].carries, node.carries)),
                tuple(
                    summed_to_operand(outputs[i], o) if i in outputs else None
                    for i, o in enumerate(node.inputs)
                ),
            )
        )
    flat: list[Any] = [None] * sum(map(len, x.weights))
    for n, answer in enumerate(answers):
        if answer.state is not None:
            needed = n in adjoints and undefined(x.nodes[n].state)
            flat.append(_of_first_state(n, x, of_node[n].states, params) if needed else None)
        flat += [*answer.carries, *answer.inputs]
    return flat


def _adjoints(x: Operands, given: Sequence[Results], params: dict[str, Any]) -> dict[int, Adjoint]:
    """The nodes that cotangents reach, the last first, and their steps' adjoints."""
    nodes, edges = params["nodes"], params["edges"]
    dtype = _aval(with_batch(x.nodes, x.nodes)).dtype
    adjoints: dict[int, Adjoint] = {}
    for n in reversed(range(len(nodes))):
        (states, carries, outputs), inputs = given[n], x.nodes[n].inputs
        of_states = states is not None and not is_zero(states)
        used = tuple(i for i, ct in enumerate(outputs) if not is_zero(ct))
        above = any(edge.target in adjoints for edge in edges if edge.source == n)
        if above or of_states or used or not all(map(is_zero, carries)):
            linear = tuple(i for i, o in enumerate(inputs) if undefined(o))
            wide = wide_inputs(inputs, linear, params["spans"][n], dtype)
            adjoints[n] = Adjoint(nodes[n], linear, of_states, used, wide)
    return adjoints


def _of_first_state(n: int, x: Operands, states: Any, params: dict[str, Any]) -> Any:
    """The cotangent of a node's first state: of the products of the first step alone."""
    step, units = params["nodes"][n], params["units"][n]
    ((edge, weights),) = (
        (edge, w)
        for edge, w in zip(params["edges"], x.weights, strict=True)
        if edge.delay and edge.target == n
    )
    z = _edge_products(
        edge.turned(len(params["nodes"])),
        weights,
        states[..., -1:, :, :, :] if params["reverse"] else states[..., :1, :, :, :],
        units,
        accumulator_dtype(states.dtype),
        transposed=not params["transposed"],
        precision=params["precision"],
        implementation=params["implementation"],
    )[..., 0, :, :, :]
    zero = jnp.zeros_like(z[..., 0, :])
    parts = [
        z[..., edge.states.index(i), :] if i in edge.states else zero for i in range(step.states)
    ]
    return summed_to_operand(jnp.stack(parts, -2), x.nodes[n].state)


def _aval(x: Any) -> Any:
    return x.aval if undefined(x) else jax.typeof(x)
