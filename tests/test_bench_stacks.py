"""Suites of stacks of `benchmarks run recurrent`: their problems, reference, implementations."""

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

from benchmarks import panels, plots, report, run
from benchmarks.__main__ import main
from benchmarks.cudnn.library import CudnnError
from benchmarks.stacks import jax_programs, ours, reference
from benchmarks.stacks.cases import StackCase
from benchmarks.stacks.implementations import DTYPES, IMPLEMENTATIONS, forced, variants
from benchmarks.stacks.plots import AXES, STYLES
from benchmarks.stacks.problems import SUITES, Problem, name, names
from benchmarks.stacks.selection import StackSelection

PASSES = ("forward", "gradient")


def stack(cell="LSTM", layers=3, **fields):
    sizes = {"hidden": 32, "batch": 3, "length": 10, "state_dtype": "float32", **fields}
    return Problem("test", cell, layers, **sizes)


STACKS = [
    stack("LSTM", 2),
    stack("GRU", 2),
    stack("RNN", 3, skip=2, norm=True),
    stack("RNN", 6, skip=2, parts=2, norm=True),
    stack("GRU", 2, directions=2, features=20, length=6),
    stack("RNN", 1, directions=2, resets=True, length=5),
    stack("GRU", 2, resets=True, length=6),
    stack("LSTM", 2, density=0.3),
    stack("LSTM", 1, heads=4, projected=False),
    stack("sLSTM", 2, heads=2),
]


@pytest.fixture
def short_loops(monkeypatch):
    """Loops of JAX's that compile sooner than those that are timed."""
    monkeypatch.setattr(jax_programs, "UNROLLED", 2)


# ---- stacks ----


def test_stacks_are_those_of_the_papers():
    # Appleyard et al. 2016, Table 1 and Figures 1 and 2.
    ladder = SUITES["stack_ladder"].problems
    assert {(p.cell, p.layers, p.hidden, p.batch) for p in ladder} == {("LSTM", 4, 512, 64)}
    assert {p.length for p in ladder} == {100}
    for suite, batches in (("stack_sizes", {64, 256}), ("stack_cells", {64})):
        problems = SUITES[suite].problems
        assert {p.batch for p in problems} == batches
        assert {p.hidden for p in problems} == {256, 512, 1024, 2048}
    assert {p.cell for p in SUITES["stack_cells"].problems} == {"RNN", "GRU", "LSTM"}
    # Pöppel et al. 2024, FlashRNN.
    assert {p.hidden // p.heads for p in SUITES["heads"].problems} == {16, 64, 256, 768}
    # Diamos et al. 2016, Figure 1 and section 4.
    depth = SUITES["stack_depth"].problems
    assert {p.layers for p in depth} == {8, 48, 108}
    assert {(p.cell, p.hidden) for p in depth} == {("RNN", 1152)}
    # Amodei et al. 2016, Deep Speech 2.
    assert "GRU_7x2560_b16_t256_bfloat16" in {p.name for p in SUITES["stack_networks"].problems}


def test_names_and_sizes_of_stacks():
    for suite, known in SUITES.items():
        assert {p.suite for p in known.problems} == {suite}
        assert len({p.name for p in known.problems}) == len(known.problems)
    assert stack("GRU", 2, directions=2, features=20, skip=1, norm=True).name == (
        "bidirectional_GRU_2x32_in20_skip1_norm_b3_t10_float32"
    )
    for problem in STACKS:
        operands = problem.operands()
        matrices = [x for key, x in operands.items() if key[0] in "WU"]
        assert problem.weights == sum(x.size for x in matrices)
        products = sum(2 * x.size for x in matrices) * problem.batch * problem.length
        assert problem.operations("forward") == products
        assert problem.operations("gradient") == 3 * products
        assert set(names(problem)) == set(operands) - {"cotangent", "resets"}


def test_operands_are_exact_in_every_dtype_and_states_of_all_layers_move(short_loops):
    deep = [
        stack("LSTM", 8, hidden=64, length=40),
        stack("GRU", 7, hidden=64, length=40),
        stack("RNN", 8, hidden=64, length=40),
        stack("RNN", 24, hidden=64, length=40, skip=4, norm=True),
    ]
    for problem in deep:
        for array in problem.operands().values():
            assert array.std() > 0.05 and array.all()
            for dtype in "bfloat16", "float16":
                np.testing.assert_allclose(array.astype(dtype).astype(np.float32), array, atol=1e-7)
        ys = reference._forward(problem)
        assert ys[10:].std(0).mean() > 0.05, problem.name
        # What rounding does to the first layers must not drown what the last ones compute.
        case = StackCase(problem, IMPLEMENTATIONS["jaxsparse-layers"], "bfloat16", PASSES)
        check = case.check("forward")
        assert 2**-11 < check.relative_error < check.limit, problem.name


# ---- what results are compared with ----


def with_resets(cell, weights, carry, xs, resets, direction):
    """Step by step."""
    ys = {}
    for t in reversed(range(len(xs))) if direction == 1 else range(len(xs)):
        carry = jax.tree.map(lambda a, t=t: jnp.where(resets[t][:, None], 0, a), carry)
        carry, (ys[t],) = oracle.recurrent_scan(cell, weights, carry, xs[t : t + 1])
    return jnp.stack([ys[t] for t in range(len(xs))])


def oracle_stack(problem, operands):
    """By the tests' own scan of one layer, whose cells are jaxsparse's functions."""
    outputs, cell = [operands["x"]], jax_programs.CELLS[problem.cell]
    for layer in range(problem.layers):
        below = outputs[-1]
        if problem.norm:
            centred = below - below.mean(-1, keepdims=True)
            below = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        ys = []
        for direction in range(problem.directions):
            own = {kind: operands.get(name(kind, layer, direction)) for kind in "WUb"}
            carry = tuple(operands[name(leaf, layer, direction)] for leaf in problem.leaves)
            carry = carry[0] if len(carry) == 1 else carry
            xs, u = below, own["U"]
            if own["W"] is not None:
                xs = jnp.matmul(below, own["W"], precision="highest") + own["b"]
            if problem.density:
                topology = problem.topology()
                at = topology.row_indices, topology.column_indices
                u = jnp.zeros(topology.shape).at[at].set(u).T
            if problem.heads > 1:  # as one matrix, gate by gate
                by_gate = u.reshape(*u.shape[:2], problem.gates, -1)
                blocks = [
                    jax.scipy.linalg.block_diag(*by_gate[:, :, g]) for g in range(problem.gates)
                ]
                u = jnp.concatenate(blocks, -1)
            if problem.resets:
                ys.append(with_resets(cell, u, carry, xs, operands["resets"], direction))
            else:
                ys.append(oracle.recurrent_scan(cell, u, carry, xs, reverse=direction == 1)[1])
        y = jnp.concatenate(ys, -1)
        place = layer % (problem.layers // problem.parts)
        over = problem.skip and (place + 1) % problem.skip == 0
        outputs.append(y + outputs[layer + 1 - problem.skip] if over else y)
    return outputs[-1]


@pytest.mark.parametrize("problem", STACKS, ids=lambda p: p.name)
def test_reference_is_that_of_the_tests(problem):
    operands = {key: jnp.asarray(x) for key, x in problem.operands().items()}
    given = {key: operands[key] for key in names(problem)}

    @jax.jit
    def forward_and_gradient(given):
        ys, pull = jax.vjp(lambda given: oracle_stack(problem, operands | given), given)
        return ys, *pull(operands["cotangent"])

    ys, made = forward_and_gradient(given)
    gradients = tuple(np.asarray(made[key], np.float64) for key in names(problem))
    assert reference.forward_error(problem, np.asarray(ys)) < 1e-5
    assert reference.gradient_error(problem, gradients) < 1e-4
    # A gradient that lacks something small is found out.
    for at in range(len(gradients)):
        spoiled = [g * (1.01 if i == at else 1) for i, g in enumerate(gradients)]
        assert reference.gradient_error(problem, tuple(spoiled)) > 5e-3
    assert reference.gradient_error(problem, gradients[:-1]) == float("inf")


HERE = [i for i in IMPLEMENTATIONS.values() if i.available() is None]


@pytest.mark.parametrize("implementation", HERE, ids=lambda i: i.name)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_implementations_agree_with_the_reference(implementation, state_dtype, short_loops):
    # In 16 bits, one of a usual cell and one whose carry has leaves of its own.
    for at, problem in enumerate(STACKS if state_dtype == "float32" else (STACKS[0], STACKS[-1])):
        if implementation.name.startswith("ladder"):  # which is for some suites only
            problem = dataclasses.replace(problem, suite="stack_ladder")
        if implementation.devices > 1:
            problem = dataclasses.replace(problem, suite="stack_devices", batch=4)
        problem = dataclasses.replace(problem, state_dtype=state_dtype)
        if not implementation.takes(problem) or (implementation.dense and problem.density):
            continue
        dtypes = DTYPES[implementation.dtypes][state_dtype]
        on_a_cpu = jax.default_backend() == "cpu"  # where TF32 is float32
        for dtype in dtypes[:1] if at and on_a_cpu else dtypes:
            # Gradients that are right are those of a forward pass that is.
            for passed in implementation.passes[-1:] if at else implementation.passes:
                case = StackCase(problem, implementation, dtype, implementation.passes)
                try:
                    check = case.check(passed)
                except CudnnError:
                    continue
                assert check.relative_error <= check.limit, (problem.name, dtype, passed)
                assert check.checked == problem.length


def test_wrong_results_are_not_timed():
    ours = IMPLEMENTATIONS["jaxsparse-layers"]

    def build(problem, dtype, passed):
        program = ours.build(problem, dtype, passed)
        return dataclasses.replace(
            program, results=lambda out: tuple(x * 1.01 for x in program.results(out))
        )

    spoiled = dataclasses.replace(ours, name="spoiled", build=build)
    problem = stack(state_dtype="float16")
    made = StackSelection((problem,), (spoiled,), PASSES, {}, StackCase, DTYPES)
    result, whole = run.execute(made, run.Effort(seconds=0.01, repeats=2))
    assert whole and [row["pass"] for row in result["results"]] == list(PASSES)
    for row in result["results"]:
        assert row["us"] is None and row["error"].startswith("WrongResult: relative error")
    assert "wrong" in report.table(result)


# ---- selections ----


def test_what_options_plan():
    made = planned(["--suite", "stack_ladder", "--length", "20", "--implementation", "lax.scan"])
    assert [p.name for p in made.problems] == [
        "LSTM_4x512_b64_t20_float32",
        "LSTM_4x512_b64_t20_bfloat16",
    ]
    assert [(c.dtype, c.passes) for p in made.problems for c in made.cases(p)] == [
        ("float32", ("forward",)),
        ("tf32", ("forward",)),
        ("bfloat16", ("forward",)),
    ]
    argv = ["--suite", "stack_small", "--dtype", "float16", "--pass", "gradient"]
    made = planned([*argv, "--implementation", "lax.scan-wavefront"])
    # Of layers of one form alone; the others have skips, or run both ways.
    assert [len(made.cases(p)) for p in made.problems] == [1, 1, 0, 0]
    assert made.cases(made.problems[0])[0].passes == ("gradient",)


def test_plans_are_told_once(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    problem = stack("LSTM", 3, hidden=256, state_dtype="bfloat16")
    told = ours.scans_plan(problem, "gradient")
    assert told.count("dense_tensor_cores") == 2  # of the scans, and of their transposes


def test_the_ladder_is_for_its_suites():
    rungs = {name for name in IMPLEMENTATIONS if name.startswith("ladder-")}
    assert len(rungs) == 24
    for suite, known in SUITES.items():
        taken = {i.name for i in IMPLEMENTATIONS.values() if i.takes(known.problems[0])}
        assert rungs <= taken if known.ladder else not rungs & taken, suite
    # Everything that is measured there on one device can take a plain LSTM.
    assert {i.name for i in IMPLEMENTATIONS.values() if i.devices == 1} - {
        i.name for i in IMPLEMENTATIONS.values() if i.takes(SUITES["stack_ladder"].problems[-1])
    } == {"cudnn-static-b8", "cudnn-static-b16"}  # whose batch is full


def test_several_devices_are_for_their_suite():
    several = [i for i in IMPLEMENTATIONS.values() if i.devices > 1]
    taken = {
        suite: [[i.way for i in several if i.takes(p)] for p in known.problems]
        for suite, known in SUITES.items()
    }
    batch, layers = (f"jaxsparse, the {what} over 2 devices" for what in ("batch", "layers"))
    assert taken.pop("stack_devices") == [[batch, layers]] * 3
    assert not any(any(ways) for ways in taken.values())
    deep = dataclasses.replace(SUITES["stack_devices"].problems[-1], batch=3)
    assert [i.way for i in several if i.takes(deep)] == [layers]
    # Skips must stay on their devices; and weights of several forms are no runs of one form.
    for change in (
        {"parts": 1},
        {"layers": 9},
        {"features": 40},
        {"directions": 2},
        {"density": 0.1},
    ):
        assert not any(i.takes(dataclasses.replace(deep, **change)) for i in several), change


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--suite", "stack_none"], "--suite: recurrent has layers, .*no 'stack_none'"),
        (
            ["--suite", "layers", "stack_small"],
            "--suite: 'stack_small' has implementations of its own: give stacks alone",
        ),
        (
            ["--suite", "stack_small", "--implementation", "jaxsparse-dense"],
            "--implementation: recurrent has .*no 'jaxsparse-dense'",
        ),
        (["--suite", "stack_small", "--variant", "rows"], "--variant: recurrent has dense_"),
        (["--suite", "stack_small", "--n", "4"], "--n: the suites of recurrent have layers"),
        (
            ["--suite", "stack_small", "--problem", "x*"],
            "--problem: 'x\\*' matches none of LSTM_3x64_b4",
        ),
    ],
)
def test_usage_errors(argv, message, capsys):
    error = refused(["run", "recurrent", *argv], capsys)
    assert re.search(message, error), error


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="they can be had there")
def test_what_needs_a_gpu_is_left_out():
    skipped = planned(["--suite", "stack_small"], "gpu").skipped
    assert {"torch", "cudnn-static", "ladder-naive", "jax.experimental.rnn"} <= set(skipped)
    assert {why for n, why in skipped.items() if n != "flax"} == {"runs on a GPU only"}


def test_list(capsys):
    assert main(["run", "recurrent", "--list"]) == 0
    text = capsys.readouterr().out
    for known in (*SUITES, *IMPLEMENTATIONS, *variants()):
        assert known in text


# ---- runs ----


COMMON = {
    "suite": str, "problem": str, "operation": str, "cell": str, "layers": int, "hidden": int,
    "features": int, "directions": int, "skip": int, "norm": bool, "heads": int,
    "resets": bool, "batch": int, "length": int,
    "state_dtype": str, "nnz": int, "sparsity": float, "operations": int, "dtype": str,
    "implementation": str, "way": str, "devices": int, "pass": str,
    "us": float, "us_quartiles": list,
    "us_range": list, "wall_us": float, "timer": str, "calls": int, "copies": int,
    "relative_error": float, "steps_checked": int, "error": type(None), "peak_bytes": int,
}  # fmt: skip
ON_A_GPU = {"plan", "device_us"}


def test_from_command_to_picture(tmp_path, capsys, short_loops):
    output = tmp_path / "out.json"
    argv = ["run", "recurrent", "--suite", "stack_small", "--problem", "LSTM_3x64_*"]
    argv += ["--length", "9", "--dtype", "float16", "--seconds", "0.01", "--repeats", "2"]
    argv += ["--implementation", "jaxsparse-layers", "lax.scan", "lax.scan-wavefront"]
    assert main([*argv, "--output", str(output), "--plot"]) == 0
    shown = capsys.readouterr()
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert (
        "[1/1] stack_small LSTM_3x64_b4_t9_float16 jaxsparse-layers float16 forward:" in shown.err
    )
    result = json.loads(output.read_text())
    rows = result["results"]
    assert len(rows) == 3 * 2 and result["skipped"] == {}
    for row in rows:
        assert set(row) == set(COMMON) | ON_A_GPU
        assert {key: type(row[key]) for key in COMMON} == COMMON
    assert "times as fast as jax.lax.scan, wavefront (1 stack)" in shown.out
    assert main(["table", str(output), "--markdown", "--against", str(output)]) == 0
    head = "| stack | jaxsparse, layer by layer | jax.lax.scan, layer by layer |"
    assert head in capsys.readouterr().out


def figures(suite, times):
    """Rows of a suite: {(implementation, way): milliseconds of its problems, None if it failed}."""
    return [
        {
            **StackCase(p, IMPLEMENTATIONS["torch"], "float16", PASSES).description("forward"),
            "implementation": known, "way": way, "us": ms and ms * 1e3, "device_us": None,
            "timer": "wall", "peak_bytes": 2_000_000,
            "error": None if ms else "CudnnError: NOT_SUPPORTED",
        }
        for (known, way), figures in times.items()
        for p, ms in zip(SUITES[suite].problems, figures, strict=False)
    ]  # fmt: skip


def test_tables():
    rows = figures(
        "stack_ladder",
        {
            ("ladder-naive", "naive"): [800.0],
            ("ladder-fused", "fused"): [100.0],
            ("jaxsparse-layers", "jaxsparse, layer by layer"): [20.0],
            ("cudnn-static", "cuDNN, forced"): [None],
        },
    )
    (panel,) = panels.panels(rows)
    whole, first = report.TABLES["recurrent_stack"](panel)
    assert whole.cells[1] == ["LSTM_4x512_b64_t100_float32", "800", "100", "20", "-"]
    assert whole.notes[0] == (
        "jaxsparse, layer by layer: 40.00 to 40.00 times as fast as naive (1 stack)"
    )
    assert first.cells[0] == [
        "implementation", "ms", "us a cell", "TFLOP/s", "GPU busy, ms", "memory, MB", "over naive",
    ]  # fmt: skip
    # 100 steps of four layers; 2 * 64 * 100 * 4 * (1024 * 2048) operations.
    assert first.cells[2] == ["ladder-fused float16", "100.000", "250", "1.07", "-", "2", "8x"]
    assert first.cells[4] == ["cudnn-static float16", "refused", *["-"] * 5]


def test_tables_of_several_devices():
    batch = IMPLEMENTATIONS["jaxsparse-sharded"].way
    rows = figures(
        "stack_devices",
        {
            ("jaxsparse", "jaxsparse"): [9.7, 14.0, 100.0],
            ("jaxsparse-sharded", batch): [8.0, 10.0, 80.0],
        },
    )
    rows = [{**row, "devices": 1 + (row["way"] == batch)} for row in rows]
    (panel,) = panels.panels(rows)
    whole, *_ = report.TABLES["recurrent_stack"](panel)
    assert whole.notes[1:] == [
        "LSTM_4x512_b32_t1000_bfloat16 on 2 devices: 97.0 % of 2 times the throughput of one with "
        "LSTM_4x512_b16_t1000_bfloat16"
    ]


def test_every_way_and_axis_can_be_drawn():
    assert {i.way for i in (*IMPLEMENTATIONS.values(), forced(variants()[0]))} <= set(STYLES)
    assert {suite.varies for suite in SUITES.values()} - {None} == set(AXES)


@pytest.mark.parametrize("suite", ["stack_sizes", "stack_depth", "stack_networks"])
def test_plots(suite, tmp_path):
    count = len(SUITES[suite].problems)
    times = {
        ("jaxsparse-layers", "jaxsparse, layer by layer"): [1.0] * count,
        ("torch", "cuDNN by PyTorch"): [9.0] * (count - 1) + [None],
    }
    plots.plot(figures(suite, times), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
