"""What a program's sparse operations run as: on this machine, and on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from jaxsparse.device import AnyDevice, Device, by_device, explained_devices, tracing_for
from jaxsparse.dynamic.explained import (
    ExplainedDynamicScan,
    explained_dynamic_loss,
    explained_dynamic_scan,
    planned_dynamic,
    scripts_in,
)
from jaxsparse.dynamic.loss_primitive import dynamic_loss_p
from jaxsparse.dynamic.primitive import dynamic_scan_p
from jaxsparse.dynamic.script import Script
from jaxsparse.ops.arguments import PATTERN, matrix_shape, operands_of_pattern
from jaxsparse.ops.attention import OF_MASKS
from jaxsparse.primitive import (
    OPERATIONS,
    Fallback,
    Refused,
    TypedCall,
    choose_or_refuse,
    equations,
    typed_call,
)
from jaxsparse.recurrent.explained import ExplainedScan, explained_scan, planned
from jaxsparse.recurrent.graph import recurrent_graph_p
from jaxsparse.recurrent.graph.explained import ExplainedGraph, explained_graph
from jaxsparse.recurrent.primitive import recurrent_scan_p

_MOST_MULTIPROCESSORS = 2**31 - 1  # a C++ int
_OF_POSITIONS = {*(name for name, _ in PATTERN), *OF_MASKS}
# Params that the types of operands and results tell.
_OF_TYPES = (
    "out_dtype",
    "columns",
    "mask_of_group",
    "mask_of_head",
    "has_mask",
    "has_pattern",
    "scores",
)
_OTHER_PROGRAM = "other scans, which are explained where no device is named"


@dataclasses.dataclass(frozen=True)
class ExplainedCall:
    """One sparse operation of a program, and what it runs as."""

    operation: str
    options: dict[str, Any]  # its own, such as "transpose"
    operands: dict[str, jax.ShapeDtypeStruct]  # those of its pattern, too
    results: dict[str, jax.ShapeDtypeStruct]
    shape: tuple[int, int]  # of the stored matrix, or of the mask
    stored: str  # what it stores, in words
    here: str  # as what it runs on this machine; empty where that is on the GPU below
    device: str  # the name of the GPU that all else is about
    # Variants of the kernel that fit and their predicted microseconds: first the chosen one, the
    # others by rising cost. Infinity is for those that are only taken by their name.
    variants: tuple[tuple[str, float], ...]
    forced: bool  # the chosen one was asked for by its name
    otherwise: str  # what happens without a kernel, and why; empty where there is one
    remark: str  # what else bears on the choice

    @property
    def variant(self) -> str | None:
        """The chosen variant, or None where no kernel runs."""
        return self.variants[0][0] if self.variants else None

    @property
    def entries(self) -> int | None:
        """Stored entries of the matrix, of each where there is a batch of them; None if unknown.

        Of a block mask only its tiles and cells are.
        """
        columns = self.operands.get("column_indices")
        return None if columns is None else int(columns.shape[-1])

    def __str__(self) -> str:
        choice = self._choice() if self.variants else self.otherwise
        lines = (self._problem(), *by_device(self.here, self.device, choice), self.remark)
        return "\n  ".join(line for line in lines if line)

    def _problem(self) -> str:
        options = [
            name if value is True else f"{name}={value!r}"
            for name, value in self.options.items()
            if value is not None and value is not False
        ]
        dense = {name: x for name, x in self.operands.items() if name not in _OF_POSITIONS}
        return (
            f"{self.operation}{' (' + ', '.join(options) + ')' if options else ''}: "
            f"{self.stored}; {_listed(dense)} -> {_listed(self.results)}"
        )

    def _choice(self) -> str:
        (chosen, cost), *others = self.variants
        priced = [f"{name} {us:.1f} us" for name, us in others if math.isfinite(us)]
        by_name = [name for name, us in others if not math.isfinite(us)]
        text = chosen
        if self.forced:
            text += ", asked for by its name"
        # The cost of a variant that is alone is only a place in an order.
        if priced and math.isfinite(cost):
            text += f", about {cost:.1f} us"
        if priced:
            text += f"; others: {', '.join(priced)}"
        if by_name:
            text += f"; by name only: {', '.join(by_name)}"
        return text


Explained = ExplainedCall | ExplainedScan | ExplainedGraph | ExplainedDynamicScan


class Explanation(tuple[Explained, ...]):
    """The sparse operations of a program, in its order; prints as a text."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no sparse operations"


def explain(
    function: Callable[..., Any], *arguments: Any, device: Device | None = None
) -> Explanation:
    """How the sparse operations of a function run on this machine, and would run on a GPU.

    Nothing is computed or compiled, and no GPU is needed: a kernel is chosen by shapes and types
    alone. The function is traced for the GPU: recurrent matrices whose pattern it sees are laid out
    for that one, on the host. First comes what runs where JAX runs on this machine, on a CPU
    without times, then what would run on the GPU; there is one line of the two where no device is
    named and this machine's GPU is both. Predicted times are fitted to measurements on an H200; for
    other GPUs they only put the variants in an order. A program that the compiler cuts for several
    devices is explained as if one had all of it; inside ``shard_map`` sizes are those of one
    device. Operations are listed even if nothing uses their results, where the compiler drops them.

    Args:
        function: uses operations of this package, in any depth; ``jaxsparse.grad(loss)`` shows
            those of a gradient, too.
        *arguments: what it is called with: arrays, or anything with ``shape`` and ``dtype``.
        device: a description of the GPU (`jaxsparse.Device`); this machine's first one,
            or else an H200.

    Returns:
        A tuple that prints as a text, of one entry for each operation. All have ``operation``, its
        name, ``here``, what it runs as on this machine, and ``device``, the name of the GPU.

        A recurrent scan has its form, ``problem``, and the ``plan`` for the GPU: kernel, where the
        weights lie, predicted time of a step; or why it runs as ``jax.lax.scan``. A stack of
        recurrent layers has ``choice``, which of its layers run at once on the GPU, and ``scans``,
        form and plan of each layer that runs by itself. A scan over graphs, and a loss over graphs
        with its gradient, have ``problem``, the form, ``plan`` as well, and ``scripts``: what those
        of this form hold that are arguments.

        All else has ``options``, ``operands`` and ``results`` (shapes and dtypes, by name),
        ``shape`` and ``entries`` of the stored matrix. On the GPU ``variant`` is the chosen one,
        and ``variants`` are pairs of name and predicted microseconds of all that fit, the chosen
        one first. Where no kernel runs there are none, and ``otherwise`` says what happens and
        why; ``remark`` what would allow something faster.

    Raises:
        ValueError: for a device without multiprocessors, or with more than 2^31 - 1.

    >>> import jax.numpy as jnp
    >>> from jaxsparse import CSR, H200, spmm
    >>> a = CSR.fromdense(jnp.eye(64))
    >>> print(explain(lambda x: spmm(a, x, implementation="xla"), jnp.ones((64, 8)), device=H200))
    spmm: matrix (64, 64) with 64 stored entries, uint16 columns; values float32 (64,),
        x float32 (64, 8) -> out float32 (64, 8)
      on this machine's ...: plain XLA, because implementation='xla' asks for it
      on NVIDIA H200: plain XLA, because implementation='xla' asks for it
    >>> (product,) = explain(lambda x: spmm(a, x, variant="generic_rows"), jnp.ones((64, 8)))
    >>> product.variant
    'generic_rows'
    """
    here, device = explained_devices(device)
    if not 1 <= device.multiprocessors <= _MOST_MULTIPROCESSORS:
        raise ValueError(f"explain: {device.name} has {device.multiprocessors} multiprocessors")
    program = _sparse_equations(function, arguments, device)
    scripts = scripts_in(arguments)
    return Explanation(
        _explained(eqn, runs_here, device, scripts)
        for eqn, runs_here in zip(
            program, _on_this_machine(here, program, function, arguments), strict=True
        )
    )


def _explained(
    eqn: JaxprEqn, runs_here: str, device: Device, scripts: Sequence[Script]
) -> Explained:
    if eqn.primitive is recurrent_scan_p:
        return explained_scan(_typed(eqn), runs_here, device)
    if eqn.primitive is recurrent_graph_p:
        typed = _typed(eqn)
        return explained_graph(typed, runs_here, device, _choice(typed, device).otherwise)
    if eqn.primitive is dynamic_scan_p:
        return explained_dynamic_scan(_typed(eqn), runs_here, device, scripts)
    if eqn.primitive is dynamic_loss_p:
        return explained_dynamic_loss(_typed(eqn), runs_here, device, scripts)
    return _explained_call(eqn, runs_here, device)


def _sparse_equations(
    function: Callable[..., Any], arguments: Sequence[Any], device: Device
) -> list[JaxprEqn]:
    """The sparse operations of a function's program for a GPU."""
    with tracing_for(device):
        jaxpr = jax.make_jaxpr(function)(*arguments)
    return [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive in OPERATIONS]


def _typed(eqn: JaxprEqn) -> TypedCall:
    avals: list[Any] = [v.aval for v in eqn.invars]
    return typed_call(OPERATIONS[eqn.primitive], eqn.params, avals)


def _on_this_machine(
    here: AnyDevice | None,
    program: list[JaxprEqn],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> list[str]:
    """As what each operation of a program runs here; empty where that is on the GPU."""
    if here is None:
        return [""] * len(program)
    of_here = program
    if isinstance(here, Device):
        # Patterns are laid out for the GPU that a program is traced for, and two directions are one
        # scan only where their layouts have one form.
        of_here = _sparse_equations(function, arguments, here)
        if [eqn.primitive for eqn in of_here] != [eqn.primitive for eqn in program]:
            return [f"{here.name}: {_OTHER_PROGRAM}"] * len(program)
    return [f"{here.name}: {_runs_as(eqn, here)}" for eqn in of_here]


def _runs_as(eqn: JaxprEqn, device: AnyDevice) -> str:
    """As what an operation runs on a device, without times."""
    if eqn.primitive is recurrent_scan_p:
        return str(planned(_typed(eqn), device))
    if eqn.primitive in (dynamic_scan_p, dynamic_loss_p):
        return str(planned_dynamic(_typed(eqn), device))
    choice = _choice(_typed(eqn), device)
    forced = ", asked for by its name" if eqn.params["variant"] else ""
    return f"{choice.variants[0][0]}{forced}" if choice.variants else choice.otherwise


def _explained_call(eqn: JaxprEqn, runs_here: str, device: Device) -> ExplainedCall:
    operation, params = OPERATIONS[eqn.primitive], eqn.params
    avals: list[Any] = [v.aval for v in eqn.invars]
    out_avals: list[Any] = [v.aval for v in eqn.outvars]
    signature = operation.signature(params)
    operands = _by_name(signature.operands, avals)
    stored, shape = (operation.stored or _stored_matrix)(params, operands)
    choice = _choice(_typed(eqn), device)
    return ExplainedCall(
        operation=operation.name,
        options={name: params[name] for name in operation.params if name not in _OF_TYPES},
        operands=operands,
        results=_by_name(signature.results, out_avals),
        shape=shape,
        stored=stored,
        here=runs_here,
        device=device.name,
        variants=choice.variants,
        forced=params["variant"] is not None,
        otherwise=choice.otherwise,
        remark=choice.remark,
    )


def _stored_matrix(params: dict[str, Any], operands: dict[str, Any]) -> tuple[str, Any]:
    columns = operands["column_indices"]
    names = [name for name, _ in operands_of_pattern(params["columns"])]
    shape = matrix_shape([operands[name] for name in names], params["columns"])
    return f"matrix {shape} with {columns.shape[-1]} stored entries, {columns.dtype} columns", shape


class _Choice(NamedTuple):
    """As in `ExplainedCall`: either the variants that fit, or what happens without a kernel."""

    variants: tuple[tuple[str, float], ...] = ()
    otherwise: str = ""
    remark: str = ""


def _choice(call: TypedCall, device: AnyDevice) -> _Choice:
    operation = call.operation
    made = choose_or_refuse(call, device)
    if isinstance(made, Refused):
        return _Choice(otherwise=f"refused, because {made.reason}")
    if isinstance(made, Fallback):
        return _Choice(otherwise=f"{made.called or operation.plain}, because {made.reason}")
    if not all(isinstance(n, int) for a in (*made.operands, *made.results) for n in a.shape):
        return _Choice(otherwise="a variant that is chosen when it runs, because a size is open")
    try:
        variants = device.choose_variant(
            operation.target, made.operands, made.results, made.attributes
        )
    except ValueError as error:
        return _Choice(otherwise=f"refused, because {error}")
    return _Choice(variants, remark=made.remark)


def _by_name(
    names: Sequence[tuple[str, str]], avals: Sequence[ShapedArray]
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for (name, _), aval in zip(names, avals, strict=True)
    }


def _listed(arrays: dict[str, jax.ShapeDtypeStruct]) -> str:
    return ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in arrays.items())
