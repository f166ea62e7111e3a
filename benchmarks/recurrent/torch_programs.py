"""Programs of PyTorch: its modules, which call cuDNN, and loops of products in CUDA graphs.

PyTorch is imported only where it is asked for. Float32 is float32 throughout, not TF32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.recurrent.problems import Problem
from benchmarks.recurrent.reference import narrow_input
from benchmarks.torch_arrays import as_float64, nbytes, to_device, torch_module
from benchmarks.torch_graphs import CAPTURE_MODE, captured
from jaxsparse.timing import Program


def carry_of(problem: Problem, dtype: str) -> tuple[Any, ...]:
    """The leaves of the carry, the state last: (batch, hidden)."""
    x = problem.operands()
    return tuple(to_device(x[name], dtype) for name in ("c", "h") if name in x)


# ---- modules ----


def module(problem: Problem, dtype: str, passed: str, *, narrow: bool) -> Program:
    """`torch.nn.RNN`, `GRU` or `LSTM`, which has no other way than to project its input as well.

    The input has as many features as the layer has units, and weights that hand it to every gate;
    if it is narrow, one feature, the least there can be.
    """
    torch, is_forward = torch_module(), passed == "forward"
    h, host = problem.hidden, problem.operands()
    if narrow:
        x, input_weights = narrow_input(problem)
    else:
        x, input_weights = host["x"], np.tile(np.eye(h, dtype=np.float32), problem.gates)
    layer = getattr(torch.nn, problem.cell)(x.shape[-1], h, bias=False, device="cuda")
    with torch.no_grad():
        layer.weight_ih_l0.copy_(to_device(input_weights, "float32").t())
        layer.weight_hh_l0.copy_(to_device(host["weights"], "float32").t())
    layer = layer.to(getattr(torch, dtype)).train(not is_forward)
    tensors = [to_device(x, dtype), *carry_of(problem, dtype), to_device(host["cotangent"], dtype)]

    def operands() -> tuple[Any, ...]:
        own = copy.deepcopy(layer)
        own.flatten_parameters()
        return own, *(t.clone().requires_grad_(not is_forward) for t in tensors)

    def run(own: Any, x: Any, *carry: Any) -> Any:
        # PyTorch has the state first: (h, c).
        states = tuple(s[None] for s in reversed(carry))
        return own(x, states if len(states) > 1 else states[0])

    def forward(own: Any, x: Any, *rest: Any) -> Any:
        with torch.no_grad():
            return run(own, x, *rest[:-1])

    def gradient(own: Any, x: Any, *rest: Any) -> Any:
        ys, _ = run(own, x, *rest[:-1])
        return torch.autograd.grad(ys, (own.weight_hh_l0, x, *rest[:-1]), rest[-1].detach())

    def results(out: Any) -> tuple[np.ndarray, ...]:
        if is_forward:
            return (as_float64(out[0]),)
        weights, *others = out
        return as_float64(weights).T, *map(as_float64, others)

    read = [*layer.parameters(), *(tensors[:-1] if is_forward else tensors)]
    return Program(
        function=forward if is_forward else gradient,
        operands=operands,
        bytes_read=nbytes(read),
        wait=lambda out: torch.cuda.synchronize(),
        results=results,
    )


# ---- loops in CUDA graphs ----


def _parts(torch: Any, weights: Any) -> list[Any]:
    """The arrays that a matrix consists of."""
    if weights.layout == torch.strided:
        return [weights]
    return [weights.values(), weights.col_indices(), weights.crow_indices()]


def _replayed(
    problem: Problem,
    dtype: str,
    weights: Any,
    product: Callable[[Any, Any, Any], None],
) -> Program:
    """A whole scan captured in one graph, which has to be replayed where its operands lay then.

    ``product(weights, h, out)`` writes the recurrent product of (batch, hidden) to (batch, gates *
    hidden), and adds it there for an RNN.
    """
    torch = torch_module()
    xs = to_device(np.tile(problem.operands()["x"], problem.gates), dtype)
    carry = carry_of(problem, dtype)

    def rnn(weights: Any, xs: Any, h: Any) -> Any:
        ys = xs.clone()  # of which every step makes its state in place, by two kernels
        for y in ys:
            product(weights, h, y)
            h = y.tanh_()
        return ys

    def gated(weights: Any, xs: Any, *carry: Any) -> Any:
        products, ys = torch.empty_like(xs[0]), []
        *c, h = carry
        for x in xs:
            product(weights, h, products)
            if c:  # one kernel for all that is pointwise
                h, c[0], _ = torch.ops.aten._thnn_fused_lstm_cell(x, products, c[0])
            else:
                h, _ = torch.ops.aten._thnn_fused_gru_cell(x, products, h)
            ys.append(h)
        return torch.stack(ys)

    scan = rnn if problem.cell == "RNN" else gated

    def copies() -> tuple[Any, ...]:
        return tuple(t.clone() for t in (weights, xs, *carry))

    replay, operands = captured(scan, copies)
    return Program(
        function=replay,
        operands=operands,
        bytes_read=nbytes([xs, *carry, *_parts(torch, weights)]),
        wait=lambda out: torch.cuda.synchronize(),
        results=lambda out: (as_float64(out),),
    )


def cublas_graph(problem: Problem, dtype: str, passed: str) -> Program:
    """Products by cuBLAS, of the layout of the weights that is faster."""
    torch = torch_module()
    weights = to_device(problem.operands()["weights"], dtype)
    adds = problem.cell == "RNN"

    def by_rows(weights: Any, h: Any, out: Any) -> None:
        torch.addmm(out, h, weights, out=out) if adds else torch.mm(h, weights, out=out)

    def by_columns(weights: Any, h: Any, out: Any) -> None:
        by_rows(weights.t(), h, out)

    layouts = ((weights, by_rows), (weights.t().contiguous(), by_columns))
    *_, h = carry_of(problem, dtype)
    out = torch.zeros(problem.batch, problem.gates * problem.hidden, dtype=h.dtype, device="cuda")
    faster = min(layouts, key=lambda layout: _milliseconds(lambda: layout[1](layout[0], h, out)))
    return _replayed(problem, dtype, *faster)


def _milliseconds(run: Callable[[], None]) -> float:
    """Of a few calls in a graph, as they will be."""
    torch = torch_module()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
        for _ in range(20):
            run()
    for _ in range(2):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def cusparse_graph(problem: Problem, dtype: str, passed: str) -> Program:
    """Products of a CSR matrix by cuSPARSE; the state is its right side, by columns."""
    torch = torch_module()
    topology = problem.topology()
    assert topology is not None
    offsets, columns = (
        torch.from_numpy(np.array(a, np.int32)).cuda()
        for a in (topology.row_offsets, topology.column_indices)
    )
    values = to_device(problem.operands()["weights"], dtype)
    with warnings.catch_warnings(action="ignore"):  # that CSR tensors are in beta
        matrix = torch.sparse_csr_tensor(offsets, columns, values, size=topology.shape)
    beta = 1.0 if problem.cell == "RNN" else 0.0

    def product(matrix: Any, h: Any, out: Any) -> None:
        target = out.t()
        torch.addmm(target, matrix, h.t(), beta=beta, out=target)

    return _replayed(problem, dtype, matrix, product)
