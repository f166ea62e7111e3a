"""Operands of several directions and heads as one, and patterns padded to as many entries.

To the primitive a head is a direction of its own: its units take the state of no other head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.topology import Topology


def stacked(parts: list[Any]) -> Any:
    """Arrays of every direction, (directions, ...)."""
    return jnp.expand_dims(parts[0], 0) if len(parts) == 1 else jnp.stack(parts)


def stacked_heads(parts: list[Any], heads: int) -> Any:
    """Arrays (..., heads * d) of every direction, (directions * heads, ..., d)."""
    if heads == 1:
        return stacked(parts)
    split = [jnp.moveaxis(x.reshape(*x.shape[:-1], heads, -1), -2, 0) for x in parts]
    return split[0] if len(split) == 1 else jnp.concatenate(split)


def joined_heads(x: Any) -> Any:
    """An array of one direction, (heads, ..., d), as (..., heads * d)."""
    if x.shape[0] == 1:
        return x[0]
    return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)


def stacked_patterns(topologies: list[Topology]) -> list[Any]:
    """The operands of several patterns of one shape, padded to as many entries."""
    nse = max(t.nse for t in topologies)
    operands = [t.padded(nse).operands() for t in topologies]
    return [stacked(list(arrays)) for arrays in zip(*operands, strict=True)]


def padded_values(matrices: list[CSR]) -> list[jax.Array]:
    """The values of several matrices, padded to as many entries."""
    nse = max(m.nse for m in matrices)
    return [jnp.pad(m.values, (0, nse - m.nse)) for m in matrices]
