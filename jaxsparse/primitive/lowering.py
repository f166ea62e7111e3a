"""Lowering: from a primitive over any number of devices to what `choose` says, on each."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsparse import backend
from jaxsparse.batching import over_batch
from jaxsparse.device import lowered_for
from jaxsparse.primitive.cache_key import make_key_stable
from jaxsparse.primitive.choice import TypedCall, choose, narrowed
from jaxsparse.primitive.declaration import Fallback, Operation, core_dims
from jaxsparse.primitive.shapes import abstract_eval
from jaxsparse.primitive.sharding import partitioned


def typed_call(
    operation: Operation, params: dict[str, Any], avals: Sequence[ShapedArray]
) -> TypedCall:
    """What a primitive lowers to, on one device."""
    params, dtypes = operation.cast(params, avals)
    operands = [ShapedArray(a.shape, d) for a, d in zip(avals, dtypes, strict=True)]
    return TypedCall(operation, params, operands, abstract_eval(operation, *operands, **params))


def partitionable_lowering(operation: Operation, call: Primitive) -> Any:
    """The lowering rule of what a user's program holds: to the call, cut over devices."""

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        typed = typed_call(operation, params, ctx.avals_in)
        params, types = typed.params, typed.operands
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
    """The lowering rule of a call on one device of a platform: to its kernel, or to jnp."""

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        typed = TypedCall(operation, params, ctx.avals_in, ctx.avals_out)
        call = choose(typed, lowered_for(platform))
        if isinstance(call, Fallback):
            _warn_once(call)
            declared = {name: params[name] for name in operation.params}
            compute = functools.partial(_in_jnp, operation, platform, declared)
            if call.compute is not None:
                compute = functools.partial(_broadcast, call.compute, declared, ctx.avals_out)
            # The operands are one device's by now: mesh axes in their types only get in the way.
            ctx = ctx.replace(avals_in=[ShapedArray(a.shape, a.dtype) for a in ctx.avals_in])
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return mlir.lower_fun(compute, multiple_results=True)(ctx, *operands)
        call = narrowed(typed, call, lowered_for(platform))
        passed = [
            _as_target_has_it(ctx, ctx.avals_in[i], target, operands[i], swap)
            for i, target, swap in zip(
                call.positions, call.operands, call.swapped_operands, strict=True
            )
        ]
        lowering = jax.ffi.ffi_lowering(backend.target_name(operation.target))
        results = lowering(
            ctx.replace(avals_in=call.operands, avals_out=call.results),
            *passed,
            **call.attributes,
        )
        if platform == "cuda":
            results = _kept_apart(ctx, call.results, results)
        of_primitive = len(call.swapped_results)
        return [
            _as_primitive_has_it(ctx, target, aval, result, swap)
            for target, aval, result, swap in zip(
                call.results[:of_primitive],
                ctx.avals_out,
                results[:of_primitive],
                call.swapped_results,
                strict=True,
            )
        ]

    return rule


_warned: set[tuple[str, str]] = set()  # of which subject, and why


def _warn_once(fallback: Fallback) -> None:
    told = (fallback.subject, fallback.reason)
    if fallback.warning and told not in _warned:
        _warned.add(told)
        warnings.warn(fallback.warning, stacklevel=2)


def _broadcast(
    compute: Any, params: dict[str, Any], avals: Sequence[ShapedArray], *operands: jax.Array
) -> list[jax.Array]:
    """What stands for a kernel; a result may lack batch dimensions that its operands lack."""
    results = compute(*operands, **params)
    return [jnp.broadcast_to(x, a.shape) for x, a in zip(results, avals, strict=True)]


def _in_jnp(
    operation: Operation, platform: str, params: dict[str, Any], *operands: jax.Array
) -> list[jax.Array]:
    """The plain jnp form over all batch dimensions, unbatched operands left so."""
    on_gpu = operation.xla_on_gpu if platform == "cuda" else None
    compute = functools.partial(on_gpu or operation.xla, **params)
    if operation.plain_takes_batch:
        return compute(*operands)
    core_rank = len(core_dims(operation.signature(params).operands[0][1]))
    return over_batch(compute, operands[0].ndim - core_rank, *operands)


def _kept_apart(ctx: Any, avals: Sequence[ShapedArray], results: Sequence[Any]) -> list[Any]:
    """A kernel's results behind a barrier, so that XLA runs the kernel once.

    XLA of jaxlib 0.11 fuses a kernel in a loop with the slices that it reads and writes. Where a
    result is stacked by the loop and read by something else too, the fusion is a second kernel:
    the first one stays, for that reader.
    """
    barrier = mlir.lower_fun(lambda *xs: jax.lax.optimization_barrier(xs), multiple_results=True)
    kept: list[Any] = barrier(ctx.replace(avals_in=avals, avals_out=avals), *results)
    return kept


def _as_target_has_it(
    ctx: Any, aval: ShapedArray, target: ShapedArray, operand: Any, swap: bool
) -> Any:
    """An operand with its last two dimensions swapped and zeros behind it, where the call says so.

    XLA may do that where the operand is made.
    """
    if not swap and aval.shape == target.shape:
        return operand

    def laid_out(x: jax.Array) -> jax.Array:
        x = jnp.swapaxes(x, -1, -2) if swap else x
        if x.shape == target.shape:
            return x
        return jnp.pad(x, [(0, m - n) for m, n in zip(target.shape, x.shape, strict=True)])

    return _changed(ctx, laid_out, aval, target, operand)


def _as_primitive_has_it(
    ctx: Any, target: ShapedArray, aval: ShapedArray, result: Any, swap: bool
) -> Any:
    """A result without what `_as_target_has_it` did to the operands."""
    if not swap and aval.shape == target.shape:
        return result

    def restored(y: jax.Array) -> jax.Array:
        y = jnp.swapaxes(y, -1, -2) if swap else y
        return y if y.shape == aval.shape else jax.lax.slice(y, (0,) * y.ndim, aval.shape)

    return _changed(ctx, restored, target, aval, result)


def _changed(
    ctx: Any,
    function: Callable[[jax.Array], jax.Array],
    before: ShapedArray,
    after: ShapedArray,
    value: Any,
) -> Any:
    # The value is one device's by now: mesh axes in its type only get in the way.
    before, after = (ShapedArray(aval.shape, aval.dtype) for aval in (before, after))
    ctx = ctx.replace(avals_in=[before], avals_out=[after])
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return mlir.lower_fun(function, multiple_results=False)(ctx, value)[0]
