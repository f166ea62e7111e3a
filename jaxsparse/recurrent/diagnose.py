"""What became of a program's recurrent scans: how they run, and whether they ran."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jax.extend.core import JaxprEqn

from jaxsparse import _ffi
from jaxsparse.device import Device, present_device
from jaxsparse.primitive import equations
from jaxsparse.recurrent import engine
from jaxsparse.recurrent.plan import NoPlan, Plan, Problem, make_plan
from jaxsparse.recurrent.primitive import operand_names, recurrent_scan_p


@dataclasses.dataclass(frozen=True)
class ExplainedScan:
    """One scan of a program, and what it runs as on a GPU."""

    operation: ClassVar[str] = "recurrent_scan"
    problem: Problem
    plan: Plan | NoPlan
    launches: int  # directions and batch entries that are not scanned at once

    def __str__(self) -> str:
        times = f", {self.launches} launches" if self.launches > 1 else ""
        return f"{self.problem}{times}\n  {self.plan}"


class Explanation(tuple[ExplainedScan, ...]):
    """The scans of a program, in its order; prints as a text."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no recurrent scans"


def explain(
    function: Callable[..., Any], *arguments: Any, device: Device | None = None
) -> Explanation:
    """How the recurrent scans of a function would run on a GPU.

    Nothing is computed or compiled, and no GPU is needed: a plan follows from shapes and types
    alone.

    Args:
        function: uses ``recurrent.scan``, in any depth; ``jax.grad(loss)`` shows the scans of a
            gradient, too.
        *arguments: what it is called with: arrays, or anything with ``shape`` and ``dtype``.
        device: a description of the GPU; this machine's first one, or else an H200.

    Returns:
        For every scan its form, and the plan: kernel, where the weights lie, predicted time of a
        step; or why it runs as a loop of XLA.

    >>> import jax, jax.numpy as jnp
    >>> from jaxsparse import recurrent
    >>> def model(w, h, xs):
    ...     return recurrent.scan(recurrent.RNN(), w, h, xs)[1]
    >>> shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (2, 64), (9, 2, 64)))
    >>> len(explain(model, *shapes))
    1
    """
    device = present_device() if device is None else device
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return Explanation(
        explained_scan(eqn, device)
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive is recurrent_scan_p
    )


def check() -> None:
    """Waits for all GPUs that run scans, and raises if one of the scans gave up.

    A kernel whose blocks wait for one another longer than ``JAXSPARSE_SCAN_WAIT_LIMIT`` seconds (10
    if it is not set) waits no more, and what it did not compute is NaN. By then its call has
    returned, so the failure is reported here, or by the next scan on that GPU.

    Raises:
        RuntimeError: if a scan gave up since this was last asked, naming the GPU.

    >>> check()
    """
    failed = _ffi.take_scan_failures()
    if failed:
        gpus = ", ".join(map(str, failed))
        raise RuntimeError(
            f"recurrent.check: a scan on GPU {gpus} gave up: its blocks waited for one another "
            f"longer than {engine.wait_limit():g} s (JAXSPARSE_SCAN_WAIT_LIMIT); what it did not "
            "compute is NaN"
        )


def explained_scan(eqn: JaxprEqn, device: Device) -> ExplainedScan:
    """What a scan runs as on a GPU."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    problem = engine.problem_of(eqn.params, avals, operand_names(eqn.params))
    states: Any = eqn.outvars[0].aval
    launches = math.prod(states.shape[:-4])  # batch dimensions and directions
    implementation = eqn.params["implementation"]
    if implementation in ("xla", "cpu"):
        plan: Plan | NoPlan = NoPlan(f"implementation={implementation!r} asks for it")
    else:
        forced = engine.is_forced(eqn.params)
        plan = make_plan(problem, device, eqn.params["variant"], forced=forced)
    if isinstance(plan, Plan):
        launches = launches * plan.groups // plan.scans
    return ExplainedScan(problem, plan, launches)
