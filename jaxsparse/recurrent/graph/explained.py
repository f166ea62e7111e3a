"""What a recurrent graph of a program runs as."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxsparse.device import Device, by_device
from jaxsparse.primitive import TypedCall
from jaxsparse.recurrent.graph.operands import dtype_of, recurrent_nodes, split


@dataclasses.dataclass(frozen=True)
class ExplainedGraph:
    """The layers of a stack, or their derivatives, and what they run as."""

    operation: ClassVar[str] = "recurrent_graph"
    problem: str
    here: str  # as what it runs on this machine; empty where that is on the GPU below
    device: str  # the name of the GPU that is planned for
    choice: str  # as what it runs there

    def __str__(self) -> str:
        return "\n  ".join((self.problem, *by_device(self.here, self.device, self.choice)))


def explained_graph(call: TypedCall, here: str, device: Device, choice: str) -> ExplainedGraph:
    """What a graph runs as on a GPU, as it is given, beside what is said of this machine."""
    params, x = call.params, split(call.operands, call.params)
    layers = sorted(recurrent_nodes(params["edges"]))
    sizes = sorted({params["units"][n] for n in layers}, reverse=True)
    state = x.nodes[layers[0]].state
    problem = (
        f"layers {layers[0]} to {layers[-1]} of {' or '.join(map(str, sizes))} units, "
        f"{dtype_of(x).name} state, batch {state.shape[-3]}, {params['length']} steps"
        f"{', transposed' if params['transposed'] else ''}"
    )
    return ExplainedGraph(problem, here, device.name, choice)
