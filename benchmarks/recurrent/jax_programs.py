"""Programs of JAX: `recurrent.scan`, and the `jax.lax.scan` that a user would write.

Weights, patterns, xs and carries are arguments of the compiled function. A gradient is that of the
sum of the outputs times a random cotangent, in weights, xs and the carry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsparse
from benchmarks.jax_programs import fresh_copies
from benchmarks.recurrent.problems import Problem
from jaxsparse import recurrent
from jaxsparse.csr import CSR
from jaxsparse.recurrent.explained import ExplainedScan
from jaxsparse.recurrent.plan import Plan
from jaxsparse.timing import Program
from jaxsparse.topology import Topology

CELLS = {"RNN": recurrent.elman(), "GRU": recurrent.GRU, "LSTM": recurrent.LSTM}


def _arrays(problem: Problem, weight_dtype: str, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Weights, xs, carry, cotangent. The cell state of an LSTM is float32."""
    x = problem.operands()
    h = jnp.asarray(x["h"], dtype)
    carry = (jnp.asarray(x["c"]), h) if "c" in x else h
    xs = jnp.tile(jnp.asarray(x["x"], dtype), problem.gates)
    return jnp.asarray(x["weights"], weight_dtype), xs, carry, jnp.asarray(x["cotangent"], dtype)


def _function(scan: Callable[..., Any], passed: str) -> Callable[..., Any]:
    """Of (weights, xs, carry, cotangent, topology)."""

    def forward(weights: Any, xs: Any, carry: Any, cotangent: Any, topology: Any) -> Any:
        return scan(weights, xs, carry, topology)

    def gradient(weights: Any, xs: Any, carry: Any, cotangent: Any, topology: Any) -> Any:
        _, pull = jax.vjp(lambda w, x, c: scan(w, x, c, topology)[1], weights, xs, carry)
        return pull(cotangent)

    return forward if passed == "forward" else gradient


def _program(
    problem: Problem,
    arrays: tuple[Any, ...],
    topology: Topology | None,
    scan: Callable[..., Any],
    passed: str,
) -> Program:
    layout = None if topology is None else topology.layouts.get("scan_layout")
    operands, bytes_read = fresh_copies(
        (*arrays, topology), (arrays[:3] if passed == "forward" else arrays, layout)
    )

    def results(out: Any) -> tuple[np.ndarray, ...]:
        if passed == "forward":
            return (np.asarray(out[1], np.float64),)
        weights, xs, *carry = (np.asarray(x, np.float64) for x in jax.tree.leaves(out))
        # All gates have the same input.
        return weights, xs.reshape(*xs.shape[:2], problem.gates, -1).sum(2), *carry

    return Program(
        function=jax.jit(_function(scan, passed)),
        operands=operands,
        bytes_read=bytes_read,
        wait=jax.block_until_ready,
        results=results,
    )


# ---- jaxsparse ----


def _our_scan(problem: Problem, **options: Any) -> Callable[..., Any]:
    def scan(weights: Any, xs: Any, carry: Any, topology: Any) -> Any:
        matrix = weights if topology is None else CSR(weights, topology)
        return recurrent.scan(CELLS[problem.cell], matrix, carry, xs, **options)

    return scan


Layout = tuple[tuple[str, Any], ...]
"""Options of `recurrent.pack` that a program asks for."""


@functools.lru_cache(maxsize=2)
def _packed(problem: Problem, layout: Layout = ()) -> Topology | None:
    """The pattern, laid out where it is for a GPU and fits it."""
    topology = problem.topology()
    if topology is None or jax.default_backend() != "gpu":
        return topology
    matrix = CSR(jnp.zeros(topology.nse, problem.weight_dtype), topology)
    try:
        return recurrent.pack(
            matrix, batch=problem.batch, dtype=problem.state_dtype, **dict(layout)
        ).topology
    except ValueError:  # scan takes the plain path then, as the row's plan says
        return topology


def jaxsparse_scan(
    problem: Problem, dtype: str, passed: str, layout: Layout = (), **options: Any
) -> Program:
    """`recurrent.scan`, with its option ``variant``."""
    arrays = _arrays(problem, problem.weight_dtype, dtype)
    topology = _packed(problem, layout)
    return _program(problem, arrays, topology, _our_scan(problem, **options), passed)


def jaxsparse_plans(
    problem: Problem, passed: str, layout: Layout = (), **options: Any
) -> tuple[str | None, float | None]:
    """What runs on this GPU, scan by scan, and the time of a step that is predicted for it.

    None and None without a GPU.
    """
    if jax.default_backend() != "gpu":
        return None, None
    arrays = jax.eval_shape(lambda: _arrays(problem, problem.weight_dtype, problem.state_dtype))
    function = _function(_our_scan(problem, **options), passed)
    topology = _packed(problem, layout)
    explanation = jaxsparse.explain(function, *arrays, topology)
    plans = [call.plan for call in explanation if isinstance(call, ExplainedScan)]
    whole = all(isinstance(plan, Plan) for plan in plans)
    predicted = sum(plan.microseconds for plan in plans if isinstance(plan, Plan))
    return "; ".join(map(str, plans)), predicted if whole else None


def has_plan(problem: Problem) -> bool:
    """Whether the present GPU, or else an H200, has a kernel for a layer with dense weights."""
    t, b, h, gates = problem.length, problem.batch, problem.hidden, problem.gates
    state = jax.ShapeDtypeStruct((b, h), problem.state_dtype)
    arrays = (
        jax.ShapeDtypeStruct((h, gates * h), problem.weight_dtype),
        jax.ShapeDtypeStruct((t, b, gates * h), problem.state_dtype),
        (state, state) if problem.cell == "LSTM" else state,
    )
    (scan,) = jaxsparse.explain(
        lambda weights, xs, carry: recurrent.scan(CELLS[problem.cell], weights, carry, xs), *arrays
    )
    return isinstance(scan, ExplainedScan) and isinstance(scan.plan, Plan)


# ---- jax.lax.scan ----


def lax_scan(problem: Problem, dtype: str, passed: str, *, unroll: int) -> Program:
    """The same cell with dense weights in the dtype of the state.

    Products are summed and the cell is computed in float32, as in ours. The gradient of the weights
    is what JAX makes of the loop: a sum step by step, in their dtype.
    """
    cell, gates = CELLS[problem.cell], problem.gates

    def scan(weights: Any, xs: Any, carry: Any, topology: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            product = jnp.dot(
                jax.tree.leaves(carry)[-1],
                weights,
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            wide = jax.tree.map(lambda a: a.astype(jnp.float32), carry)
            wide_x, r = (tuple(jnp.split(a.astype(jnp.float32), gates, -1)) for a in (x, product))
            new, y = cell(wide_x, r, wide)
            return jax.tree.map(lambda a, b: a.astype(b.dtype), new, carry), y.astype(x.dtype)

        return jax.lax.scan(step, carry, xs, unroll=unroll)

    return _program(problem, _arrays(problem, dtype, dtype), None, scan, passed)
