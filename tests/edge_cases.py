"""Patterns and sizes that every operation and variant is tested on, and can be timed on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxsparse.topology import Topology


def _random(m: int, k: int, density: float, seed: int = 0, padding: int = 0) -> Topology:
    mask = np.random.default_rng(seed).random((m, k)) < density
    return Topology.from_mask(mask, nse=int(mask.sum()) + padding)


def _uneven(m: int, k: int, seed: int = 0) -> Topology:
    """Row lengths from 0 to k."""
    rng = np.random.default_rng(seed)
    return Topology.from_mask(rng.random((m, k)) < rng.beta(0.3, 0.7, (m, 1)))


def _one_entry(m: int, k: int) -> Topology:
    mask = np.zeros((m, k), bool)
    mask[m // 2, k - 1] = True
    return Topology.from_mask(mask)


def _wide_indices() -> Topology:
    """More than 65,536 columns: no 16-bit indices."""
    rng = np.random.default_rng(11)
    k = 70_001
    rows = [np.sort(rng.choice(k, size, replace=False)) for size in (3, 0, 50, 1)]
    rows[-1][:] = k - 1
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
    return Topology(offsets, np.concatenate(rows), (4, k))


# name -> (topology, n): sizes odd, even, one, zero; rows empty, full, long; padding; wide indices.
EDGE_CASES: dict[str, Callable[[], tuple[Topology, int]]] = {
    "square": lambda: (_random(64, 64, 0.1), 128),
    "odd": lambda: (_random(37, 53, 0.2, seed=1), 19),
    "wide": lambda: (_random(5, 300, 0.5, seed=2), 7),
    "tall": lambda: (_random(301, 5, 0.5, seed=3), 33),
    "uneven": lambda: (_uneven(50, 2100, seed=4), 12),
    "full": lambda: (Topology.from_mask(np.ones((9, 17), bool)), 130),
    "empty_rows": lambda: (_random(40, 30, 0.02, seed=5), 3),
    "padding": lambda: (_random(20, 30, 0.3, seed=6, padding=13), 5),
    "one_entry": lambda: (_one_entry(7, 9), 4),
    "nothing_stored": lambda: (Topology.from_mask(np.zeros((6, 8), bool)), 5),
    "only_padding": lambda: (_random(6, 8, 0.0, padding=4), 5),
    "one_row": lambda: (_random(1, 90, 0.5, seed=7), 16),
    "one_column": lambda: (_random(90, 1, 0.5, seed=8), 16),
    "vector": lambda: (_random(33, 65, 0.3, seed=9), 1),
    "pair": lambda: (_random(33, 65, 0.3, seed=9), 2),
    "no_columns_in_x": lambda: (_random(8, 8, 0.5, seed=10), 0),
    "no_rows": lambda: (Topology([0], [], (0, 5)), 3),
    "no_columns": lambda: (Topology([0, 0, 0], [], (2, 0)), 3),
    "no_rows_but_padding": lambda: (Topology([0], [0, 0], (0, 3)), 2),
    "no_columns_but_padding": lambda: (Topology([0, 0, 0], [0, 0], (2, 0)), 2),
    "many_columns": lambda: (_wide_indices(), 2),
}
