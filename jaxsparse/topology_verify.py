"""Whether what a topology holds beside its offsets and columns belongs to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxsparse.layouts import KINDS
from jaxsparse.pattern import derive_on_host
from jaxsparse.topology_arguments import check_arrays

if TYPE_CHECKING:
    from jaxsparse.topology import Topology


def verify(topology: Topology) -> None:
    """Derives a topology anew, on the host, and compares.

    Raises:
        ValueError: see `jaxsparse.Topology.verify`.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(topology)):
        raise ValueError("Topology.verify: needs a concrete topology, got a traced one")
    rows = check_arrays(topology.row_offsets, topology.column_indices, topology.shape)
    expected = jax.tree.leaves(derive_on_host(*rows, topology.shape, topology.has_transpose))
    orientations = (topology.pattern, topology.transposed_pattern, topology.permutation)
    actual = jax.tree.leaves(orientations)
    if len(actual) != len(expected) or not all(map(np.array_equal, actual, expected)):
        raise ValueError(
            f"Topology.verify: the arrays derived from the pattern (row order, transposed "
            f"pattern, permutation) of {topology!r} are not those of its offsets and columns"
        )
    for name, kind in KINDS.items():
        if kind.needed and name not in topology.layouts:
            raise ValueError(f"Topology.verify: {topology!r} lacks the layout {name!r}")
        if name in topology.layouts:
            try:
                kind.verify(topology.layouts[name], topology)
            except ValueError as error:
                raise ValueError(f"Topology.verify: {error}") from None
