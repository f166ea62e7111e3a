"""Operands of several directions as one: stacked, and patterns padded to as many entries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.topology import Topology


def stacked(parts: list[Any]) -> Any:
    """Arrays of every direction, (directions, ...)."""
    return jnp.expand_dims(parts[0], 0) if len(parts) == 1 else jnp.stack(parts)


def stacked_patterns(topologies: list[Topology]) -> list[Any]:
    """The operands of several patterns of one shape, padded to as many entries."""
    nse = max(t.nse for t in topologies)
    operands = [t.padded(nse).operands() for t in topologies]
    return [stacked(list(arrays)) for arrays in zip(*operands, strict=True)]


def padded_values(matrices: list[CSR]) -> list[jax.Array]:
    """The values of several matrices, padded to as many entries."""
    nse = max(m.nse for m in matrices)
    return [jnp.pad(m.values, (0, nse - m.nse)) for m in matrices]
