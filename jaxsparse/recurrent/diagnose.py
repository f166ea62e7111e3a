"""What became of a program's recurrent scans: how they run, and whether they ran."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jax.extend.core import JaxprEqn

from jaxsparse import _ffi, backend
from jaxsparse.device import Default, Device, by_device, explained_devices
from jaxsparse.primitive import equations
from jaxsparse.recurrent import engine
from jaxsparse.recurrent.plan import NoPlan, Plan, Problem, make_plan
from jaxsparse.recurrent.primitive import operand_names, recurrent_scan_p


@dataclasses.dataclass(frozen=True)
class ExplainedScan:
    """One scan of a program, and what it runs as."""

    operation: ClassVar[str] = "recurrent_scan"
    problem: Problem
    here: str  # as what it runs on this machine; empty where that is on the GPU below
    device: str  # the name of the GPU that is planned for
    plan: Plan | NoPlan
    launches: int  # directions and batch entries that are not scanned at once

    def __str__(self) -> str:
        times = f", {self.launches} launches" if self.launches > 1 else ""
        lines = (f"{self.problem}{times}", *by_device(self.here, self.device, str(self.plan)))
        return "\n  ".join(lines)


class Explanation(tuple[ExplainedScan, ...]):
    """The scans of a program, in its order; prints as a text."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no recurrent scans"


def explain(
    function: Callable[..., Any], *arguments: Any, device: Device | None = None
) -> Explanation:
    """How the recurrent scans of a function run on this machine, and would run on a GPU.

    Nothing is computed or compiled, and no GPU is needed: a plan follows from shapes and types
    alone. First comes what runs where JAX runs on this machine, then what would run on the GPU;
    there is one line of the two where this machine's GPU is both.

    Args:
        function: uses ``recurrent.scan``, in any depth; ``jax.grad(loss)`` shows the scans of a
            gradient, too.
        *arguments: what it is called with: arrays, or anything with ``shape`` and ``dtype``.
        device: a description of the GPU; this machine's first one, or else an H200.

    Returns:
        For every scan its form (``problem``), as what it runs on this machine (``here``), the name
        of the GPU (``device``), and the ``plan`` for that: kernel, where the weights lie, predicted
        time of a step; or why it runs as ``jax.lax.scan``.

    >>> import jax, jax.numpy as jnp
    >>> from jaxsparse import recurrent
    >>> def model(w, h, xs):
    ...     return recurrent.scan(recurrent.RNN(), w, h, xs)[1]
    >>> shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (2, 64), (9, 2, 64)))
    >>> explanation = explain(model, *shapes, device=recurrent.H200)
    >>> print(explanation)
    dense float32 weights (1 x 64, 1 x 64), float32 state, batch 2, 9 steps
      on this machine's ...
      on NVIDIA H200: ...
    """
    here, device = explained_devices(device)
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return Explanation(
        explained_scan(eqn, here, device)
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


def explained_scan(eqn: JaxprEqn, here: Device | Default | None, device: Device) -> ExplainedScan:
    """What a scan runs as here, if that is not on the GPU, and on the GPU."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    problem = engine.problem_of(eqn.params, avals, operand_names(eqn.params))
    states: Any = eqn.outvars[0].aval
    launches = math.prod(states.shape[:-4])  # batch dimensions and directions
    plan = _plan(problem, eqn.params, device)
    if isinstance(plan, Plan):
        launches = launches * plan.groups // plan.scans
    return ExplainedScan(problem, _here(problem, eqn.params, here), device.name, plan, launches)


def _plan(problem: Problem, params: dict[str, Any], device: Device) -> Plan | NoPlan:
    implementation = params["implementation"]
    if implementation in ("xla", "cpu"):
        return NoPlan(f"implementation={implementation!r} asks for it")
    return make_plan(problem, device, params["variant"], forced=engine.is_forced(params))


def _here(problem: Problem, params: dict[str, Any], device: Device | Default | None) -> str:
    if device is None:
        return ""
    if isinstance(device, Device):
        return f"{device.name}: {_plan(problem, params, device)}"
    try:
        chosen = backend.resolve(
            "recurrent_scan", device.platform, params["implementation"], params["variant"]
        )
    except ValueError as error:
        return f"{device.name}: refused, because {str(error).splitlines()[0].rstrip(':')}"
    by_kernels = problem.sparse and chosen == "cpu"
    products = ", its products by the kernels of spmm" if by_kernels else ""
    return f"{device.name}: jax.lax.scan{products}"
