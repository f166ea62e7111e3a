"""Bytes of recurrent weights that the scans of a step read, counted and not measured.

A loop over tiles reads all weights for every tile, forward and backward. A kernel whose blocks keep
them on chip reads them once for each team of blocks and launch. What the caches serve counts too:
an H200 keeps these weights in its L2 cache. The one product for the gradient of the weights reads
none of them.
"""

from __future__ import annotations

import functools

from benchmarks.dynamic.batches import Scripts, pack_levels
from benchmarks.dynamic.problems import Problem
from benchmarks.run import if_known
from jaxsparse import dynamic

_ITEM = {"bfloat16": 2}
_RUNS = {"forward": 1, "gradient": 2, "training": 2, "end_to_end": 2, "pack": 2}
"""Scans of a pass; scripts that are packed are for training."""


def weight_bytes(problem: Problem, implementation: str, dtype: str, passed: str) -> float | None:
    """Of a step in the mean; None where it is not known."""
    runs = _RUNS.get(passed)
    net = problem.net
    copy = net.slots * net.products * problem.hidden**2 * _ITEM.get(dtype, 4)
    if runs is None:
        return None
    if implementation in ("jaxsparse-teams", "jaxsparse-loss"):
        return _teams(problem, dtype, runs * copy)
    width = _width(implementation)
    if width is None:
        return None
    by_levels = implementation.startswith(("levels", "loop"))
    return runs * _tiles(problem, width, by_levels) * copy


def _teams(problem: Problem, dtype: str, loads: int) -> float | None:
    """So many bytes of each kind of rows for each team of blocks; None if there is no kernel."""
    groups = if_known(lambda: Scripts(teams=dtype).layout(problem).groups)
    return None if groups is None else float(loads * groups * problem.net.directions)


def _width(implementation: str) -> int | None:
    """Of tiles; 0 is that of a scan's own layout, None what has no tiles."""
    if implementation == "jaxsparse":
        return 0
    kind, _, width = implementation.partition("-")
    return int(width.partition("-")[0]) if kind in ("levels", "loop", "tiles", "width") else None


@functools.lru_cache(maxsize=64)
def _tiles(problem: Problem, width: int, by_levels: bool) -> float:
    """That a step has in the mean."""
    batches = Scripts(width or None, packer=pack_levels if by_levels else dynamic.pack)
    total = steps = 0
    for group in problem.groups():
        for step in group:
            script = batches.packer(problem.graphs, problem.ids(step), batches.layout(problem))
            total, steps = total + int(script.used_tiles), steps + 1
    return total / steps
