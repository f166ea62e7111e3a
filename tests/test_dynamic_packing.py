"""Scripts: both packers, the rules that scripts keep, and what programs read of them."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import graph_sets, random_trees, recursion, rows_of

from jaxsparse import H200, _ffi
from jaxsparse.device import lowered_for
from jaxsparse.dynamic import Channel, Form, Graphs, Layout, pack, reference, stack
from jaxsparse.dynamic.form import LEAST, bucket
from jaxsparse.dynamic.packing import pack_numpy

TREES = Graphs.from_brackets(
    "(3 (2 It) (4 (4 works) (2 .))) (1 (2 (1 No) (2 it)) (2 (2 does) (1 not))) (2 yes)"
).with_channel("target", "graph", [0.5, 1.5, 2.5])


def assert_same(script, other):
    assert script.form == other.form
    np.testing.assert_array_equal(script.words, other.words)


# ---- Packers ----


@settings(max_examples=60, deadline=None)
@given(graph_sets(), st.integers(0, 7))
def test_packers_agree(problem, size):
    """C++ and NumPy make the same words, in the least form and in a roomier one."""
    graphs, layout, rng = problem
    ids = rng.integers(0, len(graphs), (2, size))
    one = pack(graphs, ids[0], layout)
    assert_same(one, pack_numpy(graphs, ids[0], layout))
    both = pack(graphs, ids, layout).verify()
    assert both.form == Form.covering([one.form, pack(graphs, ids[1], layout).form])
    roomy = dataclasses.replace(
        both.form,
        leaves=both.form.leaves + 3,
        tiles=both.form.tiles + 2,
        graphs=both.form.graphs + 1,
        kinds=both.form.kinds + 1,
    )
    for form in both.form, roomy:
        each = [pack_numpy(graphs, x, layout, form=form).verify() for x in ids]
        assert_same(pack(graphs, ids, layout, form=form), stack(each))


def random_machine(graphs, rng):
    """A cell that depends on slot, kind and input, for the machine and for recursion.

    Of leaves the carry is that of their word, of rows without inputs these are 0.
    """
    weights = rng.normal(size=(3, 4))

    def cell(kind, children, x):
        mixed = sum(np.sin(weights[kind, k] * c + k) * (c != 0) for k, c in enumerate(children))
        return np.tanh(mixed + 0.1 * x + 0.2)

    def step(kind, children, x):
        return [cell(kind, [carry for (carry,) in children], x)]

    size = graphs.channel("size").astype(np.float64) * graphs.has_input
    word = graphs.channel("word")

    def value(graph):
        return recursion(
            graphs,
            graph,
            lambda row: 1.0 + word[row],
            lambda row, children: cell(
                graphs.kinds[row], [0.0 if c is None else c for c in children], size[row]
            ),
        )

    return step, value


@settings(max_examples=40, deadline=None)
@given(graph_sets())
def test_the_machine_runs_scripts(problem):
    """Every row is as plain recursion has it, and channels are at the rows they belong to."""
    graphs, layout, rng = problem
    ids = rng.integers(0, len(graphs), 5)
    script = pack(graphs, ids, layout)
    step, value = random_machine(graphs, rng)
    (carry,) = reference.run(script, step, [1.0 + script.leaf("word")], script.input("size"))
    expected = [value(graph) for graph in ids]
    rows = np.array([row for graph in ids for row in rows_of(graphs, graph)], int)
    assert script.used_leaves + (script.sources >= 0).any(-1).sum() == len(rows)
    for b, graph in enumerate(ids):
        root = graphs.roots[graph]
        row = script.root_rows[b]
        assert (row == -1) == (root == -1)
        if root >= 0:
            assert carry[row] == expected[b][graphs.offsets[graph] + root]
    # Weights are random numbers, of which no two rows have the same.
    weight, label = graphs.channel("weight"), graphs.channel("label")
    at = {w: row for row, w in enumerate(script.row("weight").tolist()) if script.row_mask[row]}
    for b, graph in enumerate(ids):
        for row in rows_of(graphs, graph):
            assert script.row("label")[at[weight[row]]] == label[row]
            if len(set(ids)) == len(ids):
                assert carry[at[weight[row]]] == expected[b][row]
    inputs = rows[graphs.has_input[rows]]
    np.testing.assert_array_equal(
        script.input("token")[: len(inputs)], graphs.channel("token")[inputs]
    )
    np.testing.assert_array_equal(script.graph("class")[:5], graphs.channel("class")[ids])
    np.testing.assert_array_equal(script.graph("target")[:5], graphs.channel("target")[ids])


@settings(max_examples=20, deadline=None)
@given(graph_sets())
def test_the_machine_runs_scripts_backwards(problem):
    """Of what leaves get, the sum over ways from a row is what ways to it have, forwards."""
    graphs, layout, rng = problem
    script = pack(graphs, np.arange(len(graphs)), layout)
    factors = rng.normal(size=(graphs.kind_count, layout.slots))
    leaves, given = rng.normal(size=script.form.leaves), rng.normal(size=script.form.rows)

    def forward(kind, children, x):
        return [sum(factors[kind, k] * carry for k, (carry,) in enumerate(children))]

    def backward(kind, sums, x):
        return [[factors[kind, k] * sums[0]] for k in range(layout.slots)]

    (carry,) = reference.run(script, forward, [leaves])
    (reached,) = reference.run_backwards(script, backward, [given])
    used = script.used_leaves
    is_row = script.row_mask
    np.testing.assert_allclose(
        leaves[:used] @ reached[:used], carry[is_row] @ given[is_row], rtol=1e-9, atol=1e-9
    )


def test_graphs_are_dealt_longest_first():
    lengths = [2, 5, 4, 3]
    graphs = Graphs.from_sequences(lengths)
    script = pack(graphs, [0, 1, 2, 3], Layout(width=8, groups=3, slots=1))
    # 5 | 4 | 3 and 2, which share tiles
    assert script.group_tiles.tolist() == [0, 5, 9, 12]
    root = (script.root_rows - script.form.leaves) // 8
    assert root.tolist() == [11, 4, 8, 11]


# ---- Tiles ----


@settings(max_examples=60, deadline=None)
@given(graph_sets())
def test_tiles_wait_for_each_other_or_are_full(problem):
    """Of one kind no more tiles have room than there are levels; of any graphs none has no rows."""
    graphs, layout, rng = problem
    layout = dataclasses.replace(layout, groups=1)
    script = pack(graphs, rng.integers(0, len(graphs), 8), layout).verify()
    used = script.used_tiles
    rows = (script.sources[:used] >= 0).any(-1).sum(-1)
    assert (rows > 0).all()
    if graphs.kind_count == 1:
        assert used <= rows.sum() // layout.width + graphs.depths.max()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 8]), st.integers(1, 3))
def test_trees_have_the_least_tiles(seed, width, slots):
    """By Hu's theorem: behind all rows of some tail or a longer one, the tail."""
    rng = np.random.default_rng(seed)
    arrays = random_trees(rng, graphs=rng.integers(1, 12), most_rows=30, slots=slots)
    graphs = Graphs.from_arrays(**arrays)
    script = pack(graphs, range(len(graphs)), Layout(width, 1, slots)).verify()
    tails = graphs.tails[graphs.levels > 0]
    bounds = [-(-(tails >= tail).sum() // width) + tail for tail in np.unique(tails)]
    assert script.used_tiles == max(bounds, default=0)


@pytest.mark.parametrize(("chains", "distance"), [(8, 1), (16, 2), (24, 3), (48, 6)])
def test_rows_keep_their_distance(chains, distance):
    """From their children, where there are rows enough to be computed between them."""
    graphs = Graphs.from_sequences([20] * chains)
    script = pack(graphs, range(chains), Layout(slots=1))
    assert script.used_tiles == 20 * chains // 8
    child = script.sources[:, :, 0] - script.form.leaves
    behind = np.arange(script.form.tiles)[:, None] - child // 8
    assert set(behind[child >= 0]) == {distance}


def test_rows_leave_room_for_those_that_follow():
    """Beside a chain that takes all tiles, rows of others keep a distance, and its own don't."""
    graphs = Graphs.from_sequences([9, 4, 4])
    script = pack(graphs, [0, 1, 2], Layout(slots=1))
    rows = (script.sources[: script.used_tiles, :, 0] >= 0).sum(1)
    assert rows.tolist() == [3, 1, 3, 1, 3, 1, 3, 1, 1]


@pytest.mark.parametrize("packer", [pack, pack_numpy])
def test_tiles_that_stay_empty_are_left_out(packer):
    """Two parents would both be 2 tiles behind their child, and one of them is 3, with 1 empty."""
    graphs = Graphs.from_arrays([0, 4], [[-1, -1], [0, 0], [-1, 1], [1, 1]])
    script = packer(graphs, [0], Layout(width=1)).verify()
    assert script.used_tiles == 3 and script.waits.tolist() == [1, -1, -1]


def test_kinds_have_tiles_of_their_own():
    children = [[-1, -1], [0, 0], [0, -1], [-1, 0], [1, 2]]
    graphs = Graphs.from_arrays([0, 5], children, kinds=[7, 1, 0, 1, 0])
    script = pack(graphs, [0, 0], Layout(width=2))
    assert script.kinds[: script.used_tiles].tolist() == [1, 0, 1, 0]
    assert script.waits.tolist()[: script.used_tiles] == [3, 3, -1, -1]
    assert script.form.kinds == 2


@pytest.mark.parametrize("packer", [pack, pack_numpy])
def test_batches_of_nothing(packer):
    """No graphs; graphs without rows; graphs of a leaf alone."""
    graphs = Graphs.from_arrays([0, 0, 1], [[-1]], leaf={"word": [3]})
    for ids in [], [0], [1], [0, 1, 0]:
        script = packer(graphs, ids, Layout(slots=1)).verify()
        assert script.used_tiles == 0 and script.used_leaves == sum(ids)
        assert (script.leaf("word") == 3).sum() == sum(ids)
        assert script.root_rows[: len(ids)].tolist() == [0 if i else -1 for i in ids]
        reference.run(script, lambda *_: pytest.fail("there are no rows"), [np.ones(8)])


@pytest.mark.parametrize("packer", [pack, pack_numpy])
def test_refused_batches(packer):
    layout = Layout()
    form = pack(TREES, [0, 1], layout).form
    small = dataclasses.replace(form, tiles=1)
    for ids, options, message in [
        ([0.5], {}, "ids must be integers, got float64"),
        (0, {}, r"ids must have shape \(..., batch\), got \(\)"),
        (np.zeros((0, 2), int), {}, r"ids must have shape \(..., batch\), got \(0, 2\)"),
        ([3], {}, "out of range"),
        ([-1], {}, "out of range"),
        ([0, 1], {"form": small}, "the batch has 2 tiles, the form has room for 1"),
        ([0, 1, 2], {"form": form}, "the batch has 3 graphs, the form has room for 2"),
        ([0], {"form": dataclasses.replace(form, width=4)}, r"forms differ in width \(4 and 8\)"),
        ([0], {"form": dataclasses.replace(form, channels=())}, "forms differ in channels"),
        ([0], {"layout": Layout(slots=1)}, "up to 2 children, more than the 1 slots"),
        ([0], {"layout": 8}, "layout must be a dynamic.Layout, got int"),
        ([0], {"form": layout}, "form must be a dynamic.Form, got Layout"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"^dynamic.pack.*: .*{message}"):
            packer(TREES, ids, **({"layout": layout} | options))
    with pytest.raises(TypeError, match=r"graphs must be a dynamic\.Graphs, got str"):
        packer("(3 a)", [0], layout)
    with pytest.raises(ValueError, match="batch 1 has 2 tiles, the form has room for 1"):
        pack(TREES, [[2], [1]], layout, form=dataclasses.replace(small, leaves=20))


def test_the_packer_refuses_what_is_no_set_of_graphs():
    """Of another library, say: its pointer is of something else."""
    sizes = {"width": 8, "slots": 2, "groups": 1, "kinds": 1, "room": None}
    with pytest.raises(ValueError, match="incorrect name"):
        _ffi.pack_graphs(datetime.datetime_CAPI, np.zeros((1, 1), np.int64), **sizes)


# ---- Sizes ----


@given(st.integers(0, 10**6))
def test_buckets(size):
    sizes = {max(1, part * 2**power // 4) for power in range(21) for part in (4, 5, 6, 7)}
    assert bucket(size) == min(s for s in sizes if s >= size)
    assert bucket(size, 8) == max(8, bucket(size))


def test_few_forms():
    """Batches of 40 chains of 1 to 30 rows: sizes differ, forms hardly."""
    rng = np.random.default_rng(0)
    graphs = Graphs.from_sequences(rng.integers(1, 30, 500))
    scripts = [pack(graphs, rng.integers(0, 500, 40), Layout(slots=1)) for _ in range(50)]
    used = {tuple(s.words[1:5].tolist()) for s in scripts}
    assert len(used) > 40 and len({s.form for s in scripts}) <= 5
    for script in scripts:
        assert script.form.leaves == bucket(40) and script.form.tiles == bucket(
            int(script.used_tiles)
        )
        assert script.form.inputs == bucket(int(script.used_inputs), LEAST["inputs"])


def test_forms():
    form = pack(TREES, [0], Layout()).form
    assert Form.from_json(form.to_json()) == form
    wide = pack(TREES, [0], Layout(width=np.int64(9))).form  # which JSON would not take
    assert Form.from_json(wide.to_json()) == wide
    assert form.words % 64 == 0 and form.record_words == 32
    with pytest.raises(ValueError, match=r"Form\.covering: forms differ in width"):
        Form.covering([form, dataclasses.replace(form, width=2)])
    with pytest.raises(ValueError, match="needs at least one form"):
        Form.covering([])
    with pytest.raises(KeyError, match=r"no channel 'x' of a leaf or of a row; .* 'word' \(leaf\)"):
        form.channel("x", "leaf", "row")
    one, other = pack(TREES, [0], Layout()), pack(TREES, [0, 1], Layout())
    with pytest.raises(ValueError, match="scripts 0 and 1: forms differ in graphs"):
        stack([one, other])
    with pytest.raises(ValueError, match="needs at least one script"):
        stack([])
    with pytest.raises(TypeError, match=r"scripts\[1\] must be a dynamic.Script, got Form"):
        stack([one, form])


def test_layouts():
    batches, cpu = (0, 1, 8, 9, 16, 17, 4096), lowered_for("cpu")
    assert [Layout.plain(b, device=cpu).width for b in batches] == [8, 8, 8, 16, 16, 32, 32]
    assert [Layout.plain(b, device=H200).width for b in batches] == [8, 8, 32, 32, 32, 32, 128]
    assert Layout.plain(3, slots=1) == Layout(8, 1, 1)
    with pytest.raises(ValueError, match=r"dynamic\.Layout: width must be >= 1, got 0"):
        Layout(width=0)


# ---- What programs read ----


@pytest.mark.smoke
def test_in_programs():
    """One compilation for a form; a batch of scripts under vmap; gradients of roots."""
    layout, compiled = Layout(), []
    form = pack(TREES, [0, 1, 2], layout).form

    @jax.jit
    def read(script, carry, h):
        compiled.append(script.form)
        return (
            script.roots(carry, {"h": h}["h"]),
            script.mean(jnp.arange(form.rows, dtype=jnp.float32), "label"),
            script.mean(script.graph("target"), "target"),
            script.row_mask,
        )

    rng = np.random.default_rng(0)
    carry, h = rng.normal(size=(form.leaves, 2)), rng.normal(size=(form.computed, 2))
    carry[6:], h[:, 1] = np.nan, np.inf
    batches = [[0, 1, 2], [2, 0, 1], [1, 1]]
    scripts = [pack(TREES, ids, layout, form=form) for ids in batches]
    results = [read(jax.device_put(s), carry, h) for s in scripts]
    assert len(compiled) == 1
    for script, ids, (roots, mean, target, mask) in zip(scripts, batches, results, strict=True):
        expected = np.concatenate([carry, h])[script.root_rows[: len(ids)]].astype(np.float32)
        np.testing.assert_array_equal(roots[: len(ids)], expected)
        np.testing.assert_array_equal(roots[len(ids) :], 0)
        np.testing.assert_array_equal(mask, script.row_mask)
        np.testing.assert_allclose(mean, np.flatnonzero(script.row("label") != -1).mean(), 1e-6)
        np.testing.assert_allclose(target, TREES.channel("target")[ids].mean(), 1e-6)
    together = jax.vmap(read, in_axes=(0, None, None))(stack(scripts), carry, h)
    for i, one in enumerate(results):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), together, one)
    gradient = jax.grad(lambda h: scripts[0].roots(jnp.zeros(form.leaves), h).sum())(h[:, 0])
    rows = scripts[0].root_rows
    np.testing.assert_array_equal(
        np.flatnonzero(gradient), np.sort(rows[rows >= form.leaves]) - form.leaves
    )


def test_means_over_many_entries():
    """Which are counted in parts: of no multiple of a part, and gradients, and a few scripts."""
    graphs = Graphs.from_sequences([1100, 1150], input={"tag": np.arange(2250) % 3 - 1})
    scripts = [pack(graphs, [i, 1], Layout(slots=1)) for i in range(2)]
    form = dataclasses.replace(Form.covering([script.form for script in scripts]), inputs=2301)
    together = stack([pack(graphs, [i, 1], Layout(slots=1), form=form) for i in range(2)])
    values = jnp.asarray(np.random.default_rng(0).standard_normal(form.inputs), jnp.float32)
    mean = jax.value_and_grad(lambda values, script: script.mean(values, "tag"))
    made, gradients = jax.jit(jax.vmap(mean, (None, 0)))(values, together)
    chosen = together.input("tag") != -1
    assert chosen.shape == (2, 2301) and (chosen.sum(1) % 128 != 0).all()
    for i, own in enumerate(chosen):
        np.testing.assert_allclose(made[i], values[own].mean(), 1e-5)
        np.testing.assert_allclose(gradients[i], own / own.sum(), 1e-6)


def test_states_in_the_order_of_inputs():
    """Both directions of sequences lie as their entries do."""
    tokens = np.arange(100, 109)
    for reverse in False, True:
        graphs = Graphs.from_sequences([4, 0, 5], reverse=reverse, input={"token": tokens})
        script = pack(graphs, [2, 1, 0], Layout(width=2, slots=1))
        rows = script.x_rows.reshape(-1)
        h = np.where(rows < 0, np.nan, script.input("token")[rows])
        inputs = np.asarray(script.in_input_order(h))
        assert inputs[:9].tolist() == [*tokens[4:], *tokens[:4]] and (inputs[9:] == 0).all()
        assert (script.input("token")[9:] == -1).all()
        weights = np.arange(1.0, len(inputs) + 1)
        _, back = jax.vjp(script.in_input_order, jnp.ones(len(rows)))
        (given,) = back(jnp.asarray(weights, jnp.float32))
        np.testing.assert_array_equal(given, np.where(rows < 0, 0, weights[rows]))


def test_refused_values():
    script = pack(TREES, [0, 1], Layout())
    with pytest.raises(ValueError, match=r"roots: carry must have 8 rows, got shape \(7, 2\)"):
        script.roots(np.zeros((7, 2)), np.zeros((16, 2)))
    with pytest.raises(ValueError, match=r"roots: h must have 16 rows, got shape \(8, 2\)"):
        script.roots(np.zeros((8, 2)), np.zeros((8, 2)))
    with pytest.raises(ValueError, match=r"roots: carry must have 8 rows, got shape \(\)"):
        script.roots([1.0], [2.0])  # a pytree
    with pytest.raises(ValueError, match=r"roots: rows .* one shape, got \(2,\) and \(3,\)"):
        script.roots(np.zeros((8, 2)), np.zeros((16, 3)))
    with pytest.raises(ValueError, match=r"'label' of a row has 24 entries, values have .*\(8,\)"):
        script.mean(np.zeros(8), "label")
    with pytest.raises(ValueError, match=r"in_input_order: h must have 16 rows, got shape \(8,\)"):
        script.in_input_order(np.zeros(8))
    with pytest.raises(ValueError, match=r"mean: needs one script, got a batch \(2,\)"):
        stack([script, script]).mean(np.zeros(24), "label")
    with pytest.raises(KeyError, match="no channel 'label' of a graph"):
        script.graph("label")


def test_scripts_in_exported_programs():
    script = pack(TREES, [0, 1], Layout())
    exported = jax.export.export(jax.jit(lambda s: s.row("label") + s.used_tiles))(script)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(script), script.row("label") + script.used_tiles)
    assert Channel("word", "leaf", "int32") in script.form.channels


def test_a_treebank():
    """Scripts of the Stanford Sentiment Treebank, where there is one."""
    folder = os.environ.get("JAXSPARSE_DATA")
    path = pathlib.Path(folder or "", "sst", "train.txt")
    if not folder or not path.exists():
        pytest.skip("JAXSPARSE_DATA names no folder with sst/train.txt")
    graphs = Graphs.from_brackets(path.read_text())
    rng, layout = np.random.default_rng(0), Layout(groups=8)
    for batch in 1, 64, 256:
        ids = rng.permutation(len(graphs))[:batch]
        script = pack(graphs, ids, layout).verify()
        assert_same(script, pack_numpy(graphs, ids, layout))
        (sizes,) = reference.run(
            script,
            lambda _, children, x: [children[0][0] + children[1][0]],
            [np.ones(script.form.leaves)],
        )
        leaves = [(graphs[i].levels == 0).sum() for i in ids]
        assert sizes[script.root_rows[:batch]].tolist() == leaves
