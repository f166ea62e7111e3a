"""How the partitioner cuts a call over devices, and what names the call in compilation caches."""

from __future__ import annotations

import functools
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax._src import custom_partitioning as jax_partitioning  # its callbacks have no public name
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.precision import unrounded

if TYPE_CHECKING:
    from jaxsparse.primitive import Operation


def _sharding_rule(
    operation: Operation, params: dict[str, Any], operands: Any, results: Any
) -> Any:
    """The einsum-like rule of Shardy; dimensions that can't be sharded are factors to replicate."""
    signature = operation.signature(params)
    batch_rank = len(results[0].shape) - len(signature.results[0][1].split())
    batch = [f"b{d}" for d in range(batch_rank)]
    fresh = itertools.count()

    def factors(spec: str, shape: Sequence[int]) -> str:
        # A broadcast dimension needs a factor of its own: it does not follow the others' sharding.
        lead = [
            name if shape[d] == results[0].shape[d] else f"s{next(fresh)}"
            for d, name in enumerate(batch)
        ]
        core = (
            f"s{next(fresh)}" if dim.isdigit() else dim.replace("+1", "p") for dim in spec.split()
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


@functools.lru_cache(maxsize=1024)
def partitioned(operation: Operation, call: Primitive, items: tuple[tuple[str, Any], ...]) -> Any:
    """The call as something that the partitioner can cut along batch and shardable dimensions."""
    params = dict(items)
    signature = operation.signature(params)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        dims = signature.results[0][1].split()
        first = results[0]
        spec = tuple(first.sharding.spec)
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
            of_operand = (*x.sharding.spec, *(None,) * len(x.shape))[batch_rank : len(x.shape)]
            for dim, axis in zip(core.split(), of_operand, strict=True):
                if dim in operation.summed and axis and not taken & {*_axis_names(axis)}:
                    axes.setdefault(dim, axis)
        reduced = tuple(
            name for dim in operation.summed if dim in axes for name in _axis_names(axes[dim])
        )

        def sharding(core: str, shape: Sequence[int]) -> NamedSharding:
            lead = [spec[d] if shape[d] == first.shape[d] else None for d in range(batch_rank)]
            return NamedSharding(
                mesh, PartitionSpec(*lead, *(axes.get(dim) for dim in core.split()))
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


def make_key_stable(
    ctx: Any, result: Any, call: Callable[..., Any], types: Sequence[ShapedArray]
) -> None:
    """Names the partitioning that a program's result comes from by what it computes.

    JAX names it by the address of a Python object, so that no program over several devices finds
    itself in the persistent compilation cache. A name has to tell apart what is compiled
    differently: it is a hash of the call as it is lowered for one device, of the mesh, and of the
    sources that cut and lower it.
    """
    callbacks = getattr(jax_partitioning, "_sharding_callbacks", None)
    if jax.config.jax_compilation_cache_dir is None or callbacks is None:  # type: ignore[attr-defined]
        return
    owner = result.owner
    while not isinstance(owner, ir.Block) and owner.operation.name == "stablehlo.convert":
        owner = owner.operation.operands[0].owner
    attributes = {} if isinstance(owner, ir.Block) else owner.operation.attributes
    if "call_target_name" not in attributes or (
        ir.StringAttr(attributes["call_target_name"]).value != "CustomSPMDPartitioning"
    ):
        return  # on one device
    callback = callbacks[ir.StringAttr(attributes["backend_config"]).value.encode()]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        lowered = jax.jit(call).trace(*types).lower(lowering_platforms=ctx.module_context.platforms)
    mesh = callback.mesh
    named = (lowered.as_text(), mesh.axis_names, [(d.id, d.device_kind) for d in mesh.devices.flat])
    key = hashlib.sha256(f"{_sources()}{mesh.devices.shape}{named}".encode()).hexdigest()
    # An equal one is kept by every program that names it.
    callback = callbacks.setdefault(key.encode(), callback)
    ctx.module_context.add_keepalive(callback)
    attributes["backend_config"] = ir.StringAttr.get(key)
    # `jax_remove_custom_partitioning_ptr_from_cache_key` takes away that one alone.
    attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({"call": ir.StringAttr.get(key)})


@functools.cache
def _sources() -> str:
    """A hash of this package's Python."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
