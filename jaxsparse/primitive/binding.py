"""Binds primitives: in a trace, eagerly, and in the plain form of another operation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

# The primitive that each one of `make_primitive` lowers to.
CALLS: dict[Primitive, Primitive] = {}


def bind(primitive: Primitive, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Binds a primitive, in the derivative rules too.

    Inside ``shard_map`` all operands must vary over the same mesh axes: without the cast, a
    gradient taken there misses the sum over the axes of the operand that varies less.

    And those of no elements, as a matrix of no entries has them, are made anew in there: jaxlib
    0.11 crashes where ``shard_map`` takes one that is used.
    """
    tracing = any(isinstance(x, jax.core.Tracer) for x in operands)
    if not tracing and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        eager: list[jax.Array] = _eager(primitive, tuple(sorted(params.items())))(*operands)
        return eager
    if tracing:
        if jax.sharding.get_abstract_mesh().manual_axes:
            operands = tuple(jnp.zeros_like(x) if x.size == 0 else x for x in operands)
        varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
        union = frozenset().union(*varying)
        operands = tuple(
            jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if union - axes else x
            for x, axes in zip(operands, varying, strict=True)
        )
    results: list[jax.Array] = primitive.bind(*operands, **params)
    return results


def bind_local(primitive: Primitive, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Binds in the plain form of another operation, where the operands are one device's already."""
    results: list[jax.Array] = CALLS[primitive].bind(*operands, **params)
    return results


def evaluate(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Eager evaluation, also under ``jax.disable_jit()``."""
    with jax.disable_jit(False):  # else jax.disable_jit() would come back here for ever
        eager: list[jax.Array] = _eager(primitive, tuple(sorted(params.items())))(*operands)
        return eager


@functools.lru_cache(maxsize=1024)
def _eager(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    """The primitive as a compiled function, one object for each set of parameters.

    So an eager call hits its cache without going through Python's part of `bind`.
    """
    return jax.jit(functools.partial(primitive.bind, **dict(params)))
