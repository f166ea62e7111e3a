"""Programs of cuDNN's own interface: every algorithm forced, the input not multiplied.

PyTorch does not say which algorithm it wants, nor skips the input's product. Here both are chosen,
and a batch can be filled up to one that a kernel likes better.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cudnn.library import loaded
from benchmarks.cudnn.network import Calls, Form, Network, check_units
from benchmarks.cudnn.programs import program_of
from benchmarks.recurrent.problems import Problem
from benchmarks.recurrent.torch_programs import carry_of
from benchmarks.torch_arrays import as_float64, to_device, torch_module
from jaxsparse.timing import Program


def scan(problem: Problem, dtype: str, passed: str, *, algorithm: str, fill: int = 1) -> Program:
    """A layer by one algorithm, its batch filled up to a multiple of ``fill``.

    The rows that fill it repeat others, and have no part in the gradient.
    """
    batch = -(-problem.batch // fill) * fill
    form = Form(problem.cell, problem.hidden, batch, problem.length)
    check_units(form, algorithm)
    torch, is_forward = torch_module(), passed == "forward"
    calls = Calls(Network(loaded(), form, dtype, algorithm), training=not is_forward)
    weights = calls.weights()
    h, item = problem.hidden, getattr(torch, dtype).itemsize
    gates = [
        slice(offset, offset + h * h * item)
        for offset in calls.network.slots(weights.data_ptr()).recurrent
    ]
    host = problem.operands()
    matrices = to_device(host["weights"], dtype).split(h, 1)
    for gate, matrix in zip(gates, matrices, strict=True):
        weights[gate] = matrix.t().contiguous().view(torch.uint8).flatten()
    rows = np.arange(batch) % problem.batch
    x = to_device(host["x"][:, rows], dtype)
    carry = tuple(s[torch.from_numpy(rows).cuda()] for s in carry_of(problem, dtype))
    dy = to_device(host["cotangent"][:, rows] * (np.arange(batch) < problem.batch)[:, None], dtype)

    def results(out: Any) -> tuple[np.ndarray, ...]:
        if is_forward:
            return (as_float64(out[0][:, : problem.batch]),)
        made, d_input, *d_states = out
        kind = getattr(torch, dtype)
        parts = [as_float64(made[gate].view(kind).view(h, h)).T for gate in gates]
        return (
            np.concatenate(parts, 1),
            as_float64(d_input[:, : problem.batch]),
            *(as_float64(s[: problem.batch]) for s in d_states),
        )

    return program_of(calls, weights, x, carry, dy, passed, results)
