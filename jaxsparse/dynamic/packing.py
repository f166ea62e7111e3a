"""Packs graphs into scripts: graphs are dealt to groups, whose rows are put into tiles.

Graphs go to groups longest first, each to the group with the fewest computed rows so far. Leaves,
and what rows have as inputs, are numbered in the order of the batch. schedule.py says which tile a
computed row goes to; those of a tile are in the order in which they were put there. The C++ packer
(ffi/dynamic/packer.cc) is the one that is used; the one here is its reference, and makes the same
words.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxsparse import _ffi
from jaxsparse.dynamic.form import LEAST, SIZES, USED, VERSION, Channel, Form, bucket, difference
from jaxsparse.dynamic.graphs import Graphs
from jaxsparse.dynamic.layout import Layout
from jaxsparse.dynamic.schedule import schedule
from jaxsparse.dynamic.script import Script
from jaxsparse.dynamic.script_verify import nearest_parents


def pack(graphs: Graphs, ids: Any, layout: Layout, *, form: Form | None = None) -> Script:
    """The script of a batch of graphs, or of several batches of one size.

    Its form is the least one that has room for each batch, with sizes rounded up to 1, 1.25, 1.5
    or 1.75 times a power of 2, so that few programs are compiled. Runs without holding Python's
    lock; several batches by several threads.

    Args:
        graphs: the set of graphs.
        ids: integers ``(..., batch)``, which graphs; one may come several times. Leading
            dimensions become those of the script's words.
        layout: how the script is cut.
        form: the form of the script; by default it is found.

    Returns:
        A script whose words are an array of NumPy.

    Raises:
        TypeError: if ids are no integers, or ``graphs``, ``layout`` or ``form`` are something else.
        ValueError: if ids are out of range, rows have more children than the layout has slots, or
            ``form`` is not of this layout and these graphs, or has no room.

    >>> text = "(3 (2 It) (4 works)) (1 (2 (1 No) (2 it)) (2 (2 does) (1 not)))"
    >>> trees = Graphs.from_brackets(text)
    >>> script = pack(trees, [0, 1], Layout(width=8))
    >>> script
    Script(graphs=2, leaves=8, tiles=2, width=8, groups=1)
    >>> script.sources[0, :3].tolist()
    [[2, 3], [4, 5], [0, 1]]
    >>> script.leaf("word").tolist(), script.root_rows.tolist()
    ([0, 1, 2, 3, 4, 5, -1, -1], [10, 16])
    """
    batches = _batches(graphs, ids)
    kinds = _check(graphs, layout, form)
    try:
        room, words = _ffi.pack_graphs(
            graphs.packable,
            batches.reshape(math.prod(batches.shape[:-1]), batches.shape[-1]),
            width=layout.width,
            slots=layout.slots,
            groups=layout.groups,
            kinds=kinds,
            room=None if form is None else (form.leaves, form.tiles, form.graphs, form.inputs),
        )
    except ValueError as error:
        raise ValueError(f"dynamic.pack: {error}") from None
    form = _form(layout, kinds, graphs.channels, *room) if form is None else form
    return Script(words.reshape(*batches.shape[:-1], words.shape[-1]), form)


def pack_numpy(
    graphs: Graphs,
    ids: Any,
    layout: Layout,
    *,
    form: Form | None = None,
    scheduler: Callable[..., np.ndarray] = schedule,
) -> Script:
    """As `pack`, by NumPy and for one batch: the reference that says what a script of graphs is.

    Another ``scheduler`` than `schedule` puts rows into other tiles.
    """
    batch = _batches(graphs, ids)
    kinds = _check(graphs, layout, form)
    if batch.ndim != 1:
        raise ValueError(f"dynamic.pack_numpy: ids must be those of one batch, got {batch.shape}")
    if batch.size and (batch.min() < 0 or batch.max() >= len(graphs)):
        raise ValueError("dynamic.pack_numpy: ids are out of range")
    rows = _BatchRows(graphs, batch, layout, scheduler)
    used = dict(zip(USED, (rows.leaves, rows.tiles, len(batch), rows.inputs), strict=True))
    if form is None:
        room = {name: bucket(size, LEAST[name]) for name, size in used.items()}
        if not graphs.any_input:
            room["inputs"] = 0
        form = _form(layout, kinds, graphs.channels, *room.values())
    for name, size in used.items():
        if size > getattr(form, name):
            raise ValueError(
                f"dynamic.pack: the batch has {size} {name}, the form has room for "
                f"{getattr(form, name)}"
            )
    return Script(_words(graphs, batch, rows, form, list(used.values())), form)


@functools.lru_cache(maxsize=1024)
def _form(
    layout: Layout,
    kinds: int,
    channels: tuple[Channel, ...],
    leaves: int,
    tiles: int,
    graphs: int,
    inputs: int,
) -> Form:
    """One object for all scripts of a form."""
    return Form(
        leaves=leaves,
        tiles=tiles,
        width=layout.width,
        slots=layout.slots,
        groups=layout.groups,
        graphs=graphs,
        inputs=inputs,
        kinds=kinds,
        channels=channels,
    )


def _batches(graphs: Graphs, ids: Any) -> np.ndarray:
    batches = np.asarray(ids)
    if batches.dtype.kind not in "iu" and batches.size:
        raise TypeError(f"dynamic.pack: ids must be integers, got {batches.dtype}")
    if batches.ndim < 1 or 0 in batches.shape[:-1]:
        raise ValueError(f"dynamic.pack: ids must have shape (..., batch), got {batches.shape}")
    return np.ascontiguousarray(batches, np.int64)


def _check(graphs: Graphs, layout: Layout, form: Form | None) -> int:
    """The kinds of the script's form, once graphs, layout and form are found to go together."""
    expected: list[tuple[str, Any, type]] = [("graphs", graphs, Graphs), ("layout", layout, Layout)]
    if form is not None:
        expected.append(("form", form, Form))
    for name, given, cls in expected:
        if not isinstance(given, cls):
            raise TypeError(
                f"dynamic.pack: {name} must be a dynamic.{cls.__name__}, got {type(given).__name__}"
            )
    if graphs.slots > layout.slots:
        raise ValueError(
            f"dynamic.pack: rows of the graphs have up to {graphs.slots} children, more than the "
            f"{layout.slots} slots of the layout"
        )
    if form is None:
        return graphs.kind_count
    wanted = _form(
        layout,
        max(form.kinds, graphs.kind_count),
        graphs.channels,
        form.leaves,
        form.tiles,
        form.graphs,
        form.inputs,
    )
    if wanted != form:
        raise ValueError(
            f"dynamic.pack: the form is of another layout or of other graphs: "
            f"{difference(form, wanted)}"
        )
    return form.kinds


class _BatchRows:
    """Where the rows of a batch lie: computed ones among tiles, leaves and inputs in order."""

    def __init__(
        self,
        graphs: Graphs,
        ids: np.ndarray,
        layout: Layout,
        scheduler: Callable[..., np.ndarray],
    ):
        begin, sizes = graphs.offsets[ids], graphs.lengths[ids]
        self.base = np.repeat(np.cumsum(sizes) - sizes, sizes)  # of the row's graph in the batch
        self.at = np.arange(int(sizes.sum())) + np.repeat(begin, sizes) - self.base
        self.is_leaf = graphs.levels[self.at] == 0
        self.leaves = int(self.is_leaf.sum())
        self.has_input = graphs.has_input[self.at]
        self.inputs = int(self.has_input.sum())
        graph = np.repeat(np.arange(len(ids)), sizes)
        computed = np.bincount(graph[~self.is_leaf], minlength=len(ids))
        self._place(graphs, _deal(computed, layout.groups)[graph], layout, scheduler)

    def _place(
        self,
        graphs: Graphs,
        group: np.ndarray,
        layout: Layout,
        scheduler: Callable[..., np.ndarray],
    ) -> None:
        """The computed rows of one group after another, in tiles."""
        child = graphs.children[self.at]
        child = np.where(child < 0, -1, child + self.base[:, None])
        tails, kinds = graphs.tails[self.at], graphs.kinds[self.at]
        self.computed = np.full(len(self.at), -1)  # the number of each row among computed ones
        self.tiles, self.group_tiles = 0, [0]
        tile_kinds: list[np.ndarray] = []
        for g in range(layout.groups):
            rows = np.flatnonzero((group == g) & ~self.is_leaf)
            rows = rows[np.argsort(-tails[rows], kind="stable")]
            number = np.full(len(self.at) + 1, -1)  # behind all: of a child that there is none of
            number[rows] = np.arange(len(rows))
            children = [[c for c in own if c >= 0] for own in number[child[rows]].tolist()]
            tile = scheduler(children, tails[rows], kinds[rows], layout.width)
            order = np.argsort(tile, kind="stable")
            counts = np.bincount(tile)
            lane = np.arange(len(rows)) - (np.cumsum(counts) - counts)[tile[order]]
            self.computed[rows[order]] = (self.tiles + tile[order]) * layout.width + lane
            of_tile = np.zeros(len(counts), np.int64)
            of_tile[tile] = kinds[rows]
            tile_kinds.append(of_tile)
            self.tiles += len(counts)
            self.group_tiles.append(self.tiles)
        self.tile_kinds = np.concatenate(tile_kinds)


def _deal(computed: np.ndarray, groups: int) -> np.ndarray:
    """The group of each graph: the longest graph first, to the group with the fewest rows."""
    dealt = np.zeros(len(computed), np.int64)
    loads = [(0, group) for group in range(groups)]
    for graph in np.argsort(-computed, kind="stable").tolist():
        load, group = loads[0]
        dealt[graph] = group
        heapq.heapreplace(loads, (load + int(computed[graph]), group))
    return dealt


def _words(
    graphs: Graphs, ids: np.ndarray, rows: _BatchRows, form: Form, used: list[int]
) -> np.ndarray:
    words = np.full(form.words, -1, np.int32)
    words[: 1 + len(used)] = [VERSION, *used]
    words[1 + len(used) :][: len(SIZES)] = [getattr(form, size) for size in SIZES]
    words[form.group_tiles_offset :][: form.groups + 1] = rows.group_tiles
    place = np.where(rows.is_leaf, np.cumsum(rows.is_leaf) - 1, form.leaves + rows.computed)

    records = words[form.records_offset : form.roots_offset].reshape(form.tiles, -1)
    records[:, 0] = 0
    records[: rows.tiles, 0] = rows.tile_kinds
    sources = np.full((form.computed, form.slots), -1, np.int32)
    x_rows = np.full(form.computed, -1, np.int32)
    is_computed = ~rows.is_leaf
    child = graphs.children[rows.at[is_computed]]
    found = place[np.where(child < 0, 0, child + rows.base[is_computed, None])]
    sources[rows.computed[is_computed], : graphs.slots] = np.where(child < 0, -1, found)
    x_rows[rows.computed[rows.has_input]] = np.arange(rows.inputs)
    lanes = form.width * form.slots
    records[:, 2 : 2 + lanes] = sources.reshape(form.tiles, lanes)
    records[:, 2 + lanes : 2 + lanes + form.width] = x_rows.reshape(form.tiles, form.width)
    records[:, 1] = nearest_parents(sources.reshape(form.tiles, form.width, -1), form.leaves)

    sizes, root = graphs.lengths[ids], graphs.roots[ids]
    has_root = root >= 0
    roots = words[form.roots_offset :][: len(ids)]
    roots[has_root] = place[(np.cumsum(sizes) - sizes + root)[has_root]]
    for channel in form.channels:
        numbers = graphs.channel(channel.name).view(np.int32)
        entries = words[form.channel_offset(channel) :][: form.room(channel.place)]
        if channel.dtype == "float32":
            entries[:] = 0
        if channel.place == "graph":
            entries[: len(ids)] = numbers[ids]
        elif channel.place == "row":
            entries[place] = numbers[rows.at]
        else:
            chosen = rows.is_leaf if channel.place == "leaf" else rows.has_input
            entries[: int(chosen.sum())] = numbers[rows.at[chosen]]
    return words
