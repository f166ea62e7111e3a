"""Batch dimensions: as many for all operands, and what is computed for each of their entries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def align_batch(operands: Sequence[jax.Array], core_ranks: Sequence[int]) -> list[jax.Array]:
    """Operands with as many batch dimensions in front as the one that has most, of size 1."""
    ranks = [x.ndim - core for x, core in zip(operands, core_ranks, strict=True)]
    most = max(ranks)
    return [
        x if rank == most else jnp.expand_dims(x, tuple(range(most - rank)))
        for x, rank in zip(operands, ranks, strict=True)
    ]


def over_batch(compute: Callable[..., T], rank: int, *operands: jax.Array) -> T:
    """Computes for each entry of so many batch dimensions; an operand has all or 1 of each."""
    if rank == 0:
        return compute(*operands)
    sizes = [x.shape[0] for x in operands]
    size = next((s for s in sizes if s != 1), 1)
    axes = [0 if s == size else None for s in sizes]
    inner = [x if axis == 0 else x[0] for x, axis in zip(operands, axes, strict=True)]
    results: T = jax.vmap(functools.partial(over_batch, compute, rank - 1), axes)(*inner)
    return results
