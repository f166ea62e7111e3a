"""The primitive of recurrent scans, without its rules for batching and derivatives."""

from __future__ import annotations

import functools

from jaxsparse.primitive import Fallback, Operation, make_primitive
from jaxsparse.recurrent import engine
from jaxsparse.recurrent.plan import COMPUTE_CAPABILITY, PLAIN
from jaxsparse.recurrent.primitive.operands import operand_names, result_dtypes, signature
from jaxsparse.recurrent.primitive.plain import plain_scan

recurrent_scan_p = make_primitive(
    Operation(
        name="recurrent_scan",
        target="recurrent_scan",
        called="recurrent.scan",
        params=(
            "step",
            "sparse",
            "forms",
            "not_laid_out",
            "transposed",
            "reversed",
            "length",
            "spans",
            "precision",
            "recompute",
            "implementation",
        ),
        signature=signature,
        result_dtypes=result_dtypes,
        shardable=("b",),
        xla=plain_scan,
        xla_on_gpu=functools.partial(plain_scan, on_gpu=True),
        ffi=lambda params, avals, device: engine.ffi_call(
            params, avals, operand_names(params), device
        ),
        plain=PLAIN,
        on_cpu=Fallback("on a CPU only its sparse products have kernels, those of spmm"),
        compute_capability=COMPUTE_CAPABILITY,
    )
)
