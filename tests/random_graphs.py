"""Random acyclic graphs of every kind, and what plain recursion makes of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from jaxsparse.dynamic import Graphs, Layout


def random_arrays(rng, *, graphs=5, most_rows=12, slots=2, kinds=1, with_inputs=True):
    """The arguments of `Graphs.from_arrays`: missing children, one child twice, many parents.

    A graph may have one row or none; children may come behind their parents.
    """
    lengths = rng.integers(0, most_rows + 1, graphs)
    children = [random_children(rng, length, slots) for length in lengths]
    rows = int(lengths.sum())
    children = np.concatenate([np.zeros((0, slots), int), *children])
    is_row = (children >= 0).any(1)
    return {
        "offsets": np.append(0, np.cumsum(lengths)),
        "children": children,
        "kinds": rng.integers(0, kinds, rows) * is_row,
        "roots": np.array([rng.integers(-1, length) for length in lengths], int),
        "has_input": is_row & (rng.random(rows) < 0.6) & with_inputs,
        "leaf": {"word": rng.integers(0, 99, rows)},
        "row": {"label": rng.integers(-1, 5, rows), "weight": rng.normal(size=rows)},
        "input": {"token": rng.integers(0, 99, rows), "size": rng.normal(size=rows)},
        "graph": {"class": rng.integers(0, 9, graphs), "target": rng.normal(size=graphs)},
    }


def random_children(rng, rows, slots):
    """Of one graph, whose rows are in any order."""
    order = rng.permutation(rows)
    children = np.full((rows, slots), -1)
    leaves = rng.choice([0.1, 0.5, 0.9])
    for i in range(1, rows):
        if rng.random() > leaves:
            chosen = np.where(rng.random(slots) < 0.7, order[rng.integers(0, i, slots)], -1)
            children[order[i]] = chosen
    return children


def random_trees(rng, *, graphs, most_rows, slots):
    """The arguments of `Graphs.from_arrays` for graphs whose rows have one parent or none."""
    offsets, children = [0], []
    for rows in rng.integers(0, most_rows + 1, graphs):
        order, without_parent = rng.permutation(rows), []
        tree = np.full((rows, slots), -1)
        for row in order:
            for k in range(min(slots, len(without_parent), rng.integers(0, slots + 2))):
                tree[row, k] = without_parent.pop(rng.integers(len(without_parent)))
            without_parent.append(row)
        offsets.append(offsets[-1] + rows)
        children.append(tree)
    return {"offsets": np.array(offsets), "children": np.concatenate(children)}


@st.composite
def graph_sets(draw):
    """(graphs, a layout for them, a source of random numbers)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slots, kinds = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    arrays = random_arrays(
        rng,
        graphs=draw(st.integers(1, 6)),
        most_rows=draw(st.sampled_from([1, 5, 25])),
        slots=slots,
        kinds=kinds,
        with_inputs=draw(st.booleans()),
    )
    layout = Layout(
        width=draw(st.sampled_from([1, 2, 3, 8, 16])),
        groups=draw(st.integers(1, 4)),
        slots=slots + draw(st.integers(0, 1)),
    )
    return Graphs.from_arrays(**arrays), layout, rng


def rows_of(graphs, graph):
    """The rows of a graph, those of the set."""
    return range(graphs.offsets[graph], graphs.offsets[graph + 1])


def recursion(graphs, graph, of_leaf, of_row):
    """What plain recursion makes of each row of a graph: ``{row: value}``.

    ``of_leaf(row)``; ``of_row(row, [value of each slot's child, None where there is none])``.
    """
    begin, values = graphs.offsets[graph], {}

    def value(row):
        if row not in values:
            children = graphs.children[row]
            if (children < 0).all():
                values[row] = of_leaf(row)
            else:
                values[row] = of_row(row, [None if c < 0 else value(begin + c) for c in children])
        return values[row]

    for row in rows_of(graphs, graph):
        value(row)
    return values
