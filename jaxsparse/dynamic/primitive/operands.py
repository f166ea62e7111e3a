"""The operands and results of a scan over graphs: their roles, core dimensions and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import Signature

FULL = "rh"  # the dimensions of an input that it does not repeat along: rows and units


class Operands(NamedTuple):
    """The operands of a scan by their roles, each with leading batch dimensions (...)."""

    weights: Any  # (kinds, K h, P h)
    words: Any  # of the script
    state: Any  # of the given rows, (F, 1, h); None where it emits
    carries: tuple[Any, ...]  # of the given rows, (F, h) each; () where it emits
    inputs: tuple[Any, ...]  # (rows, parts, h) each, rows or h being 1 where it repeats


class Results(NamedTuple):
    """The results of a scan by their roles."""

    states: Any  # of the computed rows, (rows, parts, h)
    reached: Any  # what was emitted to given rows, (F, 1, h); None where it gathers
    carries: list[Any]  # of the computed rows where it gathers, of the given ones where it emits
    outputs: list[Any]  # (rows, parts, h) each


def split(operands: Sequence[Any], params: dict[str, Any]) -> Operands:
    """The primitive's operands, or what stands for them, by their roles."""
    weights, words, *rest = operands
    if params["emits"]:
        return Operands(weights, words, None, (), tuple(rest))
    state, *rest = rest
    carries = params["step"].carries
    return Operands(weights, words, state, tuple(rest[:carries]), tuple(rest[carries:]))


def joined(x: Operands) -> list[Any]:
    """The primitive's operands in their order."""
    first = [] if x.state is None else [x.state, *x.carries]
    return [x.weights, x.words, *first, *x.inputs]


def split_results(results: Sequence[Any], params: dict[str, Any]) -> Results:
    """The primitive's results, or what stands for them, by their roles."""
    states, *rest = results
    reached = rest.pop(0) if params["emits"] else None
    carries = params["step"].carries
    return Results(states, reached, list(rest[:carries]), list(rest[carries:]))


def joined_results(x: Results) -> list[Any]:
    """The primitive's results in their order."""
    return [x.states, *([] if x.reached is None else [x.reached]), *x.carries, *x.outputs]


def signature(params: dict[str, Any]) -> Signature:
    """What the primitive declares: names and core dimensions of its operands and results."""
    step, form, emits = params["step"], params["form"], params["emits"]
    given, computed = form.leaves, form.computed
    carries = [f"carry {i}" for i in range(step.carries)]
    inputs = []
    for i, (parts, span) in enumerate(zip(step.inputs, params["spans"], strict=True)):
        rows, units = computed if "r" in span else 1, "h" if "h" in span else "1"
        inputs.append((f"input {i}", f"{rows} {parts} {units}"))
    operands = [("weights", "kinds k m"), ("script", f"{form.words}")]
    results = [("states", f"{computed} {step.states} h")]
    if emits:
        results += [("reached", f"{given} 1 h"), *((name, f"{given} h") for name in carries)]
    else:
        operands += [("state", f"{given} 1 h"), *((name, f"{given} h") for name in carries)]
        results += [(name, f"{computed} h") for name in carries]
    outputs = [(f"output {i}", f"{computed} {n} h") for i, n in enumerate(step.outputs)]
    return Signature((*operands, *inputs), (*results, *outputs))


def operand_names(params: dict[str, Any]) -> list[str]:
    """What the operands are called, in their order."""
    return [name for name, _ in signature(params).operands]


def result_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    """States and outputs are rounded to the dtype of states but for wide ones; sums are not."""
    step, narrow = params["step"], jnp.dtype(params["dtype"])
    wide = accumulator_dtype(narrow)
    return [
        narrow,
        *(wide,) * (params["emits"] + step.carries),
        *(wide if w else narrow for w in step.wide_outputs),
    ]
