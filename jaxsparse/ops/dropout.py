"""Which probabilities of attention are dropped: by a hash of a seed, the row and the column.

So the choice is the same in kernels and in jnp, however positions are cut into blocks or over
devices. ``ffi/attention/kernels/dropout.cuh`` has the same functions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = np.uint32(0x9E3779B9)  # 2**32 divided by the golden ratio: multiples of it spread evenly


def seeds_of(key: jax.Array, heads: tuple[int, ...], *, same_for_all: bool) -> jax.Array:
    """Uint32 seeds of heads, of a random key."""
    seeds = jax.random.bits(key, () if same_for_all else heads, jnp.uint32)
    return jnp.broadcast_to(seeds, heads)


def kept(seeds: jax.Array, rows: jax.Array, columns: jax.Array, rate: jax.Array) -> jax.Array:
    """Whether a probability is kept, for seeds and int32 positions that broadcast.

    Of each pair of neighbouring columns one has the lower half of a hash, one the upper half: it is
    dropped if that is less than ``rate`` times 2**16.
    """
    rows, columns = (x.astype(jnp.uint32) for x in (rows, columns))
    of_row = _mix(_mix(rows) + seeds)
    bits = _mix(of_row + (columns >> 1) * _GOLDEN)
    half = jnp.where(columns & 1 == 1, bits >> 16, bits & 0xFFFF)
    return half >= jnp.rint(rate.astype(jnp.float32) * 2**16).astype(jnp.uint32)


def multipliers(
    seeds: jax.Array, rows: jax.Array, columns: jax.Array, rate: jax.Array, dtype: Any
) -> jax.Array:
    """By what probabilities are multiplied: 0, or 1 / (1 - rate)."""
    scale = 1 / (1 - rate.astype(dtype))
    return jnp.where(kept(seeds, rows, columns, rate), scale, jnp.zeros((), dtype))


def applied(weights: jax.Array, multipliers: jax.Array | None) -> jax.Array:
    """Weights by their multipliers, if there are any: what is dropped is 0, also if it is NaN."""
    if multipliers is None:
        return weights
    return jnp.where(multipliers == 0, jnp.zeros((), weights.dtype), weights * multipliers)


def _mix(x: jax.Array) -> jax.Array:
    """C. Wellons' bijection of uint32 of low avalanche bias, github.com/skeeto/hash-prospector."""
    x = x ^ (x >> 16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
