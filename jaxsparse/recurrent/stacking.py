"""Operands of several directions as one: stacked, and patterns padded to as many entries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.pattern import NO_STARTS, Pattern
from jaxsparse.topology import Topology


def stacked(parts: list[Any]) -> Any:
    """Arrays of every direction, (directions, ...)."""
    return jnp.expand_dims(parts[0], 0) if len(parts) == 1 else jnp.stack(parts)


def stacked_patterns(topologies: list[Topology]) -> list[Any]:
    """The operands of several patterns of one shape, padded to as many entries."""
    nse = max(t.nse for t in topologies)
    # As many entries as there will be may have starts of tiles where these have none.
    alike = len({t.tile_starts.shape for t in topologies}) == 1
    no_starts = jnp.zeros(NO_STARTS, jnp.int32)

    def padded(t: Topology) -> tuple[Any, ...]:
        room = nse - t.nse
        if not room and alike:
            return t.operands()

        def pad(pattern: Pattern) -> Pattern:
            compact = pattern.compact_column_indices
            return pattern._replace(
                column_indices=jnp.pad(pattern.column_indices, (0, room)),
                compact_column_indices=None if compact is None else jnp.pad(compact, (0, room)),
            )

        # Padding stands behind the stored entries in both orientations.
        permutation = jnp.concatenate([t.permutation, jnp.arange(t.nse, nse, dtype=jnp.int32)])
        return Topology._from_parts(
            pad(t.pattern),
            pad(t.transposed_pattern),
            permutation,
            t.tile_starts if alike else no_starts,
            None,
            t.shape,
        ).operands()

    return [stacked(list(arrays)) for arrays in zip(*map(padded, topologies), strict=True)]


def padded_values(matrices: list[CSR]) -> list[jax.Array]:
    nse = max(m.nse for m in matrices)
    return [jnp.pad(m.values, (0, nse - m.nse)) for m in matrices]
