"""The commands run, table and plot: their options, and runs from a command to its picture."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_commands import refused
from bench_problems import edge_case
from edge_cases import EDGE_CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import __main__ as cli
from benchmarks import (
    cases,
    choices,
    comparison,
    environment,
    operations,
    plots,
    report,
    run,
    selection,
)
from benchmarks.__main__ import INTERRUPTED, SLOWER, main
from benchmarks.implementations import (
    DTYPES,
    PASSES,
    Implementation,
    implementations_of,
    variants,
)
from benchmarks.problems import SUITES, suites_of
from jaxsparse.timing import Program

QUICK = ["--seconds", "0.01", "--repeats", "2"]
EFFORT = run.Effort(seconds=0.01, repeats=2)
RESULT = pathlib.Path(__file__).parents[1] / "benchmarks/results/cpu/spmm_square.json"


def planned(argv):
    return selection.select(cli.asked(cli.make_parser().parse_args(["run", *argv])), "cpu")


# ---- options ----


@st.composite
def legal_options(draw):
    """(argv, what it must select: implementations by dtype, number of problems, passes)."""
    operation = draw(st.sampled_from(sorted(operations.MEASURED)))
    suites = [name for name in suites_of(operation) if name not in ("files", "dlmc")]
    suites = draw(st.lists(st.sampled_from(suites), min_size=1, unique=True))
    argv, sizes = [operation, "--suite", *suites], {}
    options = {
        "n": (
            st.integers(1, 300),
            operations.MEASURED[operation].has_n and suites != ["dispatch"],
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
    "llm": (6, 2, 1),
    "crossover": (8, 1, 1),
    "rnn": (3, 2, 6),
    "imbalance": (1, 1, 11),
    "networks": (2, 1, 18),
    "attention": (1, 1, 1),
    "graphs": (3, 1, 1),
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
        patterns -= suite == "graphs" and operation == "sparse_attention"  # not along a star
        columns = sizes.get("n", columns) if operations.MEASURED[operation].has_n else 1
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
            main(["run", "spmm", f"{option}={value}"])
    assert stopped.value.code == 2
    (message,) = written
    assert option in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "nope"], "OPERATION"),
        (["run", "sparse_softmax", "--n", "4"], "--n: sparse_softmax has no size"),
        (["run", "spmm", "--suite", "edge_cases", "--sparsity", "0.5"], "--sparsity"),
        (["run", "spmm", "--suite", "files"], "--suite: 'files' .* JAXSPARSE_DATA: set it"),
        (["run", "sparse_attention", "--variant", "rows"], "--variant"),
        (["run", "spmm", "--length", "4"], r"--length: spmm has no steps, got \[4\]"),
        (["run", "spmm", "--implementation", "scipy", "--pass", "gradient"], "--pass|--impl"),
        (["table", "nothing.json"], "nothing.json"),
        (["plot", "nothing.json", "--output", "a.png"], "nothing.json"),
        (["plot", str(RESULT), "--output", "a.gif"], "--output"),
        (["plot", str(RESULT), "--output", "/"], "--output"),
    ],
)
def test_usage_errors(argv, message, monkeypatch, capsys):
    monkeypatch.delenv("JAXSPARSE_DATA", raising=False)
    error = refused(argv, capsys)
    assert re.search(message, error), error


def test_plots_need_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plots, "available", lambda: False)
    drawn = ["run", "spmm", "--plot", str(tmp_path / "a.png")]
    for argv, option in ((drawn, "--plot"), (["plot", str(RESULT)], "--output")):
        error = refused(argv, capsys)
        assert f"{option}: needs matplotlib: pip install matplotlib" in error


def test_list(capsys):
    assert main(["run", "spmm", "--list"]) == 0
    text = capsys.readouterr().out
    for part in ("crossover", "JAXSPARSE_DATA", "jaxsparse-xla", "torch", *variants("spmm")):
        assert part in text


# ---- runs ----


def spoiled(change, name="spoiled"):
    """The product of jaxsparse with something done to its result."""
    own = implementations_of("spmm")["jaxsparse"].build

    def build(problem, dtype, passed):
        program = own(problem, dtype, passed)
        return Program(
            function=lambda *operands: change(program.function(*operands)),
            operands=program.operands,
            bytes_read=program.bytes_read,
            wait=program.wait,
            results=program.results,
        )

    return Implementation(name, "spmm", build, passes=("forward",))


def plan_of(*implementations, problems=("odd", "vector")):
    pairs = tuple((i, i.dtypes[0]) for i in implementations)
    return selection.OperationSelection(tuple(map(edge_case, problems)), pairs, ("forward",), {})


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
    monkeypatch.setattr(selection, "select", lambda *args: made)
    calls = iter(range(100))
    output = tmp_path / "new" / "out.json"
    assert main(["run", "spmm", "--output", str(output), *QUICK]) == INTERRUPTED
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
    argv = ["run", "spmm", "--suite", "edge_cases", "--problem", "[op][da]d*", *QUICK]
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
    assert picture.stat().st_size > 10_000 and capsys.readouterr().out == f"{picture}\n"
    beside = output.with_suffix(".png")
    beside.write_bytes(b"")  # what stands there is written over
    assert main(["plot", str(output), str(other)]) == 0
    assert beside.stat().st_size > 10_000 and capsys.readouterr().out == f"{beside}\n"
    # Two figures of the same: neither may hide the other.
    result["results"] *= 2
    other.write_text(json.dumps(result))
    for command in (
        ["plot", str(output), str(output), "--output", str(picture)],
        ["table", str(other)],
    ):
        error = refused(command, capsys)
        assert re.search("two figures of jaxsparse( float16)? on edge_cases odd, spmm for", error)


# ---- against an earlier result ----


def result_of(us, *, device="a GPU", spread=0.01):
    """A result whose rows are (problem, implementation) -> microseconds, or None."""
    rows = [
        {
            "suite": "s", "problem": problem, "operation": "spmm", "pass": "forward",
            "implementation": implementation, "dtype": "float32", "sparsity": 0.9, "us": time,
            "us_quartiles": None if time is None else [time * (1 - spread), time * (1 + spread)],
        }
        for (problem, implementation), time in us.items()
    ]  # fmt: skip
    return {"schema": 1, "environment": {"device": device}, "results": rows}


def test_what_got_slower_is_named():
    names = ["slow", "failing", "fast", "noisy", "same", "new"]
    before = {(name, "jaxsparse"): 100.0 for name in names[:-1]} | {("slow", "dense"): 50.0}
    now = {
        ("slow", "jaxsparse"): 150.0, ("failing", "jaxsparse"): None, ("fast", "jaxsparse"): 50.0,
        ("noisy", "jaxsparse"): 104.0, ("same", "jaxsparse"): 100.0, ("new", "jaxsparse"): 1.0,
        ("slow", "dense"): 100.0,
    }  # fmt: skip
    compared = comparison.compare(result_of(now), result_of(before))
    assert [pair.problem for pair in compared.slower] == ["failing", "slow"]
    assert [pair.problem for pair in compared.faster] == ["fast"]
    assert compared.unshared == 1
    text = report.comparison(compared)
    assert "slower than before: 2 of 5 figures of jaxsparse" in text
    assert re.search(r"failing \(spmm, s, forward\) +jaxsparse +100 +failed +inf", text)
    assert re.search(r"slow \(spmm, s, forward\) +jaxsparse +100 +150 +1.50", text)
    assert "peers: 2.000 times the time before" in text
    # More than both vary.
    compared = comparison.compare(result_of(now, spread=0.5), result_of(before, spread=0.5))
    assert [pair.problem for pair in compared.slower] == ["failing"] and not compared.faster


def test_against(tmp_path, capsys):
    files = {}
    for name, us, device in ("old", 1.0, "a"), ("new", 2.0, "a"), ("other", 1.0, "b"):
        files[name] = str(tmp_path / f"{name}.json")
        made = result_of({("p", "jaxsparse"): us}, device=device)
        pathlib.Path(files[name]).write_text(json.dumps(made))
    assert main(["table", files["new"], "--against", files["old"]]) == SLOWER
    assert "p (spmm, s, forward)" in capsys.readouterr().out
    assert main(["table", files["old"], "--against", files["new"], "--markdown"]) == 0
    assert "| p (spmm, s, forward) | jaxsparse | 2 | 1 | 0.50 |" in capsys.readouterr().out
    for command in (
        ["table", files["new"], "--against", files["other"]],
        ["run", "spmm", "--against", files["other"]],
    ):
        error = refused(command, capsys)
        assert "--against: it was measured on b, and can't be compared with" in error
    environments = ({"device": "cpu", "processor": name, "cores": 2} for name in ("A", "B"))
    first, second = ({**result_of({}), "environment": e} for e in environments)
    comparison.check_device(first["environment"], first)
    with pytest.raises(ValueError, match=r"measured on B, 2 cores, None, and can't .* with A"):
        comparison.check_device(first["environment"], second)
    output = str(tmp_path / "run.json")
    argv = ["run", "spmm", "--suite", "edge_cases", "--problem", "odd", "--pass", "forward"]
    argv += ["--implementation", "jaxsparse", "dense", *QUICK]
    assert main([*argv, "--output", output]) == 0
    assert main([*argv, "--against", output]) in (0, SLOWER)
    assert "slower than before" in capsys.readouterr().out


def test_dispatch(capsys):
    assert main(["run", "dispatch", "--quiet", *QUICK]) == 0
    shown = capsys.readouterr()
    assert "eager" in shown.out and not shown.err


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
