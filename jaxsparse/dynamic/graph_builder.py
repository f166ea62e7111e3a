"""Graphs of plain Python that adds row after row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxsparse.integers import integer

Numbers = dict[str, float]


class GraphBuilder:
    """One graph that a function builds; see `Graphs.from_function`.

    Attributes:
        root: the row that stands for the graph; None is the last one that was added.

    >>> builder = GraphBuilder()
    >>> left, right = builder.leaf(word=3), builder.leaf(word=5)
    >>> builder.row(left, right, label=1)
    2
    """

    def __init__(self) -> None:
        self.root: int | None = None
        self._children: list[tuple[int, ...]] = []
        self._kinds: list[int] = []
        self._leaf_or_row: list[Numbers] = []
        self._inputs: list[Numbers | None] = []
        self._graph: Numbers = {}

    def leaf(self, **channels: float) -> int:
        """Adds a leaf with these numbers; returns its row."""
        return self._add((), 0, None, channels)

    def row(
        self,
        *children: int | None,
        kind: int = 0,
        inputs: Mapping[str, float] | None = None,
        **channels: float,
    ) -> int:
        """Adds a computed row; returns it.

        Args:
            children: rows that were added before, in the order of slots; None is an empty slot.
            kind: which cell computes it, where there are several.
            inputs: numbers of the row's inputs; None if it has none.
            channels: numbers of the row. A name that leaves have, too, is a channel of all rows.

        Raises:
            TypeError: if a child or the kind is no integer.
            ValueError: if there is no child, or one was not added before.
        """
        name = "GraphBuilder.row"
        rows = tuple(
            -1 if child is None else integer(name, "child", child, 0) for child in children
        )
        kind = integer(name, "kind", kind, 0)
        if not any(child >= 0 for child in rows):
            raise ValueError("GraphBuilder.row: a row has at least one child")
        for child in rows:
            if child >= len(self._children):
                raise ValueError(
                    f"GraphBuilder.row: there is no row {child} yet, only {len(self._children)}"
                )
        return self._add(rows, kind, None if inputs is None else dict(inputs), channels)

    def graph(self, **channels: float) -> None:
        """Sets numbers of the whole graph."""
        self._graph.update(channels)

    def _add(
        self, children: tuple[int, ...], kind: int, inputs: Numbers | None, channels: Numbers
    ) -> int:
        self._children.append(children)
        self._kinds.append(kind)
        self._inputs.append(inputs)
        self._leaf_or_row.append(channels)
        return len(self._children) - 1


def build(
    function: Callable[[GraphBuilder, Any], None], examples: Iterable[Any], slots: int | None
) -> dict[str, Any]:
    """The arguments of `Graphs.from_arrays` for what a function builds of each example."""
    builders = []
    for example in examples:
        builders.append(GraphBuilder())
        function(builders[-1], example)
    children = [row for b in builders for row in b._children]
    most = max(map(len, children), default=1)
    slots = max(1, most) if slots is None else slots
    if most > slots:
        raise ValueError(
            f"Graphs.from_function: {most} children are more than the {slots} slots of a row"
        )
    table = np.full((len(children), slots), -1, np.int32)
    for i, row in enumerate(children):
        table[i, : len(row)] = row
    named = [numbers for b in builders for numbers in b._leaf_or_row]
    inputs = [numbers for b in builders for numbers in b._inputs]
    of_rows = {key for row, numbers in zip(children, named, strict=True) if row for key in numbers}
    of_all = {key for numbers in named for key in numbers}
    return {
        "offsets": np.cumsum([0, *(len(b._children) for b in builders)]),
        "children": table,
        "kinds": np.array([kind for b in builders for kind in b._kinds], np.int64),
        "roots": [len(b._children) - 1 if b.root is None else b.root for b in builders],
        "has_input": np.array([numbers is not None for numbers in inputs], bool),
        "leaf": _columns(named, of_all - of_rows),
        "row": _columns(named, of_rows),
        "input": _columns([numbers or {} for numbers in inputs]),
        "graph": _columns([b._graph for b in builders]),
    }


def _columns(entries: list[Numbers], names: set[str] | None = None) -> dict[str, np.ndarray]:
    """Numbers by name, in the order of names; where an entry has none -1, or 0 among floats."""
    if names is None:
        names = {key for numbers in entries for key in numbers}
    columns = {}
    for name in sorted(names):
        given = np.array([numbers[name] for numbers in entries if name in numbers])
        if given.dtype.kind in "bu":  # which have no -1
            given = given.astype(np.int64)
        column = np.full(len(entries), 0 if given.dtype.kind == "f" else -1, given.dtype)
        column[[name in numbers for numbers in entries]] = given
        columns[name] = column
    return columns
