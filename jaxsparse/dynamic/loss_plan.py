"""What a loss over graphs and its gradient run as on a GPU: in which kernel, or why in none.

As the plans of scans (plan.py) these are made in C++ (ffi/dynamic/loss_plan.h).
"""

from __future__ import annotations

import dataclasses
import functools

from jaxsparse import _ffi
from jaxsparse.device import Device
from jaxsparse.dynamic.plan import NoPlan, Plan, ScanForm, loop_microseconds, make_plan, refusal

# Microseconds that XLA's kernels around two scans take longer than those around one launch: heads,
# losses and sums between them, less what is left to do behind a launch; of any script, and more for
# each of its tiles. Found by traces of training on an H200.
_HEADS, _HEADS_OF_TILE = 8.0, 0.015


@dataclasses.dataclass(frozen=True)
class LossForm:
    """The form of a loss and its gradient, on one device."""

    gather: ScanForm
    emit: ScanForm
    classes: int
    head_dtype: str
    head_bias_dtype: str  # that of states, or float32


@dataclasses.dataclass(frozen=True)
class LossPlan(Plan):
    """A kernel for a loss and its gradient, and its launch.

    What is said of tiles is of both passes together; the constants are those of the first.
    """

    emit_constants: str
    emit_poll_delay: int

    def __str__(self) -> str:
        return f"value and gradient in one launch: {super().__str__()}"


def make_loss_plan(form: LossForm, device: Device, variant: str | None = None) -> LossPlan | NoPlan:
    """The plan of least predicted time, or why there is none.

    Args:
        form: the loss.
        device: the GPU.
        variant: the only one to consider.
    """
    if form.gather.kinds > 1:
        return NoPlan(f"there is no kernel yet for losses of rows of {form.gather.kinds} kinds")
    for of_pass in (form.gather, form.emit):
        if reason := refusal(of_pass, device):
            return NoPlan(reason)
    if form.head_dtype != form.gather.state_dtype:
        return NoPlan(
            f"the kernels take a head's weights in the states' dtype, {form.gather.state_dtype}, "
            f"got {form.head_dtype}"
        )
    return _made_plan(form, device, variant)


def scans_microseconds(form: LossForm, device: Device, launches: int) -> float:
    """What both scans, each as it runs fastest, and the heads between them take."""
    total = _HEADS + _HEADS_OF_TILE * form.gather.tiles
    for of_pass in (form.gather, form.emit):
        plan, loop = make_plan(of_pass, device), loop_microseconds(of_pass)
        total += loop if isinstance(plan, NoPlan) else min(loop, launches * plan.total_microseconds)
    return total


@functools.lru_cache(maxsize=1024)
def _made_plan(form: LossForm, device: Device, variant: str | None) -> LossPlan | NoPlan:
    gather = form.gather
    made, reason = _ffi.plan_loss(
        variant or "",
        products=gather.products,
        slots=gather.slots,
        carries=gather.carries,
        arrays=gather.arrays,
        emit_arrays=form.emit.arrays,
        hidden=gather.hidden,
        tiles=gather.tiles,
        groups=gather.groups,
        classes=form.classes,
        dtype=gather.state_dtype,
        multiprocessors=device.multiprocessors,
        shared_bytes=device.shared_bytes,
    )
    return NoPlan(reason) if made is None else LossPlan(**made)
