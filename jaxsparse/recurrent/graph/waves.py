"""Waves: runs of nodes of a graph that one persistent kernel computes together.

Step t of a node runs beside step t + 1 of the node below it. The nodes of a wave are of one form:
each has an edge to itself and one from the node before it in the wave. What comes from nodes below
the wave is computed for all steps ahead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.device import Device
from jaxsparse.primitive import bind_local
from jaxsparse.recurrent.engine import printed_step
from jaxsparse.recurrent.graph.alone import alone
from jaxsparse.recurrent.graph.edges import Edge
from jaxsparse.recurrent.graph.operands import (
    OfNode,
    Operands,
    Results,
    dtype_of,
    given_states,
    has_states,
    split,
    split_results,
)
from jaxsparse.recurrent.graph.plain import node_alone, sums_ahead
from jaxsparse.recurrent.plan import NoPlan, Plan, ScanForm, WaveForm, make_plan, make_wave_plan
from jaxsparse.recurrent.primitive.operands import FULL
from jaxsparse.recurrent.step import Adjoint, Step

_PRODUCTS_A_MICROSECOND = 2e8  # of a product over all steps, 400 TFLOP/s
_START = 5.0  # microseconds of a product over all steps, beside that


class Wave(NamedTuple):
    """Nodes ``first`` to ``last``, both among them, as one launch."""

    first: int
    last: int
    form: WaveForm
    plan: Plan


def cut_into_waves(
    params: dict[str, Any], x: Operands, device: Device, variant: str | None
) -> tuple[list[Wave], str]:
    """The waves of least predicted time, and why there are none.

    Args:
        params: of the graph.
        x: the types of its operands.
        device: the GPU.
        variant: of a wave, if it is asked for; then as many nodes as can be are in waves.
    """
    count = len(params["nodes"])
    reasons: list[str] = []
    best: list[tuple[float, list[Wave]]] = [(0.0, [])]  # of the first so many nodes
    for end in range(count):
        before, waves = best[end]
        alone_cost = _microseconds_alone(end, params, x, device)
        found = (before + alone_cost * (1e3 if variant else 1.0), waves)
        for first in range(end - 1, -1, -1):
            form = form_of_run(first, end, params, x)
            if isinstance(form, str):
                reasons.append(form)
                break
            plan = make_wave_plan(form, device, variant)
            if isinstance(plan, NoPlan):
                reasons.append(plan.reason)
                break  # more layers need more room
            cost = plan.total_microseconds + _microseconds_ahead(first, end, params, x)
            before, waves = best[first]
            if before + cost < found[0]:
                found = before + cost, [*waves, Wave(first, end, form, plan)]
        best.append(found)
    waves = best[count][1]
    if waves:
        return waves, ""
    return [], (reasons[0] if reasons else "it has a single node") if variant or reasons else ""


def _microseconds_alone(n: int, params: dict[str, Any], x: Operands, device: Device) -> float:
    """Predicted for a node as a scan of its own; more than any scan takes if it has no kernel."""
    ahead = _microseconds_ahead(n, n, params, x)
    loops = [e for e, edge in enumerate(params["edges"]) if edge.delay and edge.target == n]
    if not loops:
        return ahead
    (e,) = loops
    edge, step = params["edges"][e], params["nodes"][n]
    state = dtype_of(x).name
    form = ScanForm(
        products=len(edge.products),
        states=len(edge.states),
        inputs=sum(step.inputs) + step.products,
        outputs=sum(step.outputs),
        arrays=max(step.carries, len(step.inputs) + 1, len(step.outputs)),
        hidden=params["units"][n],
        batch=x.nodes[n].state.shape[-3],
        length=params["length"],
        state_dtype=state,
        weight_dtype=x.weights[e][0].dtype.name,
        sparse=edge.kind == "csr",
        input_dtypes=(state,),
    )
    plan = _planned(form, device) if edge.kind in ("dense", "csr") else NoPlan("")
    return ahead + (plan.total_microseconds if isinstance(plan, Plan) else 1e9)


@functools.lru_cache(maxsize=1024)
def _planned(form: ScanForm, device: Device) -> Plan | NoPlan:
    return make_plan(form, device, forced=True)


def _microseconds_ahead(first: int, last: int, params: dict[str, Any], x: Operands) -> float:
    """Predicted for what nodes take from those below ``first``, all steps at once."""
    batch = next(node.state.shape[-3] for node in x.nodes if node.state is not None)
    cost = 0.0
    for edge in params["edges"]:
        if not edge.delay and first <= edge.target <= last and edge.source < first:
            k = len(edge.states) * params["units"][edge.source]
            m = len(edge.products) * params["units"][edge.target]
            size = k * m if edge.kind in ("dense", "csr") else m
            cost += _START + params["length"] * batch * size / _PRODUCTS_A_MICROSECOND
    return cost


def graph_by_waves(
    *operands: jax.Array, waves: Sequence[Wave], variant: str | None, **params: Any
) -> list[Any]:
    """A graph some of whose nodes run as waves, and the others each on its own."""
    x = split(operands, params)
    begins = {wave.first: wave for wave in waves}
    every: list[Results] = []
    states: list[Any] = []
    while (n := len(every)) < len(params["nodes"]):
        if n in begins:
            results = _run_wave(begins[n], x, states, {**params, "variant": variant})
        else:
            results = [node_alone(n, x, states, {**params, "variant": None})]
        for r in results:
            given = given_states(params["nodes"][len(every)])
            states.append(r.states if given is None else x.nodes[len(every)].inputs[given])
            every.append(r)
    return flat_results(params["nodes"], every)


def _run_wave(
    wave: Wave, x: Operands, states: Sequence[Any], params: dict[str, Any]
) -> list[Results]:
    """The results of a wave's nodes, of the states of those before it."""
    run = range(wave.first, wave.last + 1)
    edges = params["edges"]
    found = alike(tuple(params["nodes"][n] for n in run))
    assert found is not None
    dtype = dtype_of(x)
    outside = {
        n: [
            (edge, w)
            for edge, w in zip(edges, x.weights, strict=True)
            if edge.target == n and edge.source < wave.first
        ]
        for n in run
    }
    ahead = tuple(sorted({p for into in outside.values() for edge, _ in into for p in edge.products}))
    step = alone(found.step, *(tuple(range(k)) for k in (found.step.states, found.step.products)), ahead)

    def zeros(parts: int, of_type: Any) -> Any:
        return jnp.zeros((1, 1, parts, 1), of_type)

    nodes, spans = [], []
    for n, places in zip(run, found.inputs, strict=True):
        state, carries, given = x.nodes[n]
        inputs, own = [], []
        for i, size, name in zip(places, found.step.inputs, wave.form.input_dtypes, strict=False):
            inputs.append(zeros(size, jnp.dtype(name)) if i is None else given[i])
            own.append("" if i is None else params["spans"][n][i])
        if ahead:
            into, units = outside[n], params["units"][n]
            sums = sums_ahead(into, ahead, states, units, dtype, params) if into else None
            inputs.append(zeros(len(ahead), dtype) if sums is None else sums)
            own.append(FULL if into else "")
        nodes.append(OfNode(state, carries, tuple(inputs)))
        spans.append(tuple(own))
    places = {n: i for i, n in enumerate(run)}
    kept = [e for e, edge in enumerate(edges) if edge.target in places and edge.source in places]
    of_wave = {
        **params,
        "nodes": (step,) * len(run),
        "edges": tuple(edges[e].moved(places) for e in kept),
        "units": tuple(params["units"][n] for n in run),
        "spans": tuple(spans),
    }
    of_wave = {name: of_wave[name] for name in OPERATIONS[recurrent_wave_p].params}
    flat = Operands(tuple(x.weights[e] for e in kept), tuple(nodes)).flat
    return split_results(bind_local(recurrent_wave_p, *flat, **of_wave), of_wave)
