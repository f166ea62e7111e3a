"""Programs of PyTorch's modules of several layers, which call cuDNN as PyTorch sees fit."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from benchmarks.stacks.jax_programs import stored
from benchmarks.stacks.problems import Problem, name, names
from benchmarks.torch_arrays import as_float64, nbytes, tf32, to_device, torch_module
from jaxsparse.timing import Program


def states(problem: Problem, dtype: str) -> tuple[Any, ...]:
    """The leaves of the carry, the state last: (layers * directions, batch, hidden)."""
    host = problem.operands()
    return tuple(
        to_device(
            np.stack(
                [
                    host[name(leaf, layer, direction)]
                    for layer in range(problem.layers)
                    for direction in range(problem.directions)
                ]
            ),
            dtype,
        )
        for leaf in problem.leaves
    )


_PARAMETERS = {"W": "weight_ih", "U": "weight_hh", "b": "bias_ih"}


def _parameters(problem: Problem, module: Any) -> dict[str, Any]:
    """By the names of operands."""
    return {
        name(kind, layer, direction): getattr(
            module, f"{theirs}_l{layer}" + ("_reverse" if direction else "")
        )
        for kind, theirs in _PARAMETERS.items()
        for layer in range(problem.layers)
        for direction in range(problem.directions)
    }


def module(problem: Problem, dtype: str, passed: str) -> Program:
    """`torch.nn.RNN`, `GRU` or `LSTM`; the second bias that they have is zero."""
    torch, is_forward, kind = torch_module(), passed == "forward", stored(dtype)
    host = problem.operands()
    layers = getattr(torch.nn, problem.cell)(
        problem.inputs(0),
        problem.hidden,
        problem.layers,
        bidirectional=problem.directions == 2,
        device="cuda",
    )
    with torch.no_grad():
        for key, parameter in layers.named_parameters():
            if key.startswith("bias_hh"):
                parameter.zero_()
        for key, parameter in _parameters(problem, layers).items():
            parameter.copy_(to_device(host[key].T, "float32"))
    layers = layers.to(getattr(torch, kind)).train(not is_forward)
    x, cotangent = (to_device(host[key], kind) for key in ("x", "cotangent"))
    carry = states(problem, kind)
    differentiable = list(names(problem))

    def operands() -> tuple[Any, ...]:
        own = copy.deepcopy(layers)
        own.flatten_parameters()
        tensors = (t.clone().requires_grad_(not is_forward) for t in (x, *carry))
        return own, cotangent.clone(), *tensors

    def run(own: Any, x: Any, *carry: Any) -> Any:
        # PyTorch has the state first: (h, c).
        given = tuple(reversed(carry))
        with tf32(torch, dtype == "tf32"):
            return own(x, given if len(given) > 1 else given[0])[0]

    def forward(own: Any, cotangent: Any, x: Any, *carry: Any) -> Any:
        with torch.no_grad():
            return (run(own, x, *carry),)

    def gradient(own: Any, cotangent: Any, x: Any, *carry: Any) -> Any:
        ys = run(own, x, *carry)
        with tf32(torch, dtype == "tf32"):
            parameters = _parameters(problem, own)
            wanted = (*parameters.values(), x, *carry)
            made = torch.autograd.grad(ys, wanted, cotangent)
        return dict(zip((*parameters, "x", *problem.leaves), made, strict=True))

    def results(out: Any) -> tuple[np.ndarray, ...]:
        if is_forward:
            return (as_float64(out[0]),)
        made = {key: as_float64(t) for key, t in out.items() if key not in problem.leaves}
        made = {key: t.T if t.ndim == 2 else t for key, t in made.items()}
        for leaf in problem.leaves:
            pairs = iter(as_float64(out[leaf]))
            for layer in range(problem.layers):
                for direction in range(problem.directions):
                    made[name(leaf, layer, direction)] = next(pairs)
        return tuple(made[key] for key in differentiable)

    read = [*layers.parameters(), x, *carry, *(() if is_forward else (cotangent,))]
    return Program(
        function=forward if is_forward else gradient,
        operands=operands,
        bytes_read=nbytes(read),
        wait=lambda out: torch.cuda.synchronize(),
        results=results,
    )
