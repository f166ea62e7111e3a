"""Waves: runs of nodes of a graph that one persistent kernel computes together.

A graph is cut into waves and single nodes so that the predicted time is least. What comes to a wave
from nodes below it is computed for all steps ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse import _ffi
from jaxsparse.device import AnyDevice, Device
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import OPERATIONS, Fallback, UnavailableError, bind_local
from jaxsparse.recurrent.graph.alike import StateOf, own_states, parts_as
from jaxsparse.recurrent.graph.alone import alone
from jaxsparse.recurrent.graph.edges import MEANS
from jaxsparse.recurrent.graph.norm_ahead import norm_ahead, of_normalised
from jaxsparse.recurrent.graph.operands import (
    OfNode,
    Operands,
    Results,
    batch_of,
    dtype_of,
    recurrent_nodes,
    split,
    split_results,
)
from jaxsparse.recurrent.graph.plain import PLAIN, added_ahead
from jaxsparse.recurrent.graph.runs import in_runs
from jaxsparse.recurrent.graph.wave import recurrent_wave_p
from jaxsparse.recurrent.graph.wave_form import form_of_run, run_of
from jaxsparse.recurrent.plan import NoPlan, Plan, ScanForm, WaveForm, make_plan, make_wave_plan

WAVE_VARIANTS = tuple(_ffi.WAVE_VARIANTS)
BY_NAME = "it is asked for by its name"
_FORWARD_ONLY, _BACKWARD_ONLY = (
    frozenset(name for name, passes in _ffi.WAVE_VARIANTS.items() if passes == only)
    for only in ("forward", "backward")
)
_PRODUCTS_A_MICROSECOND = 2e8  # of a product over all steps, 400 TFLOP/s
_START = 5.0  # microseconds of a product over all steps, beside that
_LEAST_GAIN = 0.05  # of the predicted time: predictions of less would be wrong too often
_MOST_ROWS = _ffi.WAVE_MMA_MOST_ROWS  # of a batch whose backward passes are waves by states
_MANY_ROWS = (
    f"beyond {_MOST_ROWS} rows only adjoints that exchange sums are waves by default; "
    f"variant={WAVE_VARIANTS[0]!r} asks for others"
)


class Wave(NamedTuple):
    """Nodes ``first`` to ``last``, both among them, as one launch."""

    first: int
    last: int
    form: WaveForm
    plan: Plan


def choose_waves(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> Fallback:
    """What a graph is lowered to on a GPU: waves where they are faster, or node by node.

    Raises:
        UnavailableError: if a wave was asked for and there is none.
    """
    assert isinstance(device, Device)  # on what is none, no kernel of scans runs
    variant, x = params["variant"], split(avals, params)
    if variant is not None and variant not in WAVE_VARIANTS:
        return Fallback(f"variant {variant!r} is one of single layers")
    if not all(isinstance(size, int) for a in avals for size in a.shape):
        return Fallback("a size is open, and kernels are made for sizes")
    if variant in _FORWARD_ONLY and params["transposed"]:
        compute = functools.partial(in_runs, {})
        return Fallback(f"{variant} is for forward passes", compute, PLAIN)
    # What is no adjoint runs as if none was asked for.
    apart = variant in _BACKWARD_ONLY and not params["transposed"]
    one_by_one = functools.partial(in_runs, {}) if apart else None
    if apart:
        variant = None
    waves, reason = _cut(params, x, device, variant)
    if waves:
        runs = {wave.first: functools.partial(run_wave, wave) for wave in waves}
        compute = functools.partial(in_runs, runs)
        return Fallback(reason, compute, _called(waves))
    if variant is not None:
        raise UnavailableError(
            f"recurrent.stack_scan: {variant} was asked for, but {reason}", reason
        )
    return Fallback(reason, one_by_one, PLAIN if apart else "")


def _called(waves: Sequence[Wave]) -> str:
    """What waves are called; those of equal plans together, of which a deep stack has many."""
    by_plan: dict[str, list[str]] = {}
    for wave in waves:
        by_plan.setdefault(str(wave.plan), []).append(f"{wave.first} to {wave.last}")
    return " and ".join(
        f"nodes {', '.join(nodes)}{', each' if len(nodes) > 1 else ''} as a wave by {plan}"
        for plan, nodes in by_plan.items()
    )


def _plan_of(
    form: WaveForm, params: dict[str, Any], device: Device, variant: str | None
) -> Plan | NoPlan:
    """The plan of a wave; by default only one of those that were measured."""
    plan = make_wave_plan(form, device, variant)
    many = form.batch > _MOST_ROWS and jnp.dtype(form.state_dtype).itemsize == 2
    by_sums = isinstance(plan, Plan) and plan.variant in _BACKWARD_ONLY
    if variant is None and params["transposed"] and many and not by_sums:
        return NoPlan(_MANY_ROWS)
    return plan


def _cut(
    params: dict[str, Any], x: Operands, device: Device, variant: str | None
) -> tuple[list[Wave], str]:
    """The waves of least predicted time, and why these, or why there are none.

    If a variant of waves is asked for, as few nodes as can be are in none.
    """
    recurrent = recurrent_nodes(params["edges"])
    reasons: list[str] = []
    best: list[tuple[float, list[Wave]]] = [(0.0, [])]  # of the first so many nodes
    alone = 0.0
    for last in range(len(params["nodes"])):
        cost = _microseconds_alone(last, params, x, device)
        alone += cost
        before, waves = best[last]
        found = before + cost * (1.0 if variant is None else 1e6), waves
        for first in range(last - 1, -1, -1):
            if not {first, last} <= recurrent:
                break
            form = form_of_run(first, last, params, x)
            plan = (
                NoPlan(form) if isinstance(form, str) else _plan_of(form, params, device, variant)
            )
            if isinstance(form, str) or isinstance(plan, NoPlan):
                reasons.append(plan.reason if isinstance(plan, NoPlan) else "")
                break  # a longer run holds this one, and needs more room
            cost = plan.total_microseconds + _microseconds_ahead(first, last, params, x)
            before, waves = best[first]
            if before + cost < found[0]:
                found = before + cost, [*waves, Wave(first, last, form, plan)]
        best.append(found)
    total, waves = best[-1]
    if waves and variant is not None:
        return waves, BY_NAME
    if total < (1 - _LEAST_GAIN) * alone:
        return waves, f"they take about {total:.0f} us, and {alone:.0f} would be taken node by node"
    slower = f"it takes about {alone:.0f} us, and waves would hardly be faster"
    return [], next(iter(reasons), slower)


def _microseconds_alone(n: int, params: dict[str, Any], x: Operands, device: Device) -> float:
    """Predicted for a node as a scan of its own; more than any scan takes if it has no kernel."""
    ahead = _microseconds_ahead(n, n, params, x)
    if n not in recurrent_nodes(params["edges"]):
        return ahead
    plan = plan_alone(n, params, x, device, forced=True)
    return ahead + (plan.total_microseconds if isinstance(plan, Plan) else 1e9)


def plan_alone(
    n: int,
    params: dict[str, Any],
    x: Operands,
    device: Device,
    *,
    forced: bool = False,
) -> Plan | NoPlan:
    """The plan of a node with an edge to itself as a scan of its own.

    Args:
        n: the node.
        params: of the graph.
        x: its operands, or their types.
        device: the GPU.
        forced: plans even what would be slower than the plain path.
    """
    (e,) = (e for e, edge in enumerate(params["edges"]) if edge.delay and edge.target == n)
    edge, step = params["edges"][e], params["nodes"][n]
    ahead = norm_ahead(step)
    if ahead is not None:
        step = ahead.step
    if edge.kind not in ("dense", "csr"):
        return NoPlan(f"its edge is of kind {edge.kind}")
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
        layout_form=edge.forms[params["transposed"]] if edge.forms else None,
        not_laid_out=edge.not_laid_out,
    )
    if not all(isinstance(size, int) for size in (form.batch, form.length, form.hidden)):
        return NoPlan("a size is open, and kernels are made for sizes")
    return _planned(form, device, forced)


@functools.lru_cache(maxsize=1024)
def _planned(form: ScanForm, device: Device, forced: bool) -> Plan | NoPlan:
    return make_plan(form, device, forced=forced)


def _microseconds_ahead(first: int, last: int, params: dict[str, Any], x: Operands) -> float:
    """Predicted for what nodes take from those below ``first``, all steps at once.

    Edges of means stand for norms that are taken ahead, too.
    """
    batch = batch_of(x)
    cost = 0.0
    for edge in params["edges"]:
        if not edge.delay and first <= edge.target <= last and edge.source < first:
            k = len(edge.states) * params["units"][edge.source]
            m = len(edge.products) * params["units"][edge.target]
            size = k * m if edge.kind in ("dense", "csr") else m
            cost += _START + params["length"] * batch * size / _PRODUCTS_A_MICROSECOND
    return cost


def run_wave(
    wave: Wave, x: Operands, states: Sequence[Any], params: dict[str, Any]
) -> list[Results]:
    """The results of a wave's nodes, of the states of those before it."""
    dtype = dtype_of(x)
    run = run_of(wave.first, wave.last, params)
    assert not isinstance(run, str)
    common = run.found.step
    added = [
        (means, run.ahead(means=means), accumulator_dtype(dtype) if means else dtype)
        for means in (False, True)
    ]
    every = tuple(range(common.states))
    step = alone(common, every, run.fed, *(products for _, products, _ in added))
    nodes, spans = [], []
    for i, (placed, below) in enumerate(zip(run.found.placed, run.outside, strict=True)):
        n = wave.first + i
        state, carries, own = x.nodes[n]
        inputs = []
        of_inputs = []
        for given, size, name in zip(
            placed.inputs, common.inputs, wave.form.input_dtypes, strict=False
        ):
            inputs.append(
                _zeros(size, name) if given is None else parts_as(own[given.place], given)
            )
            of_inputs.append("" if given is None else params["spans"][n][given.place])
        for means, products, of_type in added:
            into = [(e, x.weights[w]) for w, e in below if (e.kind in MEANS) == means]
            if into:
                terms, sources = of_normalised(into, states)
                more = added_ahead(terms, sources, params["units"][n], of_type, params, products)
                inputs.append(more.values)
                of_inputs.append(more.span)
            elif products:
                inputs.append(_zeros(len(products), of_type))
                of_inputs.append("")
        first = _in_places(state, placed.states, common.states)
        nodes.append(OfNode(first, carries, tuple(inputs)))
        spans.append(tuple(of_inputs))
    of_wave = {
        **{name: params[name] for name in OPERATIONS[recurrent_wave_p].params},
        "nodes": (step,) * len(nodes),
        "edges": tuple(edge for _, edge in run.inside),
        "units": tuple(params["units"][wave.first : wave.last + 1]),
        "spans": tuple(spans),
        "variant": params["variant"] if params["variant"] == wave.plan.variant else None,
    }
    flat = Operands(tuple(x.weights[e] for e, _ in run.inside), tuple(nodes)).flat
    results = split_results(bind_local(recurrent_wave_p, *flat, **of_wave), of_wave)
    return [
        r._replace(
            states=own_states(r.states, placed.states),
            outputs=[parts_as(r.outputs[given.place], given) for given in placed.outputs],
        )
        for r, placed in zip(results, run.found.placed, strict=True)
    ]


def _zeros(parts: int, dtype: Any) -> Any:
    """An input that is 0 everywhere."""
    return jnp.zeros((1, 1, parts, 1), dtype)


def _in_places(state: Any, places: Sequence[StateOf], count: int) -> Any:
    """The state before the first step, (b, S, h), with the states of the common step."""
    own = {of.place: i for i, of in enumerate(places) if not of.squared}
    if own == {i: i for i in range(count)} and len(places) == count:
        return state
    zero = jnp.zeros_like(state[:, :1])
    return jnp.concatenate(
        [state[:, own[i] : own[i] + 1] if i in own else zero for i in range(count)], 1
    )
