"""The primitive of recurrent graphs, without its rules for batching and derivatives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from jaxsparse.device import AnyDevice
from jaxsparse.primitive import Fallback, Operation, make_primitive
from jaxsparse.recurrent.graph.operands import result_dtypes, signature
from jaxsparse.recurrent.graph.plain import plain_graph
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY

PLAIN = "node by node"  # what a graph is without a kernel of its own


def _no_kernel(params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice) -> Fallback:
    return Fallback("no kernel runs several nodes at once")


recurrent_graph_p = make_primitive(
    Operation(
        name="recurrent_graph",
        target="recurrent_scan",  # what its nodes run as, each on its own
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
        ffi=_no_kernel,
        plain=PLAIN,
        on_cpu=Fallback("on a CPU only its sparse products have kernels, those of spmm"),
        compute_capability=COMPUTE_CAPABILITY,
    )
)
