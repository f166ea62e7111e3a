"""The operands and results of the losses of rows: their roles, core dimensions and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxsparse.dynamic.loss_primitive.steps import steps_of
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import Signature


class Operands(NamedTuple):
    """The operands by their roles, each with leading batch dimensions (...)."""

    weights: Any  # (kinds, K h, P h)
    words: Any  # of the script
    labels: Any  # of all rows, leaves first
    head_weights: Any  # (h, C)
    head_bias: Any  # (C,)
    state: Any  # of leaves, (F, 1, h)
    carries: tuple[Any, ...]  # of leaves, (F, h) each
    inputs: tuple[Any, ...]  # of the step, (rows, parts, h) each, rows or h 1 where it repeats


class Results(NamedTuple):
    """The results by their roles; what is a gradient is one of the sum of all losses."""

    bias: Any  # the gradient by the head's bias, (C,)
    totals: Any  # the sum of losses, and how many rows have labels, (2,)
    logits: Any  # the gradient by those of all rows, leaves first, (all rows, C)
    leaves: Any  # the gradient by their states of their own losses, (F, 1, h)
    states: Any  # of the computed rows, (rows, 1, h)
    products: Any  # their gradient, (rows, P, h)
    reached: Any  # the gradient by the states of leaves of all other losses, (F, 1, h)
    carries: list[Any]  # the gradient of those of leaves, (F, h) each
    outputs: list[Any]  # of the adjoint, (rows, parts, h) each


def split(operands: Sequence[Any], params: dict[str, Any]) -> Operands:
    """The primitive's operands by their roles."""
    weights, words, labels, head_weights, head_bias, state, *rest = operands
    carries = params["step"].carries
    first = weights, words, labels, head_weights, head_bias, state
    return Operands(*first, tuple(rest[:carries]), tuple(rest[carries:]))


def joined(x: Operands) -> list[Any]:
    """The primitive's operands in their order."""
    return [*x[:6], *x.carries, *x.inputs]


def split_results(results: Sequence[Any], params: dict[str, Any]) -> Results:
    """The primitive's results by their roles."""
    bias, totals, logits, leaves, states, products, reached, *rest = results
    carries = params["step"].carries
    first = bias, totals, logits, leaves, states, products, reached
    return Results(*first, rest[:carries], rest[carries:])


def joined_results(x: Results) -> list[Any]:
    """The primitive's results in their order."""
    return [*x[:7], *x.carries, *x.outputs]


def signature(params: dict[str, Any]) -> Signature:
    """What the primitive declares: names and core dimensions of its operands and results."""
    step, form = params["step"], params["form"]
    given, computed, rows = form.leaves, form.computed, form.rows
    carries = range(step.carries)
    operands = [
        ("weights", "kinds k m"),
        ("script", f"{form.words}"),
        ("labels", f"{rows}"),
        ("head weights", "h c"),
        ("head bias", "c"),
        ("state", f"{given} 1 h"),
        *((f"carry {i}", f"{given} h") for i in carries),
    ]
    for i, (parts, span) in enumerate(zip(step.inputs, params["spans"], strict=True)):
        sizes = computed if "r" in span else 1, parts, "h" if "h" in span else 1
        operands.append((f"input {i}", " ".join(map(str, sizes))))
    adjoint = steps_of(step, params["active"], params["wide"]).adjoint
    results = [
        ("bias", "c"),
        ("totals", "2"),
        ("logits", f"{rows} c"),
        ("leaves", f"{given} 1 h"),
        ("states", f"{computed} 1 h"),
        ("products", f"{computed} {step.products} h"),
        ("reached", f"{given} 1 h"),
        *((f"carry {i}", f"{given} h") for i in carries),
        *((f"output {i}", f"{computed} {n} h") for i, n in enumerate(adjoint.outputs)),
    ]
    return Signature(tuple(operands), tuple(results))


def operand_names(params: dict[str, Any]) -> list[str]:
    """What the operands are called, in their order."""
    return [name for name, _ in signature(params).operands]


def result_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    """What is published, and outputs, are rounded to the dtype of states but for wide ones."""
    narrow = jnp.dtype(params["dtype"])
    wide, step = accumulator_dtype(narrow), params["step"]
    adjoint = steps_of(step, params["active"], params["wide"]).adjoint
    return [
        *(wide, wide, wide, wide, narrow, narrow),
        *(wide,) * (1 + step.carries),
        *(wide if w else narrow for w in adjoint.wide_outputs),
    ]
