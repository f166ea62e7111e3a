"""Programs of jaxsparse: stacks of layers in one call, and a scan for each layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxsparse
from benchmarks.stacks.jax_programs import (
    CELLS,
    PRECISION,
    Layer,
    Operands,
    ahead,
    arrays,
    by_names,
    carry_of,
    gradient_of,
    layer_by_layer,
    program,
    stored,
)
from benchmarks.stacks.problems import Problem, name
from benchmarks.stacks.reference import NORM_EPSILON
from jaxsparse import recurrent
from jaxsparse.csr import CSR
from jaxsparse.timing import Program


def _operands(problem: Problem, dtype: str) -> Operands:
    """With the pattern, laid out where it is for a GPU and fits it."""
    operands, topology = arrays(problem, dtype, "float32"), problem.topology()
    if topology is None:
        return operands
    if jax.default_backend() == "gpu":
        matrix = CSR(jnp.zeros(topology.nse, dtype), topology)
        with contextlib.suppress(ValueError):  # it takes the plain path then, as its plan says
            topology = recurrent.pack(matrix, batch=problem.batch, dtype=dtype).topology
    return {**operands, "topology": topology}


def _matrix(operands: Operands, weights: Any) -> Any:
    return CSR(weights, operands["topology"]) if "topology" in operands else weights


Stack = Callable[[Operands], Any]
"""Of all operands: the output."""


def stack_scan(problem: Problem, dtype: str, passed: str, variant: str | None = None) -> Program:
    """`recurrent.stack_scan` or `bidirectional_stack_scan`."""
    return program(
        _operands(problem, stored(dtype)),
        stack(problem, dtype, variant),
        dtype,
        passed,
        functools.partial(by_names, problem),
    )


def stack_plan(problem: Problem, passed: str, variant: str | None = None) -> str | None:
    """What runs on this GPU, each plan once; None without a GPU."""
    return _plan(problem, passed, stack(problem, problem.state_dtype, variant))


def _precision(dtype: str) -> str | None:
    return PRECISION["tf32"] if dtype == "tf32" else None


def stack(
    problem: Problem,
    dtype: str,
    variant: str | None = None,
    scan: Callable[..., Any] = recurrent.stack_scan,
) -> Stack:
    """All layers, those of one direction by a scan of several."""
    cell = CELLS[problem.cell]

    def run(operands: Operands) -> Any:
        def layer(at: int, direction: int) -> recurrent.Layer:
            w, u, b = (operands.get(name(kind, at, direction)) for kind in ("W", "U", "b"))
            return recurrent.Layer(
                cell,
                recurrent=_matrix(operands, u),
                input=w,
                bias=b,
                skip=problem.skip if problem.ends_skip(at) else None,
                norm="layer" if problem.norm else None,
                norm_epsilon=NORM_EPSILON,
            )

        def carry(at: int, direction: int) -> Any:
            leaves = tuple(operands[name(leaf, at, direction)] for leaf in problem.leaves)
            return leaves if len(leaves) > 1 else leaves[0]

        resets = operands.get("resets")
        options: dict[str, Any] = {"precision": _precision(dtype), "variant": variant}
        of_layers = range(problem.layers)
        if problem.directions == 1:
            layers, carries = ([made(at, 0) for at in of_layers] for made in (layer, carry))
            return scan(layers, carries, operands["x"], resets=resets, **options)[1]
        pairs, of_pairs = (
            [(made(at, 0), made(at, 1)) for at in of_layers] for made in (layer, carry)
        )
        resets = resets if resets is None else (resets, resets)
        return recurrent.bidirectional_stack_scan(
            pairs, of_pairs, operands["x"], resets=resets, **options
        )[1]

    return run


def scans(problem: Problem, dtype: str, passed: str) -> Program:
    """`recurrent.scan` or `bidirectional_scan` for each layer, after its inputs' products."""
    layer = _layer(problem, dtype)
    return program(
        _operands(problem, stored(dtype)),
        lambda operands: layer_by_layer(problem, operands, layer),
        dtype,
        passed,
        functools.partial(by_names, problem),
    )


def scans_plan(problem: Problem, passed: str) -> str | None:
    """What runs on this GPU, each plan once; None without a GPU."""
    layer = _layer(problem, problem.state_dtype)
    return _plan(problem, passed, lambda operands: layer_by_layer(problem, operands, layer))


def _layer(problem: Problem, dtype: str) -> Layer:
    cell, precision = CELLS[problem.cell], _precision(dtype)

    def layer(own: list[Operands], below: Any) -> Any:
        weights, carries, xs = zip(
            *((_matrix(d, d["U"]), carry_of(d), ahead(d, below)) for d in own), strict=True
        )
        resets = own[0].get("resets")
        if len(own) == 1:
            return recurrent.scan(
                cell, weights[0], carries[0], xs[0], resets=resets, precision=precision
            )[1]
        resets = resets if resets is None else (resets, resets)
        _, ys = recurrent.bidirectional_scan(
            cell, weights, carries, xs, resets=resets, precision=precision
        )
        return jnp.concatenate(ys, -1)

    return layer


def _plan(problem: Problem, passed: str, stack: Stack) -> str | None:
    """What an explanation says of each operation for the GPU, in one line and once."""
    if jax.default_backend() != "gpu":
        return None
    return told(stack, _operands(problem, problem.state_dtype), passed)


def told(stack: Stack, operands: Operands, passed: str) -> str:
    """The same of a function of such operands."""
    function = stack if passed == "forward" else functools.partial(gradient_of, stack)
    plans = [
        " ".join(line.strip() for line in str(call).splitlines()[1:])  # the first is what is asked
        for call in jaxsparse.explain(function, operands)
        if call.operation.startswith("recurrent")
    ]
    return "; ".join(dict.fromkeys(plans))
