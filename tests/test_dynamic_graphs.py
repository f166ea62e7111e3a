"""Sets of graphs: how they are made, their levels, and what is refused."""

from __future__ import annotations

import os
import pathlib
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import graph_sets, recursion, rows_of

from jaxsparse.dynamic import Channel, Graphs

TEXT = """(3 (2 It) (4 (4 works) (2 .)))
(1 (2 It) (1 (1 (0 never)) (2 (2 works) (2 .))))

(2
  yes)"""


def assert_same(graphs, other):
    for name in "offsets", "children", "kinds", "roots", "has_input", "levels", "tails":
        np.testing.assert_array_equal(getattr(graphs, name), getattr(other, name), name)
    assert graphs.channels == other.channels
    for channel in graphs.channels:
        np.testing.assert_array_equal(graphs.channel(channel.name), other.channel(channel.name))
    assert graphs.vocabulary == other.vocabulary


@settings(max_examples=30, deadline=None)
@given(graph_sets())
def test_levels(problem):
    graphs, _, _ = problem
    for graph in range(len(graphs)):
        levels = recursion(
            graphs,
            graph,
            lambda row: 0,
            lambda row, children: 1 + max(c for c in children if c is not None),
        )
        assert [graphs.levels[row] for row in rows_of(graphs, graph)] == [
            levels[row] for row in rows_of(graphs, graph)
        ]
        assert graphs.depths[graph] == max(levels.values(), default=0)


@settings(max_examples=30, deadline=None)
@given(graph_sets())
def test_tails(problem):
    """They are the levels of the rows if parents are children."""
    graphs, _, _ = problem
    begin = np.repeat(graphs.offsets[:-1], graphs.lengths)
    row, slot = np.nonzero(graphs.children >= 0)
    turned = Graphs.from_edges(
        graphs.offsets, child=row, parent=graphs.children[row, slot] + begin[row]
    )
    np.testing.assert_array_equal(graphs.tails, turned.levels)


@settings(max_examples=15, deadline=None)
@given(graph_sets())
def test_choosing_joining_and_pickling(problem):
    graphs, _, rng = problem
    ids = rng.integers(0, len(graphs), 4)
    assert_same(Graphs.concatenate([graphs[i] for i in ids]), graphs[ids])
    assert_same(graphs[:], graphs)
    assert_same(pickle.loads(pickle.dumps(graphs)), graphs)


@settings(max_examples=15, deadline=None)
@given(graph_sets())
def test_from_edges(problem):
    """Edges in the order of slots give the same children, slots without a child left out."""
    graphs, _, rng = problem
    begin = np.repeat(graphs.offsets[:-1], graphs.lengths)
    parent, slot = np.nonzero(graphs.children >= 0)
    child = graphs.children[parent, slot] + begin[parent]
    order = np.argsort(rng.permutation(len(graphs.children))[parent], kind="stable")
    made = Graphs.from_edges(graphs.offsets, child[order], parent[order], slots=graphs.slots)
    for row, children in enumerate(graphs.children):
        there = children[children >= 0]
        np.testing.assert_array_equal(made.children[row, : len(there)], there)
        assert (made.children[row, len(there) :] == -1).all()
    np.testing.assert_array_equal(made.levels, graphs.levels)


def test_deep_graphs():
    """Levels and tails come without recursion, whatever the order of rows."""
    rows = 200_000
    chain = np.arange(rows)[:, None] + 1
    chain[-1] = -1
    graphs = Graphs.from_arrays([0, rows], chain)
    np.testing.assert_array_equal(graphs.levels, np.arange(rows)[::-1])
    np.testing.assert_array_equal(graphs.tails, np.arange(rows))


def test_arrays_are_copied_and_closed():
    children = np.array([[-1], [0]])
    graphs = Graphs.from_arrays([0, 2], children, row={"label": [True, False]})
    children[:] = 7
    assert graphs.children.tolist() == [[-1], [0]]
    assert graphs.channel("label").tolist() == [1, 0]
    with pytest.raises(ValueError, match="read-only"):
        graphs.children[:] = 7


def test_empty_channels():
    """A channel has the dtype of its array, be it empty, so that all sets have forms alike."""
    for numbers, dtype in (
        ([], "int32"),
        (np.zeros(0, int), "int32"),
        (np.zeros(0, np.float32), "float32"),
        (np.zeros(0), "float32"),
    ):
        graphs = Graphs.from_sequences([0, 0], input={"size": numbers})
        assert graphs.channels == (Channel("size", "input", dtype),)


def test_no_graphs():
    graphs = Graphs.from_arrays([0], np.zeros((0, 2), int), graph={"target": []})
    assert len(graphs) == 0 and graphs.kind_count == 1 and not graphs.any_input
    assert len(Graphs.from_brackets("\n")) == len(Graphs.from_sequences([])) == 0
    assert len(Graphs.from_edges([0], [], [])) == len(Graphs.from_function(print, [])) == 0
    assert graphs.channels == (Channel("target", "graph", "int32"),)


# ---- Sequences ----


@pytest.mark.parametrize("reverse", [False, True])
def test_sequences(reverse):
    lengths, tokens = [3, 0, 1], [5, 6, 7, 8]
    graphs = Graphs.from_sequences(
        lengths, reverse=reverse, kind=1, input={"token": tokens}, graph={"class": [1, 2, 3]}
    )
    assert graphs.has_input.tolist() == [False, True, True, True, False, False, True]
    assert graphs.channel("token")[graphs.has_input].tolist() == tokens
    expected = [0, 3, 2, 1, 0, 0, 1] if reverse else [0, 1, 2, 3, 0, 0, 1]
    assert graphs.levels.tolist() == expected
    assert graphs.levels[graphs.offsets[:-1] + graphs.roots].tolist() == lengths
    assert graphs.kind_count == 2 and graphs.lengths.tolist() == [4, 1, 2]


# ---- Text in brackets ----


def test_brackets():
    graphs = Graphs.from_brackets(TEXT)
    assert graphs.vocabulary == ("It", "works", ".", "never", "yes")
    assert graphs.offsets.tolist() == [0, 5, 13, 14]
    no = [-1, -1]
    first = [no, no, no, [1, 2], [0, 3]]
    second = [no, no, [1, -1], no, no, [3, 4], [2, 5], [0, 6]]
    assert graphs.children.tolist() == [*first, *second, no]
    assert graphs.channel("label").tolist() == [2, 4, 2, 4, 3, 2, 0, 1, 2, 2, 2, 1, 1, 2]
    words = graphs.channel("word")
    assert words.tolist() == [0, 1, 2, -1, -1, 0, 3, -1, 1, 2, -1, -1, -1, 4]
    again = Graphs.from_brackets(TEXT, slots=3, vocabulary=["works", "It"])
    assert again.slots == 3 and again.vocabulary == ("works", "It")
    assert again.channel("word")[words >= 0].tolist() == [1, 0, 2, 1, 2, 0, 2, 2]


trees = st.recursive(
    st.tuples(st.integers(0, 9), st.text("ab'é,%", min_size=1, max_size=3)),
    lambda t: st.tuples(st.integers(0, 9), st.lists(t, min_size=1, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(trees, max_size=3), st.sampled_from(["", " ", "\n", " \t\r\n"]))
def test_brackets_of_any_tree(forest, space):
    """Written and parsed again, with any white space between brackets."""
    rows = []

    def write(tree):
        label, inside = tree
        if isinstance(inside, str):
            rows.append((label, inside, []))
            return f"({space}{label} {inside}{space})"
        text = space.join(write(child) for child in inside)
        rows.append((label, None, [child[0] for child in inside]))
        return f"({label}{space}{text}{space})"

    graphs = Graphs.from_brackets(space.join(map(write, forest)), slots=3)
    assert len(graphs) == len(forest) and len(graphs.children) == len(rows)
    begin = np.repeat(graphs.offsets[:-1], graphs.lengths)
    label, word = graphs.channel("label"), graphs.channel("word")
    for row, (expected, text, labels_of_children) in enumerate(rows):
        assert label[row] == expected
        assert (graphs.vocabulary[word[row]] if word[row] >= 0 else None) == text
        children = graphs.children[row][graphs.children[row] >= 0] + begin[row]
        assert label[children].tolist() == labels_of_children


BRACKETS = [
    ("(3 (2 a) (2 b)", "tree 0, line 1: a bracket is not closed"),
    ("(3 a)\n(2 b))", "tree 2, line 2: text outside of brackets"),
    ("(3 a)\nb", "tree 1, line 2: text outside of brackets"),
    ("(x a)", "tree 0, line 1: a label must be an integer >= 0, got 'x'"),
    ("(1 a)\n(x\n\na)", "tree 1, line 2: a label must be an integer >= 0, got 'x'"),
    ("(-1 a)", "a label must be an integer >= 0, got '-1'"),
    ("(99999999999 a)", "a label must be an integer >= 0, got '99999999999'"),
    ("((2 a))", "a label must be an integer >= 0, got ''"),
    ("(3)", "a bracket has neither a word nor further brackets"),
    ("(3 a b)", "a bracket has a word and more than that"),
    ("(3 (2 a) b)", "a bracket has a word and more than that"),
    ("(3 a (2 b))", "a bracket has a word and further brackets"),
    ("(1 (1 a) (1 b) (1 c))", "a bracket has 3 children, more than the 2 slots"),
]


@pytest.mark.parametrize(("text", "message"), BRACKETS, ids=[text for text, _ in BRACKETS])
def test_damaged_brackets(text, message):
    with pytest.raises(ValueError, match=r"Graphs\.from_brackets: .*" + re.escape(message)):
        Graphs.from_brackets(text)


def test_a_treebank():
    """The Stanford Sentiment Treebank, where there is one."""
    folder = os.environ.get("JAXSPARSE_DATA")
    path = pathlib.Path(folder or "", "sst", "train.txt")
    if not folder or not path.exists():
        pytest.skip("JAXSPARSE_DATA names no folder with sst/train.txt")
    text = path.read_text()
    graphs = Graphs.from_brackets(text)
    assert len(graphs) == text.count("\n") and len(graphs.children) == text.count("(")
    is_leaf = graphs.levels == 0
    assert (is_leaf == (graphs.channel("word") >= 0)).all()
    assert ((graphs.children >= 0).sum(1) == np.where(is_leaf, 0, 2)).all()
    words = re.findall(r"\d ([^() \n]+)\)", text)
    numbers = graphs.channel("word")[is_leaf]
    assert [graphs.vocabulary[n] for n in numbers] == words
    assert set(graphs.channel("label").tolist()) == {0, 1, 2, 3, 4}


# ---- Plain Python ----


def test_from_function_with_missing_numbers():
    """A number that is not there is -1, though those that are have no sign."""

    def build(builder, positive):
        builder.row(builder.leaf(positive=positive, size=np.uint8(200)), builder.leaf())

    graphs = Graphs.from_function(build, [True, False])
    assert graphs.channel("positive").tolist() == [1, -1, -1, 0, -1, -1]
    assert graphs.channel("size").tolist() == [200, -1, -1, 200, -1, -1]


def test_from_function():
    def build(builder, lengths):
        first = [builder.leaf(word=w, label=1) for w in range(lengths)]
        last = builder.row(first[0], None, first[-1], kind=1, inputs={"token": 3}, label=2)
        builder.row(last, size=0.5)
        builder.root = last
        builder.graph(target=lengths / 2)

    graphs = Graphs.from_function(build, [1, 2])
    no = [-1, -1, -1]
    assert graphs.children.tolist() == [
        no,
        [0, -1, 0],
        [1, -1, -1],
        no,
        no,
        [0, -1, 1],
        [2, -1, -1],
    ]
    assert graphs.roots.tolist() == [1, 2] and graphs.kinds.tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert graphs.has_input.tolist() == [False, True, False, False, False, True, False]
    assert graphs.channel("word").tolist() == [0, -1, -1, 0, 1, -1, -1]
    assert graphs.channel("label").tolist() == [1, 2, -1, 1, 1, 2, -1]
    assert graphs.channel("size").tolist() == [0, 0, 0.5, 0, 0, 0, 0.5]
    assert graphs.channel("target").tolist() == [0.5, 1]
    places = {c.name: (c.place, c.dtype) for c in graphs.channels}
    assert places == {
        "word": ("leaf", "int32"),
        "label": ("row", "int32"),
        "size": ("row", "float32"),
        "token": ("input", "int32"),
        "target": ("graph", "float32"),
    }


# ---- What is refused ----

ONE = {"offsets": [0, 3], "children": [[-1, -1], [0, -1], [1, 0]]}
REFUSED = {
    "cycle": ({"children": [[-1, -1], [2, 0], [1, 0]]}, "graph 0, row 1: the row is its own"),
    "itself": ({"children": [[-1, -1], [0, -1], [1, 2]]}, "graph 0, row 2: the row is its own"),
    "child": ({"children": [[-1, -1], [0, 3], [1, 0]]}, "graph 0, row 1: child 3 is out of range"),
    "below": ({"children": [[-1, -1], [0, -2], [1, 0]]}, "graph 0, row 1: child -2 is out of"),
    "neighbour": (
        {"offsets": [0, 2, 3]},
        "graph 1, row 0: child 1 is out of range, the graph has 1 rows",
    ),
    "offsets": ({"offsets": [0, 2]}, "offsets must rise from 0 to the number of rows, 3"),
    "falling": ({"offsets": [0, 4, 3]}, "offsets must rise from 0"),
    "kind": ({"kinds": [0, -1, 0]}, r"graph 0, row 1: the kind must be in \[0, 256\), got -1"),
    "root": ({"roots": [3]}, "graph 0: root 3 is out of range, the graph has 3 rows"),
    "roots": ({"roots": [1, 1]}, r"roots must have shape \(1,\), got shape \(2,\)"),
    "input": (
        {"has_input": np.array([True, False, False])},
        "graph 0, row 0: a row without children is a leaf, and has no inputs",
    ),
    "dtype": ({"children": [[0.5]]}, "children must be integers, got float64"),
    "slots": ({"children": np.zeros((3, 0), int)}, "children must have at least one slot"),
    "range": ({"roots": [2**31]}, "roots must fit int32, got 2147483648"),
    "below range": ({"kinds": [0, 1, -(2**40)]}, "kinds must fit int32, got -1099511627776"),
    "flat": ({"children": [-1, 0, 1]}, r"children must have 2 dimensions, got shape \(3,\)"),
    "mask": ({"has_input": [0, 1, 1]}, r"has_input must be bool \(3,\), got int64"),
    "channel": (
        {"row": {"label": [1, 2]}},
        r"the channel 'label' of a row must have shape \(3,\), got shape \(2,\)",
    ),
    "channels": (
        {"row": {"x": [1, 2, 3]}, "leaf": {"x": [1, 2, 3]}},
        "there are two channels 'x'",
    ),
    "complex": ({"graph": {"x": [1j]}}, "the channel 'x' of a graph must be integers, got complex"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays(case):
    changed, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=f"^Graphs.*: {message}"):
        Graphs.from_arrays(**(ONE | changed))


EDGES = [
    ([0, 3], [0, 0, 0], [1, 1, 1], "graph 0, row 1: 3 children are more than the 2 slots"),
    ([0, 1, 3], [0], [2], "graph 1, row 1: the child 0 is a row of another graph"),
    ([0, 3], [3], [1], "child 3 is out of range, there are 3 rows"),
    ([0, 3], [1], [-1], "parent -1 is out of range, there are 3 rows"),
    ([0, 3], [0, 1], [1], r"parent must have shape \(2,\), got shape \(1,\)"),
]


@pytest.mark.parametrize(("offsets", "child", "parent", "message"), EDGES)
def test_refused_edges(offsets, child, parent, message):
    with pytest.raises(ValueError, match=f"^Graphs.from_edges: {message}"):
        Graphs.from_edges(offsets, child, parent, slots=2)


def test_other_refusals():
    one = Graphs.from_sequences([1], input={"token": [1]})
    with pytest.raises(ValueError, match="parts 0 and 1 differ in their channels"):
        Graphs.concatenate([one, Graphs.from_sequences([1])])
    with pytest.raises(ValueError, match="needs at least one set of graphs"):
        Graphs.concatenate([])
    with pytest.raises(ValueError, match="lengths must be >= 0, got -1"):
        Graphs.from_sequences([2, -1])
    with pytest.raises(ValueError, match=r"the channel 'token' of an input must have shape \(1,\)"):
        Graphs.from_sequences([1], input={"token": [1, 2]})
    with pytest.raises(ValueError, match="words of the vocabulary must differ"):
        Graphs.from_brackets("", vocabulary=["a", "a"])
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        Graphs.from_brackets(b"(1 a)")
    with pytest.raises(TypeError, match="vocabulary must be a sequence of str"):
        Graphs.from_brackets("(1 a)", vocabulary="abc")
    with pytest.raises(IndexError, match=r"ids must have 1 dimension, got shape \(1, 2\)"):
        one[[[0, 0]]]
    with pytest.raises(ValueError, match="place must be one of"):
        one.with_channel("x", "tree", [1])
    with pytest.raises(KeyError, match="no channel 'word'; there are: 'token'"):
        one.channel("word")
    with pytest.raises(ValueError, match="a row has at least one child"):
        Graphs.from_function(lambda builder, _: builder.row(), [0])
    with pytest.raises(TypeError, match=r"GraphBuilder\.row: child must be an integer, got 0\.5"):
        Graphs.from_function(lambda builder, _: builder.row(0.5), [0])
    with pytest.raises(ValueError, match="there is no row 0 yet, only 0"):
        Graphs.from_function(lambda builder, _: builder.row(0), [0])
    with pytest.raises(ValueError, match="2 children are more than the 1 slots of a row"):
        Graphs.from_function(lambda b, _: b.row(b.leaf(), b.leaf()), [0], slots=1)
