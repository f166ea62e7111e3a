"""Batches on the host, as scripts: those of one step, and of several for a loop over steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from benchmarks.dynamic import datasets
from benchmarks.dynamic.models import Batch, letter_units
from benchmarks.dynamic.problems import Problem
from jaxsparse import dynamic
from jaxsparse.dynamic.packing import pack_numpy

Room = Any
"""What the batches of some steps need at most, so that they have one form."""


class Batches(Protocol):
    """A way to lay batches out."""

    def room(self, problem: Problem, steps: Sequence[np.ndarray]) -> Room:
        """For each of these steps."""

    def one(self, problem: Problem, step: np.ndarray, room: Room) -> Any:
        """The batch of one step, which may have no examples, in arrays of NumPy."""

    def logits(self, problem: Problem, step: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Those of a step that are no padding, in the order of the examples."""


Packer = Callable[..., dynamic.Script]


def pack_levels(
    graphs: dynamic.Graphs, ids: Any, layout: dynamic.Layout, *, form: dynamic.Form | None = None
) -> dynamic.Script:
    """A script whose tiles are those of one level after another, as a loop over levels has them."""
    return pack_numpy(graphs, ids, layout, form=form, scheduler=_by_levels)


def _by_levels(
    children: Sequence[Sequence[int]], tails: np.ndarray, kinds: np.ndarray, width: int
) -> np.ndarray:
    """The tile of each row: those of a level and a kind are next to each other."""
    level: list[int] = []
    for own in children:
        level.append(1 + max((level[row] for row in own), default=-1))
    if not level:
        return np.zeros(0, np.int64)
    lists, of_row = np.unique(np.stack([level, kinds]), axis=1, return_inverse=True)
    of_row = of_row.reshape(-1)
    counts = np.bincount(of_row, minlength=lists.shape[1])
    order = np.argsort(of_row, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - (np.cumsum(counts) - counts)[of_row[order]]
    tiles = -(-counts // width)
    return (np.cumsum(tiles) - tiles)[of_row] + rank // width


@dataclass(frozen=True)
class Scripts:
    """As scripts.

    Args:
        width: of tiles; None for what a scan without a kernel has of its own.
        groups: of tiles.
        teams: the dtype of weights, for the layout that kernels take; "" for another one.
        packer: `dynamic.pack`, or another one that makes the same.
    """

    width: int | None = None
    groups: int = 1
    packer: Packer = dynamic.pack
    teams: str = ""

    def layout(self, problem: Problem, hidden: int | None = None) -> dynamic.Layout:
        """How scripts are cut; ``hidden`` units, if the scan has not as many as the problem says.

        Each direction is a kind of rows, with weights of its own.
        """
        net, h = problem.net, hidden or problem.hidden
        slots = net.slots
        if self.teams:
            weights = jax.ShapeDtypeStruct((slots * h, net.products * h), self.teams)
            kinds = (weights,) * net.directions
            return dynamic.Layout.teams(kinds, round(problem.batch_rows), slots)
        if self.width is None:
            graphs, rows = problem.batch * net.directions, problem.level_rows
            # Graphs whose levels have many rows are as so many narrow ones.
            return dynamic.Layout.plain(graphs if rows < 4 * graphs else round(rows), slots)
        return dynamic.Layout(self.width, self.groups, slots)

    def room(self, problem: Problem, steps: Sequence[np.ndarray]) -> Room:
        """The forms that have room for all scripts."""
        every = [self._packed(problem, step, Batch(None, None)) for step in steps]
        scripts = zip(*every, strict=True)
        return Batch(
            *(
                None if kind[0] is None else dynamic.Form.covering([s.form for s in kind])
                for kind in scripts
            )
        )

    def one(self, problem: Problem, step: np.ndarray, room: Room) -> Batch:
        """The script of a step, and that of its letters, where there are such."""
        return self._packed(problem, step, room)

    def _packed(self, problem: Problem, step: np.ndarray, room: Batch) -> Batch:
        script = self.packer(
            problem.graphs, problem.ids(step), self.layout(problem), form=room.script
        )
        if problem.model != "bilstm_letters":
            return Batch(script)
        letters = datasets.two_directions(problem.source, "letters")
        half = len(letters) // 2
        rare = datasets.rare_words(problem.source)
        own = np.concatenate([np.zeros(0, np.int64), *map(rare.of, step)])
        ids = np.concatenate([own, own + half])
        # Rare words have about as many letters as sentences have words.
        layout = self.layout(problem, letter_units(problem.hidden))
        return Batch(script, self.packer(letters, ids, layout, form=room.letters))

    def logits(self, problem: Problem, step: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """The first ones: graphs, or entries, are in the order of the batch."""
        return logits[: problem.rows_of(step)]


def stacked(
    batches: Batches, problem: Problem, steps: Sequence[np.ndarray], used: int, room: Room
) -> Any:
    """Batches of some steps in arrays with a first dimension more; those behind ``used`` are empty.

    So one program runs all steps, or a few of them.
    """
    every = [
        batches.one(problem, step if i < used else step[:0], room) for i, step in enumerate(steps)
    ]
    return jax.tree.map(lambda *xs: np.stack(xs), *every)
