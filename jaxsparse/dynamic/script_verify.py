"""Whether a script keeps the rules of scripts, on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsparse.dynamic.form import SIZES, USED, VERSION
from jaxsparse.pattern import is_concrete

if TYPE_CHECKING:
    from jaxsparse.dynamic.script import Script


def nearest_parents(sources: np.ndarray, leaves: int) -> np.ndarray:
    """``(tiles,)``: for each tile the nearest later one with a parent of its rows, -1 if none."""
    tiles, width, _ = sources.shape
    waits = np.full(tiles, -1, np.int32)
    parent, *lane_and_slot = np.nonzero(sources >= leaves)
    child = (sources[parent, *lane_and_slot] - leaves) // width
    waits[child[::-1]] = parent[::-1]  # of several, the last one that is assigned stays
    return waits


def verify(script: Script) -> None:
    """Raises ValueError for the first rule that a script, or one of a batch, does not keep."""
    if not is_concrete(script.words):
        raise ValueError("Script.verify: needs a concrete script, got a traced one")
    words, form = np.asarray(script.words), script.form
    if words.dtype != np.int32 or words.ndim < 1 or words.shape[-1] != form.words:
        raise ValueError(
            f"Script.verify: words must be int32 (..., {form.words}), got {words.dtype} "
            f"{words.shape}"
        )
    for index in np.ndindex(words.shape[:-1]):
        try:
            _verify_one(type(script)(words[index], form))
        except ValueError as error:
            which = f"script {index}: " if index else ""
            raise ValueError(f"Script.verify: {which}{error}") from None


def _verify_one(script: Script) -> None:
    _verify_header(script)
    _verify_groups(script)
    _verify_tiles(script)
    _verify_roots(script)
    _verify_channels(script)


def _verify_header(script: Script) -> None:
    header, form = script.words, script.form
    if header[0] != VERSION:
        raise ValueError(f"version {header[0]} of scripts, this is version {VERSION}")
    for i, name in enumerate(SIZES, 1 + len(USED)):
        if header[i] != getattr(form, name):
            raise ValueError(f"the header says {header[i]} {name}, the form {getattr(form, name)}")
    for i, name in enumerate(USED, 1):
        if not 0 <= header[i] <= getattr(form, name):
            raise ValueError(f"{header[i]} {name} are used, of {getattr(form, name)}")


def _verify_groups(script: Script) -> None:
    first = script.group_tiles
    if first[0] != 0 or first[-1] != script.used_tiles or (np.diff(first) < 0).any():
        raise ValueError(
            f"group_tiles must rise from 0 to the {script.used_tiles} used tiles, got {first}"
        )


def _refuse(bad: np.ndarray, values: np.ndarray, what: str) -> None:
    """Raises ValueError, naming the place, if any value is bad."""
    if bad.any():
        index = np.unravel_index(np.argmax(bad), bad.shape)
        where = ", ".join(f"{n} {i}" for n, i in zip(("tile", "lane", "slot"), index, strict=False))
        raise ValueError(f"{where}: {what}, got {values[index]}")


def _verify_tiles(script: Script) -> None:
    form = script.form
    sources, x_rows = script.sources, script.x_rows
    tile = np.arange(form.tiles)[:, None, None]
    empty = (sources < 0).all(-1)
    is_used = np.arange(form.tiles) < script.used_tiles
    rows = (~empty).sum(-1)
    _refuse((script.kinds < 0) | (script.kinds >= form.kinds), script.kinds, "no such kind")
    _refuse(~is_used & (script.kinds != 0), script.kinds, "tiles that are not used have kind 0")
    _refuse(sources < -1, sources, "a source must be a row or -1")
    _refuse(~is_used[tile] & (sources != -1), sources, "tiles that are not used have no sources")
    _refuse(
        (sources < form.leaves) & (sources >= script.used_leaves), sources, "no leaf that is used"
    )
    group = np.searchsorted(script.group_tiles, np.arange(form.tiles), side="right")
    first = np.append(0, script.group_tiles)[group][:, None, None]
    computed = sources >= form.leaves
    child = np.where(computed, sources - form.leaves, 0)
    _refuse(
        computed & ((child // form.width < first) | (child // form.width >= tile)),
        sources,
        f"a source must be a leaf or a row of tiles of the same group before this one, rows "
        f"{form.leaves} on",
    )
    if form.tiles:
        _refuse(computed & empty.reshape(-1)[child], sources, "a source must be no padding")
    _refuse((x_rows < -1) | (x_rows >= script.used_inputs), x_rows, "no row of inputs, or -1")
    _refuse(empty & (x_rows != -1), x_rows, "padding has no row of inputs")
    again = x_rows >= 0
    again.flat[np.unique(x_rows, return_index=True)[1]] = False
    _refuse(again, x_rows, "a row of inputs must be that of one row alone")
    _refuse(is_used & (rows == 0), rows, "a tile that is used must have rows")
    waits = nearest_parents(sources, form.leaves)
    _refuse(script.waits != waits, script.waits, "wait is not the nearest tile with a parent")


def _verify_roots(script: Script) -> None:
    form, rows = script.form, script.root_rows
    is_row = script.row_mask
    for graph, row in enumerate(rows):
        if row < -1 or row >= form.rows or (row >= 0 and not is_row[row]):
            raise ValueError(f"graph {graph}: the root must be a row that is used, got {row}")
        if row != -1 and graph >= script.used_graphs:
            raise ValueError(f"graph {graph}: only {script.used_graphs} are used, got root {row}")


def _verify_channels(script: Script) -> None:
    """Entries of padding must say so, as means skip them by that."""
    sizes: dict[str, Any] = {
        "leaf": script.used_leaves,
        "input": script.used_inputs,
        "graph": script.used_graphs,
    }
    for channel in script.form.channels:
        room = script.form.room(channel.place)
        used = script.row_mask if channel.place == "row" else np.arange(room) < sizes[channel.place]
        begin = script.form.channel_offset(channel)
        entries = script.words[begin : begin + room]
        bad = ~used & (entries != (-1 if channel.dtype == "int32" else 0))
        if bad.any():
            entry = int(np.argmax(bad))
            raise ValueError(
                f"channel {channel.name!r}: entry {entry} of padding must be empty, got "
                f"{entries[entry]}"
            )
