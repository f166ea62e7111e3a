"""Makes a JAX primitive of a declaration."""

from __future__ import annotations

import functools

from jax._src import dispatch  # for prim_requires_devices_during_lowering; it has no public name
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxsparse.primitive.batching import batch
from jaxsparse.primitive.binding import CALLS, evaluate
from jaxsparse.primitive.declaration import Operation
from jaxsparse.primitive.derivatives import taylor
from jaxsparse.primitive.lowering import local_lowering, partitionable_lowering
from jaxsparse.primitive.shapes import abstract_eval

# What each primitive that make_primitive made computes.
OPERATIONS: dict[Primitive, Operation] = {}


def make_primitive(operation: Operation) -> Primitive:
    """A primitive of several results with every rule but the derivatives'."""
    # The primitive that users' programs hold lowers to a partitionable call of a second one, which
    # lowers to the kernel: only so do sharded operands stay sharded.
    primitive = Primitive(f"jaxsparse_{operation.name}")
    call = Primitive(f"jaxsparse_{operation.name}_call")
    for p in (primitive, call):
        p.multiple_results = True
        p.def_abstract_eval(functools.partial(abstract_eval, operation))
        p.def_impl(functools.partial(evaluate, p))
        batching.primitive_batchers[p] = functools.partial(batch, p)
    OPERATIONS[primitive], CALLS[primitive] = operation, call
    jet.jet_rules[primitive] = functools.partial(taylor, primitive)
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    mlir.register_lowering(primitive, partitionable_lowering(operation, call))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(call, local_lowering(operation, platform), platform=platform)
    mlir.register_lowering(call, local_lowering(operation, "other"))
    return primitive
