"""The persistent kernel behind a recurrent scan: its source, and the call of its FFI target."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from jaxsparse import _ffi
from jaxsparse.device import AnyDevice, Device
from jaxsparse.primitive import Fallback, FfiCall, UnavailableError
from jaxsparse.recurrent import printer
from jaxsparse.recurrent.plan import (
    VARIANTS,
    NoPlan,
    Plan,
    ScanForm,
    make_plan,
)
from jaxsparse.recurrent.primitive.operands import runs_of_order
from jaxsparse.recurrent.step import Step

_WAIT_LIMIT = "JAXSPARSE_SCAN_WAIT_LIMIT"
_DEFAULT_WAIT_LIMIT = 10.0  # seconds
_DELAY = "JAXSPARSE_SCAN_DELAY"


def wait_limit() -> float:
    """Seconds that a block waits for others before the scan times out. Read when lowering."""
    text = os.environ.get(_WAIT_LIMIT, "")
    try:
        limit = float(text) if text else _DEFAULT_WAIT_LIMIT
    except ValueError:
        limit = -1.0
    if not 0 < limit < 1e9:
        raise ValueError(f"{_WAIT_LIMIT} must be a number of seconds above 0, got {text!r}")
    return limit


def most_delay() -> int:
    """Clock cycles by which kernels hold up their warps now and then, to test their exchange."""
    text = os.environ.get(_DELAY, "0")
    if not text.isdecimal() or int(text) >= 2**30:  # the counter has 32 bits
        raise ValueError(f"{_DELAY} must be a number of clock cycles below 2^30, got {text!r}")
    return int(text)


def form_of(params: dict[str, Any], avals: Sequence[ShapedArray], names: Sequence[str]) -> ScanForm:
    """The form of a scan for operands of these types."""
    step: Step = params["step"]
    by_name = dict(zip(names, avals, strict=True))
    state, weights = by_name["state"], by_name["recurrent"]
    directions = len(params["reversed"])
    return ScanForm(
        products=step.products,
        states=step.states,
        inputs=sum(step.inputs),
        outputs=sum(step.outputs),
        arrays=max(step.carries, len(step.inputs), len(step.outputs)),
        hidden=state.shape[-1],
        batch=state.shape[-3],
        length=params["length"],
        state_dtype=state.dtype.name,
        weight_dtype=weights.dtype.name,
        sparse=params["sparse"],
        layout_form=params["forms"][params["transposed"]] if params["forms"] else None,
        not_laid_out=params["not_laid_out"],
        input_dtypes=tuple(by_name[f"input {i}"].dtype.name for i in range(len(step.inputs))),
        output_dtypes=tuple("float32" if w else state.dtype.name for w in step.wide_outputs),
        directions=directions,
        loops=directions if params["sparse"] else len(runs_of_order(params["reversed"])),
    )


@functools.lru_cache(maxsize=1024)
def printed_step(step: Step, *, prepares: bool = False) -> str:
    """A step as device code, in one part or two; the same for two that are one program.

    Raises:
        ValueError: if it can't be printed.
    """
    return printer.print_step(
        step.jaxpr,
        name="PrintedStep",
        products=step.products,
        states=step.states,
        carries=step.carries_taken,
        inputs=sum(step.inputs),
        outputs=sum(step.outputs),
        carries_made=step.carries_made,
        prepares=prepares,
    )


def source(step: Step, form: ScanForm, plan: Plan, delay: int) -> str:
    """The kernel's translation unit: the step and the plan, printed, and the kernel.

    ``delay`` is `most_delay`.
    """
    return (
        f'#include "{plan.file}"\n#include "cuda/pointwise.cuh"\n\n'
        f"{printed_step(step)}\n"
        "struct PrintedPlan {\n"
        f"  using State = {_ffi.SCAN_DTYPES[form.state_dtype]};\n"
        f"  using Weight = {_ffi.SCAN_DTYPES[form.weight_dtype]};\n"
        f"{printer.print_arrays(step.inputs, form.input_dtypes, step.outputs, form.output_dtypes)}"
        f"{plan.constants}"
        f"  static constexpr unsigned kMostDelay = {delay};\n"
        "};\n"
    )


def launch_attributes(plan: Plan) -> dict[str, Any]:
    """What a target is told of a kernel's launch."""
    return {
        "groups": plan.groups,
        "scans": plan.scans,
        "blocks": plan.layers * plan.scans * plan.blocks,
        "threads": plan.threads,
        "cluster": plan.cluster,
        "shared_bytes": plan.shared_bytes,
        "exchange_bytes": plan.exchange_bytes,
        "poll_delay": plan.poll_delay,
        "poll_delay_increase": plan.poll_delay_increase,
        "poll_delay_decrease": plan.poll_delay_decrease,
        "wait_limit_ns": int(wait_limit() * 1e9),
    }


_OPERANDS = {
    "dense": ("recurrent",),
    "masked": ("recurrent", "row_offsets", "column_indices"),
    "pairs": ("recurrent", "layout"),
}
EXPRESSION = "jaxsparse::RecurrentScan<PrintedStep, PrintedPlan>"


@functools.lru_cache(maxsize=1024)
def _planned(form: ScanForm, device: Device, variant: str | None, forced: bool) -> Plan | NoPlan:
    return make_plan(form, device, variant, forced=forced)


def ffi_call(
    params: dict[str, Any], avals: Sequence[ShapedArray], names: Sequence[str], device: AnyDevice
) -> FfiCall | Fallback:
    """How the target is called for operands of these types on a GPU, or why the plain path runs.

    Raises:
        UnavailableError: if a kernel was asked for and can't be had.
    """
    assert isinstance(device, Device)  # on what is none, no kernel of scans runs
    step: Step = params["step"]
    form = form_of(params, avals, names)
    implementation, variant = params["implementation"], params["variant"]
    # Then it runs by a kernel even where the plain path would be faster, or not at all.
    forced = implementation == "cuda" or variant is not None
    if not all(isinstance(size, int) for size in (form.batch, form.length, form.hidden)):
        plan: Plan | NoPlan = NoPlan("a size is open, and kernels are made for sizes")
    else:
        plan = _planned(form, device, variant, forced)
    delay = most_delay()
    if isinstance(plan, Plan):
        try:
            text = source(step, form, plan, delay)
        except ValueError as error:  # in a derivative: the cell itself was checked
            plan = NoPlan(str(error))
    if isinstance(plan, NoPlan):
        if forced:
            asked = variant or "implementation='cuda'"
            raise UnavailableError(
                f"recurrent.scan: {asked} was asked for, but {plan.reason}", plan.reason
            )
        missed = f"recurrent.scan: {step.name} runs on {device.name} as {plan}"
        # A derivative's is only said if it has a reason of its own.
        return Fallback(plan.reason, warning="" if plan.wanted else missed, subject=step.cell_name)
    inputs = (f"{n}{span}" for n, span in zip(step.inputs, params["spans"], strict=True))
    weights = VARIANTS[plan.variant].weights
    operands = _OPERANDS[weights]
    words = 0
    if weights == "pairs":
        assert form.layout_form is not None
        words = form.layout_form.words
        if params["transposed"]:
            operands = ("recurrent", "transposed layout")
    return FfiCall(
        (*operands, *names[names.index("state") :]),
        {
            "name": f"recurrent_scan_{plan.variant}.cu",
            "source": text,
            "expression": EXPRESSION,
            "weights": weights,
            "weight_dtype": form.weight_dtype,
            "input_dtypes": " ".join(form.input_dtypes),
            "products": step.products,
            "layout_words": words,
            "transposed": params["transposed"],
            "carries": step.carries,
            "inputs": " ".join(inputs),
            "outputs": " ".join(map(str, step.outputs)),
            "output_dtypes": " ".join(form.output_dtypes),
            "reversed": "".join(str(int(backwards)) for backwards in params["reversed"]),
            **launch_attributes(plan),
        },
        workspace=plan.workspace_bytes,
        plan=plan,
    )
