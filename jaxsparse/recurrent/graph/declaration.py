"""The primitive of recurrent graphs, without its rules for batching and derivatives."""

from __future__ import annotations

import functools

from jaxsparse.primitive import Fallback, Operation, make_primitive
from jaxsparse.recurrent.graph.operands import result_dtypes, signature
from jaxsparse.recurrent.graph.plain import ON_CPU, PLAIN, plain_graph
from jaxsparse.recurrent.graph.waves import choose_waves
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY

recurrent_graph_p = make_primitive(
    Operation(
        name="recurrent_graph",
        target="recurrent_wave",
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
        xla_on_gpu=functools.partial(plain_graph, on_gpu=True),
        ffi=choose_waves,
        plain=PLAIN,
        on_cpu=Fallback(ON_CPU),
        compute_capability=COMPUTE_CAPABILITY,
    )
)
