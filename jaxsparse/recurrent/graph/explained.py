"""What a recurrent graph of a program runs as."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, ClassVar

import jax

from jaxsparse.batching import over_batch
from jaxsparse.device import AnyDevice, Device, by_device
from jaxsparse.primitive import CALLS, OPERATIONS, TypedCall, choose, core_dims, equations
from jaxsparse.recurrent import engine
from jaxsparse.recurrent.explained import planned
from jaxsparse.recurrent.graph.operands import batch_of, dtype_of, recurrent_nodes, split
from jaxsparse.recurrent.plan import NoPlan, Plan, ScanForm
from jaxsparse.recurrent.primitive import operand_names, recurrent_scan_p


@dataclasses.dataclass(frozen=True)
class ExplainedGraph:
    """The layers of a stack, or their derivatives, and what they run as."""

    operation: ClassVar[str] = "recurrent_graph"
    problem: str
    here: str  # as what it runs on this machine; empty where that is on the GPU below
    device: str  # the name of the GPU that is planned for
    choice: str  # as what it runs there
    scans: tuple[tuple[ScanForm, Plan | NoPlan], ...]  # of the layers that run there by themselves

    def __str__(self) -> str:
        lines = [self.problem, *by_device(self.here, self.device, self.choice)]
        scans = collections.Counter(f"{form}: {plan}" for form, plan in self.scans)
        for scan, count in scans.items():
            lines.append(f"  {f'{count} layers' if count > 1 else 'a layer'} of {scan}")
        return "\n  ".join(lines)


def explained_graph(call: TypedCall, here: str, device: Device, choice: str) -> ExplainedGraph:
    """What a graph runs as on a GPU, as it is given, beside what is said of this machine."""
    params, x = call.params, split(call.operands, call.params)
    layers = sorted(recurrent_nodes(params["edges"]))
    sizes = sorted({params["units"][n] for n in layers or range(len(x.nodes))}, reverse=True)
    which = "a layer of" if layers else "an input of"  # in some derivatives there is no layer
    if len(layers) > 1:
        which = f"{len(layers)} layers, nodes {layers[0]} to {layers[-1]}, of"
    problem = (
        f"{which} {' or '.join(map(str, sizes))} units, "
        f"{dtype_of(x).name} state, batch {batch_of(x)}, {params['length']} steps"
        f"{', transposed' if params['transposed'] else ''}"
    )
    return ExplainedGraph(problem, here, device.name, choice, _scans(call, device))


def _scans(call: TypedCall, device: AnyDevice) -> tuple[tuple[ScanForm, Plan | NoPlan], ...]:
    """The scans that a graph has where it is lowered for a device, and their plans."""
    try:
        chosen = choose(call, device)
    except ValueError:  # the choice says why
        return ()
    operation = call.operation
    declared = {name: call.params[name] for name in operation.params}
    compute = getattr(chosen, "compute", None)
    if compute is None:
        core = core_dims(operation.signature(call.params).operands[0][1])
        rank = len(call.operands[0].shape) - len(core)
        one = functools.partial(operation.xla, **declared)
        program = jax.make_jaxpr(functools.partial(over_batch, one, rank))(*call.operands)
    else:
        program = jax.make_jaxpr(functools.partial(compute, **declared))(*call.operands)
    scans = []
    for eqn in equations(program.jaxpr):
        if eqn.primitive is CALLS[recurrent_scan_p]:
            operands: list[Any] = [v.aval for v in eqn.invars]
            results: list[Any] = [v.aval for v in eqn.outvars]
            scan = TypedCall(OPERATIONS[recurrent_scan_p], eqn.params, operands, results)
            form = engine.form_of(eqn.params, operands, operand_names(eqn.params))
            scans.append((form, planned(scan, device)))
    return tuple(scans)
