"""Scripts that break a rule: what `Script.verify` and the machine that runs scripts say of it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import graph_sets

from jaxsparse.dynamic import Form, Graphs, Layout, Script, pack, reference, stack

TREES = Graphs.from_brackets(
    "(3 (2 It) (4 (4 works) (2 .))) (1 (2 (1 No) (2 it)) (2 (2 does) (1 not))) (2 yes)"
).with_channel("target", "graph", [0.5, 1.5, 2.5])


# With room for one more graph.
FORM = dataclasses.replace(pack(TREES, [0, 1], Layout()).form, graphs=3)


def damaged(place, value):
    script = pack(TREES, [0, 1], Layout(), form=FORM)
    words = script.words.copy()
    words[place] = value
    return Script(words, script.form)


RECORD, ROOT = FORM.records_offset, FORM.roots_offset
WORDS = FORM.channel_offset(FORM.channel("word", "leaf"))
TARGETS = FORM.channel_offset(FORM.channel("target", "graph"))
DAMAGE = [
    (0, 9, "version 9 of scripts"),
    (5, 9, "the header says 9 leaves, the form 8"),
    (1, 9, "9 leaves are used, of 8"),
    (FORM.group_tiles_offset + 1, 1, "group_tiles must rise from 0 to the 2 used tiles"),
    (RECORD, 1, "tile 0: no such kind, got 1"),
    (RECORD + 1, -1, "tile 0: wait is not the nearest tile with a parent, got -1"),
    (RECORD + 2, -2, "tile 0, lane 0, slot 0: a source must be a row or -1, got -2"),
    (RECORD + 2, 7, "tile 0, lane 0, slot 0: no leaf that is used, got 7"),
    (RECORD + 3, 9, "tile 0, lane 0, slot 1: a source must be a leaf or a row of tiles of the"),
    (RECORD + 32 + 2, 16, "tile 1, lane 0, slot 0: a source must be a leaf or a row of tiles"),
    (RECORD + 32 + 2, 15, "tile 1, lane 0, slot 0: a source must be no padding, got 15"),
    (RECORD + 18, 0, "tile 0, lane 0: no row of inputs, or -1, got 0"),
    (ROOT, 15, "graph 0: the root must be a row that is used, got 15"),
    (ROOT, 99, "graph 0: the root must be a row that is used, got 99"),
    (ROOT + 2, 0, "graph 2: only 2 are used, got root 0"),
    (WORDS + 7, 5, "channel 'word': entry 7 of padding must be empty, got 5"),
    (TARGETS + 2, 5, "channel 'target': entry 2 of padding must be empty, got 5"),
]


@pytest.mark.parametrize(("place", "value", "message"), DAMAGE, ids=[m for _, _, m in DAMAGE])
def test_damaged_scripts(place, value, message):
    with pytest.raises(ValueError, match=f"^Script.verify: {message}"):
        damaged(place, value).verify()


def test_damaged_scripts_of_sequences():
    """Without channels or roots, which would be wrong as well."""
    graphs = Graphs.from_arrays(
        [0, 2, 4], [[-1], [0]] * 2, has_input=[False, True] * 2, roots=[0] * 2
    )
    script = pack(graphs, [0, 1], Layout(width=2, slots=1), form=Form(8, 2, 2, 1, 1, 2, 8))
    record = script.form.records_offset
    for place, value, message in (
        (record + 5, 0, "tile 0, lane 1: a row of inputs must be that of one row alone, got 0"),
        (slice(record + 2, record + 6), -1, "tile 0: a tile that is used must have rows, got 0"),
    ):
        words = script.words.copy()
        words[place] = value
        with pytest.raises(ValueError, match=f"^Script.verify: {message}"):
            Script(words, script.form).verify()
    form = dataclasses.replace(script.form, kinds=2)
    words = pack(graphs, [0, 1], Layout(width=2, slots=1), form=form).words.copy()
    words[record + form.record_words] = 1
    with pytest.raises(ValueError, match="tile 1: tiles that are not used have kind 0, got 1"):
        Script(words, form).verify()


def test_damaged_scripts_of_several_groups():
    graphs = Graphs.from_sequences([2, 2])
    script = pack(graphs, [0, 1], Layout(slots=1, groups=2))
    words = script.words.copy()
    second = script.form.records_offset + 3 * script.form.record_words + 2
    assert words[second] == script.form.leaves + 2 * 8
    words[second] -= 16  # a row of the other group
    with pytest.raises(ValueError, match=r"tile 3, lane 0, slot 0: .* of the same group"):
        Script(words, script.form).verify()
    with pytest.raises(reference.RuleBroken, match="tile 3: a source is of another group"):
        reference.run(Script(words, script.form), lambda *_: [np.zeros(1)], [np.zeros(8)])
    with pytest.raises(ValueError, match=r"words must be int32 \(\.\.\., \d+\), got int64"):
        Script(script.words.astype(np.int64), script.form).verify()
    with pytest.raises(ValueError, match=r"Script.verify: script \(1,\): version 0"):
        stack([script, Script(np.zeros_like(words), script.form)]).verify()
    with pytest.raises(ValueError, match="needs a concrete script, got a traced one"):
        jax.eval_shape(lambda s: s.verify().words, script)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (RECORD + 32 + 2, 16, "tile 1: a source is not ready"),
        (RECORD + 2, 99, "tile 0: a source is out of range"),
        (RECORD, 1, "tile 0: no kind 1"),
        (RECORD + 1, -1, "tile 0: must wait for tile 1"),
    ],
)
def test_the_machine_refuses_damaged_scripts(place, value, message):
    script = damaged(place, value)
    with pytest.raises(reference.RuleBroken, match=message):
        reference.run_backwards(
            script, lambda _, sums, x: [sums, sums], [np.zeros(script.form.rows)]
        )


@settings(max_examples=60, deadline=None)
@given(graph_sets(), st.data())
def test_the_machine_runs_what_is_verified(problem, data):
    """Any word of a script may be another one: what verify lets pass, both directions can run."""
    graphs, layout, _ = problem
    script = pack(graphs, np.arange(len(graphs)), layout)
    form, words = script.form, script.words.copy()
    place = data.draw(st.integers(0, form.roots_offset - 1))
    words[place] = data.draw(st.integers(-2, form.rows + 1))
    spoilt = Script(words, form)
    try:
        spoilt.verify()
    except ValueError:
        return
    ones = np.ones(form.rows)
    reference.run(spoilt, lambda kind, children, x: [children[0][0]], [ones[: form.leaves]])
    slots = range(form.slots)
    reference.run_backwards(spoilt, lambda kind, sums, x: [sums for _ in slots], [ones])
