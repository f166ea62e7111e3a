"""What a recurrent scan of a program runs as."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxsparse.device import AnyDevice, Device, by_device
from jaxsparse.primitive import Fallback, Refused, TypedCall, choose_or_refuse
from jaxsparse.recurrent import engine
from jaxsparse.recurrent.plan import NoPlan, Plan, ScanForm
from jaxsparse.recurrent.primitive import operand_names


@dataclasses.dataclass(frozen=True)
class ExplainedScan:
    """One scan of a program, and what it runs as."""

    operation: ClassVar[str] = "recurrent_scan"
    problem: ScanForm
    here: str  # as what it runs on this machine; empty where that is on the GPU below
    device: str  # the name of the GPU that is planned for
    plan: Plan | NoPlan
    launches: int  # of kernels, or loops: of what is not scanned at once

    def __str__(self) -> str:
        times = f", {self.launches} launches" if self.launches > 1 else ""
        lines = (f"{self.problem}{times}", *by_device(self.here, self.device, str(self.plan)))
        return "\n  ".join(lines)


def explained_scan(call: TypedCall, here: str, device: Device) -> ExplainedScan:
    """What a scan runs as on a GPU, beside what is said of this machine."""
    form = engine.form_of(call.params, call.operands, operand_names(call.params))
    plan = planned(call, device)
    batch = call.results[0].shape[:-5]
    launches = math.prod(batch) * (plan.launches if isinstance(plan, Plan) else form.loops)
    return ExplainedScan(form, here, device.name, plan, launches)


def planned(call: TypedCall, device: AnyDevice) -> Plan | NoPlan:
    """The plan that a scan runs by on a device, or why it runs without."""
    choice = choose_or_refuse(call, device)
    if isinstance(choice, Refused):
        return NoPlan(choice.reason, refused=True)
    if isinstance(choice, Fallback):
        return NoPlan(choice.reason, wanted=not choice.warning)
    plan: Plan = choice.plan
    return plan
