"""The primitive of recurrent graphs, without its rules for batching and derivatives."""

from __future__ import annotations

from jaxsparse.primitive import make_primitive
from jaxsparse.recurrent.graph.choice import choose, without_waves
from jaxsparse.recurrent.graph.operation import PARAMS, graph_operation

recurrent_graph_p = make_primitive(
    graph_operation(
        name="recurrent_graph",
        params=(*PARAMS, "recompute"),
        ffi=choose,
        without_kernel=without_waves,
    )
)
