"""A machine that runs scripts in NumPy, tile by tile, and checks every rule of scripts on the way.

It is the oracle for packers, for scans and for kernels: slow, in float64, and for any function of
NumPy arrays. What a scan computes of a row it leaves to the function, products included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsparse.dynamic.script import Script

Arrays = list[np.ndarray]
# (kind, the carries of each slot's children, inputs) -> carries of rows, (rows, ...) each.
GatherStep = Callable[[int, list[Arrays], np.ndarray | None], Sequence[np.ndarray]]
# (kind, what was emitted to rows, inputs) -> for each slot what its children are emitted.
EmitStep = Callable[[int, Arrays, np.ndarray | None], Sequence[Sequence[np.ndarray]]]


class RuleBroken(AssertionError):
    """A script that a machine can't run, or only by luck."""


def run(script: Script, step: GatherStep, leaves: Sequence[Any], inputs: Any = None) -> Arrays:
    """Carries of all rows, leaves first, of a scan in the order of the script.

    Args:
        script: a concrete script.
        step: called for the rows of each tile with the tile's kind, for each slot the carries of
            the children (zeros where there is none), and the rows' inputs (likewise); returns the
            rows' carries.
        leaves: carries of leaves, ``(form.leaves, ...)`` each.
        inputs: ``(form.inputs, ...)``, or None.

    Returns:
        For each carry ``(form.rows, ...)`` in float64; padding is 0.

    Raises:
        RuleBroken: if the script breaks a rule, naming tile and lane.

    >>> from jaxsparse.dynamic import Graphs, Layout, pack
    >>> trees = Graphs.from_brackets("(0 (0 a) (0 (0 b) (0 c)))")
    >>> script = pack(trees, [0], Layout(width=1))
    >>> def add(kind, children, inputs):
    ...     (left,), (right,) = children
    ...     return [left + right]
    >>> (sums,) = run(script, add, [2.0 ** np.arange(8)])
    >>> sums[script.root_rows]
    array([7.])
    """
    tiles = _Tiles(script)
    form = script.form
    used = np.arange(form.leaves) < script.used_leaves
    carries = []
    for leaf in leaves:
        given = np.asarray(leaf, np.float64)
        carry = np.zeros((form.rows, *given.shape[1:]))
        carry[: form.leaves][used] = given[used]
        carries.append(carry)
    for tile in range(tiles.used):
        rows, sources, x_rows = tiles.open(tile)
        children = [[_taken(carry, slot) for carry in carries] for slot in sources.T]
        x = None if inputs is None else _taken(np.asarray(inputs, np.float64), x_rows)
        made = step(tiles.kind(tile), children, x)
        for carry, new in zip(carries, made, strict=True):
            carry[rows] = new
        tiles.close(tile)
    return carries


def run_backwards(
    script: Script, step: EmitStep, given: Sequence[Any], inputs: Any = None
) -> Arrays:
    """What reaches all rows, leaves first, of a scan from parents to children.

    A row has what is given for it and the sum of what its parents emit; the step makes of this what
    the row emits to its own children.

    Args:
        script: a concrete script.
        step: called for the rows of each tile, the last tile first, with the tile's kind, what
            reached the rows, and their inputs; returns for each slot what its children get.
        given: ``(form.rows, ...)`` each.
        inputs: ``(form.inputs, ...)``, or None.

    Raises:
        RuleBroken: as `run`, and if a tile would not wait for the parents of its rows.
    """
    tiles = _Tiles(script)
    sums = [np.array(x, np.float64) for x in given]
    for tile in range(tiles.used):  # the rules are those of the forward order
        tiles.open(tile)
        tiles.close(tile)
    latest = np.full(tiles.used, -1)  # for each tile the last one that emitted to it
    for tile in reversed(range(tiles.used)):
        rows, sources, x_rows = tiles.rows_of(tile)
        tiles.require(
            script.waits[tile] == latest[tile], tile, f"must wait for tile {latest[tile]}"
        )
        x = None if inputs is None else _taken(np.asarray(inputs, np.float64), x_rows)
        emitted = step(tiles.kind(tile), [total[rows] for total in sums], x)
        for slot, parts in zip(sources.T, emitted, strict=True):
            for total, part in zip(sums, parts, strict=True):
                np.add.at(total, slot[slot >= 0], part[slot >= 0])
        latest[tiles.of(sources)] = tile
    return sums


def _taken(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of an array, zeros for -1."""
    taken = np.zeros((len(rows), *array.shape[1:]))
    taken[rows >= 0] = array[rows[rows >= 0]]
    return taken


class _Tiles:
    """The tiles of a script: which are done, and what a rule asks of the next one."""

    def __init__(self, script: Script):
        if script.batch_shape:
            raise ValueError(f"reference: needs one script, got a batch {script.batch_shape}")
        self.script = Script(np.asarray(script.words), script.form)
        self.used = int(self.script.used_tiles)
        bounds = self.script.group_tiles
        self.require(
            bounds[0] == 0 and bounds[-1] == self.used and bool((np.diff(bounds) >= 0).all()),
            0,
            f"groups of tiles {bounds} must follow one another",
        )
        # Rows that may be children: leaves that are used, and rows of tiles that are done.
        self._ready = np.zeros(script.form.rows, bool)
        self._ready[: self.script.used_leaves] = True

    def require(self, holds: Any, tile: int, rule: str) -> None:
        if not holds:
            raise RuleBroken(f"tile {tile}: {rule}")

    def kind(self, tile: int) -> int:
        return int(self.script.kinds[tile])

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The tiles of computed rows, leaves and -1 left out."""
        form = self.script.form
        tiles: np.ndarray = (rows[rows >= form.leaves] - form.leaves) // form.width
        return tiles

    def rows_of(self, tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of a tile that are no padding, their sources and rows of inputs."""
        form, sources = self.script.form, self.script.sources[tile]
        lanes = np.flatnonzero((sources >= 0).any(1))
        rows = form.leaves + tile * form.width + lanes
        return rows, sources[lanes], self.script.x_rows[tile][lanes]

    def open(self, tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `rows_of`, once the rules are kept."""
        form, script = self.script.form, self.script
        rows, sources, x_rows = self.rows_of(tile)
        self.require(len(rows), tile, "has no rows")
        self.require(0 <= script.kinds[tile] < form.kinds, tile, f"no kind {script.kinds[tile]}")
        self.require((sources < form.rows).all(), tile, "a source is out of range")
        self.require(self._ready[sources[sources >= 0]].all(), tile, "a source is not ready")
        group = np.searchsorted(script.group_tiles, tile, side="right")
        first = script.group_tiles[group - 1]
        self.require((self.of(sources) >= first).all(), tile, "a source is of another group")
        self.require((x_rows < script.used_inputs).all(), tile, "there is no such row of inputs")
        return rows, sources, x_rows

    def close(self, tile: int) -> None:
        """The rows of a tile are there."""
        self._ready[self.rows_of(tile)[0]] = True
