"""What a call of an operation runs as on a device: a kernel, or jnp and why.

`choose` decides it: for lowering, and for `explain`, which says what lowering does. `narrowed` then
leaves out what the variant does not take, in lowering only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse import backend
from jaxsparse.device import AnyDevice, workspace_bytes
from jaxsparse.primitive.declaration import Fallback, FfiCall, Operation, core_dims


class TypedCall(NamedTuple):
    """A call of an operation on one device, with the types that it is lowered for."""

    operation: Operation
    params: dict[str, Any]
    operands: Sequence[ShapedArray]
    results: Sequence[ShapedArray]


class TargetCall(NamedTuple):
    """A call of an operation's FFI target, with the types that it is lowered to."""

    positions: list[int]  # of its operands, among the primitive's
    operands: list[ShapedArray]
    results: list[ShapedArray]  # the primitive's; last the workspace, if there is one
    swapped_operands: list[bool]  # which have their last two dimensions in the other order
    swapped_results: list[bool]
    attributes: dict[str, Any]
    remark: str
    plan: Any
    narrower: tuple[str, TargetCall] | None = None  # as FfiCall's


class UnavailableError(ValueError):
    """What was asked for can't be had on a device.

    Its message is for lowering; ``reason`` is what follows "because" where it is only explained.
    """

    def __init__(self, message: str, reason: str | None = None):
        super().__init__(message)
        self.reason = reason or message


def choose(call: TypedCall, device: AnyDevice) -> TargetCall | Fallback:
    """The kernel that a call runs by on a device, or what is computed in its place, and why.

    Raises:
        UnavailableError: where what was asked for by its name can't be had there.
    """
    made, instead = _chosen(call, device), call.operation.without_kernel
    if instead is None or device.platform != "cuda":
        return made
    if isinstance(made, Fallback) and made.compute is None:
        return instead(call.params, call.operands, device, made)
    return made


class Refused(NamedTuple):
    """Why what was asked for by its name can't be had."""

    reason: str


def choose_or_refuse(call: TypedCall, device: AnyDevice) -> TargetCall | Fallback | Refused:
    """`choose`, with the reason in place of an error, for what only says what a call runs by."""
    try:
        return choose(call, device)
    except UnavailableError as error:
        return Refused(error.reason)
    except ValueError as error:  # as lowering says it, of a variable that is no number
        return Refused(str(error))


def _chosen(call: TypedCall, device: AnyDevice) -> TargetCall | Fallback:
    """`choose`, the operation's plain form standing for whatever it computes without a kernel."""
    operation, params = call.operation, call.params
    target, platform = operation.target, device.platform
    asked, variant = params["implementation"], params["variant"]
    without = _without_kernels(operation, device)
    lacks = "" if without is None else without.reason
    if asked in ("cpu", "cuda") and asked != platform:
        raise _placed_elsewhere(_called(operation), asked, platform)
    if lacks and (asked == "cuda" or (asked is None and variant is not None)):
        what = "implementation='cuda'" if asked else f"variant {variant!r}"
        message = f"{_called(operation)}: {what} was asked for, but\n  {lacks}"
        raise UnavailableError(message, lacks)
    _check_variant(operation, asked or platform, variant)
    if asked == "xla":
        return Fallback("implementation='xla' asks for it")
    if without is not None:
        missed = platform == "cuda" and device.lacks
        instead = (
            f"jaxsparse: its CUDA kernels can't be used, {operation.plain} is used instead:\n  "
        )
        return without._replace(warning=f"{instead}{lacks}" if missed else "")
    made = operation.ffi(params, call.operands, device)
    if isinstance(made, Fallback):
        return made
    kernel = _target_call(call, made, platform)
    if made.fallback is not None and variant is None and not _variants(target, kernel, device):
        return made.fallback
    return kernel


def narrowed(call: TypedCall, made: TargetCall, device: AnyDevice) -> TargetCall:
    """What a call is lowered to: without operands that the variant chosen here does not take.

    That variant is chosen for the device that is lowered for. A program exported for another one
    has no other left, although the other device may be faster by one. Of sizes that are still open
    it is not known, and all operands stay.
    """
    if made.narrower is None or not all(isinstance(n, int) for x in made.operands for n in x.shape):
        return made
    variant, narrower = made.narrower
    chosen = _variants(call.operation.target, made, device)[:1]
    return narrower if any(name == variant for name, _ in chosen) else made


def lacks_kernel(operation: Operation, device: AnyDevice) -> str:
    """Why no kernel of an operation runs on a device, whatever the call; empty if some may."""
    without = _without_kernels(operation, device)
    return "" if without is None else without.reason


def _without_kernels(operation: Operation, device: AnyDevice) -> Fallback | None:
    """What is computed where no kernel of an operation runs on a device; None if some may."""
    lacks = device.lacks_for(operation.compute_capability)
    if lacks:
        return Fallback(lacks)
    return operation.on_cpu if device.platform == "cpu" else None


def variants_of(call: TypedCall, made: FfiCall, device: AnyDevice) -> tuple[tuple[str, float], ...]:
    """The variants that would take a call of its target, and their costs; the chosen one first.

    There are none where none fits, or not the one that is asked for.
    """
    return _variants(call.operation.target, _target_call(call, made, device.platform), device)


def _variants(target: str, call: TargetCall, device: AnyDevice) -> tuple[tuple[str, float], ...]:
    try:
        return device.choose_variant(
            target, _sized(call.operands), _sized(call.results), call.attributes
        )
    except ValueError:
        return ()


def _sized(avals: Sequence[ShapedArray]) -> list[ShapedArray]:
    """Types of which sizes that are still open are taken for 1."""
    return [
        ShapedArray(tuple(n if isinstance(n, int) else 1 for n in a.shape), a.dtype) for a in avals
    ]


def _called(operation: Operation) -> str:
    return operation.called or operation.target


def _placed_elsewhere(called: str, asked: str, platform: str) -> UnavailableError:
    what = f"implementation={asked!r}"
    message = f"{called}: {what} was asked for, but it is lowered for {platform!r}"
    if asked == "cpu":
        return UnavailableError(message, f"{what} asks for a CPU")
    reasons = backend.cuda_problems() or ("the computation is placed on another platform",)
    return UnavailableError("\n  ".join([f"{message}:", *reasons]), f"{what} asks for a GPU")


def _check_variant(operation: Operation, implementation: str, variant: str | None) -> None:
    names = backend.TARGETS[operation.target]["variants"].get(implementation, [])
    if variant is not None and variant not in names:
        raise UnavailableError(
            f"{_called(operation)}: implementation {implementation!r} has no variant {variant!r}, "
            f"it has {names}"
        )


def _target_call(call: TypedCall, made: FfiCall, platform: str) -> TargetCall:
    signature = call.operation.signature(call.params)
    if made.padded is not None:
        call = call._replace(
            operands=_padded(call.operands, signature.operands, *made.padded),
            results=_padded(call.results, signature.results, *made.padded),
        )
    names = [name for name, _ in signature.operands]
    positions = [names.index(name) for name in made.operands]
    swapped_operands = [name in made.swapped for name in made.operands]
    swapped_results = [name in made.swapped for name, _ in signature.results]

    def swapped(avals: Sequence[ShapedArray], swaps: list[bool]) -> list[ShapedArray]:
        return [
            _with_swapped_axes(aval) if swap else aval
            for aval, swap in zip(avals, swaps, strict=True)
        ]

    operands = swapped([call.operands[i] for i in positions], swapped_operands)
    results = swapped(call.results, swapped_results)
    attributes = {"variant": call.params["variant"] or "", **made.attributes}
    workspace = made.workspace
    if workspace is None:
        attributes["workspace"] = workspace = 0
        if platform == "cuda":
            sized = _sized if made.workspace_is_fixed else list
            workspace = workspace_bytes(
                call.operation.target, sized(operands), sized(results), attributes
            )
            attributes["workspace"] = workspace
    if workspace:
        results = [*results, ShapedArray((workspace,), jnp.uint8)]
    return TargetCall(
        positions,
        operands,
        results,
        swapped_operands,
        swapped_results,
        attributes,
        made.remark,
        made.plan,
        made.narrower and (made.narrower[0], _target_call(call, made.narrower[1], platform)),
    )


def _padded(
    avals: Sequence[ShapedArray], specs: Sequence[tuple[str, str]], dimension: str, size: int
) -> list[ShapedArray]:
    """Types in which a core dimension has another size."""
    types = []
    for aval, (_, spec) in zip(avals, specs, strict=True):
        dims = core_dims(spec)
        batch = aval.shape[: aval.ndim - len(dims)]
        core = aval.shape[len(batch) :]
        sizes = (size if dim == dimension else n for dim, n in zip(dims, core, strict=True))
        types.append(ShapedArray((*batch, *sizes), aval.dtype))
    return types


def _with_swapped_axes(aval: ShapedArray) -> ShapedArray:
    """An array's type with its last two dimensions in the other order."""
    *batch, rows, columns = aval.shape
    return ShapedArray((*batch, columns, rows), aval.dtype)
