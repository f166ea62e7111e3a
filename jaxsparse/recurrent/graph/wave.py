"""Nodes of a graph as one launch, a wave: step t of each runs beside step t + 1 of the one below.

The primitive is a graph whose nodes have one step, each with an edge to itself and one from the
node before it; beside them there are skips and, from the node before, means. It appears in what a
graph is lowered to on a GPU, so it has no derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from jaxsparse.device import AnyDevice, Device
from jaxsparse.primitive import FfiCall, UnavailableError, make_primitive
from jaxsparse.recurrent import engine
from jaxsparse.recurrent.graph.operands import signature, split
from jaxsparse.recurrent.graph.operation import PARAMS, graph_operation
from jaxsparse.recurrent.graph.wave_form import form_of_run
from jaxsparse.recurrent.plan import NoPlan, make_wave_plan
from jaxsparse.recurrent.step import Step

EXPRESSION = "jaxsparse::RecurrentWaveScan<PrintedStep, PrintedPlan>"


def _ffi_call(params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice) -> FfiCall:
    assert isinstance(device, Device)  # on what is none, no kernel of scans runs
    count = len(params["nodes"])
    form = form_of_run(0, count - 1, params, split(avals, params))
    assert not isinstance(form, str), form  # as it was where the wave was made
    plan = make_wave_plan(form, device, params["variant"])
    if isinstance(plan, NoPlan):
        raise UnavailableError(
            f"recurrent.stack_scan: no wave runs {count} layers: {plan.reason}", plan.reason
        )
    step: Step = params["nodes"][0]
    names = [name for name, _ in signature(params).operands]
    own: dict[int, str] = {}
    below: dict[int, str] = {}
    skips = ["-"] * count
    for e, edge in enumerate(params["edges"]):
        if edge.kind == "identity":
            skips[edge.target] = str(edge.source)
        elif edge.operands:
            (own if edge.delay else below)[edge.target] = f"weights of edge {e}"
    operands = []
    for n in range(count):
        operands += [own[n], *([below[n]] if n else [])]
        operands += [name for name in names if name.endswith(f" of node {n}")]
    return FfiCall(
        tuple(operands),
        {
            "name": f"recurrent_{plan.variant}.cu",
            "source": engine.source(step, form, plan, engine.most_delay()),
            "expression": EXPRESSION,
            "layers": count,
            "own_products": len(form.own_products),
            "own_states": len(form.own_states),
            "below_products": len(form.below_products),
            "below_states": len(form.below_states),
            "skips": " ".join(skips),
            "norm_epsilon": next((e.norm.epsilon for e in params["edges"] if e.norm), 0.0),
            "transposed": params["transposed"],
            "reverse": params["reverse"],
            "carries": step.carries,
            "inputs": " ".join(
                f"{parts}{span}"
                for spans in params["spans"]
                for parts, span in zip(step.inputs, spans, strict=True)
            ),
            "input_dtypes": " ".join(form.input_dtypes),
            "outputs": " ".join(map(str, step.outputs)),
            "output_dtypes": " ".join(form.output_dtypes),
            **engine.launch_attributes(plan),
        },
        workspace=plan.workspace_bytes,
        plan=plan,
    )


recurrent_wave_p = make_primitive(
    graph_operation(name="recurrent_wave", params=PARAMS, ffi=_ffi_call)
)
