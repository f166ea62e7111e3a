"""What a recurrent scan of a program runs as."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from jax.extend.core import JaxprEqn

from jaxsparse import backend
from jaxsparse.device import DefaultDevice, Device, by_device
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
    launches: int  # directions and batch entries that are not scanned at once

    def __str__(self) -> str:
        times = f", {self.launches} launches" if self.launches > 1 else ""
        lines = (f"{self.problem}{times}", *by_device(self.here, self.device, str(self.plan)))
        return "\n  ".join(lines)


def explained_scan(
    eqn: JaxprEqn, here: Device | DefaultDevice | None, device: Device
) -> ExplainedScan:
    """What a scan runs as here, if that is not on the GPU, and on the GPU."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    names = operand_names(eqn.params)
    choice = engine.choose(eqn.params, avals, names, device)
    states: Any = eqn.outvars[0].aval
    *batch, directions = states.shape[:-4]
    launches = choice.plan.launches if isinstance(choice.plan, Plan) else directions
    launches *= math.prod(batch)
    text = ""
    if isinstance(here, Device):
        text = f"{here.name}: {engine.choose(eqn.params, avals, names, here).plan}"
    elif here is not None:
        text = f"{here.name}: {_without_cuda(choice.form, eqn.params, here)}"
    return ExplainedScan(choice.form, text, device.name, choice.plan, launches)


def _without_cuda(form: ScanForm, params: dict[str, Any], here: DefaultDevice) -> str:
    try:
        chosen = backend.resolve(
            "recurrent_scan", here.platform, params["implementation"], params["variant"]
        )
    except ValueError as error:
        return f"refused, because {str(error).splitlines()[0].rstrip(':')}"
    by_kernels = form.sparse and chosen == "cpu"
    return "jax.lax.scan" + (", its products by the kernels of spmm" if by_kernels else "")
