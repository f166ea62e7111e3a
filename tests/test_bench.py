"""The commands bench, table and plot: options, results, pictures, timers."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsparse.__main__ import main
from jaxsparse.bench import (
    cases,
    choices,
    cli,
    environment,
    operations,
    panels,
    plan,
    plots,
    report,
    run,
    timing,
    trace,
)
from jaxsparse.bench.edge_cases import EDGE_CASES
from jaxsparse.bench.implementations import (
    DTYPES,
    PASSES,
    Implementation,
    implementations_of,
    variants,
)
from jaxsparse.bench.problems import SUITES, Request, suites_of

QUICK = ["--seconds", "0.01", "--repeats", "2"]
EFFORT = run.Effort(seconds=0.01, repeats=2)


def edge_case(name, operation="spmm"):
    suite = SUITES["edge_cases"].problems(Request(operation))
    return next(problem for problem in suite if problem.name == name)


def planned(argv):
    parser = cli.Parser()
    cli.add_commands(parser.add_subparsers())
    return plan.make_plan(cli.asked(parser.parse_args(["bench", *argv])), "cpu")


# ---- options ----


@st.composite
def legal_options(draw):
    """(argv, what it must plan: names of implementations by dtype, number of problems, passes)."""
    operation = draw(st.sampled_from(sorted(operations.OPERATIONS)))
    suites = [name for name in suites_of(operation) if name not in ("files", "dlmc")]
    suites = draw(st.lists(st.sampled_from(suites), min_size=1, unique=True))
    argv, sizes = [operation, "--suite", *suites], {}
    options = {
        "n": (
            st.integers(1, 300),
            operations.OPERATIONS[operation].has_n and suites != ["dispatch"],
        ),
        "sparsity": (st.floats(0, 0.99), all(SUITES[name].has_sparsity for name in suites)),
    }
    for option, (values, possible) in options.items():
        if possible and draw(st.booleans()):
            chosen = draw(st.lists(values, min_size=1, max_size=3, unique=True))
            argv += [f"--{option}", *map(str, chosen)]
            sizes[option] = len(chosen)
    here = [i.name for i in implementations_of(operation).values() if i.available() is None]
    names = draw(st.lists(st.sampled_from(here), min_size=1, unique=True))
    argv += ["--implementation", *names]
    if variants(operation) and draw(st.booleans()):
        forced = draw(st.lists(st.sampled_from(variants(operation)), min_size=1, unique=True))
        argv += ["--variant", *forced]
        names += [f"jaxsparse[{name}]" for name in forced]
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, unique=True))
    argv += ["--dtype", *dtypes]
    passes = draw(st.lists(st.sampled_from(PASSES), min_size=1, unique=True))
    argv += ["--pass", *passes]
    return argv, operation, suites, sizes, names, dtypes, passes


# suite -> patterns, sizes n on each, for the CPU
COUNTS = {
    "square": (2, 3, 1),
    "crossover": (8, 1, 1),
    "rnn": (3, 2, 6),
    "imbalance": (1, 1, 11),
    "networks": (2, 1, 18),
    "attention": (1, 1, 1),
    "edge_cases": (1, 1, len(EDGE_CASES)),
    "dispatch": (1, 1, 1),
}


@settings(max_examples=60, deadline=None)
@given(legal_options())
def test_legal_options_plan_what_they_say(drawn):
    argv, operation, suites, sizes, names, dtypes, passes = drawn
    table = implementations_of(operation)
    has_pass = [n for n in names if n not in table or set(passes) & set(table[n].passes)]
    if not has_pass:
        with pytest.raises(choices.UsageError, match="--pass"):
            planned(argv)
        return
    made = planned(argv)
    expected = 0
    for suite in suites:
        patterns, columns, shapes = COUNTS[suite]
        columns = sizes.get("n", columns) if operations.OPERATIONS[operation].has_n else 1
        expected += sizes.get("sparsity", patterns) * columns * shapes
    assert len(made.problems) == expected
    assert len({(p.suite, p.name) for p in made.problems}) == expected
    assert {i.name for i, _ in made.candidates} == set(has_pass)
    for implementation, dtype in made.candidates:
        assert dtype in implementation.dtypes
    for name in has_pass:
        own = {dtype for i, dtype in made.candidates if i.name == name}
        accepted = table[name].dtypes if name in table else DTYPES
        assert own == ({d for d in dtypes if d in accepted} | (
            {accepted[0]} if set(dtypes) - set(accepted) else set()
        ))  # fmt: skip
    assert made.passes == tuple(p for p in PASSES if p in passes)


def test_problem_takes_several_globs():
    argv = ["spmm", "--suite", "square", "rnn", "--problem"]
    every = [p.name for p in planned(argv[:-1]).problems]
    expected = [name for name in every if "x1024_n32_" in name or "x2048_n" in name]
    assert 0 < len(expected) < len(every)
    for globs in (
        ["*x1024_n32_*", "*x2048_*"],
        ["*x2048_*", "*x1024_n32_*", "*x2048_n32*"],
        ["*x1024_n32_*", "--problem", "*x2048_*"],
    ):
        assert [p.name for p in planned([*argv, *globs]).problems] == expected
    with pytest.raises(
        choices.UsageError, match=r"--problem: '\*x3_\*' matches none of 1024x1024_"
    ):
        planned([*argv, "*x2048_*", "*x3_*"])


def test_names_tell_problems_apart():
    close = ["0.99", str(np.nextafter(0.99, 0)), "0.9900001", "0.0", "1e-300"]
    for suite in "crossover", "attention":
        problems = planned(["sddmm", "--suite", suite, "--sparsity", *close]).problems
        assert [p.name.rpartition("_s")[2] for p in problems] == close


def test_variant_takes_globs():
    argv = ["spmm", "--implementation", "jaxsparse", "--variant"]

    def forced(*globs):
        return [i.name for i, _ in planned([*argv, *globs]).candidates][1:]

    names = [f"jaxsparse[{name}]" for name in variants("spmm")]
    assert forced("*") == forced("*", names[0][10:-1]) == names
    last = variants("spmm")[-1]
    assert forced(last, "*") == [names[-1], *names[:-1]]
    with pytest.raises(choices.UsageError, match=r"--variant: spmm has .*there is no 'zz\*'"):
        planned([*argv, "*", "zz*"])


WORDS = st.text("abcxyz_", min_size=1).filter(lambda w: w not in ("copy",))
ILLEGAL = {
    "--suite": st.sampled_from(["attention", "dispatch"]) | WORDS,
    "--problem": WORDS,
    "--implementation": st.just("copy") | WORDS,
    "--variant": WORDS,
    "--dtype": st.sampled_from(["float64", "int8"]) | WORDS,
    "--n": st.integers(-9, 0).map(str) | st.floats(0.1, 9).map(str) | WORDS,
    "--sparsity": st.sampled_from(["1", "1.5", "nan", "inf"]) | WORDS,
    "--pass": WORDS,
    "--repeats": st.sampled_from(["0", "1.5"]) | WORDS,
    "--seconds": st.sampled_from(["0", "nan", "inf"]) | WORDS,
    "--plot": st.sampled_from(["a", "a.txt"]),
    "--output": st.just("/"),
}


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(ILLEGAL)).flatmap(lambda o: st.tuples(st.just(o), ILLEGAL[o])))
def test_illegal_options_end_in_one_line(case):
    option, value = case
    with pytest.MonkeyPatch.context() as patch:
        written = []
        patch.setattr(
            cli.argparse.ArgumentParser, "_print_message", lambda s, m, f: written.append(m)
        )
        patch.setattr(cli, "execute", lambda *args, **kwargs: pytest.fail("it ran"))
        with pytest.raises(SystemExit) as stopped:
            main(["bench", "spmm", f"{option}={value}"])
    assert stopped.value.code == 2
    (message,) = written
    assert option in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "nope"], "OPERATION"),
        (["bench", "sparse_softmax", "--n", "4"], "--n: sparse_softmax has no size"),
        (["bench", "spmm", "--suite", "edge_cases", "--sparsity", "0.5"], "--sparsity"),
        (["bench", "spmm", "--suite", "files"], "--suite: 'files' .* JAXSPARSE_DATA: set it"),
        (["bench", "sparse_attention", "--variant", "rows"], "--variant"),
        (["bench", "spmm", "--length", "4"], r"--length: spmm has no steps, got \[4\]"),
        (["bench", "spmm", "--implementation", "scipy", "--pass", "gradient"], "--pass|--impl"),
        (["table", "nothing.json"], "nothing.json"),
        (["plot", "nothing.json", "--output", "a.png"], "nothing.json"),
        (["plot", "nothing.json", "--output", "a.gif"], "--output"),
    ],
)
def test_usage_errors(argv, message, monkeypatch, capsys):
    monkeypatch.delenv("JAXSPARSE_DATA", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_plots_need_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plots, "available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "spmm", "--plot", str(tmp_path / "a.png")])
    assert stopped.value.code == 2
    assert "--plot: needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_list(capsys):
    assert main(["bench", "spmm", "--list"]) == 0
    text = capsys.readouterr().out
    for part in ("crossover", "JAXSPARSE_DATA", "jaxsparse-xla", "torch", *variants("spmm")):
        assert part in text


# ---- runs ----


def spoiled(change, name="spoiled"):
    """The product of jaxsparse with something done to its result."""
    own = implementations_of("spmm")["jaxsparse"].build

    def build(problem, dtype, passed):
        program = own(problem, dtype, passed)
        return timing.Program(
            function=lambda *operands: change(program.function(*operands)),
            operands=program.operands,
            bytes_read=program.bytes_read,
            wait=program.wait,
            results=program.results,
        )

    return Implementation(name, "spmm", build, passes=("forward",))


def plan_of(*implementations, problems=("odd", "vector")):
    pairs = tuple((i, i.dtypes[0]) for i in implementations)
    return plan.OperationPlan(tuple(map(edge_case, problems)), pairs, ("forward",), {})


def out_of_memory(y):
    raise MemoryError("no room\nfor it")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda y: y * 1.001, "WrongResult: relative error 0.001"),
        (lambda y: y.at[-1, -1].set(jnp.nan), "WrongResult: relative error inf"),
        (lambda y: y[:, :0], "WrongResult"),
        (out_of_memory, "MemoryError: no room"),
    ],
)
def test_failures_are_recorded_and_the_run_goes_on(change, error):
    good = spoiled(lambda y: y, "good")
    result, whole = run.execute(plan_of(spoiled(change), good), EFFORT)
    assert whole and len(result["results"]) == 4
    for row in result["results"]:
        if row["implementation"] == "good":
            assert row["us"] > 0 and row["error"] is None and row["relative_error"] < 1e-5
        else:
            assert row["us"] is None and row["timer"] is None
            assert row["error"].startswith(error) and "\n" not in row["error"]
    json.dumps(result, allow_nan=False)
    text = report.table(result)
    assert ("wrong" if error.startswith("Wrong") else "failed") in text and error in text


def test_what_does_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(cases, "memory_limit", lambda: 1000)
    dense = implementations_of("spmm")["dense"]
    (row,) = run.execute(plan_of(dense, problems=("odd",)), EFFORT)[0]["results"]
    assert row["us"] is None and "MemoryError: it needs" in row["error"]


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    calls = iter(range(100))

    def interrupt(y):
        if next(calls) >= 12:
            raise KeyboardInterrupt
        return y

    saved = []
    made = plan_of(spoiled(lambda y: y, "good"), spoiled(interrupt))
    result, whole = run.execute(made, EFFORT, save=lambda r: saved.append(json.dumps(r)))
    assert not whole and json.loads(saved[-1]) == result
    assert any(row["implementation"] == "good" and row["us"] for row in result["results"])
    monkeypatch.setattr(plan, "make_plan", lambda *args: made)
    calls = iter(range(100))
    output = tmp_path / "new" / "out.json"
    assert main(["bench", "spmm", "--output", str(output), *QUICK]) == cli.INTERRUPTED
    assert json.loads(output.read_text())["results"]
    assert "spmm, edge_cases, forward" in capsys.readouterr().out


ROW = {
    "suite": str, "problem": str, "operation": str, "m": int, "k": int, "n": int, "heads": int,
    "nnz": int, "sparsity": float, "dtype": str, "implementation": str, "pass": str, "us": float,
    "us_quartiles": list, "us_range": list, "wall_us": float, "device_us": float,
    "timer": str, "calls": int, "copies": int, "relative_error": float, "rows_checked": int,
    "error": type(None),
}  # fmt: skip


def test_from_command_to_picture(tmp_path, capsys):
    output = tmp_path / "out.json"
    argv = ["bench", "spmm", "--suite", "edge_cases", "--problem", "[op][da]d*", *QUICK]
    argv += ["--implementation", "jaxsparse", "dense", "--commit", "abc", "--output", str(output)]
    assert main([*argv, "--plot"]) == 0
    shown = capsys.readouterr()
    assert output.with_suffix(".png").stat().st_size > 10_000
    result = json.loads(output.read_text())
    assert result["schema"] == 1 and result["skipped"] == {}
    known = result["environment"]
    assert known["commit"] == "abc" and known["jax"] == jax.__version__ and known["cores"] > 0
    assert {row["problem"] for row in result["results"]} == {"odd", "padding"}
    assert len(result["results"]) == 2 * 2 * 2
    for row in result["results"]:
        if row["timer"] == "wall":  # no GPU to trace
            assert row["device_us"] is None
            row = {**row, "device_us": 0.0}
        assert {name: type(value) for name, value in row.items()} == ROW
        low, high = row["us_quartiles"]
        assert 0 < row["us_range"][0] <= low <= row["us"] <= high <= row["us_range"][1]
        assert row["timer"] in ("wall", "device") and row["wall_us"] > 0
        assert row["relative_error"] < 1e-5
    assert "jaxsparse float32 forward" in shown.err
    assert main(["table", str(output)]) == 0
    assert capsys.readouterr().out == shown.out
    assert main(["table", str(output), "--markdown"]) == 0
    markdown = capsys.readouterr().out
    assert "| problem | jaxsparse | dense |\n|---|---:|---:|\n| odd |" in markdown
    picture, other = tmp_path / "both.svg", tmp_path / "other.json"
    for row in result["results"]:
        row["dtype"] = "float16"
    other.write_text(json.dumps(result))
    assert main(["plot", str(output), str(other), "--output", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    # Two figures of the same: neither may hide the other.
    result["results"] *= 2
    other.write_text(json.dumps(result))
    for command in (
        ["plot", str(output), str(output), "--output", str(picture)],
        ["table", str(other)],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(command)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1
        assert re.search("two figures of jaxsparse( float16)? on edge_cases odd, spmm for", error)


def test_dispatch(capsys):
    assert main(["bench", "dispatch", "--quiet", *QUICK]) == 0
    shown = capsys.readouterr()
    assert "eager" in shown.out and not shown.err


def rows(us):
    """Results of the crossover suite: {implementation: [us at 50 %, at 90 %]}."""
    return [
        {"suite": "crossover", "problem": f"s{s}", "operation": "spmm", "n": 128, "sparsity": s,
         "implementation": name, "dtype": "float32", "pass": passed, "us": figure, "error": None}
        for name, figures in us.items()
        for passed in PASSES
        for s, figure in zip((0.5, 0.9), figures, strict=True)
    ]  # fmt: skip


def test_speedups_and_crossover_plot(tmp_path):
    made = rows({"jaxsparse": [10.0, 1.0], "dense": [20.0, 32.0], "bcsr": [None, 3.0]})
    panel = panels.panels(made)[0]
    assert panel.speedups("jaxsparse", "dense") == pytest.approx([2.0, 32.0])
    assert panel.speedups("jaxsparse", "bcsr") == pytest.approx([3.0])
    assert panel.speedups("jaxsparse", "none") == []
    text = report.table({"results": made}, markdown=True)
    head = "|  | geometric mean | least | most | faster on | TFLOP/s at most |"
    assert head in text
    assert "| jaxsparse over dense | 8.00 | 2.00 | 32.00 | 2 of 2 | - |" in text
    assert "| jaxsparse over bcsr | 3.00 | 3.00 | 3.00 | 1 of 1 | - |" in text
    plots.plot(made, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="nothing was measured"):
        plots.plot(rows({"jaxsparse": [None, None]}), tmp_path / "b.png")


def of_networks(us):
    """The same on layers of two networks: {implementation: us of each}."""
    groups = "transformer_b1/a", "rn50_b1/a", "rn50_b1/b"
    return [
        {**rows({name: [1.0, 1.0]})[0], "suite": "networks", "problem": problem, "nnz": 10**6,
         "us": figure}
        for name, figures in us.items()
        for problem, figure in zip(groups, figures, strict=True)
    ]  # fmt: skip


def test_summaries_by_network():
    made = of_networks({"jaxsparse": [10.0, 10.0, 10.0], "torch": [20.0, 5.0, 10.0]})
    text = report.table({"results": made}, markdown=True)
    for line in (
        "| jaxsparse over torch, transformer_b1 | 2.00 | 2.00 | 2.00 | 1 of 1 | 25.6 |",
        "| jaxsparse over torch, rn50_b1 | 0.71 | 0.50 | 1.00 | 0 of 2 | 25.6 |",
        "| jaxsparse over torch | 1.00 | 0.50 | 2.00 | 1 of 3 | 25.6 |",
    ):
        assert line in text
    (row, *_) = made
    assert panels.teraflops(row) == pytest.approx(2e6 * 128 / 10e-6 / 1e12)
    assert panels.teraflops({**row, "pass": "gradient"}) == pytest.approx(3 * 25.6)
    assert panels.teraflops({**row, "operation": "spmm_pullback"}) == pytest.approx(2 * 25.6)
    for unknown in {"us": None}, {"n": None}, {"operation": "sparse_softmax"}:
        assert panels.teraflops({**row, **unknown}) is None


def test_what_is_left_without_a_technique(tmp_path):
    made = of_networks(
        {
            "jaxsparse": [8.0, 8.0, 8.0],
            "jaxsparse[rows]": [10.0, 10.0, 10.0],
            "jaxsparse[rows_scalar]": [20.0, 10.0, 40.0],
            "jaxsparse[rows_scalar_twice]": [40.0, None, 40.0],
            "jaxsparse[other]": [1.0, 1.0, 1.0],
        }
    )
    (panel,) = panels.panels(made)
    base, without = "jaxsparse[rows]", "jaxsparse[rows_scalar]"
    assert panel.ablations() == {base: [without], without: ["jaxsparse[rows_scalar_twice]"]}
    text = report.table({"results": made}, markdown=True)
    assert f"### spmm, networks, forward: throughput, of that of {base}" in text
    assert "|  | transformer_b1 | rn50_b1 | all |" in text
    assert "| jaxsparse[rows_scalar] | 50.0 % | 50.0 % | 50.0 % |" in text
    assert "| jaxsparse[rows_scalar_twice] | 50.0 % | 100.0 % | 70.7 % |" in text
    assert "jaxsparse over jaxsparse[rows] |" in text  # of all problems together
    assert "jaxsparse over jaxsparse[rows], " not in text
    half = [{**row, "dtype": "float16"} for row in made]
    both = panels.panels([*made, *half])[0].ablations()
    assert both[f"{base} float16"] == [f"{without} float16"] and both[base] == [without]
    plots.plot(made, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_what_a_paper_says_stands_beside(tmp_path):
    us = {"jaxsparse": [8.0, 8.0, 8.0], "jaxsparse[tiled_rows]": [10.0, 10.0, 10.0]}
    us |= {"jaxsparse[tiled_rows_rolled]": [20.0, 10.0, 40.0], "torch": [16.0, 16.0, 16.0]}
    made = of_networks(us)
    cells = report.table({"results": made}, markdown=True).splitlines()
    ours = cells.index("| jaxsparse[tiled_rows_rolled] | 50.0 % | 50.0 % | 50.0 % |")
    assert cells[ours + 1] == "| Gale et al. 2020, V100 | 92.0 % | 87.8 % | - |"
    assert len([line for line in cells if "Gale" in line]) == 1  # not of this suite's speedups
    plots.plot(made, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000

    pruned = [{**row, "suite": "dlmc"} for row in made if "[" not in row["implementation"]]
    line = "| Gale et al. 2020, V100, over cuSPARSE | 3.58 | - | 14.2 | - | 4.29 |"
    assert line in report.table({"results": pruned}, markdown=True)
    drawn = Points()
    colours = {"jaxsparse": "C0", "torch": "C1"}
    plots.DRAWINGS["dlmc"](drawn, panels.panels(pruned)[0], colours)
    assert drawn.levels == [4.29]
    narrow = [{**row, "dtype": "float16"} for row in pruned]
    line = "| Gale et al. 2020, V100 float16, over cuSPARSE | 5.97 | - | 297.5 | - | 5.57 |"
    assert line in report.table({"results": narrow}, markdown=True)

    # A technique in another dtype, and gradients, are not what the paper has figures of.
    half = [{**row, "dtype": "float16"} for row in made]
    backward = [{**row, "pass": "gradient"} for row in (*made, *pruned)]
    for others in half, backward:
        assert "Gale" not in report.table({"results": others})


@pytest.mark.parametrize("operation", ["spmm", "sparse_softmax"])
def test_points_by_size(operation, tmp_path):
    made = of_networks({"jaxsparse": [10.0, 20.0, None], "torch": [20.0, 5.0, 10.0]})
    made = [{**row, "operation": operation} for row in made]
    (panel,) = panels.panels(made)
    drawn = Points()
    if operation == "spmm":
        plots.DRAWINGS["networks"](drawn, panel, {"jaxsparse": "C0", "torch": "C1"})
        assert [len(x) for x, y in drawn.lines] == [2, 3]
        for x, _ in drawn.lines:
            assert set(x) == {128 * 10**6}
        assert sorted(drawn.lines[0][1]) == pytest.approx([12.8, 25.6])
    plots.plot(made, tmp_path / "a.png")  # of what multiplies nothing, bars
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_imbalance_plot_shows_throughput(tmp_path):
    made = [
        {**row, "suite": "imbalance", "problem": f"4x4_v{v}", "nnz": 100, "us": us}
        for row in rows({"jaxsparse": [1.0, 1.0]})[:1]
        for v, us in ((0.0, 10.0), (1.0, 20.0), (2.0, None))
    ]
    drawn = Drawn()
    plots.DRAWINGS["imbalance"](drawn, panels.panels(made)[0], {"jaxsparse": "C0"})
    assert [(list(x), list(y)) for x, y in drawn.lines] == [([0.0, 1.0], [100.0, 50.0])]
    assert drawn.levels == [47.5, 96.5]  # the paper's
    drawn, backward = Drawn(), [{**row, "pass": "gradient"} for row in made]
    plots.DRAWINGS["imbalance"](drawn, panels.panels(backward)[0], {"jaxsparse": "C0"})
    assert drawn.lines and not drawn.levels
    plots.plot(made, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


class Drawn:
    """Axes that keep what is drawn."""

    def __init__(self):
        self.lines, self.levels = [], []

    def axhline(self, y, **style):
        self.levels.append(y)

    def plot(self, x, y, **style):
        self.lines.append((x, y))

    def set_ylim(self, **limits):
        assert limits == {"bottom": 0}

    def set_xlabel(self, text):
        assert "variation" in text

    def set_ylabel(self, text):
        assert "throughput" in text


class Points(Drawn):
    """The same, on axes of throughput by size."""

    def plot(self, x, y, marker, **style):
        assert marker == "."
        super().plot(x, y, **style)

    def set_xscale(self, name):
        assert name == "log"

    set_yscale = set_xscale

    def set_xlabel(self, text):
        assert "entries" in text


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 2}', '{"schema": 1, "results": [{}]}', '{"schema": 1}']
)
def test_files_that_are_no_results(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json: "):
        panels.read_result(path)


def test_commit_is_that_of_the_checkout(monkeypatch):
    assert environment.environment("given")["commit"] == "given"
    monkeypatch.setattr(environment, "__file__", str(pathlib.Path("/proc/nothing.py")))
    assert environment.environment()["commit"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_says_if_tracked_files_were_changed(tmp_path, monkeypatch):
    file = tmp_path / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(file))

    def git(*command):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    file.write_text("a")
    assert environment._commit() is None
    git("add", ".")
    git("commit", "-m", "a")
    commit = environment._commit()
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    (tmp_path / "untracked").write_text("b")
    assert environment._commit() == commit
    file.write_text("b")
    assert environment._commit() == f"{commit}-dirty"


# ---- timers ----


def test_wall_time_is_proportional_to_work():
    def program(seconds):
        return timing.Program(
            lambda x: time.sleep(seconds), lambda: (0,), 1, lambda out: out, lambda out: ()
        )

    short, long = (
        timing.measure(program(s), seconds=0.1, repeats=3, on_device=False) for s in (1e-3, 1e-2)
    )
    assert 5 < long.us / short.us < 15 and 1000 < short.us < 3000
    assert short.timer == "wall" and short.us == short.wall_us and short.copies == 1


def test_operands_are_rotated_on_a_gpu(monkeypatch):
    made, seen = iter(range(1000)), []
    program = timing.Program(
        seen.append, lambda: (next(made),), timing.ROTATED_BYTES // 3, lambda x: x, lambda x: ()
    )
    monkeypatch.setattr(trace, "device_times", lambda run, calls: [2.0, 4.0, 9.0])
    figure = timing.measure(program, seconds=1e-6, repeats=1, on_device=True)
    assert figure.copies == 4 and seen[:5] == [0, 1, 2, 3, 0]  # 3 would be a little too few
    assert figure.timer == "device" and figure.us == 4 and figure.us_range == (2, 9)
    monkeypatch.setattr(trace, "device_times", lambda run, calls: None)
    assert timing.measure(program, seconds=1e-6, repeats=1, on_device=True).timer == "wall"
    assert timing.copies_to_rotate(0) == timing.MOST_COPIES
    assert timing.copies_to_rotate(2**30) == 1


def test_device_time_is_of_streams_alone():
    text = """planes { name: "/device:GPU:0"
      lines { name: "Stream #7(Compute)" timestamp_ns: 1000
        events { metadata_id: 1 offset_ps: 0 duration_ps: 5000000 }
        events { metadata_id: 1 offset_ps: 9000000 duration_ps: 7000000 } }
      lines { name: "XLA Ops" events { metadata_id: 1 offset_ps: 0 duration_ps: 5000000 } } }
      planes { name: "/host:CPU"
      lines { name: "Stream" events { metadata_id: 1 offset_ps: 0 duration_ps: 5000000 } } }"""
    events = trace._stream_events(jax.profiler.ProfileData.from_text_proto(text))
    assert events == [(1000, 6000), (10000, 17000)]
    # Two that overlap count once.
    assert trace.busy(np.array([[0, 4000], [1000, 2000], [3000, 5000], [9000, 10000]])) == 6


def test_device_times_of_calls(monkeypatch):
    events = np.array([[i * 10_000, i * 10_000 + 1000 * (1 + i % 2)] for i in range(8)])
    monkeypatch.setattr(trace, "_trace", lambda run, light: events)
    assert trace.device_times(None, 4) == [3.0, 3.0, 3.0, 3.0]
    assert trace.device_times(None, 3) == [4.0, 4.0, 4.0]  # a record lost: means of three traces
    monkeypatch.setattr(trace, "_trace", lambda run, light: np.empty((0, 2)))
    assert trace.device_times(None, 3) is None


def test_tracing():
    """Of a GPU if there is one; else there is nothing to see, and the wall clock is used."""
    program = implementations_of("spmm")["jaxsparse"].build(
        edge_case("square"), "float32", "forward"
    )
    on_gpu = jax.default_backend() == "gpu"
    figure = timing.measure(program, seconds=0.01, repeats=2, on_device=True)
    assert figure.timer == ("device" if on_gpu else "wall")
    if on_gpu:
        assert 0.5 < figure.us <= figure.wall_us
