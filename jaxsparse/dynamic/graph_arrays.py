"""The arrays of graphs: checks of what users give, and what sequences and edges become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxsparse.dynamic.form import Channel


def integers(
    name: str, what: str, values: Any, ndim: int, dtype: Any = np.int32, size: int | None = None
) -> np.ndarray:
    """A copy of an array of integers, in a dtype that holds them all."""
    array = np.asarray(values)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(dtype)  # an empty list
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: {what} must be integers, got {array.dtype}")
    if array.ndim != ndim or size not in (None, len(array)):
        wanted = f"shape ({size},)" if size is not None else f"{ndim} dimension{'s' * (ndim > 1)}"
        raise ValueError(f"{name}: {what} must have {wanted}, got shape {array.shape}")
    limits = np.iinfo(dtype)
    for extreme in (array.min(), array.max()) if array.size else ():
        if not limits.min <= extreme <= limits.max:
            raise ValueError(f"{name}: {what} must fit {np.dtype(dtype).name}, got {extreme}")
    return np.array(array, dtype, order="C")


def booleans(name: str, what: str, values: Any, size: int) -> np.ndarray:
    """A copy of an array of bool."""
    array = np.asarray(values)
    if array.dtype != np.bool_ or array.shape != (size,):
        raise ValueError(f"{name}: {what} must be bool ({size},), got {array.dtype} {array.shape}")
    return np.array(array)


def check_offsets(name: str, offsets: np.ndarray, rows: int) -> None:
    """Raises ValueError unless offsets rise from 0 to the number of rows."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name}: offsets must rise from 0 to the number of rows, {rows}")


def channels(
    name: str, by_place: Mapping[str, Mapping[str, Any]], rows: int, graphs: int
) -> dict[Channel, np.ndarray]:
    """Channels of all places, as int32 or float32."""
    found: dict[Channel, np.ndarray] = {}
    for place, named in by_place.items():
        for key, values in named.items():
            what = f"the channel {key!r} of a {place}"
            if key in {c.name for c in found}:
                raise ValueError(f"{name}: there are two channels {key!r}")
            numbers = _numbers(name, what, values, graphs if place == "graph" else rows)
            found[Channel(key, place, numbers.dtype.name)] = numbers
    return found


def _numbers(name: str, what: str, values: Any, size: int) -> np.ndarray:
    array = np.asarray(values)
    is_array = hasattr(values, "dtype")  # an empty list is one of integers as well
    if np.issubdtype(array.dtype, np.floating) and (array.size or is_array):
        if array.shape != (size,):
            raise ValueError(f"{name}: {what} must have shape ({size},), got shape {array.shape}")
        return np.array(array, np.float32)
    return integers(
        name, what, array.astype(np.int32) if array.dtype == bool else array, 1, size=size
    )


def spread(name: str, key: str, values: Any, entry: np.ndarray) -> np.ndarray:
    """Numbers of the entries of sequences, at their rows."""
    numbers = _numbers(name, f"the channel {key!r} of an input", values, int(entry.sum()))
    rows = np.full(len(entry), -1, numbers.dtype)
    rows[entry] = numbers
    return rows


def chains(lengths: np.ndarray, reverse: bool) -> np.ndarray:
    """The child of each row of sequences: row 0 is the leaf, row 1 + t is entry t."""
    sizes = lengths + 1
    last = np.repeat(lengths, sizes)
    row = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    backward = np.where(row == 0, -1, np.where(row == last, 0, row + 1))
    return backward if reverse else row - 1


def widened(children: np.ndarray, slots: int) -> np.ndarray:
    """Children with slots behind theirs, which are empty."""
    return np.pad(children, ((0, 0), (0, slots - children.shape[1])), constant_values=-1)


def of_edges(
    name: str, offsets: np.ndarray, child: np.ndarray, parent: np.ndarray, slots: int | None
) -> np.ndarray:
    """Children by row and slot, from edges whose rows count through all graphs."""
    rows = int(offsets[-1]) if len(offsets) else 0
    check_offsets(name, offsets, rows)
    for what, ends in ("child", child), ("parent", parent):
        outside = ends[(ends < 0) | (ends >= rows)]
        if outside.size:
            raise ValueError(f"{name}: {what} {outside[0]} is out of range, there are {rows} rows")
    graph = np.searchsorted(offsets, parent, side="right") - 1
    begin = offsets[graph]

    def at(edge: int) -> str:
        return f"{name}: graph {graph[edge]}, row {parent[edge] - begin[edge]}"

    outside = (child < begin) | (child >= offsets[graph + 1])
    if outside.any():
        edge = int(np.argmax(outside))
        raise ValueError(f"{at(edge)}: the child {child[edge]} is a row of another graph")
    order = np.argsort(parent, kind="stable")
    counts = np.bincount(parent, minlength=rows)
    slot = np.empty(len(parent), np.int64)
    slot[order] = np.arange(len(parent)) - (np.cumsum(counts) - counts)[parent[order]]
    most = int(counts.max(initial=0))
    slots = max(1, most) if slots is None else slots
    if most > slots:
        edge = int(np.argmax(slot >= slots))
        raise ValueError(
            f"{at(edge)}: {counts[parent[edge]]} children are more than the {slots} slots"
        )
    children = np.full((rows, slots), -1, np.int32)
    children[parent, slot] = child - begin
    return children
