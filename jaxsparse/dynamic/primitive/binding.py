"""Binds a scan over graphs, without outputs that repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxsparse.dynamic.primitive.declaration import dynamic_scan_p
from jaxsparse.dynamic.primitive.operands import Operands, Results, joined, split_results
from jaxsparse.primitive import bind
from jaxsparse.recurrent.step import without_repeats


def scan_bind(
    operands: Operands, *, binder: Callable[..., list[Any]] = bind, **params: Any
) -> Results:
    """Binds the primitive; an output that equals the states, or another one, is that.

    Args:
        operands: of the scan.
        binder: `primitive.bind`, or `primitive.bind_local` in the plain form of another operation.
        **params: of the scan.
    """
    step, places = without_repeats(params["step"])
    params = {**params, "step": step}
    results = split_results(binder(dynamic_scan_p, *joined(operands), **params), params)
    outputs = [results.states if i is None else results.outputs[i] for i in places]
    return results._replace(outputs=outputs)
