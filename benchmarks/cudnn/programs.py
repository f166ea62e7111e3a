"""Programs of cuDNN's calls, of layers and of stacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.cudnn.network import Calls
from benchmarks.torch_arrays import nbytes, torch_module
from jaxsparse.timing import Program


def program_of(
    calls: Calls,
    weights: Any,
    x: Any,
    carry: tuple[Any, ...],
    cotangent: Any,
    passed: str,
    results: Callable[[Any], tuple[np.ndarray, ...]],
) -> Program:
    """The outputs of all steps, or the gradients of weights, input and carry."""
    torch, is_forward = torch_module(), passed == "forward"

    def forward(weights: Any, x: Any, carry: Any, cotangent: Any) -> Any:
        return (calls.forward(weights, x, carry),)

    def gradient(weights: Any, x: Any, carry: Any, cotangent: Any) -> Any:
        return calls.gradient(weights, x, carry, cotangent)

    def operands() -> tuple[Any, ...]:
        return weights.clone(), x.clone(), tuple(s.clone() for s in carry), cotangent.clone()

    return Program(
        function=forward if is_forward else gradient,
        operands=operands,
        bytes_read=nbytes([weights, x, *carry, *([] if is_forward else [cotangent])]),
        wait=lambda out: torch.cuda.synchronize(),
        results=results,
    )
