"""From scores to masks: how many weights each group keeps (scope), and which (structure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.integers import INT32_MAX

# Scores (rows, columns) of one matrix and the number of weights to keep -> bool (rows, columns).
Structure = Callable[[jax.Array, jax.Array], jax.Array]


def _order(scores: jax.Array) -> jax.Array:
    """Integers in the order of floating scores: NaN highest, zeros of both signs equal."""
    # XLA compares signed integers several times as fast as unsigned ones on a CPU.
    kind = jnp.dtype(f"int{jnp.finfo(scores.dtype).bits}")
    highest = kind.type(jnp.iinfo(kind).max)
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), kind)
    # Bits after the sign rise with the magnitude.
    rising = jnp.where(bits < 0, bits ^ highest, bits)
    return jnp.where(jnp.isnan(scores), highest, rising)


def _count(flags: jax.Array) -> jax.Array:
    return jnp.sum(flags, axis=-1, dtype=jnp.int32)


def _middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """Halfway between integers whose sum may overflow, halves up."""
    return (low >> 1) + (high >> 1) + ((low | high) & 1)


def _least_kept(order: jax.Array, kept: jax.Array) -> jax.Array:
    """A bound that at least so many are not below, and that exactly so many reach if one can.

    Halves the range of bit patterns, a count each time: at most as many passes as a number has
    bits, where a sort takes fifteen times as long on a CPU.
    """

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = _middle(low, high)
        reach = _count(order >= middle[..., None])
        higher = jnp.where(reach < kept, middle - 1, high)
        return jnp.where(reach < kept, low, middle), jnp.where(reach == kept, middle, higher)

    bounds = jnp.min(order, axis=-1), jnp.max(order, axis=-1)
    return jax.lax.while_loop(lambda b: jnp.any(b[0] < b[1]), halve, bounds)[0]


def _first(flags: jax.Array, wanted: jax.Array) -> jax.Array:
    """The first so many that are True, along the last dimension; all if there are no more."""
    size = flags.shape[-1]
    places = jnp.arange(size, dtype=jnp.int32)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = _count(flags & (places < middle[..., None])) >= wanted
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    # Where none has to go, not a single pass.
    low = jnp.where(_count(flags) > wanted, 0, size).astype(jnp.int32)
    bounds = low, jnp.full_like(low, size)
    end = jax.lax.while_loop(lambda b: jnp.any(b[0] < b[1]), halve, bounds)[0]
    return flags & (places < end[..., None])


def _highest_traced(scores: jax.Array, kept: jax.Array) -> jax.Array:
    """The ``kept`` highest along the last dimension: NaN first, of equal ones the earlier."""
    if not scores.size:
        return jnp.zeros(scores.shape, bool)
    order = _order(scores)
    kept = jnp.broadcast_to(jnp.asarray(kept, jnp.int32), scores.shape[:-1])
    least = _least_kept(order, kept)[..., None]
    above = order > least
    return above | _first(order == least, kept - _count(above))


_highest: Callable[[jax.Array, jax.Array], jax.Array] = jax.jit(_highest_traced)


# ---- Structures ----


def unstructured(scores: jax.Array, kept: jax.Array) -> jax.Array:
    """The ``kept`` highest scores of the matrix."""
    return _highest(scores.reshape(-1), kept).reshape(scores.shape)


def row_balanced(scores: jax.Array, kept: jax.Array) -> jax.Array:
    """The highest scores of each row, in every row the same number, at least one."""
    rows = scores.shape[0]
    each = kept // rows + jnp.where(2 * (kept % rows) >= rows, 1, 0)
    return _highest(scores, jnp.maximum(each, 1))


def refilled(scores: jax.Array, kept: jax.Array) -> jax.Array:
    """Unstructured, then every row is filled up to the longest with its own highest scores."""
    # A row's share of the highest scores of all is its own highest, so nothing kept is lost.
    longest = jnp.max(jnp.sum(unstructured(scores, kept), axis=-1))
    return _highest(scores, longest)


def pairs(scores: jax.Array, kept: jax.Array) -> jax.Array:
    """Both columns 2 k and 2 k + 1 of a row or none: the pairs with the highest mean scores.

    Of an odd number of columns the last one is a pair. The share of pairs is that of weights,
    rounded, halves up.
    """
    columns = scores.shape[1]
    rows, rest = jnp.divmod(kept, max(columns, 1))
    count = rows * ((columns + 1) // 2) + (rest + 1) // 2
    first, second = scores[:, ::2], scores[:, 1::2]
    if columns % 2:
        second = jnp.concatenate([second, first[:, -1:]], 1)
    chosen = unstructured(0.5 * first + 0.5 * second, count)
    return jnp.repeat(chosen, 2, axis=1)[:, :columns]


STRUCTURES: Mapping[str, Structure] = MappingProxyType(
    {
        "unstructured": unstructured,
        "row_balanced": row_balanced,
        "refilled": refilled,
        "pairs": pairs,
    }
)

# ---- Scopes ----


def _kept(size: int, density: Any) -> jax.Array:
    """How many of so many weights are kept: ``size - round((1 - density) size)``, at least one.

    Counted from what is left out, so that density 1 keeps all however coarse float32 is.
    """
    sparsity = 1 - jnp.asarray(density, jnp.float32)
    left_out = jnp.round(sparsity * jnp.float32(size)).astype(jnp.int32)
    return jnp.clip(size - left_out, min(size, 1), size)


def _each_alone(groups: Sequence[jax.Array], density: Any) -> list[jax.Array]:
    return [
        jnp.full(group.shape[0], _kept(math.prod(group.shape[1:]), density)) for group in groups
    ]


def _all_together(groups: Sequence[jax.Array], density: Any) -> list[jax.Array]:
    """How many of the highest scores of all groups fall into each matrix."""
    size = sum(group.size for group in groups)
    if not size:
        return [jnp.zeros(group.shape[0], jnp.int32) for group in groups]
    if size > INT32_MAX:
        raise ValueError(f"make_masks: scope 'model' ranks at most {INT32_MAX} weights, got {size}")
    scores = jnp.concatenate([group.reshape(-1) for group in groups])
    chosen = _highest(scores, _kept(size, density))
    starts = [sum(group.size for group in groups[:i]) for i in range(len(groups))]
    return [
        jnp.sum(chosen[start : start + group.size].reshape(group.shape), axis=(1, 2))
        for start, group in zip(starts, groups, strict=True)
    ]


@dataclass(frozen=True)
class Scope:
    """Among which weights scores are compared.

    Args:
        splits_gates: whether each gate of a parameter is a group, else all its gates are one.
        budgets: (scores (stack, rows, columns) of every group, density) -> how many weights each
            matrix of each group keeps, int (stack,).
    """

    splits_gates: bool
    budgets: Callable[[Sequence[jax.Array], Any], list[jax.Array]]


SCOPES: Mapping[str, Scope] = MappingProxyType(
    {
        "gate": Scope(splits_gates=True, budgets=_each_alone),
        "layer": Scope(splits_gates=False, budgets=_each_alone),
        "model": Scope(splits_gates=False, budgets=_all_together),
    }
)
