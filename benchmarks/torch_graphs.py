"""Loops of PyTorch's kernels as CUDA graphs, each launched at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.torch_arrays import torch_module

# A capture that forbids other threads what it forbids its own would be an error of JAX's stream.
CAPTURE_MODE = "thread_local"


def captured(
    run: Callable[..., Any], copies: Callable[[], tuple[Any, ...]]
) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
    """What replays a graph of a loop, and what captures it for that.

    A graph has to be replayed where its operands lay when it was captured.

    Args:
        run: the loop, of weights, an array of all steps, and the carry's leaves.
        copies: makes new copies of those.
    """
    torch = torch_module()

    def operands() -> tuple[Any, ...]:
        own = copies()
        weights, steps, *carry = own
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries make their workspaces before the capture
                run(weights, steps[:2], *carry)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
                ys = run(*own)
        return graph, ys, own

    def replay(graph: Any, ys: Any, own: Any) -> Any:
        graph.replay()
        return ys

    return replay, operands
