"""Makes a JAX primitive from a declaration of an operation.

This module and the operations' derivative rules are all that knows JAX's interpreters. An operation
declares the core dimensions of its operands and results by name ("k n"), how it is computed in
plain jnp, and what its FFI target wants; `make_primitive` gives it abstract evaluation, eager
evaluation, lowering on every platform, batching and sharding. Its derivative rules are its own
(`jaxsparse.ops`).

Every operand has the same number of leading batch dimensions; where an operand is not batched its
size there is 1, and kernels read it with stride 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import dispatch  # for prim_requires_devices_during_lowering; it has no public name
from jax.core import ShapedArray
from jax.experimental import jet
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse import backend
from jaxsparse.batching import over_batch
from jaxsparse.partitioning import make_key_stable, partitioned
from jaxsparse.precision import unrounded

MAX_BATCH_RANK = 8  # kMaxBatchRank in ffi/types.h


class Signature(NamedTuple):
    """Names and core dimensions of operands and results, e.g. ``("x", "k n")``.

    A dimension "m+1" is one longer than "m", and "3" is of size 3.
    """

    operands: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]


class FfiCall(NamedTuple):
    """A call of an operation's FFI target."""

    operands: tuple[str, ...]  # which, in the target's order
    attributes: dict[str, Any]
    workspace: int = 0  # bytes of one more result, which nobody but the kernel uses
    # Operands and results whose last two dimensions the target has in the other order.
    swapped: tuple[str, ...] = ()
    remark: str = ""  # for `explain`


class Instead(NamedTuple):
    """What is computed in jnp where an operation's FFI target would be slower."""

    reason: str
    # Of the operands with all their batch dimensions, and the operation's own params; it may bind
    # primitives by `bind_local`.
    compute: Callable[..., list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Operation:
    """What makes an operation; see the module's docstring."""

    name: str  # of the primitive
    target: str  # of its FFI target, without the prefix
    params: tuple[str, ...]  # static, beside implementation and variant
    signature: Callable[[dict[str, Any]], Signature]
    result_dtypes: Callable[[Sequence[ShapedArray], dict[str, Any]], Sequence[Any]]
    shardable: tuple[str, ...]  # core dimensions along which it is computed independently
    xla: Callable[..., list[jax.Array]]  # one batch entry in plain jnp
    # How its FFI target is called for operands of these types on a platform, what is computed
    # instead, or None for plain jnp.
    ffi: Callable[[dict[str, Any], Sequence[ShapedArray], str], FfiCall | Instead | None]
    # As `xla`, for a GPU: what is fastest there without a kernel.
    xla_on_gpu: Callable[..., list[jax.Array]] | None = None
    summed: tuple[str, ...] = ()  # core dimensions along which parts of the results add up
    # Params and dtypes of operands for the kernels, of a call whose own they may not take; its
    # results are cast to what they should be.
    cast: Callable[[dict[str, Any], Sequence[ShapedArray]], tuple[dict[str, Any], list[Any]]] = (
        lambda params, avals: (params, [a.dtype for a in avals])
    )


def bind(primitive: Primitive, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Binds a primitive, in the derivative rules too.

    Inside ``shard_map`` all operands must vary over the same mesh axes: without the cast, a
    gradient taken there misses the sum over the axes of the operand that varies less.
    """
    tracing = any(isinstance(x, jax.core.Tracer) for x in operands)
    if not tracing and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        eager: list[jax.Array] = _eager(primitive, tuple(sorted(params.items())))(*operands)
        return eager
    if tracing:
        varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
        union = frozenset().union(*varying)
        operands = tuple(
            jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if union - axes else x
            for x, axes in zip(operands, varying, strict=True)
        )
    results: list[jax.Array] = primitive.bind(*operands, **params)
    return results


@functools.lru_cache(maxsize=1024)
def _eager(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    """The primitive as a compiled function, one object for each set of parameters.

    So an eager call hits its cache without going through Python's part of `bind`.
    """
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _core_dims(spec: str) -> list[str]:
    return spec.split()


def _infer(
    operation: Operation, avals: Sequence[ShapedArray], params: dict[str, Any]
) -> list[tuple[tuple[int, ...], tuple[int, ...], list[str]]]:
    """Batch shape, core shape and core dimensions of every result, or ValueError."""
    signature = operation.signature(params)
    if len(avals) != len(signature.operands):
        raise ValueError(
            f"{operation.name}: takes {len(signature.operands)} operands, got {len(avals)}"
        )
    sizes: dict[str, int] = {}
    batches = []
    for (name, spec), aval in zip(signature.operands, avals, strict=True):
        dims = _core_dims(spec)
        split = aval.ndim - len(dims)
        if split < 0:
            raise ValueError(
                f"{operation.name}: {name} needs {len(dims)} dimensions ({spec}), "
                f"got shape {aval.shape}"
            )
        batches.append(aval.shape[:split])
        for dim, size in zip(dims, aval.shape[split:], strict=True):
            base, extra = (dim[:-2], 1) if dim.endswith("+1") else (dim, 0)
            if dim.isdigit():
                sizes[dim] = int(dim)
            if sizes.setdefault(base, size - extra) != size - extra:
                raise ValueError(
                    f"{operation.name}: {name} has shape {aval.shape}, expected {spec} with "
                    f"{base} = {sizes[base]}"
                )
    if len({len(batch) for batch in batches}) > 1:
        raise ValueError(f"{operation.name}: operands differ in batch dimensions: {batches}")
    if len(batches[0]) > MAX_BATCH_RANK:
        raise ValueError(
            f"{operation.name}: takes at most {MAX_BATCH_RANK} batch dimensions, got {batches[0]}"
        )
    try:
        batch = jnp.broadcast_shapes(*batches)
    except ValueError:
        named = {name: b for (name, _), b in zip(signature.operands, batches, strict=True) if b}
        raise ValueError(
            f"{operation.name}: batch dimensions of the operands must broadcast, got {named}"
        ) from None
    return [
        (
            batch,
            tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in _core_dims(spec)),
            _core_dims(spec),
        )
        for _, spec in signature.results
    ]


def _result_sharding(
    operation: Operation,
    avals: Sequence[ShapedArray],
    params: dict[str, Any],
    batch_rank: int,
    result_dims: list[str],
) -> NamedSharding | None:
    """Under explicit axes: batch and shardable core dimensions keep their operands' sharding."""
    mesh = next((a.sharding.mesh for a in avals if not a.sharding.mesh.empty), None)
    if mesh is None:
        return None
    names: dict[str | int, Any] = {}
    for (name, spec), aval in zip(operation.signature(params).operands, avals, strict=True):
        dims: list[str | int] = [*range(batch_rank), *_core_dims(spec)]
        for dim, size, axes in zip(dims, aval.shape, aval.sharding.spec, strict=True):
            if axes is None or (isinstance(dim, int) and size == 1):
                continue
            if isinstance(dim, str) and dim not in operation.shardable:
                raise ValueError(
                    f"{operation.name}: {name} is sharded along {dim} over {axes!r}, where it "
                    "can't be: reshard it, or use automatic axes"
                )
            if names.setdefault(dim, axes) != axes:
                raise ValueError(
                    f"{operation.name}: operands are sharded differently along dimension {dim}: "
                    f"{names[dim]!r} and {axes!r}"
                )
    axes_of_result = [names.get(dim) for dim in [*range(batch_rank), *result_dims]]
    return NamedSharding(mesh, PartitionSpec(*axes_of_result))


def _abstract_eval(operation: Operation, *avals: ShapedArray, **params: Any) -> list[ShapedArray]:
    results = []
    inferred = _infer(operation, avals, params)
    dtypes = operation.result_dtypes(avals, params)
    for (batch, core, dims), dtype in zip(inferred, dtypes, strict=True):
        results.append(
            ShapedArray(
                (*batch, *core),
                dtype,
                sharding=_result_sharding(operation, avals, params, len(batch), dims),
                manual_axis_type=avals[0].manual_axis_type,
            )
        )
    return results


def batch(primitive: Primitive, operands: Any, dims: Any, **params: Any) -> Any:
    """The batching rule: one more leading dimension, of size 1 where an operand has none."""
    operands = [
        jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    results = bind(primitive, *operands, **params)
    return results, [0] * len(results)


def _xla(
    operation: Operation, platform: str, params: dict[str, Any], *operands: jax.Array
) -> list[jax.Array]:
    """The plain jnp form over all batch dimensions, unbatched operands left so."""
    on_gpu = operation.xla_on_gpu if platform == "cuda" else None
    compute = functools.partial(on_gpu or operation.xla, **params)
    core_rank = len(_core_dims(operation.signature(params).operands[0][1]))
    return over_batch(compute, operands[0].ndim - core_rank, *operands)


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
    workspace = [ShapedArray((call.workspace,), jnp.uint8)] if call.workspace else []

    def swapped(avals: Sequence[ShapedArray], swaps: list[bool]) -> list[ShapedArray]:
        return [
            _with_swapped_axes(aval) if swap else aval
            for aval, swap in zip(avals, swaps, strict=True)
        ]

    return TargetCall(
        positions,
        swapped([avals_in[i] for i in positions], swapped_operands),
        [*swapped(avals_out, swapped_results), *workspace],
        swapped_operands,
        swapped_results,
        {"variant": params["variant"] or "", **call.attributes},
        call.remark,
    )


def call_types(
    operation: Operation, params: dict[str, Any], avals: Sequence[ShapedArray]
) -> tuple[dict[str, Any], list[ShapedArray], list[ShapedArray]]:
    """Params, operands and results of what a primitive lowers to, on one device."""
    params, dtypes = operation.cast(params, avals)
    operands = [ShapedArray(a.shape, d) for a, d in zip(avals, dtypes, strict=True)]
    return params, operands, _abstract_eval(operation, *operands, **params)


def _lower(operation: Operation, platform: str) -> Any:
    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        declared = {name: params[name] for name in operation.params}
        chosen = backend.resolve(
            operation.target, platform, params["implementation"], params["variant"]
        )
        call: TargetCall | Instead | None = None
        if chosen in backend.OPERATIONS[operation.target]["targets"]:
            call = target_call(operation, platform, params, ctx.avals_in, ctx.avals_out)
        if not isinstance(call, TargetCall):
            compute = functools.partial(_xla, operation, platform, declared)
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


def _impl(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # else jax.disable_jit() would come back here for ever
        eager: list[jax.Array] = _eager(primitive, tuple(sorted(params.items())))(*operands)
        return eager


def _taylor(primitive: Primitive, primals: Any, series: Any, **params: Any) -> Any:
    """The rule of `jax.experimental.jet`: Taylor coefficients of results along those of operands.

    They are derivatives along the curve, by the JVP, whose number doubles with each order.
    """

    def along(t: jax.Array) -> list[jax.Array]:
        powers = [t**k for k in range(1, len(series[0]) + 1)]
        operands = [
            x + sum(c * t_k.astype(x.dtype) for c, t_k in zip(terms, powers, strict=True))
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for x, terms in zip(primals, series, strict=True)
        ]
        return bind(primitive, *operands, **params)

    coefficients = []
    for order in range(len(series[0]) + 1):
        scale = 1 / math.factorial(order)
        coefficients.append([(x * scale).astype(x.dtype) for x in along(jnp.zeros(()))])
        along = functools.partial(_derivative, along)
    first, *rest = coefficients
    return first, [list(terms) for terms in zip(*rest, strict=True)]


def _derivative(function: Callable[..., Any], t: jax.Array) -> Any:
    return jax.jvp(function, (t,), (jnp.ones_like(t),))[1]


# What each primitive that make_primitive made computes, and the one that it lowers to.
OPERATIONS: dict[Primitive, Operation] = {}
_CALLS: dict[Primitive, Primitive] = {}


def bind_local(primitive: Primitive, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Binds in the plain form of another operation, where the operands are one device's already."""
    results: list[jax.Array] = _CALLS[primitive].bind(*operands, **params)
    return results


def make_primitive(operation: Operation) -> Primitive:
    """A primitive of several results with every rule but the derivatives'."""
    # The primitive that users' programs hold lowers to a partitionable call of a second one, which
    # lowers to the kernel: only so do sharded operands stay sharded.
    primitive = Primitive(f"jaxsparse_{operation.name}")
    call = Primitive(f"jaxsparse_{operation.name}_call")
    for p in (primitive, call):
        p.multiple_results = True
        p.def_abstract_eval(functools.partial(_abstract_eval, operation))
        p.def_impl(functools.partial(_impl, p))
        batching.primitive_batchers[p] = functools.partial(batch, p)
    OPERATIONS[primitive], _CALLS[primitive] = operation, call
    jet.jet_rules[primitive] = functools.partial(_taylor, primitive)

    def lowering(ctx: Any, *operands: Any, **params: Any) -> Any:
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

    dispatch.prim_requires_devices_during_lowering.add(primitive)
    mlir.register_lowering(primitive, lowering)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(call, _lower(operation, platform), platform=platform)
    mlir.register_lowering(call, _lower(operation, "other"))
    return primitive


def define_multilinear_jvp(primitive: Primitive, linear: Callable[..., tuple[int, ...]]) -> None:
    """The JVP of a product that is linear in each of some operands: a sum of one call each.

    ``linear(**params)`` says which, by position. Terms of 16 bits are rounded when they are added
    up, for which ``out_dtype`` must be one of the params if there may be several.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        (result,) = bind(primitive, *primals, **params)
        varying = [i for i in linear(**params) if type(tangents[i]) is not ad.Zero]
        if not varying:
            return [result], [ad.Zero(jax.typeof(result).to_tangent_aval())]
        of_term = params if len(varying) == 1 else unrounded(params)
        terms = (
            bind(primitive, *primals[:i], tangents[i], *primals[i + 1 :], **of_term)[0]
            for i in varying
        )
        return [result], [functools.reduce(ad.add_tangents, terms).astype(result.dtype)]

    ad.primitive_jvps[primitive] = jvp


def define_transpose(primitive: Primitive, rule: Callable[..., tuple[int, jax.Array]]) -> None:
    """The transpose of an operation of one result that is linear in the one undefined operand.

    ``rule(cotangent, operands, **params)`` answers that operand's position and cotangent under the
    result's batch dimensions; here it is summed to the operand's own shape and dtype.
    """

    def transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
        answers: list[Any] = [None] * len(operands)
        if type(cotangents[0]) is ad.Zero:
            return answers
        position, cotangent = rule(cotangents[0], operands, **params)
        aval = operands[position].aval
        summed = tuple(
            d for d, (a, b) in enumerate(zip(cotangent.shape, aval.shape, strict=True)) if a != b
        )
        if summed:
            cotangent = jnp.sum(cotangent, summed, keepdims=True)
        sharding = jax.typeof(cotangent).sharding
        if sharding.spec != aval.sharding.spec:
            # Another operand's batch was cut by explicit axes, this one's was not.
            own = NamedSharding(sharding.mesh, aval.sharding.spec)
            cotangent = jax.sharding.reshard(cotangent, own)
        answers[position] = cotangent.astype(aval.dtype)
        return answers

    ad.primitive_transposes[primitive] = transpose


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """An array that explicit sharding does not cut along an axis."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or sharding.spec[axis] is None:
        return x
    spec = list(sharding.spec)
    spec[axis] = None
    resharded: jax.Array = jax.sharding.reshard(
        x, NamedSharding(sharding.mesh, PartitionSpec(*spec))
    )
    return resharded


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program in its order, with those of the programs inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr):
                    yield from equations(inner.jaxpr)
                elif isinstance(inner, Jaxpr):
                    yield from equations(inner)


def undefined(operand: Any) -> bool:
    """Whether a transpose rule has to answer for this operand."""
    return bool(ad.is_undefined_primal(operand))
