"""How much a weight counts: those with the least scores are pruned first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from jaxsparse.precision import promoted

Score = Callable[[jax.Array, jax.Array | None, jax.Array], jax.Array]


def magnitude(weight: jax.Array, gradient: jax.Array | None, key: jax.Array) -> jax.Array:
    """The absolute value of the weight."""
    return jnp.abs(weight)


def magnitude_gradient(weight: jax.Array, gradient: jax.Array | None, key: jax.Array) -> jax.Array:
    """How far the loss would move without the weight, to first order; NaN where a factor is."""
    if gradient is None:
        raise ValueError("make_masks: score 'magnitude_gradient' needs gradients, got None")
    # In float16 the product of two small numbers would be 0, and all such weights alike.
    dtype = promoted(weight.dtype, gradient.dtype, jnp.float32)
    return jnp.abs(weight.astype(dtype) * gradient.astype(dtype))


def random(weight: jax.Array, gradient: jax.Array | None, key: jax.Array) -> jax.Array:
    """A uniform random number, another one at every pruning step."""
    return jax.random.uniform(key, weight.shape)


SCORES: Mapping[str, Score] = MappingProxyType(
    {
        "magnitude": magnitude,
        "magnitude_gradient": magnitude_gradient,
        "random": random,
    }
)
