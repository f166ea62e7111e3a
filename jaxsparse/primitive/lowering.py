"""Lowering: from a primitive over any number of devices to a kernel, or plain jnp, on each.

`explain` asks the same functions for what would be called.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsparse import backend
from jaxsparse.batching import over_batch
from jaxsparse.device import workspace_bytes
from jaxsparse.primitive.cache_key import make_key_stable
from jaxsparse.primitive.declaration import FfiCall, Instead, Operation, core_dims
from jaxsparse.primitive.shapes import abstract_eval
from jaxsparse.primitive.sharding import partitioned


class TargetCall(NamedTuple):
    """A call of an operation's FFI target, with the types that it is lowered to."""

    positions: list[int]  # of its operands, among the primitive's
    operands: list[ShapedArray]
    results: list[ShapedArray]  # the primitive's; last the workspace, if there is one
    swapped_operands: list[bool]  # which have their last two dimensions in the other order
    swapped_results: list[bool]
    attributes: dict[str, Any]
    remark: str


def target_call(
    operation: Operation,
    platform: str,
    params: dict[str, Any],
    avals_in: Sequence[ShapedArray],
    avals_out: Sequence[ShapedArray],
) -> TargetCall | Instead | None:
    """How the kernel for a call of these types is called, or as `Operation.ffi` what is instead."""
    call = operation.ffi(params, avals_in, platform)
    if not isinstance(call, FfiCall):
        return call
    signature = operation.signature(params)
    names = [name for name, _ in signature.operands]
    positions = [names.index(name) for name in call.operands]
    swapped_operands = [name in call.swapped for name in call.operands]
    swapped_results = [name in call.swapped for name, _ in signature.results]

    def swapped(avals: Sequence[ShapedArray], swaps: list[bool]) -> list[ShapedArray]:
        return [
            _with_swapped_axes(aval) if swap else aval
            for aval, swap in zip(avals, swaps, strict=True)
        ]

    operands = swapped([avals_in[i] for i in positions], swapped_operands)
    results = swapped(avals_out, swapped_results)
    attributes = {"variant": params["variant"] or "", **call.attributes}
    workspace = call.workspace
    if workspace is None:
        attributes["workspace"] = workspace = 0
        if platform == "cuda":
            workspace = workspace_bytes(operation.target, operands, results, attributes)
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
        call.remark,
    )


def call_types(
    operation: Operation, params: dict[str, Any], avals: Sequence[ShapedArray]
) -> tuple[dict[str, Any], list[ShapedArray], list[ShapedArray]]:
    """Params, operands and results of what a primitive lowers to, on one device."""
    params, dtypes = operation.cast(params, avals)
    operands = [ShapedArray(a.shape, d) for a, d in zip(avals, dtypes, strict=True)]
    return params, operands, abstract_eval(operation, *operands, **params)


def partitionable_lowering(operation: Operation, call: Primitive) -> Any:
    """The lowering rule of what a user's program holds: to the call, cut over devices."""

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        params, types, _ = call_types(operation, params, ctx.avals_in)
        function = partitioned(operation, call, tuple(sorted(params.items())))
        local = getattr(ctx.module_context.axis_context, "manual_axes", None)
        if local:
            # Inside shard_map the operands are local already. Over axes that it leaves to the
            # compiler, which custom_partitioning can't serve there, the call is replicated.
            function = functools.partial(call.bind, **params)

        def compute(*xs: jax.Array) -> list[jax.Array]:
            results = function(*(x.astype(t.dtype) for x, t in zip(xs, types, strict=True)))
            return [r.astype(a.dtype) for r, a in zip(results, ctx.avals_out, strict=True)]

        results = mlir.lower_fun(compute, multiple_results=True)(ctx, *operands)
        if not local:
            make_key_stable(ctx, results[0], functools.partial(call.bind, **params), types)
        return results

    return rule


def local_lowering(operation: Operation, platform: str) -> Any:
    """The lowering rule of a call on one device: to its kernel on a platform, or to plain jnp."""

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        declared = {name: params[name] for name in operation.params}
        chosen = backend.resolve(
            operation.target, platform, params["implementation"], params["variant"]
        )
        call: TargetCall | Instead | None = None
        if chosen in backend.TARGETS[operation.target]["targets"]:
            call = target_call(operation, platform, params, ctx.avals_in, ctx.avals_out)
        if not isinstance(call, TargetCall):
            compute = functools.partial(_in_jnp, operation, platform, declared)
            if call is not None:
                compute = functools.partial(call.compute, **declared)
            # The operands are one device's by now: mesh axes in their types only get in the way.
            ctx = ctx.replace(avals_in=[ShapedArray(a.shape, a.dtype) for a in ctx.avals_in])
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return mlir.lower_fun(compute, multiple_results=True)(ctx, *operands)
        passed = [
            _swap_axes(ctx, ctx.avals_in[i], operands[i]) if swap else operands[i]
            for i, swap in zip(call.positions, call.swapped_operands, strict=True)
        ]
        lowering = jax.ffi.ffi_lowering(backend.target_name(operation.target))
        results = lowering(
            ctx.replace(avals_in=call.operands, avals_out=call.results),
            *passed,
            **call.attributes,
        )
        of_primitive = len(call.swapped_results)
        return [
            _swap_axes(ctx, aval, result) if swap else result
            for aval, result, swap in zip(
                call.results[:of_primitive],
                results[:of_primitive],
                call.swapped_results,
                strict=True,
            )
        ]

    return rule


def _in_jnp(
    operation: Operation, platform: str, params: dict[str, Any], *operands: jax.Array
) -> list[jax.Array]:
    """The plain jnp form over all batch dimensions, unbatched operands left so."""
    on_gpu = operation.xla_on_gpu if platform == "cuda" else None
    compute = functools.partial(on_gpu or operation.xla, **params)
    core_rank = len(core_dims(operation.signature(params).operands[0][1]))
    return over_batch(compute, operands[0].ndim - core_rank, *operands)


def _with_swapped_axes(aval: ShapedArray) -> ShapedArray:
    *batch, rows, columns = aval.shape
    return ShapedArray((*batch, columns, rows), aval.dtype)


def _swap_axes(ctx: Any, aval: ShapedArray, operand: Any) -> Any:
    """An operand with its last two dimensions swapped, which XLA may do where it is made."""
    ctx = ctx.replace(
        avals_in=[ShapedArray(aval.shape, aval.dtype)], avals_out=[_with_swapped_axes(aval)]
    )
    swap = mlir.lower_fun(lambda x: jnp.swapaxes(x, -1, -2), multiple_results=False)
    return swap(ctx, operand)[0]
