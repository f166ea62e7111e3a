"""`benchmarks run recurrent`: its layers, its reference, its implementations, and the command."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as oracle
from bench_commands import planned, refused

from benchmarks import choices, panels, plots, report, run
from benchmarks.__main__ import main
from benchmarks.cudnn import library
from benchmarks.recurrent import floor, jax_programs, reference, selection
from benchmarks.recurrent.cases import ScanCase
from benchmarks.recurrent.implementations import (
    DTYPES,
    IMPLEMENTATIONS,
    Implementation,
    forced,
    variants,
)
from benchmarks.recurrent.plots import AXES, STYLES
from benchmarks.recurrent.problems import GATES, SUITES, Problem

QUICK = ["--seconds", "0.01", "--repeats", "2"]
EFFORT = run.Effort(seconds=0.01, repeats=2)
PASSES = ("forward", "gradient")


def layer(cell="RNN", density=None, **fields):
    sizes = {"hidden": 24, "batch": 3, "length": 10, "state_dtype": "float32", **fields}
    return Problem("test", cell, density=density, **sizes)


LAYERS = [layer(cell, density) for cell in GATES for density in (None, 0.3)]


# ---- layers ----


def sizes(suite):
    return [(p.hidden, p.density) for p in SUITES[suite].problems]


def test_layers_are_those_of_the_papers():
    # Zhu et al. 2018, Tables 2 and 3, Figures 2 to 4.
    assert sizes("translation") == [
        *((h, None) for h in (256, 362, 512, 768, 1024, 1448)),
        (256, 0.125), (512, 0.0625), (768, 0.0417), (1024, 0.047), (1024, 0.125), (1448, 0.047),
    ]  # fmt: skip
    assert {(p.cell, p.batch, p.length) for p in SUITES["translation"].problems} == {
        ("LSTM", 4, 256)
    }
    assert sizes("speech") == [
        *((h, None) for h in (704, 1760, 2560)),
        *((h, 0.12) for h in (1760, 2560, 3072)),
    ]
    assert {(p.batch, p.length) for p in SUITES["speech"].problems} == {(1, 256)}
    for suite in "density", "size", "batch", "length":
        baseline = [
            p
            for p in SUITES[suite].problems
            if (p.hidden, p.density, p.batch, p.length) == (1792, 0.1, 4, 256)
        ]
        assert len(baseline) == 1
    assert {0.01, 0.1, 0.3} <= {density for _, density in sizes("density_2304")}
    assert {0.01, 0.05} <= {density for _, density in sizes("density_5760")}
    assert {(2304, 0.25), (7168, 0.026), (11520, 0.01)} <= set(sizes("fixed_nonzeros"))
    for hidden, density in sizes("fixed_nonzeros"):
        assert hidden**2 * density == pytest.approx(1.32e6, rel=0.02)
    assert sizes("equal_rows") == [(2304, 0.25)] * 2
    # Diamos et al. 2016, Figure 1.
    assert set(sizes("dense_batch")) == {(1152, None)}


def test_names_and_fields_of_layers():
    for name, suite in SUITES.items():
        assert {p.suite for p in suite.problems} == {name}
        assert len({p.name for p in suite.problems}) == len(suite.problems)
        if suite.varies:
            assert len({getattr(p, suite.varies) for p in suite.problems}) == len(suite.problems)
    first = SUITES["layers"].problems[0]
    assert first.name == "RNN_1792_d0.1_b4_t256_bfloat16_float32_weights" and first.gradient
    assert [p.name for p in SUITES["layers"].problems if p.gradient][1:] == [
        "LSTM_1024_dense_b4_t256_bfloat16",
        "GRU_1024_dense_b4_t256_bfloat16",
    ]


def test_operands_are_exact_in_every_dtype_and_states_stay_alive():
    for problem in LAYERS:
        for array in problem.operands().values():
            assert array.std() > 0.1 and array.all()
            for dtype in "bfloat16", "float16":
                np.testing.assert_allclose(array.astype(dtype).astype(np.float32), array, atol=1e-7)
        _, _, _, ys = reference._scan(problem, False)
        assert np.abs(ys[-1]).mean() > 0.1 and ys.std(0).min() > 1e-3
    rows = layer(density=0.3, equal_rows=True).topology().row_offsets
    assert set(np.diff(rows)) == {7}


# ---- what results are compared with ----


@pytest.mark.parametrize("problem", LAYERS, ids=lambda p: p.name)
@pytest.mark.parametrize("narrow", [False, True])
def test_reference_is_that_of_the_tests(problem, narrow):
    operands = {name: jnp.asarray(x) for name, x in problem.operands().items()}
    topology, cell = problem.topology(), jax_programs.CELLS[problem.cell]
    x, projection = operands["x"], jnp.tile(jnp.eye(problem.hidden), problem.gates)
    if narrow:
        x, projection = map(jnp.asarray, reference.narrow_input(problem))

    def scan(weights, x, *carry):
        if topology is not None:
            at = (topology.row_indices, topology.column_indices)
            weights = jnp.zeros(topology.shape).at[at].set(weights).T
        carry = carry if len(carry) > 1 else carry[0]
        return oracle.recurrent_scan(cell, weights, carry, x @ projection)[1]

    carry = [operands[name] for name in ("c", "h") if name in operands]
    with jax.default_matmul_precision("highest"):
        ys, pull = jax.vjp(scan, operands["weights"], x, *carry)
        gradients = tuple(np.asarray(g, np.float64) for g in pull(operands["cotangent"]))
    assert reference.forward_error(problem, np.asarray(ys), narrow=narrow) < 1e-5
    assert reference.gradient_error(problem, gradients, narrow=narrow) < 1e-4
    # A gradient that lacks something small is found out.
    spoiled = (*gradients[:-1], gradients[-1] * 1.01)
    assert reference.gradient_error(problem, spoiled, narrow=narrow) > 5e-3
    assert reference.gradient_error(problem, gradients[:-1], narrow=narrow) == float("inf")


HERE = [i for i in IMPLEMENTATIONS.values() if i.available() is None]


@pytest.mark.parametrize("implementation", HERE, ids=lambda i: i.name)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_implementations_agree_with_the_reference(implementation, state_dtype):
    # Of 24 units cuDNN's statically persistent kernel gives a gradient of NaN now and then.
    problems = [layer(*kind, hidden=32) for kind in (("LSTM",), ("GRU", 0.3), ("RNN", 0.3))]
    for problem in problems:
        problem = dataclasses.replace(problem, state_dtype=state_dtype, weight_dtype=state_dtype)
        if not implementation.takes(problem):
            continue
        for dtype in DTYPES[implementation.dtypes][state_dtype]:
            case = ScanCase(problem, implementation, dtype, implementation.passes)
            for passed in implementation.passes:
                try:
                    check = case.check(passed)
                except library.CudnnError:
                    continue
                assert check.relative_error <= check.limit, (problem.name, dtype, passed)
                assert check.checked == 10


def spoiled(change):
    """Our own with something done to its results."""

    def build(problem, dtype, passed):
        program = jax_programs.jaxsparse_scan(problem, dtype, passed)
        return dataclasses.replace(program, results=lambda out: change(program.results(out)))

    return Implementation("spoiled", "spoiled", build, dense=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda results: tuple(x * 1.01 for x in results),
        lambda results: (np.where(results[0] == results[0].max(), np.nan, results[0]),),
        lambda results: (*results[:-1], results[-1][..., :-1]),
    ],
)
def test_wrong_results_are_not_timed(change):
    problem, changed = layer("GRU", 0.3), spoiled(change)
    made = selection.ScanSelection((problem,), (changed,), PASSES, {}, ScanCase, DTYPES)
    result, whole = run.execute(made, EFFORT)
    assert whole and [row["pass"] for row in result["results"]] == list(PASSES)
    for row in result["results"]:
        assert row["us"] is None and row["error"].startswith("WrongResult: relative error")
    json.dumps(result, allow_nan=False)
    assert "wrong" in report.table(result)


# ---- Selections ----


def test_what_options_plan():
    made = planned([])
    assert {p.suite for p in made.problems} == {"small"}
    assert {p.suite for p in planned([], "gpu").problems} == {"layers"}
    dense, sparse = (
        next(p for p in made.problems if (p.density is None) == wanted) for wanted in (True, False)
    )
    everywhere = {"jaxsparse", "jaxsparse-dense", "lax.scan", "lax.scan-unrolled"}
    names = {c.implementation.name for c in made.cases(dense)}
    assert names & everywhere == everywhere - {"jaxsparse-dense"}
    assert "jaxsparse-dense" in {c.implementation.name for c in made.cases(sparse)}
    assert all(c.passes == PASSES for c in made.cases(dense) if c.implementation.passes == PASSES)
    argv = ["--suite", "layers", "--implementation", "jaxsparse", "--problem", "RNN_1152_*"]
    made = planned([*argv, "--length", "64", "2048", "--dtype", "float16"])
    assert [p.name for p in made.problems] == [
        "RNN_1152_dense_b4_t64_float16",
        "RNN_1152_dense_b4_t2048_float16",
    ]
    assert [c.passes for p in made.problems for c in made.cases(p)] == [("forward",)] * 2
    made = planned([*argv, "--pass", "gradient"])
    assert [c.passes for p in made.problems for c in made.cases(p)] == [("gradient",)] * 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n", "4"], r"--n: the suites of recurrent have layers of their own, got \[4\]"),
        (["--sparsity", "0.5"], "--sparsity: the suites of recurrent"),
        (["--suite", "square"], "--suite: recurrent has layers, small, .*no 'square'"),
        (["--implementation", "dense"], "--implementation: recurrent has jaxsparse, .*no 'dense'"),
        (["--variant", "rows"], "--variant: recurrent has dense_tensor_cores, .*no 'rows'"),
        (
            ["--suite", "small", "--problem", "x*"],
            "--problem: 'x\\*' matches none of RNN_256_dense",
        ),
        (["--length", "0"], "--length: must be positive, got 0"),
        (["--dtype", "float64"], "--dtype"),
    ],
)
def test_usage_errors(argv, message, capsys):
    error = refused(["run", "recurrent", *argv], capsys)
    assert re.search(message, error), error


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="they can be had there")
def test_what_needs_a_gpu_is_left_out():
    skipped = planned([], "gpu").skipped
    assert {"torch", "cudnn-static", "cublas-graph", "cusparse-graph"} <= set(skipped)
    argv = ["--variant", "dense_fma", "--implementation", "lax.scan"]
    assert planned(argv).skipped == {"jaxsparse[dense_fma]": "runs on a GPU only"}
    with pytest.raises(choices.UsageError, match="none can be had here: torch runs on a GPU only"):
        planned(["--implementation", "torch"])


def test_list(capsys):
    assert main(["run", "recurrent", "--list"]) == 0
    text = capsys.readouterr().out
    for name in (*SUITES, *IMPLEMENTATIONS, *variants()):
        assert name in text


# ---- runs ----


COMMON = {
    "suite": str, "problem": str, "operation": str, "cell": str, "hidden": int, "batch": int,
    "length": int, "weight_dtype": str, "state_dtype": str, "nnz": int, "sparsity": float,
    "dtype": str, "implementation": str, "way": str, "pass": str, "us": float,
    "us_quartiles": list, "us_range": list, "wall_us": float, "timer": str, "calls": int,
    "copies": int, "relative_error": float, "steps_checked": int, "error": type(None),
}  # fmt: skip
ON_A_GPU = {"floor_us", "plan", "predicted_us", "device_us"}


def test_from_command_to_picture(tmp_path, capsys):
    output = tmp_path / "out.json"
    argv = ["run", "recurrent", "--suite", "small", "--problem", "RNN_256_*"]
    argv += ["--length", "9", *QUICK]
    argv += ["--implementation", "jaxsparse", "lax.scan", "--output", str(output), "--plot"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "[1/2] small RNN_256_dense_b4_t9_float32 jaxsparse float32 forward:" in shown.err
    result = json.loads(output.read_text())
    rows = result["results"]
    assert len(rows) == 2 * 2 * 2 and result["skipped"] == {}
    for row in rows:
        assert set(row) == set(COMMON) | ON_A_GPU
        assert {name: type(row[name]) for name in COMMON} == COMMON
        assert row["nnz"] == pytest.approx((1 - row["sparsity"]) * 256**2)
        if jax.default_backend() == "cpu":
            assert row["timer"] == "wall" and row["us"] == row["wall_us"]
            assert all(row[name] is None for name in ON_A_GPU)
    # Those who take dense weights are measured once, whatever stands beside them.
    dense, sparse = (
        [r for r in rows if r["implementation"] == "lax.scan" and bool(r["sparsity"]) == wanted]
        for wanted in (False, True)
    )
    assert [r["us"] for r in dense] == [r["us"] for r in sparse]
    assert "times as fast as jax.lax.scan (2 layers)" in shown.out
    assert main(["table", str(output), "--markdown"]) == 0
    head = (
        "| layer | exchange floor | jaxsparse | jax.lax.scan |\n|---|---:|---:|---:|\n| RNN_256_d"
    )
    assert head in capsys.readouterr().out


def figures(suite, times, floor_us=0.7):
    """Rows of a suite: {way: microseconds a step of its problems, None for a failure}."""
    return [
        {
            "suite": suite, "problem": p.name, "operation": "recurrent", "hidden": p.hidden,
            "batch": p.batch, "length": p.length, "state_dtype": p.state_dtype, "way": way,
            "sparsity": 1 - (p.density or 1), "nnz": p.hidden**2, "implementation": way,
            "dtype": "float16", "pass": "forward", "us": time and time * p.length,
            "device_us": time, "floor_us": floor_us, "timer": "wall",
            "plan": "a plan" if way == "jaxsparse" else None,
            "error": None if time else "CudnnError: NOT_SUPPORTED",
        }
        for way, figures in times.items()
        for p, time in zip(SUITES[suite].problems, figures, strict=False)
    ]  # fmt: skip


def test_tables_show_the_fastest_of_each_way():
    rows = figures("layers", {"jaxsparse": [1.0, 2.0], "cuDNN, forced": [3.0, None]})
    rows += [
        {**row, "implementation": "other", "us": row["us"] * 2}
        for row in rows
        if row["way"] == "jaxsparse"
    ]
    (panel,) = panels.panels(rows)
    whole, first, second = report.TABLES["recurrent"](panel)
    assert whole.cells == [
        ["layer", "exchange floor", "jaxsparse", "cuDNN, forced"],
        [rows[0]["problem"], "0.70", "1", "3"],
        [rows[1]["problem"], "0.70", "2", "-"],
    ]
    assert whole.notes == ["jaxsparse: 3.00 to 3.00 times as fast as cuDNN, forced (1 layer)"]
    assert first.cells[1] == ["jaxsparse float16", "0.256", "1", "0.001"]
    assert second.cells[2] == ["cuDNN, forced float16", "refused", "-", "-"]
    assert first.notes == ["jaxsparse float16: a plan", "other float16: a plan"]


def test_every_way_and_axis_can_be_drawn():
    ways = {i.way for i in (*IMPLEMENTATIONS.values(), forced("sparse_pairs"))}
    assert ways == set(STYLES)
    assert {suite.varies for suite in SUITES.values()} - {None} == set(AXES)


@pytest.mark.parametrize("suite", ["layers", "density", "size", "dense_batch", "length", "speech"])
def test_plots(suite, tmp_path):
    count = len(SUITES[suite].problems)
    times = {"jaxsparse": [1.0] * count, "jax.lax.scan": [9.0] * (count - 1) + [None]}
    plots.plot(figures(suite, times), tmp_path / "a.png")
    plots.plot(figures(suite, times, floor_us=None), tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > (tmp_path / "b.png").stat().st_size > 10_000


def test_exchange_floor(monkeypatch):
    small, gru = layer(hidden=256, batch=4, state_dtype="bfloat16"), layer("GRU", hidden=4096)
    if "H200" not in jax.devices()[0].device_kind:
        assert floor.exchange_floor(small, "forward") is None

    class Device:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(floor.jax, "devices", lambda: [Device])
    assert floor.exchange_floor(small, "forward") == 0.61
    assert floor.exchange_floor(small, "gradient") == 2 * 0.61
    assert floor.exchange_floor(gru, "forward") == 1.05
    between = dataclasses.replace(small, hidden=1448)  # 11,584 bytes
    assert floor.exchange_floor(between, "forward") == pytest.approx((0.66 + 0.89) / 2, abs=1e-3)
