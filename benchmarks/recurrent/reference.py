"""Recurrent layers and their gradients in float64, written out, to compare results with.

Nothing is rounded on the way: operands are exact in every dtype, and tolerances allow for the rest.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.operations import relative_error
from benchmarks.recurrent.problems import Problem

# Largest difference over largest value that rounding of products, states and the cell explains; in
# float32 what libraries save on tanh counts for more.
TOLERANCE = {"float32": 2**-14, "float16": 2**-8, "bfloat16": 2**-5}

# Length of the difference over the length of a gradient, by when that of the weights is summed: at
# once, in float32, or step by step in their own dtype, as a loop that JAX differentiates does.
GRADIENT_TOLERANCE = {
    "at once": {"float32": 2**-12, "float16": 2**-8, "bfloat16": 2**-6},
    "step by step": {"float32": 2**-12, "float16": 2**-6, "bfloat16": 2**-3},
}

Array = np.ndarray
Carry = tuple[Array, ...]


def forward_error(problem: Problem, ys: Array, *, narrow: bool = False) -> float:
    """Of the outputs of all steps."""
    return relative_error(ys, _scan(problem, narrow)[-1])


def gradient_error(problem: Problem, gradients: Carry, *, narrow: bool = False) -> float:
    """The largest of all gradients: of weights, input, and the leaves of the carry."""
    expected = _gradients(problem, narrow)
    if [g.shape for g in gradients] != [e.shape for e in expected]:
        return float("inf")
    errors = [
        np.linalg.norm(g - e) / np.linalg.norm(e) for g, e in zip(gradients, expected, strict=True)
    ]
    return float(max(errors)) if np.isfinite(errors).all() else float("inf")


def narrow_input(problem: Problem) -> tuple[Array, Array]:
    """An input of one feature (length, batch, 1), and its weights (1, gates * hidden)."""
    x = problem.operands()["x"]
    return x[:, :, :1], np.resize(x[0, 0], (1, problem.gates * problem.hidden))


def _pre_activations(problem: Problem, narrow: bool) -> Array:
    """Of the input, (length, batch, gates, hidden)."""
    if narrow:
        x, weights = (a.astype(np.float64) for a in narrow_input(problem))
        xs = x @ weights
    else:
        xs = np.tile(problem.operands()["x"].astype(np.float64), problem.gates)
    return xs.reshape(problem.length, problem.batch, problem.gates, problem.hidden)


def _matrix(problem: Problem) -> Any:
    """(gates * hidden, hidden)."""
    weights, topology = problem.operands()["weights"].astype(np.float64), problem.topology()
    if topology is None:
        return weights.T
    parts = (weights, np.asarray(topology.column_indices), np.asarray(topology.row_offsets))
    return scipy.sparse.csr_array(parts, shape=topology.shape)


def _sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


def _step(cell: str, x: Array, r: Array, carry: Carry) -> tuple[Carry, Carry]:
    """(batch, gates, hidden) twice, and the carry; the new one, and what its derivative reads."""
    if cell == "RNN":
        h = np.tanh(x + r)[:, 0]
        return (h,), (h,)
    if cell == "GRU":
        (h,) = carry
        reset, update = (_sigmoid(x[:, i] + r[:, i]) for i in (0, 1))
        new = np.tanh(x[:, 2] + reset * r[:, 2])
        return (new + update * (h - new),), (h, reset, update, new, r[:, 2])
    c_before, _ = carry
    i, f, o = (_sigmoid(x[:, k] + r[:, k]) for k in (0, 1, 3))
    g = np.tanh(x[:, 2] + r[:, 2])
    c = f * c_before + i * g
    return (c, o * np.tanh(c)), (c_before, i, f, g, o, np.tanh(c))


def _step_back(cell: str, kept: Carry, d: Carry) -> tuple[Array, Array, Carry]:
    """Gradients of x, of r, and of the carry but for what goes through r."""
    dh = d[-1]
    if cell == "RNN":
        dx = (dh * (1 - kept[0] ** 2))[:, None]
        return dx, dx, (np.zeros_like(dh),)
    if cell == "GRU":
        h, reset, update, new, r_new = kept
        d_new = dh * (1 - update) * (1 - new**2)
        d_reset = d_new * r_new * reset * (1 - reset)
        d_update = dh * (h - new) * update * (1 - update)
        dx = np.stack([d_reset, d_update, d_new], 1)
        dr = np.stack([d_reset, d_update, d_new * reset], 1)
        return dx, dr, (dh * update,)
    c_before, i, f, g, o, tanh_c = kept
    dc = d[0] + dh * o * (1 - tanh_c**2)
    dx = np.stack(
        [
            dc * g * i * (1 - i),
            dc * c_before * f * (1 - f),
            dc * i * (1 - g**2),
            dh * tanh_c * o * (1 - o),
        ],
        1,
    )
    return dx, dx, (dc * f, np.zeros_like(dh))


@functools.lru_cache(maxsize=2)  # of one layer, sparse and with dense weights
def _scan(problem: Problem, narrow: bool) -> tuple[Any, list[Carry], Array, Array]:
    """The matrix, what the steps' derivatives read, the states before them, and ys."""
    operands, matrix = problem.operands(), _matrix(problem)
    xs = _pre_activations(problem, narrow)
    carry = tuple(operands[name].astype(np.float64) for name in ("c", "h") if name in operands)
    kept, states = [], [carry[-1]]
    for x in xs:
        carry, read = _step(problem.cell, x, (matrix @ states[-1].T).T.reshape(x.shape), carry)
        kept.append(read)
        states.append(carry[-1])
    return matrix, kept, np.stack(states[:-1]), np.stack(states[1:])


@functools.lru_cache(maxsize=4)
def _gradients(problem: Problem, narrow: bool) -> Carry:
    """Of sum(cotangent * ys): of weights, input, and the leaves of the carry."""
    matrix, kept, states, _ = _scan(problem, narrow)
    cotangent = problem.operands()["cotangent"].astype(np.float64)
    d: Carry = tuple(np.zeros_like(states[0]) for _ in range(2 if problem.cell == "LSTM" else 1))
    dxs, drs = [], []
    for read, dy in zip(reversed(kept), cotangent[::-1], strict=True):
        dx, dr, d = _step_back(problem.cell, read, (*d[:-1], d[-1] + dy))
        dxs.append(dx)
        drs.append(dr)
        d = (*d[:-1], d[-1] + (matrix.T @ dr.reshape(len(dr), -1).T).T)
    dx_all = np.stack(dxs[::-1])
    dr_all = np.stack(drs[::-1]).reshape(-1, problem.gates * problem.hidden)
    before = states.reshape(-1, problem.hidden)
    topology = problem.topology()
    if topology is None:
        d_weights = before.T @ dr_all
    else:
        rows = np.repeat(np.arange(topology.shape[0]), np.diff(np.asarray(topology.row_offsets)))
        columns = np.asarray(topology.column_indices)
        d_weights = (dr_all.T @ before)[rows, columns]
    if narrow:
        d_input = dx_all.reshape(*dx_all.shape[:2], -1) @ narrow_input(problem)[1].T
    else:
        d_input = dx_all.sum(2)
    return (d_weights, d_input, *d)
