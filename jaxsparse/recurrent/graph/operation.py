"""What the primitives of graphs and of waves have in common: a wave is a graph of some form."""

from __future__ import annotations

import functools

from jaxsparse.primitive import Fallback, Operation
from jaxsparse.recurrent.graph.operands import result_dtypes, signature
from jaxsparse.recurrent.graph.plain import ON_CPU, PLAIN, plain_graph
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY

PARAMS = (
    "nodes",
    "edges",
    "units",
    "spans",
    "transposed",
    "reverse",
    "length",
    "precision",
    "implementation",
    "variant",
)

graph_operation = functools.partial(
    Operation,
    target="recurrent_wave",
    called="recurrent.stack_scan",
    signature=signature,
    result_dtypes=result_dtypes,
    shardable=("b",),
    xla=plain_graph,
    plain=PLAIN,
    on_cpu=Fallback(ON_CPU),
    compute_capability=COMPUTE_CAPABILITY,
)
