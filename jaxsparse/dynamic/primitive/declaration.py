"""The primitive of scans over graphs, without its rules for derivatives."""

from __future__ import annotations

import functools

from jaxsparse.dynamic import engine
from jaxsparse.dynamic.plan import PLAIN
from jaxsparse.dynamic.primitive.operands import operand_names, result_dtypes, signature
from jaxsparse.dynamic.primitive.plain import plain_scan
from jaxsparse.primitive import Fallback, Operation, make_primitive
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY

dynamic_scan_p = make_primitive(
    Operation(
        name="dynamic_scan",
        target="dynamic_scan",
        called="dynamic.scan",
        params=(
            "step",
            "emits",
            "form",
            "dtype",
            "spans",
            "precision",
            "recompute",
            "implementation",
        ),
        signature=signature,
        result_dtypes=result_dtypes,
        shardable=(),
        xla=plain_scan,
        xla_on_gpu=functools.partial(plain_scan, on_gpu=True),
        plain_takes_batch=True,
        ffi=lambda params, avals, device: engine.ffi_call(
            params, avals, operand_names(params), device
        ),
        plain=PLAIN,
        on_cpu=Fallback("on a CPU XLA's products are what takes the time"),
        compute_capability=COMPUTE_CAPABILITY,
    )
)
