"""How a call is cut over devices: by explicit axes, and by the partitioner."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.precision import unrounded
from jaxsparse.primitive.declaration import Operation, core_dims


def result_sharding(
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
        dims: list[str | int] = [*range(batch_rank), *core_dims(spec)]
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


def parts_along(x: jax.Array, axis: int) -> tuple[int, Any]:
    """Into how many parts explicit sharding cuts an array along an axis, and over which axes."""
    sharding = jax.typeof(x).sharding
    axes = None if sharding.mesh.empty else sharding.spec[axis]
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names), axes


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


def _spec(x: Any) -> tuple[Any, ...]:
    """By which mesh axes the dimensions of an operand or result are cut.

    Where a call has constants alone, JAX hands over shardings of another class, uncut.
    """
    return tuple(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else ()


@functools.lru_cache(maxsize=1024)
def partitioned(operation: Operation, call: Primitive, items: tuple[tuple[str, Any], ...]) -> Any:
    """The call as something that the partitioner can cut along batch and shardable dimensions."""
    params = dict(items)
    signature = operation.signature(params)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        dims = core_dims(signature.results[0][1])
        first = results[0]
        spec = _spec(first)
        spec += (None,) * (len(first.shape) - len(spec))
        batch_rank = len(first.shape) - len(dims)
        axes = {
            dim: name
            for dim, name in zip(dims, spec[batch_rank:], strict=True)
            if dim in operation.shardable
        }

        # Along summed dimensions operands are cut as the first one that is, by free mesh axes.
        taken = {name for axis in spec for name in _axis_names(axis)}
        for (_, core), x in zip(signature.operands, operands, strict=True):
            of_operand = (*_spec(x), *(None,) * len(x.shape))[batch_rank : len(x.shape)]
            for dim, axis in zip(core_dims(core), of_operand, strict=True):
                if dim in operation.summed and axis and not taken & {*_axis_names(axis)}:
                    axes.setdefault(dim, axis)
        reduced = tuple(
            name for dim in operation.summed if dim in axes for name in _axis_names(axes[dim])
        )

        def sharding(core: str, shape: Sequence[int]) -> NamedSharding:
            lead = [spec[d] if shape[d] == first.shape[d] else None for d in range(batch_rank)]
            return NamedSharding(
                mesh, PartitionSpec(*lead, *(axes.get(dim) for dim in core_dims(core)))
            )

        operand_shardings = tuple(
            sharding(core, x.shape)
            for (_, core), x in zip(signature.operands, operands, strict=True)
        )
        result_shardings = [
            sharding(core, x.shape) for (_, core), x in zip(signature.results, results, strict=True)
        ]

        def local(*xs: jax.Array) -> list[jax.Array]:
            wide = unrounded(params) if reduced else params
            parts: list[jax.Array] = call.bind(*xs, **wide)
            if not reduced:
                return parts
            return [
                jax.lax.psum(part, reduced).astype(x.dtype)
                for part, x in zip(parts, results, strict=True)
            ]

        return mesh, local, result_shardings, operand_shardings

    def rule(mesh: Any, operands: Any, results: Any) -> Any:
        return _sharding_rule(operation, params, operands, results)

    function = custom_partitioning(lambda *xs: call.bind(*xs, **params))
    function.def_partition(
        partition=partition, infer_sharding_from_operands=None, sharding_rule=rule
    )
    return function


def _sharding_rule(
    operation: Operation, params: dict[str, Any], operands: Any, results: Any
) -> Any:
    """The einsum-like rule of Shardy; dimensions that can't be sharded are factors to replicate."""
    signature = operation.signature(params)
    batch_rank = len(results[0].shape) - len(core_dims(signature.results[0][1]))
    batch = [f"b{d}" for d in range(batch_rank)]
    fresh = itertools.count()

    def factors(spec: str, shape: Sequence[int]) -> str:
        # A broadcast dimension needs a factor of its own: it does not follow the others' sharding.
        lead = [
            name if shape[d] == results[0].shape[d] else f"s{next(fresh)}"
            for d, name in enumerate(batch)
        ]
        core = (
            f"s{next(fresh)}" if dim.isdigit() else dim.replace("+1", "p")
            for dim in core_dims(spec)
        )
        return " ".join([*lead, *core])

    left = ", ".join(
        factors(spec, x.shape) for (_, spec), x in zip(signature.operands, operands, strict=True)
    )
    right = ", ".join(
        factors(spec, x.shape) for (_, spec), x in zip(signature.results, results, strict=True)
    )
    # Shardy wants replicated factors in order of first appearance.
    order = dict.fromkeys(f"{left} {right}".replace(",", " ").split())
    free = (*operation.shardable, *operation.summed)
    replicated = tuple(f for f in order if f[0] not in "bs" and f not in free)
    summed = tuple(f for f in order if f in operation.summed)
    kinds = {"need_replication_factors": replicated, "reduction_factors": summed}
    return f"{left} -> {right}", kinds


def _axis_names(axis: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
