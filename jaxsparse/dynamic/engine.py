"""The kernel behind a scan over graphs: its source, and the call of its FFI target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse import _ffi
from jaxsparse.device import AnyDevice, Device
from jaxsparse.dynamic.form import Form
from jaxsparse.dynamic.plan import NoPlan, Plan, ScanForm, loop_microseconds, make_plan
from jaxsparse.primitive import Fallback, FfiCall, UnavailableError
from jaxsparse.recurrent import printer
from jaxsparse.recurrent.engine import most_delay, printed_step, wait_limit
from jaxsparse.recurrent.step import Step

_FILE = "dynamic/kernels/graph_scan.cu"
EXPRESSIONS = {
    False: "jaxsparse::GraphGather<PrintedStep, PrintedPlan>",
    True: "jaxsparse::GraphEmit<PrintedStep, PrintedPlan>",  # of a scan that emits
}


def form_of(params: dict[str, Any], avals: Sequence[ShapedArray], names: Sequence[str]) -> ScanForm:
    """The form of a scan over graphs for operands of these types."""
    step: Step = params["step"]
    by_name = dict(zip(names, avals, strict=True))
    input_dtypes = [by_name[f"input {i}"].dtype.name for i in range(len(step.inputs))]
    return form_of_pass(params, step, params["emits"], by_name["weights"], input_dtypes)


def form_of_pass(
    params: dict[str, Any],
    step: Step,
    emits: bool,
    weights: ShapedArray,
    input_dtypes: Sequence[str],
) -> ScanForm:
    """The form of a pass over a script by a step, whose inputs have these dtypes."""
    form = params["form"]
    carries = step.carries_taken + step.carries_made
    # Where the pass emits, also what is made of inputs ahead.
    inputs = sum(step.inputs) * (2 if emits else 1)
    return ScanForm(
        emits=emits,
        products=step.states if emits else step.products,
        slots=form.slots,
        carries=step.carries,
        arrays=carries + inputs + sum(step.outputs),
        most_arrays=max(step.carries, len(step.inputs), len(step.outputs), step.products),
        hidden=weights.shape[-2] // form.slots,
        tiles=form.tiles,
        groups=form.groups,
        width=form.width,
        kinds=form.kinds,
        state_dtype=params["dtype"],
        weight_dtype=weights.dtype.name,
        input_dtypes=tuple(input_dtypes),
    )


def source(step: Step, form: ScanForm, spans: Sequence[str], plan: Plan, delay: int) -> str:
    """The kernel's translation unit: the step and the plan, printed, and the kernel.

    ``spans`` are the dimensions that inputs do not repeat along, and ``delay`` is
    `recurrent.engine.most_delay`.
    """
    return (
        f'#include "{_FILE}"\n#include "cuda/pointwise.cuh"\n\n'
        f"{printed_step(step, prepares=form.emits)}\n"
        f"{printed_plan(step, form, spans, plan.constants, delay)}"
    )


def printed_plan(
    step: Step, form: ScanForm, spans: Sequence[str], constants: str, delay: int
) -> str:
    """A pass's plan as device code: its constants, and what does not follow from these."""
    of_row, of_unit = (
        ", ".join(str(dimension in span).lower() for span in spans) or "false" for dimension in "rh"
    )
    outputs = tuple("float32" if wide else form.state_dtype for wide in step.wide_outputs)
    dtype = _ffi.SCAN_DTYPES[form.state_dtype]
    return (
        "struct PrintedPlan {\n"
        f"  using State = {dtype};\n"
        f"  using Weight = {dtype};\n"
        f"{printer.print_arrays(step.inputs, form.input_dtypes, step.outputs, outputs)}"
        f"  static constexpr bool kInputIsOfRow[] = {{{of_row}}};\n"
        f"  static constexpr bool kInputIsOfUnit[] = {{{of_unit}}};\n"
        f"{constants}"
        f"  static constexpr unsigned kMostDelay = {delay};\n"
        "};\n"
    )


def launches_of(avals: Sequence[ShapedArray], names: Sequence[str]) -> int:
    """How many launches a call is: one for each entry of its batch."""
    rank = avals[names.index("script")].ndim - 1
    return math.prod(jnp.broadcast_shapes(*(a.shape[:rank] for a in avals)))


def without_kernel(
    operation: str, plan: NoPlan, implementation: str | None, variant: str | None
) -> Fallback:
    """The plain path, unless a kernel was asked for: UnavailableError."""
    if implementation != "cuda" and variant is None:
        return Fallback(plan.reason)
    asked = f"variant {variant!r}" if variant else "implementation='cuda'"
    raise UnavailableError(f"{operation}: {asked} was asked for, but {plan.reason}", plan.reason)


def launch_attributes(plan: Plan, script: Form) -> dict[str, Any]:
    """What the FFI targets are told of a launch of teams, and of its script."""
    return {
        "window": plan.window,
        "leaves": script.leaves,
        "tiles": script.tiles,
        "script_groups": script.groups,
        # What a launch of any scan is told.
        "groups": 1,
        "scans": plan.teams,
        "exchange_bytes": 0,
        "blocks": plan.teams * plan.blocks,
        "threads": plan.threads,
        "cluster": 1,
        "shared_bytes": plan.shared_bytes,
        "poll_delay": plan.poll_delay,
        "poll_delay_increase": plan.poll_delay_increase,
        "poll_delay_decrease": plan.poll_delay_decrease,
        "wait_limit_ns": int(wait_limit() * 1e9),
    }


def ffi_call(
    params: dict[str, Any], avals: Sequence[ShapedArray], names: Sequence[str], device: AnyDevice
) -> FfiCall | Fallback:
    """How the target is called for operands of these types on a GPU, or why the plain path runs.

    Raises:
        UnavailableError: if a kernel was asked for and can't be had.
    """
    assert isinstance(device, Device)  # on what is none, no kernel of scans runs
    step: Step = params["step"]
    implementation, variant = params["implementation"], params["variant"]
    # Then it runs by a kernel even where the loop would be faster, or not at all.
    forced = implementation == "cuda" or variant is not None
    form, delay = form_of(params, avals, names), most_delay()
    plan: Plan | NoPlan = make_plan(form, device, variant)
    if isinstance(plan, Plan):
        try:
            text = source(step, form, params["spans"], plan, delay)
        except ValueError as error:  # in a derivative: the cell itself was checked
            plan = NoPlan(str(error))
    if isinstance(plan, Plan) and not forced:
        by_kernel = launches_of(avals, names) * plan.total_microseconds
        by_loop = loop_microseconds(form)
        if by_kernel > by_loop:
            plan = NoPlan(
                f"it is predicted to take about {by_loop:.0f} us, and kernels {by_kernel:.0f} us"
            )
    if isinstance(plan, NoPlan):
        return without_kernel("dynamic.scan", plan, implementation, variant)
    spans = (f"{n}{span}" for n, span in zip(step.inputs, params["spans"], strict=True))
    outputs = ("float32" if wide else form.state_dtype for wide in step.wide_outputs)
    of_script = params["form"]
    return FfiCall(
        tuple(names),
        {
            "name": f"dynamic_scan_{plan.variant}.cu",
            "source": text,
            "expression": EXPRESSIONS[form.emits],
            "emits": form.emits,
            "products": form.products,
            "slots": form.slots,
            "kinds": form.kinds,
            **launch_attributes(plan, of_script),
            "carries": step.carries,
            "inputs": " ".join(spans),
            "input_dtypes": " ".join(form.input_dtypes),
            "outputs": " ".join(map(str, step.outputs)),
            "output_dtypes": " ".join(outputs),
        },
        workspace=_ffi.team_workspace_bytes(
            teams=plan.teams,
            sums=1 + step.carries if form.emits and of_script.tiles > plan.window else 0,
            rows=of_script.computed,
            hidden=form.hidden,
        ),
        plan=plan,
    )
