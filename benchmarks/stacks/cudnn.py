"""Programs of cuDNN's own interface: whole stacks, inputs multiplied, every algorithm forced."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cudnn.library import loaded
from benchmarks.cudnn.network import Calls, Form, Network, Slots, check_units
from benchmarks.cudnn.programs import program_of
from benchmarks.stacks.jax_programs import stored
from benchmarks.stacks.problems import Problem, name, names
from benchmarks.stacks.torch_programs import states
from benchmarks.torch_arrays import as_float64, to_device, torch_module
from jaxsparse.timing import Program


def stack(problem: Problem, dtype: str, passed: str, *, algorithm: str, fill: int = 1) -> Program:
    """A stack by one algorithm, its batch filled up to a multiple of ``fill``.

    The rows that fill it repeat others, and have no part in the gradient.
    """
    batch = -(-problem.batch // fill) * fill
    form = Form(
        problem.cell,
        problem.hidden,
        batch,
        problem.length,
        problem.layers,
        problem.directions,
        problem.inputs(0),
    )
    check_units(form, algorithm)
    torch, is_forward, host = torch_module(), passed == "forward", problem.operands()
    calls = Calls(Network(loaded(), form, dtype, algorithm), training=not is_forward)
    weights = calls.weights()
    kind = getattr(torch, stored(dtype))
    pairs = [(at, d) for at in range(problem.layers) for d in range(problem.directions)]
    slots = {pair: calls.network.slots(weights.data_ptr(), *pair) for pair in pairs}
    places = {
        name(key, *pair): _places(problem, key, slots[pair], host[name(key, *pair)], kind)
        for pair in pairs
        for key in ("W", "U", "b")
    }
    for key, parts in places.items():
        for part, gate in zip(parts, np.split(host[key].T, problem.gates), strict=True):
            weights[part] = to_device(gate, stored(dtype)).view(torch.uint8).flatten()
    rows = np.arange(batch) % problem.batch
    index = torch.from_numpy(rows).cuda()
    x = to_device(host["x"][:, rows], stored(dtype))
    carry = tuple(s[:, index].contiguous() for s in states(problem, stored(dtype)))
    counts = (np.arange(batch) < problem.batch)[:, None]
    dy = to_device(host["cotangent"][:, rows] * counts, stored(dtype))

    def results(out: Any) -> tuple[np.ndarray, ...]:
        if is_forward:
            return (as_float64(out[0][:, : problem.batch]),)
        d_weights, d_input, *d_carry = out
        made = {"x": as_float64(d_input[:, : problem.batch])}
        for key, parts in places.items():
            gates = [as_float64(d_weights[part].view(kind)) for part in parts]
            shape = host[key].T.shape
            made[key] = np.concatenate(gates).reshape(shape).T
        for leaf, array in zip(problem.leaves, d_carry, strict=True):
            by_pair = as_float64(array[:, : problem.batch])
            made |= {name(leaf, *pair): by_pair[i] for i, pair in enumerate(pairs)}
        return tuple(made[key] for key in names(problem))

    return program_of(calls, weights, x, carry, dy, passed, results)


def _places(problem: Problem, key: str, slots: Slots, array: np.ndarray, kind: Any) -> list[slice]:
    """Where each gate of an operand lies, in bytes."""
    offsets = {"W": slots.inputs, "U": slots.recurrent, "b": slots.biases}[key]
    count = array.size // problem.gates * kind.itemsize
    return [slice(offset, offset + count) for offset in offsets]
