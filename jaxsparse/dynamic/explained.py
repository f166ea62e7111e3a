"""What a scan over graphs of a program runs as."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxsparse.device import AnyDevice, Device, by_device
from jaxsparse.dynamic import engine
from jaxsparse.dynamic.plan import NoPlan, Plan, ScanForm
from jaxsparse.dynamic.primitive import operand_names
from jaxsparse.primitive import Fallback, TypedCall, UnavailableError, choose


@dataclasses.dataclass(frozen=True)
class ExplainedGraphScan:
    """One scan over graphs of a program, and what it runs as."""

    operation: ClassVar[str] = "dynamic_scan"
    problem: ScanForm
    here: str  # as what it runs on this machine; empty where that is on the GPU below
    device: str  # the name of the GPU that is planned for
    plan: Plan | NoPlan

    def __str__(self) -> str:
        return "\n  ".join((str(self.problem), *by_device(self.here, self.device, str(self.plan))))


def explained_graph_scan(call: TypedCall, here: str, device: Device) -> ExplainedGraphScan:
    """What a scan over graphs runs as on a GPU, beside what is said of this machine."""
    form = engine.form_of(call.params, call.operands, operand_names(call.params))
    return ExplainedGraphScan(form, here, device.name, planned_graph_scan(call, device))


def planned_graph_scan(call: TypedCall, device: AnyDevice) -> Plan | NoPlan:
    """The plan that a scan over graphs runs by on a device, or why it runs without."""
    try:
        choice = choose(call, device)
    except UnavailableError as error:
        return NoPlan(error.reason, refused=True)
    except ValueError as error:  # as lowering says it, of a variable that is no number
        return NoPlan(str(error), refused=True)
    if isinstance(choice, Fallback):
        return NoPlan(choice.reason)
    plan: Plan = choice.plan
    return plan
