"""The suites of dynamic networks: graphs, nets, implementations, and the command."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from bench_commands import refused
from checks import PLATFORM

from benchmarks import plots
from benchmarks.__main__ import main
from benchmarks.choices import Asked
from benchmarks.dynamic import (
    circuits,
    counted,
    datasets,
    models,
    problems,
    programs,
    reference,
    report,
    selection,
)
from benchmarks.dynamic.batches import Scripts, pack_levels, stacked
from benchmarks.dynamic.cases import DynamicCase, are_compiled
from benchmarks.dynamic.implementations import IMPLEMENTATIONS
from benchmarks.panels import panels
from jaxsparse import dynamic
from jaxsparse.dynamic.packing import pack_numpy


@pytest.fixture(autouse=True)
def made_data(monkeypatch):
    """No files, and small sets."""
    monkeypatch.delenv("JAXSPARSE_DATA", raising=False)
    for name, value in (("TREES", 24), ("SENTENCES", 24), ("VOCABULARY", 40)):
        monkeypatch.setattr(datasets, name, value)
    cached = (
        datasets.rare_words,
        *(datasets._trees, datasets._sentences, datasets.two_directions, datasets.sequences),
        *(datasets.triangles, problems._graphs, problems._groups, problems._rows_and_levels),
        *(reference.expected, counted._tiles),
    )
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


# ---- Graphs ----


def gate_values(graphs, inputs):
    """What a circuit gives for inputs: a dict of rows' values, by the graph alone."""
    values = list(inputs)
    inverted = graphs.channel("inverted")
    for row in range(len(inputs), len(graphs.children)):
        a, b = (values[child] for child in graphs.children[row])
        values.append((a ^ (inverted[row] & 1)) & (b ^ (inverted[row] >> 1)))
    return values


@pytest.mark.parametrize(("kind", "operation"), [("adder", "+"), ("multiplier", "*")])
def test_circuits_calculate(kind, operation, monkeypatch):
    """The bits of results are among the gates, as they are or inverted, whatever the inputs."""
    bits, rng = 5, np.random.default_rng(0)
    outputs = []
    add = circuits._Circuit.add
    monkeypatch.setattr(
        circuits._Circuit, "add", lambda self, a, b: outputs.append(add(self, a, b)) or outputs[-1]
    )
    totals = []
    original = circuits.KINDS[kind]

    def noting(circuit, bits):
        original(circuit, bits)
        totals.append(len(circuit.gates))

    monkeypatch.setitem(circuits.KINDS, kind, noting)
    graphs = circuits.circuit(kind, bits)
    low = [] if kind == "adder" else None
    for _ in range(20):
        a, b = (int(x) for x in rng.integers(0, 2**bits, 2))
        given = [(x >> i) & 1 for x in (a, b) for i in range(bits)]
        values = gate_values(graphs, given)

        def number(literals, values=values):
            return sum((values[x >> 1] ^ (x & 1)) << i for i, x in enumerate(literals))

        if kind == "adder":
            assert low == [] and number(outputs[0]) == a + b
        else:
            # Each sum leaves its lowest bit alone; the last one has all the others.
            assert len(outputs) == bits - 1
            lowest = gate_values(graphs, given)[2 * bits]
            done = [number(x) & 1 for x in outputs[:-1]]
            high = number(outputs[-1]) << (bits - 1)
            assert lowest + sum(bit << i for i, bit in enumerate(done, 1)) + high == a * b
    assert totals[0] == len(graphs.children) and graphs.slots == 2


def test_a_shifter_has_as_many_levels_as_stages():
    graphs = circuits.circuit("shifter", 16)
    assert graphs.levels.max() == 4 * 2 and len(graphs.children) == 16 + 4 + 4 * 16 * 3
    shares = graphs.channel("probability")[graphs.levels > 0]
    assert shares.min() > 0 and shares.max() < 1


def test_made_trees_are_as_those_of_the_treebank():
    graphs = datasets.made_trees(1500, seed=1)
    leaves = np.add.reduceat(graphs.levels == 0, graphs.offsets[:-1])
    depth = graphs.levels[graphs.offsets[:-1] + graphs.roots]
    assert abs(leaves.mean() - 19.1) < 0.8 and abs(leaves.std() - 9.3) < 0.8
    assert abs(depth.mean() - 9.83) < 0.5
    assert np.array_equal(graphs.lengths, 2 * leaves - 1)


def test_triangles():
    """Sentences of 1 and 3 words: every part of each, from its shorter parts."""
    trees = dynamic.Graphs.from_brackets("(4 a) (3 (2 b) (1 (0 c) (2 a)))")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "trees", lambda: datasets.Trees("", trees))
        graphs = datasets.triangles("two trees")
    assert graphs.lengths.tolist() == [1, 6]
    assert graphs.children[1:].tolist() == [[-1, -1]] * 3 + [[0, 1], [1, 2], [3, 4]]
    assert graphs.channel("word").tolist() == [0, 1, 2, 0, -1, -1, -1]
    assert graphs.channel("label").tolist() == [4, 3]


def test_files_are_read(tmp_path, monkeypatch):
    for name, text in (
        ("sst", "(3 (2 It) (4 works))\n"),
        ("wikiner", "It|O was|O Bonn|I-LOC\n\nBonn|I-LOC\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text(text)
    monkeypatch.setenv("JAXSPARSE_DATA", str(tmp_path))
    assert datasets.trees().source == "SST" and len(datasets.trees().graphs) == 1
    data = datasets.sentences()
    assert data.source == "WikiNER" and data.lengths.tolist() == [3, 1]
    assert data.words.tolist() == [0, 1, 2, 2] and data.tags.tolist() == [0, 0, 1, 1]
    assert np.diff(data.begins).tolist() == [2, 3, 4] and datasets.is_rare(data).all()
    both = datasets.two_directions(data.source, "letters")
    assert len(both) == 8 and both.lengths.tolist() == [3, 4, 5, 5] * 2


# ---- Implementations ----

# Few programs are compiled: each net once by what runs it, most by level_scan alone.
RUN = {
    "tree_lstm": ("jaxsparse", "levels-8", "loop-8"),
    "lstm": ("padded",),
    "bilstm": ("padded", "padded-jaxsparse"),
    "bilstm_letters": ("jaxsparse", "tiles-8"),
    "td_rnn": ("levels-8",),
    "multiplier_3": ("levels-8",),
}


def small(model, batch=2, steps=1, suite="tree_lstm"):
    return problems.Problem(suite, model, 1 if "multiplier" in model else batch, 8, steps=steps)


@pytest.mark.parametrize("model", RUN)
def test_implementations_agree(model):
    """With the machine in NumPy."""
    problem = small(model)
    for name in RUN[model]:
        assert IMPLEMENTATIONS[name].takes(problem)
        case = DynamicCase(problem, IMPLEMENTATIONS[name], "float32", ())
        check = case.check("gradient")
        assert check.relative_error <= check.limit, name


def test_the_reference_is_the_derivative():
    """Of the loss by the machine, in float64, along one direction of all parameters."""
    problem = small("bilstm_letters")
    net = problem.net
    loss = reference._Net(net.loss)
    (step,) = problem.groups()[0]
    batches = Scripts(8)
    with jax.enable_x64(True):
        batch = batches.one(problem, step, batches.room(problem, [step]))
        params = {k: np.asarray(x, np.float64) for k, x in net.parameters(problem.sizes).items()}
        others = {k: x for k, x in params.items() if k != "table"}
        rows = np.random.default_rng(0).standard_normal((batch.script.form.inputs, 8))
        rng = np.random.default_rng(1)
        d = {k: rng.standard_normal(x.shape) for k, x in others.items()}

        def at(t):
            moved = {k: others[k] + t * d[k] for k in others}
            runs = loss.run(moved, rows, batch)
            return float(loss._apply(moved, rows, batch, runs[2])[1])

        slope = (at(1e-6) - at(-1e-6)) / 2e-6
        grads, _ = loss.gradients(others, rows, batch)
        assert slope == pytest.approx(float(sum((grads[k] * d[k]).sum() for k in d)), rel=1e-6)


def test_steps_end_to_end():
    """Steps whose batches come from the host add what the reference does."""
    problem = small("td_rnn", steps=2)  # in two groups
    for passed in ("forward", "training", "end_to_end"):
        case = DynamicCase(problem, IMPLEMENTATIONS["tiles-8"], "float32", ())
        check = case.check(passed)
        assert check.relative_error <= check.limit and check.checked == 2


def test_batches_that_are_sent_are_those_of_the_check():
    """By `prefetch`, several steps at a time; a check has them packed in one call."""
    problem = small("tree_lstm", batch=16, steps=12)  # in two groups of six
    way = programs.Way(Scripts(8), lambda problem, dtype: problem.net.loss)
    for steps in problem.groups():
        calls, room = programs._calls(steps, 8), way.batches.room(problem, steps)
        assert [len(call) for call in calls] == [6]
        sent = list(programs._sent(problem, way, calls * 2, room))
        expected = stacked(way.batches, problem, steps, 6, room)
        assert len(sent) == 2
        for batch in sent:
            assert jax.tree.structure(batch) == jax.tree.structure(expected)
            np.testing.assert_array_equal(batch.script.words, expected.script.words)


def test_a_wrong_result_is_seen():
    problem = small("tree_lstm")
    way = programs.Way(
        Scripts(8),
        lambda problem, dtype: functools.partial(
            problem.net.loss,
            lambda *given, bias: dynamic.scan(*given, bias=bias * 1.01),
        ),
    )
    built = programs.build(problem, "float32", "gradient", way)
    assert reference.error("gradient", built.checked(), problem) > 2**-12


# ---- What is selected and said ----


def test_problems():
    for name, suite in problems.SUITES.items():
        for platform in ("cpu", "gpu"):
            made = problems.problems(name, platform)
            assert len({p.name for p in made}) == len(made) >= 3
            assert {p.suite for p in made} == {name} and suite.about
            for p in made:
                assert p.model.partition("_")[0] in circuits.KINDS or p.model in models.MODELS
    for problem in problems.problems("tree_lstm", "gpu"):
        groups = problem.groups()
        deepest = [max(problem.graphs[ids].levels) for group in groups for ids in group]
        assert sum(map(len, groups)) == 48 and deepest == sorted(deepest)


def test_widths_are_about_those_of_levels():
    asked = Asked("dynamic", names=("*_b1", "*_b16"))
    made = selection.select(asked, "gpu")
    assert made.dtypes == ("tf32", "bfloat16") and ("torch" in made.skipped) == (PLATFORM != "cuda")
    taken = [
        [i.name for i in made.implementations if i.name.startswith("levels") and i.takes(p)]
        for p in made.problems
    ]
    assert taken == [["levels-8", "levels-32"], ["levels-8", "levels-32", "levels-64"]]


def test_programs_of_the_next_problems_are_built_by_threads_that_would_be_idle(monkeypatch):
    monkeypatch.setattr(selection, "_threads", lambda: 2)
    nets = tuple(small("tree_lstm", batch) for batch in (1, 2, 3))
    made = selection.DynamicSelection(
        nets, (IMPLEMENTATIONS["jaxsparse"],), ("float32",), ("pack",), {}
    )
    later, last = made._cases(nets[1]), made._cases(nets[2])
    assert not are_compiled(later)
    (first,) = made.cases(nets[0])
    assert are_compiled(later) and not are_compiled(last)
    built = later[0]._built("pack")
    first.ran("pack")
    (second,) = made.cases(nets[1])
    assert second._built("pack") is built and are_compiled([first])  # it was measured
    assert not are_compiled(last)  # nothing was left to build


def test_levels_begin_tiles():
    """Levels are cut into as few tiles as each of them takes, which list scheduling undercuts."""
    graphs = small("tree_lstm").graphs
    every, layout = range(len(graphs)), dynamic.Layout(4)
    script = pack_levels(graphs, every, layout).verify()
    counts = np.bincount(graphs.levels[graphs.levels > 0])
    assert int(script.used_tiles) == int(sum(-(-counts // 4)))
    assert int(dynamic.pack(graphs, every, layout).used_tiles) < int(script.used_tiles)
    both = small("bilstm").graphs  # of two kinds
    assert pack_levels(both, [0, len(both) - 1], dynamic.Layout(4, slots=1)).verify().kinds.any()


def test_weights_are_counted():
    """Two reads of all weights a tile; of a kernel, two launches of each team."""
    problem = small("tree_lstm", batch=1)
    copy = 2 * 5 * 8 * 8 * 4
    (step,) = problem.groups()[0]
    for name, packer in (("tiles-8", pack_numpy), ("levels-8", pack_levels)):
        script = packer(problem.graphs, step, dynamic.Layout(8))
        found = counted.weight_bytes(problem, name, "float32", "gradient")
        assert found == 2 * copy * int(script.used_tiles)
        assert counted.weight_bytes(problem, name, "float32", "pack") == found
    large = replace(problem, hidden=256)
    teams = Scripts(teams="bfloat16").layout(large).groups
    found = counted.weight_bytes(large, "jaxsparse-teams", "bfloat16", "training")
    assert found == 2 * teams * 2 * 5 * 256 * 256 * 2
    both = replace(small("bilstm", batch=1), hidden=256)
    teams = Scripts(teams="bfloat16").layout(both).groups
    found = counted.weight_bytes(both, "jaxsparse-teams", "bfloat16", "forward")
    assert found == 2 * teams * 4 * 256 * 256 * 2  # of each direction
    odd = replace(problem, hidden=7)  # for which there is no kernel
    assert counted.weight_bytes(odd, "jaxsparse-teams", "bfloat16", "training") is None
    assert counted.weight_bytes(problem, "torch", "float32", "forward") is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--suite", "trees"], "--suite: dynamic has tree_lstm, packed,"),
        (["--n", "3"], "--n: the suites of dynamic have nets of their own"),
        (["--length", "3", "4"], "--length: dynamic takes one number of steps"),
        (["--dtype", "float16"], "--dtype: dynamic has float32, tf32, bfloat16"),
    ],
)
def test_usage_errors(argv, message, capsys):
    assert message in refused(["run", "dynamic", *argv], capsys)
    assert "--pass: recurrent has" in refused(["run", "recurrent", "--pass", "pack"], capsys)


def test_from_command_to_result(tmp_path, capsys):
    """All parts of steps, in one table; DyNet's figures beside those of nets of its size alone."""
    output = tmp_path / "breakdown.json"
    argv = ["run", "dynamic", "--suite", "breakdown", "--problem", "*_b1", "--length", "1"]
    argv += ["--implementation", "jaxsparse", "--dtype", "float32", "--output", str(output)]
    argv += ["--pass", "training", "pack", "copy", "dispatch"]
    with pytest.MonkeyPatch.context() as patch:
        own = tuple(replace(p, hidden=8) for p in problems.SUITES["breakdown"].problems)
        changed = replace(problems.SUITES["breakdown"], problems=own)
        patch.setitem(problems.SUITES, "breakdown", changed)
        assert main([*argv, "--seconds", "0.01", "--repeats", "2", "--quiet"]) == 0
    assert "microseconds an input" in capsys.readouterr().out
    rows = json.loads(output.read_text())["results"]
    assert [row["pass"] for row in rows] == ["training", "pack", "copy", "dispatch"]
    for row in rows:
        assert row["error"] is None and row["us"] > 0 and row["steps"] == 1
        assert (row["data"], row["unit"], row["timer"]) == ("generated", "trees", "wall")
        assert (row["compile_s"] is None) == (row["pass"] != "training")
    assert main(["run", "dynamic", "--list"]) == 0
    assert "levels-64" in capsys.readouterr().out


def row_of(passed="training", **changed):
    """A row as tables take it."""
    case = DynamicCase(small("tree_lstm", 8), IMPLEMENTATIONS["jaxsparse"], "float32", ())
    figures = {"us": 10.0, "us_quartiles": [10.0, 10.0], "error": None}
    return {**case.description(passed), **figures, **changed}


@pytest.mark.parametrize(("hidden", "column"), [(256, ["DyNet, H200"]), (8, [])])
def test_dynet_stands_beside_nets_of_its_size(hidden, column):
    (panel,) = panels([row_of(hidden=hidden, embedding=hidden)])
    table = next(report.tables(panel))
    assert table.cells[0] == ["net", "jaxsparse", *column]
    assert table.cells[1][1:] == ["800,000", *["856"] * len(column)]


@pytest.mark.parametrize("suite", ["models", "ablation", "weight_loads"])
def test_plots(suite, tmp_path):
    """Dots and lines, of every way that has a figure."""
    pytest.importorskip("matplotlib")
    ways = {i.way for i in IMPLEMENTATIONS.values() if i.ablation == (suite == "ablation")}
    rows = [
        row_of(suite=suite, way=way, implementation=way, problem=f"b{batch}", batch=batch)
        for way in ways
        for batch in (1, 8)
    ]
    plots.plot(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_parts_of_a_step_are_differences():
    us = {"forward": 16.0, "gradient": 40.0, "training": 56.0, "pack": 8.0}
    rows = [row_of(passed, suite="breakdown", us=x) for passed, x in us.items()]
    packed, table = report.summaries(panels(rows))
    assert table.cells[1][1:] == ["1", "-", "-", "2", "3", "2", "-"]
    # 8 trees in 56 us on the device, and in 8 by the packer.
    assert packed.cells[1][1:] == ["142,857", "-", "-", "1,000,000", "7"]
    rows = [row_of("training"), row_of("end_to_end", us=12.5), row_of("pack", suite="ablation")]
    (whole,) = report.summaries(panels(rows))
    assert whole.cells[1][1:] == ["800,000", "640,000", "0.8", "-", "-"]


def test_the_fastest_plain_jax_stands_beside_ours():
    """Of any dtype, and in float32; memory beside that of a loop by hand in the same dtype."""

    def row(way, dtype, us, temporary=None):
        figures = {"hidden": 256, "embedding": 256, "temporary_bytes": temporary}
        return row_of(way=way, implementation=way, dtype=dtype, us=us, **figures)

    ours, by_hand = f"{report.OURS}, kernels", report.BY_HAND
    rows = [
        row(ours, "bfloat16", 10.0, 30),
        row(ours, "float32", 25.0, 90),
        row(by_hand, "bfloat16", 60.0, 60),
        row(by_hand, "float32", 75.0, 80),
        row("loop, JAX's gradient", "tf32", 50.0, 10),
        row("PyTorch by levels", "bfloat16", 1.0),
    ]
    (panel,) = panels(rows)
    table = list(report.tables(panel))[1]
    names = [f"{ours} bfloat16", "loop, JAX's gradient tf32"]
    assert table.cells[1][1:] == [*names, "5", "3", "0.5", "934"]
    (with_loss,) = panels([*rows, row(IMPLEMENTATIONS["jaxsparse-loss"].way, "bfloat16", 5.0)])
    assert "one launch" in list(report.tables(with_loss))[1].cells[1][1]
    (alone,) = panels(rows[:2])
    assert not any("plain JAX" in table.title for table in report.tables(alone))


def test_tables_of_compilation_and_of_weights():
    rows = [row_of(suite=name, compile_s=1.5, batch=2) for name in ("compile", "weight_loads")]
    rows[0] |= {"kernels": 2, "kernel_compile_s": 1.25, "kernel_load_s": 0.04, "new_script_s": 0}
    (compiled, own), (loads, *_) = (list(report.tables(panel))[1:3] for panel in panels(rows))
    assert compiled.cells[1][1:] == ["1.50", "11.10 + 7.29"]
    assert own.cells[1][1:] == ["2", "1.25", "40.0", "0.0"]
    megabytes = rows[1]["weight_bytes"] * 64 / 1e6
    assert loads.cells[1][1:] == [f"{megabytes:,.1f}", "176.31"]
