"""Stacks and their gradients in float64, step by step, to compare results with.

Cells are written out here, independently of all that is measured. JAX differentiates them. Nothing
is rounded on the way: operands are exact in every dtype, and tolerances allow for the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.operations import relative_error
from benchmarks.stacks.problems import Problem, name, names

# Largest difference over largest value that rounding of products, states and cells explains.
TOLERANCE = {"float32": 2**-14, "tf32": 2**-8, "float16": 2**-8, "bfloat16": 2**-5}

# Length of the difference over the length of a gradient, by when those of the weights are summed:
# at once, in float32, or step by step in their own dtype, as a loop that JAX differentiates does.
GRADIENT_TOLERANCE = {
    "at once": {"float32": 2**-12, "tf32": 2**-7, "float16": 2**-7, "bfloat16": 2**-5},
    "step by step": {"float32": 2**-12, "tf32": 2**-7, "float16": 2**-6, "bfloat16": 2**-3},
}

NORM_EPSILON = 1e-5

Carry = tuple[Any, ...]


def forward_error(problem: Problem, ys: np.ndarray) -> float:
    """Of the outputs of all steps."""
    return relative_error(ys, _forward(problem))


def gradient_error(problem: Problem, gradients: tuple[np.ndarray, ...]) -> float:
    """The largest of all gradients, which are in the order of `problems.names`."""
    expected = _gradients(problem)
    if [g.shape for g in gradients] != [e.shape for e in expected]:
        return float("inf")
    errors = [
        np.linalg.norm(np.asarray(g, np.float64) - e) / np.linalg.norm(e)
        for g, e in zip(gradients, expected, strict=True)
    ]
    return float(max(errors)) if np.isfinite(errors).all() else float("inf")


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + jnp.exp(-x))


def _rnn(a: list[Any], r: list[Any], carry: Carry) -> Carry:
    return (jnp.tanh(a[0] + r[0]),)


def _gru(a: list[Any], r: list[Any], carry: Carry) -> Carry:
    (h,) = carry
    reset, update = (_sigmoid(a[i] + r[i]) for i in (0, 1))
    new = jnp.tanh(a[2] + reset * r[2])
    return ((1 - update) * new + update * h,)


def _lstm(a: list[Any], r: list[Any], carry: Carry) -> Carry:
    c, _ = carry
    i, f, o = (_sigmoid(a[k] + r[k]) for k in (0, 1, 3))
    c = f * c + i * jnp.tanh(a[2] + r[2])
    return c, o * jnp.tanh(c)


def _slstm(a: list[Any], r: list[Any], carry: Carry) -> Carry:
    c, n, m, _ = carry
    i, f, z, o = (x + y for x, y in zip(a, r, strict=True))
    log_f = -jnp.logaddexp(0.0, -f) + m
    most = jnp.maximum(log_f, i)
    c = jnp.exp(log_f - most) * c + jnp.exp(i - most) * jnp.tanh(z)
    n = jnp.exp(log_f - most) * n + jnp.exp(i - most)
    return c, n, most, _sigmoid(o) * c / n


_CELLS: dict[str, Callable[..., Carry]] = {
    "RNN": _rnn,
    "GRU": _gru,
    "LSTM": _lstm,
    "sLSTM": _slstm,
}


def stack(problem: Problem, operands: dict[str, Any]) -> Any:
    """The output of the last layer, (length, batch, width)."""
    outputs = [operands["x"]]
    for layer in range(problem.layers):
        below = outputs[-1]
        if problem.norm:
            mean = below.mean(-1, keepdims=True)
            variance = ((below - mean) ** 2).mean(-1, keepdims=True)
            below = (below - mean) / jnp.sqrt(variance + NORM_EPSILON)
        y = jnp.concatenate(
            [_direction(problem, operands, below, layer, d) for d in range(problem.directions)], -1
        )
        outputs.append(y + outputs[layer + 1 - problem.skip] if problem.ends_skip(layer) else y)
    return outputs[-1]


def _direction(
    problem: Problem, operands: dict[str, Any], below: Any, layer: int, direction: int
) -> Any:
    own = {kind: operands[name(kind, layer, direction)] for kind in problem.kinds}
    topology = problem.topology()
    if topology is not None:
        rows = np.repeat(np.arange(topology.shape[0]), np.diff(np.asarray(topology.row_offsets)))
        at = np.asarray(topology.column_indices), rows
        own["U"] = jnp.zeros(topology.shape[::-1], own["U"].dtype).at[at].set(own["U"])
    carry = tuple(operands[name(leaf, layer, direction)] for leaf in problem.leaves)
    cell = _CELLS[problem.cell]

    @jax.checkpoint  # what a step computes is not kept for the way back, or it would not fit
    def step(carry: Carry, at: tuple[Any, Any]) -> tuple[Carry, Any]:
        x, reset = at
        carry = tuple(jnp.where(reset[:, None], 0, leaf) for leaf in carry)
        a = x @ own["W"] + own["b"] if problem.projected else x
        r = _recurrent(problem, carry[-1], own["U"])
        carry = cell(jnp.split(a, problem.gates, -1), jnp.split(r, problem.gates, -1), carry)
        return carry, carry[-1]

    resets = operands.get("resets", jnp.zeros((problem.length, problem.batch), bool))
    return jax.lax.scan(step, carry, (below, resets), reverse=direction == 1)[1]


def _recurrent(problem: Problem, h: Any, u: Any) -> Any:
    """(batch, gates * hidden), gate by gate."""
    if problem.heads == 1:
        return h @ u
    units = problem.hidden // problem.heads
    by_head = [
        (h[:, at * units : (at + 1) * units] @ u[at]).reshape(len(h), problem.gates, units)
        for at in range(problem.heads)
    ]
    return jnp.concatenate(by_head, -1).reshape(len(h), -1)


def _wide(problem: Problem) -> dict[str, Any]:
    return {
        key: jnp.asarray(x, bool if key == "resets" else jnp.float64)
        for key, x in problem.operands().items()
    }


@functools.lru_cache(maxsize=2)  # of a sparse stack, and the same with dense weights
def _forward(problem: Problem) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(jax.jit(functools.partial(stack, problem))(_wide(problem)))


@functools.lru_cache(maxsize=2)
def _gradients(problem: Problem) -> tuple[np.ndarray, ...]:
    """Of sum(cotangent * ys)."""

    def gradients(operands: dict[str, Any]) -> Any:
        fixed = {key: x for key, x in operands.items() if key in ("resets", "cotangent")}
        rest = {key: operands[key] for key in names(problem)}
        _, pull = jax.vjp(lambda given: stack(problem, given | fixed), rest)
        return pull(operands["cotangent"])[0]

    with jax.enable_x64(True):
        made = jax.jit(gradients)(_wide(problem))
        return tuple(np.asarray(made[key]) for key in names(problem))
