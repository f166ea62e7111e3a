"""The kernel behind a loss and its gradient: its source, and the call of its FFI target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse import _ffi
from jaxsparse.device import AnyDevice, Device
from jaxsparse.dynamic.engine import (
    form_of_pass,
    launch_attributes,
    launches_of,
    printed_plan,
    without_kernel,
)
from jaxsparse.dynamic.loss_plan import LossForm, LossPlan, make_loss_plan, scans_microseconds
from jaxsparse.dynamic.loss_primitive.steps import Steps, steps_of
from jaxsparse.dynamic.plan import NoPlan
from jaxsparse.primitive import Fallback, FfiCall
from jaxsparse.recurrent.engine import most_delay, printed_step

_FILE = "dynamic/kernels/graph_loss.cu"


def form_of(
    params: dict[str, Any], steps: Steps, avals: Sequence[ShapedArray], names: Sequence[str]
) -> LossForm:
    """The form of a loss for operands of these types."""
    by_name = dict(zip(names, avals, strict=True))
    weights, head = by_name["weights"], by_name["head weights"]
    input_dtypes = [by_name[f"input {i}"].dtype.name for i in range(len(steps.saving.inputs))]
    saved = _dtypes(steps.saving.wide_outputs, params["dtype"])
    read = [input_dtypes[i] for i in steps.read]
    return LossForm(
        gather=form_of_pass(params, steps.saving, False, weights, input_dtypes),
        emit=form_of_pass(params, steps.adjoint, True, weights, [*saved, *read, "float32"]),
        classes=head.shape[-1],
        head_dtype=head.dtype.name,
        head_bias_dtype=by_name["head bias"].dtype.name,
    )


def _dtypes(wide: Sequence[bool], dtype: str) -> list[str]:
    """Of outputs that are wider than states or not."""
    return ["float32" if w else dtype for w in wide]


def source(steps: Steps, form: LossForm, spans: Sequence[str], plan: LossPlan, delay: int) -> str:
    """The kernel's translation unit: steps and plans of both passes, printed, and the kernel.

    ``spans`` are the dimensions that inputs of the first pass do not repeat along, and ``delay`` is
    `recurrent.engine.most_delay`.
    """
    passes = (
        ("gather", steps.saving, form.gather, spans, plan.constants),
        ("emit", steps.adjoint, form.emit, steps.spans(spans), plan.emit_constants),
    )
    printed = [
        f"namespace {name} {{\n{printed_step(step, prepares=of_pass.emits)}\n"
        f"{printed_plan(step, of_pass, own, constants, delay)}}}  // namespace {name}\n"
        for name, step, of_pass, own, constants in passes
    ]
    return "\n".join((f'#include "{_FILE}"\n#include "cuda/pointwise.cuh"\n', *printed))


def expression(form: LossForm) -> str:
    """The kernel of the translation unit."""
    passes = (f"{name}::Printed{part}" for name in ("gather", "emit") for part in ("Step", "Plan"))
    bias = _ffi.SCAN_DTYPES[form.head_bias_dtype]
    return f"jaxsparse::GraphLoss<{', '.join(passes)}, {form.classes}, {bias}>"


def ffi_call(
    params: dict[str, Any], avals: Sequence[ShapedArray], names: Sequence[str], device: AnyDevice
) -> FfiCall | Fallback:
    """How the target is called for operands of these types on a GPU, or why the plain path runs.

    Raises:
        UnavailableError: if a kernel was asked for and can't be had.
    """
    assert isinstance(device, Device)  # on what is none, no kernel of scans runs
    implementation, variant = params["implementation"], params["variant"]
    forced = implementation == "cuda" or variant is not None
    steps = steps_of(params["step"], params["active"], params["wide"])
    form, delay = form_of(params, steps, avals, names), most_delay()
    plan: LossPlan | NoPlan = make_loss_plan(form, device, variant)
    if isinstance(plan, LossPlan):
        try:
            text = source(steps, form, params["spans"], plan, delay)
        except ValueError as error:  # in a derivative: the cell itself was checked
            plan = NoPlan(str(error))
    if isinstance(plan, LossPlan) and not forced:
        launches = launches_of(avals, names)
        by_kernel = launches * plan.total_microseconds
        by_scans = scans_microseconds(form, device, launches)
        if by_kernel > by_scans:
            plan = NoPlan(
                f"they are predicted to take about {by_scans:.0f} us, and one launch "
                f"{by_kernel:.0f} us"
            )
    if isinstance(plan, NoPlan):
        return without_kernel("dynamic.loss", plan, implementation, variant)
    saving, adjoint, dtype = steps.saving, steps.adjoint, params["dtype"]
    of_script = params["form"]
    spans = (
        f"{n}{span}{'b' * (i in steps.read)}"
        for i, (n, span) in enumerate(zip(saving.inputs, params["spans"], strict=True))
    )
    saved_dtypes = _dtypes(saving.wide_outputs, dtype)
    sizes = (jnp.dtype(d).itemsize for d in saved_dtypes)
    saved_units = sum(n * size for n, size in zip(saving.outputs, sizes, strict=True))
    hidden = form.gather.hidden
    labels_offset = params["labels_offset"]
    return FfiCall(
        # Labels that the script has need not be cut out of it.
        tuple(name for name in names if name != "labels" or labels_offset is None),
        {
            "name": f"dynamic_loss_{plan.variant}.cu",
            "source": text,
            "expression": expression(form),
            "head_bias_dtype": form.head_bias_dtype,
            "labels_offset": -1 if labels_offset is None else labels_offset,
            "products": form.gather.products,
            "slots": of_script.slots,
            **launch_attributes(plan, of_script),
            "carries": saving.carries,
            "inputs": " ".join(spans),
            "input_dtypes": " ".join(form.gather.input_dtypes),
            "saved": " ".join(map(str, saving.outputs)),
            "saved_dtypes": " ".join(saved_dtypes),
            "outputs": " ".join(map(str, adjoint.outputs)),
            "output_dtypes": " ".join(_dtypes(adjoint.wide_outputs, dtype)),
            "emit_poll_delay": plan.emit_poll_delay,
        },
        workspace=_ffi.loss_workspace_bytes(
            teams=plan.teams,
            sums=1 + saving.carries if of_script.tiles > plan.window else 0,
            carries=saving.carries,
            rows=of_script.computed,
            hidden=hidden,
            saved_bytes=of_script.computed * hidden * saved_units,
            blocks=plan.teams * plan.blocks,
            threads=plan.threads,
            classes=form.classes,
        ),
        plan=plan,
    )
