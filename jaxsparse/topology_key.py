"""When two topologies store the same positions."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxsparse.topology import Topology


class TopologyKey:
    """A static topology as a part of a tree structure: compared and hashed by its positions.

    Programs that were compiled for one pattern are found again for an equal one, and trees of
    matrices on different patterns do not match. Nor do those of a pattern with its transpose and
    the same without: a program that needs the transpose is not found for the latter.
    """

    __slots__ = ("digest", "topology")

    def __init__(self, topology: Topology):
        self.topology = topology
        positions = hashlib.blake2b(digest_size=16)
        positions.update(repr((topology.shape, topology.nse)).encode())
        for array in (topology.row_offsets, topology.column_indices):
            positions.update(np.ascontiguousarray(array).data)
        self.digest = positions.digest()

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, TopologyKey)
            and self.digest == other.digest
            and self.topology.has_transpose == other.topology.has_transpose
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{self.topology!r}, positions {self.digest.hex()[:8]}"


def same_pattern(a: Topology, b: Topology) -> bool:
    """Whether two topologies are known to store the same positions."""
    if a is b:
        return True
    if a.shape != b.shape or a.nse != b.nse or a.batch_shape != b.batch_shape:
        return False
    if a.static and b.static:
        return a.key.digest == b.key.digest
    if not (a.has_positions and b.has_positions):
        return True  # a derivative is on the pattern of what was differentiated
    pairs = ((a.row_offsets, b.row_offsets), (a.column_indices, b.column_indices))
    if all(x is y for x, y in pairs):
        return True
    if any(isinstance(x, jax.core.Tracer) for pair in pairs for x in pair):
        raise ValueError(
            "whether two dynamic patterns that come as separate arguments of a traced function are "
            "equal is not known: use a.with_values(a.values + b.values)"
        )
    return all(np.array_equal(x, y) for x, y in pairs)
