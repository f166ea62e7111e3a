"""Masks that are arrays: their stored positions as compressed rows, on the host or in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsparse.batching import over_batch
from jaxsparse.masks.positions import nonzero_traced
from jaxsparse.pattern import checks_enabled

_WHAT_TO_WRITE = (
    "write mask == 0 for an additive mask (0 where seen, -inf elsewhere), and matrix != 0 for the "
    "entries of a matrix"
)


def compress_on_host(mask: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Row offsets and column indices of a concrete mask ``(..., m, k)``.

    The columns of a batch have the length of the longest pattern, 0 behind the last of the others.
    """
    stored = _as_bool(mask)
    *batch, m, k = stored.shape
    offsets = np.zeros((*batch, m + 1), np.int64)
    np.cumsum(stored.sum(-1), -1, out=offsets[..., 1:])
    columns = np.zeros((*batch, int(offsets[..., -1].max(initial=0))), np.int32)
    for entry in np.ndindex(*batch):
        # Of one dimension NumPy finds them several times as fast.
        columns[entry][: offsets[entry][-1]] = np.flatnonzero(stored[entry]) % k
    return offsets, columns


def _as_bool(mask: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """A concrete mask of bool, or of 0 and 1 in any dtype."""
    if mask.dtype == np.bool_:
        return mask
    if not jnp.issubdtype(mask.dtype, np.number):
        raise ValueError(f"Topology.from_mask: mask must be bool, got dtype {mask.dtype}")
    stored: npt.NDArray[np.bool_] = mask == 1
    other = mask[~(stored | (mask == 0))]
    if other.size:
        raise ValueError(
            f"Topology.from_mask: mask must be bool, or hold 0 and 1 alone, got {other[0]} "
            f"({mask.dtype}): {_WHAT_TO_WRITE}"
        )
    return stored


def compress_traced(mask: jax.Array, nse: int) -> tuple[jax.Array, jax.Array]:
    """Row offsets and column indices of a traced mask ``(..., m, k)``, with room for nse entries.

    The offsets count all entries, also those without room. They start at -1, which no pattern may,
    where integers are neither 0 nor 1 and ``JAXSPARSE_CHECK=1``.
    """
    if not (mask.dtype == np.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(
            "Topology.from_mask: a traced mask must be bool, or integers 0 and 1, got "
            f"{mask.dtype}: {_WHAT_TO_WRITE}"
        )
    *_, m, k = mask.shape

    def one(stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        return nonzero_traced(lambda rows, columns: stored, (m, k), nse)

    stored = mask == 1
    offsets, columns = over_batch(one, mask.ndim - 2, stored)
    if mask.dtype != np.bool_ and checks_enabled():
        binary = jnp.all(stored | (mask == 0), axis=(-2, -1))
        offsets = offsets.at[..., 0].set(jnp.where(binary, 0, -1))
    return offsets, columns
