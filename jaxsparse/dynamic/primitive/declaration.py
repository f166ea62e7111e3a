"""The primitive of scans over graphs, without its rules for derivatives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from jaxsparse.device import AnyDevice
from jaxsparse.dynamic.primitive.operands import result_dtypes, signature
from jaxsparse.dynamic.primitive.plain import PLAIN, plain_scan
from jaxsparse.primitive import Fallback, Operation, UnavailableError, make_primitive

_NO_KERNEL = "there is no kernel for it yet"


def _ffi_call(params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice) -> Fallback:
    """What is computed on a GPU.

    Raises:
        UnavailableError: if a kernel was asked for.
    """
    if params["implementation"] == "cuda":
        raise UnavailableError(
            f"dynamic.scan: implementation='cuda' was asked for, but {_NO_KERNEL}", _NO_KERNEL
        )
    return Fallback(_NO_KERNEL)


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
        ffi=_ffi_call,
        plain=PLAIN,
        on_cpu=Fallback("on a CPU XLA's products are what takes the time"),
    )
)
