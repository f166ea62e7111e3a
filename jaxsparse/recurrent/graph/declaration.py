"""The primitive of recurrent graphs, without its rules for batching and derivatives."""

from __future__ import annotations

from jaxsparse.primitive import Fallback, Operation, make_primitive
from jaxsparse.recurrent.graph.choice import choose_by_name, without_waves
from jaxsparse.recurrent.graph.operands import result_dtypes, signature
from jaxsparse.recurrent.graph.plain import ON_CPU, PLAIN, plain_graph
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY

recurrent_graph_p = make_primitive(
    Operation(
        name="recurrent_graph",
        target="recurrent_wave",
        called="recurrent.stack_scan",
        params=(
            "nodes",
            "edges",
            "units",
            "spans",
            "transposed",
            "reverse",
            "length",
            "precision",
            "recompute",
            "implementation",
            "variant",
        ),
        signature=signature,
        result_dtypes=result_dtypes,
        shardable=("b",),
        xla=plain_graph,
        ffi=choose_by_name,
        without_kernel=without_waves,
        plain=PLAIN,
        on_cpu=Fallback(ON_CPU),
        compute_capability=COMPUTE_CAPABILITY,
    )
)
