"""The operands and results of a scan: their roles, core dimensions and dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxsparse.ops.arguments import PATTERN
from jaxsparse.primitive import Signature

FULL = "tbh"  # the dimensions of an input that it does not repeat along


class Operands(NamedTuple):
    """The operands of a scan by their roles, each with leading dimensions (..., directions)."""

    # (k, m), or the values and the pattern of a sparse (m, k) matrix, with its layout on chip and
    # its transpose's if there are ``forms``.
    weights: tuple[Any, ...]
    state: Any  # (b, S, h)
    carries: tuple[Any, ...]  # (b, h) each
    inputs: tuple[Any, ...]  # (t, b, parts, h) each, t, b or h being 1 where it repeats


def split(operands: Sequence[Any], params: dict[str, Any]) -> Operands:
    """The primitive's operands, or what stands for them, by their roles."""
    step = params["step"]
    count = (1 + len(PATTERN) if params["sparse"] else 1) + len(params["forms"])
    rest = operands[count + 1 :]
    return Operands(
        tuple(operands[:count]),
        operands[count],
        tuple(rest[: step.carries]),
        tuple(rest[step.carries :]),
    )


def runs_of_order(reversed: Sequence[bool]) -> list[tuple[slice, bool]]:
    """Directions side by side that have one order in time, and whether they are reversed."""
    runs, first = [], 0
    for backwards, own in itertools.groupby(reversed):
        last = first + len(list(own))
        runs.append((slice(first, last), backwards))
        first = last
    return runs


def signature(params: dict[str, Any]) -> Signature:
    """What the primitive declares: names and core dimensions of its operands and results."""
    step = params["step"]
    d, t = len(params["reversed"]), params["length"]
    if params["sparse"]:
        layouts = zip(("layout", "transposed layout"), params["forms"], strict=False)
        weights = (
            *((name, f"{d} {spec}") for name, spec in (("recurrent", "e"), *PATTERN)),
            *((name, f"{d} {form.words}") for name, form in layouts),
        )
    else:
        weights = (("recurrent", f"{d} k m"),)
    inputs = []
    for i, (parts, span) in enumerate(zip(step.inputs, params["spans"], strict=True)):
        size = {"t": t, "b": "b", "h": "h"}
        time, rows, units = (size[dim] if dim in span else 1 for dim in FULL)
        inputs.append((f"input {i}", f"{d} {time} {rows} {parts} {units}"))
    return Signature(
        (
            *weights,
            ("state", f"{d} b {step.states} h"),
            *((f"carry {i}", f"{d} b h") for i in range(step.carries)),
            *inputs,
        ),
        (
            ("states", f"{d} {t} b {step.states} h"),
            *((f"carry {i}", f"{d} b h") for i in range(step.carries)),
            *((f"output {i}", f"{d} {t} b {n} h") for i, n in enumerate(step.outputs)),
        ),
    )


def operand_names(params: dict[str, Any]) -> list[str]:
    """What the operands are called, in their order."""
    return [name for name, _ in signature(params).operands]


def result_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    """Outputs are rounded to the dtype of the state, carries keep theirs."""
    operands = split(avals, params)
    carries = [x.dtype for x in operands.carries]
    return [operands.state.dtype, *carries, *[operands.state.dtype] * len(params["step"].outputs)]
