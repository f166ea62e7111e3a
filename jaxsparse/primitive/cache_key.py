"""What names a program over several devices in persistent compilation caches."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import custom_partitioning as jax_partitioning  # its callbacks have no public name
from jax.core import ShapedArray
from jax.extend.mlir import ir


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
    """A hash of jaxsparse's Python."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
