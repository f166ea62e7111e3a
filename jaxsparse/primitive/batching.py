"""Batching: one more leading dimension of a call."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxsparse.primitive.binding import bind


def batch(primitive: Primitive, operands: Any, dims: Any, **params: Any) -> Any:
    """The batching rule: one more leading dimension, of size 1 where an operand has none."""
    operands = [
        jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    results = bind(primitive, *operands, **params)
    return results, [0] * len(results)
