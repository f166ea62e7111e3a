"""What scans over graphs and losses run as, and what their scripts hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxsparse.device import AnyDevice, Device, by_device
from jaxsparse.dynamic.plan import NoPlan, Plan
from jaxsparse.dynamic.script import Script
from jaxsparse.pattern import is_concrete
from jaxsparse.primitive import Fallback, Refused, TypedCall, choose_or_refuse


@dataclasses.dataclass(frozen=True)
class ExplainedDynamicScan:
    """One scan over graphs of a program, and what it runs as."""

    operation: ClassVar[str] = "dynamic_scan"
    problem: str
    scripts: tuple[ScriptSummary, ...]  # those that the program is called with, of its form
    here: str  # as what it runs on this machine; empty where that is on the GPU below
    device: str  # the name of the GPU that is planned for
    plan: Plan | NoPlan

    def __str__(self) -> str:
        lines = (self.problem, *map(str, self.scripts))
        return "\n  ".join((*lines, *by_device(self.here, self.device, str(self.plan))))


@dataclasses.dataclass(frozen=True)
class ExplainedDynamicLoss(ExplainedDynamicScan):
    """The loss of a net over graphs and its gradient, and what they run as."""

    operation: ClassVar[str] = "dynamic_loss"


@dataclasses.dataclass(frozen=True)
class ScriptSummary:
    """What a script has of that for which its form has room."""

    graphs: int
    leaves: int
    rows: int  # that are computed
    levels: int  # of computed rows: the most that wait for one another
    tiles: int
    fill: float  # the share of lanes in these tiles that are rows

    @classmethod
    def of(cls, script: Script) -> ScriptSummary:
        """Of one concrete script."""
        script = Script(np.asarray(script.words), script.form)
        form, sources = script.form, script.sources
        tiles, rows = int(script.used_tiles), int((sources >= 0).any(-1).sum())
        level = np.zeros(form.rows + 1, np.int64)  # of no child: behind all
        first = form.leaves
        for t in range(tiles):
            own = sources[t]
            above = level[np.where(own < 0, form.rows, own)].max(-1) + 1
            level[first + t * form.width :][: form.width] = np.where((own >= 0).any(-1), above, 0)
        return cls(
            graphs=int(script.used_graphs),
            leaves=int(script.used_leaves),
            rows=rows,
            levels=int(level.max()),
            tiles=tiles,
            fill=rows / max(tiles * form.width, 1),
        )

    def __str__(self) -> str:
        return (
            f"a script of {self.graphs} graphs: {self.leaves} leaves, {self.rows} computed rows on "
            f"{self.levels} levels, {self.tiles} tiles that are {self.fill:.0%} full"
        )


def scripts_in(arguments: Any) -> list[Script]:
    """The single scripts that a program is called with, if they are there."""
    leaves = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, Script))
    scripts = [x for x in leaves if isinstance(x, Script)]
    return [x for x in scripts if is_concrete(x.words) and not x.batch_shape]


def explained_dynamic_scan(
    call: TypedCall, here: str, device: Device, scripts: Sequence[Script]
) -> ExplainedDynamicScan:
    """What a scan runs as on a GPU, as it is given, beside what is said of this machine."""
    step, emits = call.params["step"], call.params["emits"]
    problem = _problem(call, step.states if emits else step.products)
    if emits:
        problem += ", from the roots to the leaves"
    own = _of_form(call, scripts)
    return ExplainedDynamicScan(problem, own, here, device.name, planned_dynamic(call, device))


def explained_dynamic_loss(
    call: TypedCall, here: str, device: Device, scripts: Sequence[Script]
) -> ExplainedDynamicLoss:
    """The same of a loss and its gradient."""
    classes = call.operands[3].shape[-1]
    problem = f"{_problem(call, call.params['step'].products)}; the loss of {classes} classes"
    own = _of_form(call, scripts)
    return ExplainedDynamicLoss(
        f"{problem}, and its gradient", own, here, device.name, planned_dynamic(call, device)
    )


def _problem(call: TypedCall, products: int) -> str:
    """The form of a scan."""
    form = call.params["form"]
    kinds, rows, _ = call.operands[0].shape[-3:]
    groups = "1 group" if form.groups == 1 else f"{form.groups} groups"
    return (
        f"{call.params['step'].name}: {products} products of {rows // form.slots} units, "
        f"{call.params['dtype']} state, {f'{kinds} kinds, ' if kinds > 1 else ''}{form.slots} "
        f"children; room for {form.leaves} leaves and {form.tiles} tiles of {form.width} rows in "
        f"{groups}"
    )


def _of_form(call: TypedCall, scripts: Sequence[Script]) -> tuple[ScriptSummary, ...]:
    return tuple(ScriptSummary.of(s) for s in scripts if s.form == call.params["form"])


def planned_dynamic(call: TypedCall, device: AnyDevice) -> Plan | NoPlan:
    """The plan that a scan or a loss runs by on a device, or why it runs without."""
    choice = choose_or_refuse(call, device)
    if isinstance(choice, Refused):
        return NoPlan(choice.reason, refused=True)
    if isinstance(choice, Fallback):
        return NoPlan(choice.reason, instead=call.operation.plain)
    plan: Plan = choice.plan
    return plan
