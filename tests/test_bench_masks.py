"""The suite of masks: its masks, its reference, its peers, and a run from command to picture."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_commands import refused

from benchmarks import choices, run
from benchmarks import selection as others
from benchmarks.__main__ import main
from benchmarks.implementations import PASSES
from benchmarks.masks import cases, flex, jax_programs, problems, reference, selection
from benchmarks.masks.cases import MaskCase
from benchmarks.masks.implementations import IMPLEMENTATIONS, Implementation
from benchmarks.masks.made import Made

QUICK = ["--seconds", "0.01", "--repeats", "2"]


def mask_of(kind, length=128, n=8):
    made, _ = problems.KINDS[kind]
    return made(length, n)


def written_out(problem):
    positions = np.arange(problem.length)
    return np.asarray(problem.mask(positions[:, None], positions[None, :]))


def case_of(problem, implementation, dtype="float32"):
    return MaskCase(problem, implementation, dtype, PASSES)


# ---- problems ----


@pytest.mark.parametrize("kind", problems.KINDS)
def test_masks(kind):
    problem = mask_of(kind, 200)
    dense = written_out(problem)
    assert problem.nnz == dense.sum() and not np.triu(dense, 1).any() and dense.diagonal().all()
    rows, columns = np.indices(dense.shape)
    if problem.window is not None:
        seen = (columns <= rows) & (rows - columns <= problem.window)
        np.testing.assert_array_equal(dense, seen)
    if problem.traced is not None:
        array, make = problem.traced
        made = jax.jit(lambda array: make(array)(rows, columns))(array)
        np.testing.assert_array_equal(made, dense)


def test_masks_of_a_gpu():
    made = list(problems.problems("gpu", None, None))
    assert [p.name for p in made] == [
        "paper256_12288", "band256_12288", "documents1024_12288", "strided128_12288",
        "causal_12288", "window1024_131072",
    ]  # fmt: skip
    assert [p.window for p in made] == [None, 255, None, None, None, 1023]
    (documents,) = (p for p in made if p.kind == "documents")
    assert documents.ids.shape == (12288,) and 8 <= documents.ids[-1] <= 24
    assert {p.length for p in problems.problems("cpu", None, None)} == {1024}
    asked = list(problems.problems("gpu", (64, 32), (16,)))
    assert len({p.name for p in asked}) == 12 and {p.length for p in asked} == {64, 32}


# ---- the reference ----


def by_jax(problem, mask):
    """Results and gradients in float32, all scores at once."""

    def attention(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * problem.n**-0.5
        p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest")

    operands = [problem.operands()[name] for name in ("query", "key", "value")]
    gradients = jax.grad(lambda *x: jnp.sum(jnp.square(attention(*x))), argnums=(0, 1, 2))
    return np.asarray(attention(*operands)), [np.asarray(x) for x in gradients(*operands)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", problems.KINDS)
def test_reference(kind, causal, monkeypatch):
    problem = mask_of(kind, 320)
    monkeypatch.setattr(reference, "_POSITIONS", 320 * 8 * 20)
    reference.expected.cache_clear()
    expected = reference.expected(problem, "float32", causal)
    mask = np.tri(320, dtype=bool) if causal else written_out(problem)
    out, gradients = by_jax(problem, mask)
    assert expected.rows.size == 20 and expected.rows[0] == 0 and expected.rows[-1] == 319
    assert 10 <= expected.slopes.size <= 20 and expected.keys.size
    error, rows = expected.errors(out)
    assert error < 1e-5 and rows == 20
    error, checked = expected.errors_of_gradients(*gradients)
    assert error < 1e-4 and checked == expected.slopes.size + expected.keys.size
    # Any of them being off, at what is compared, is seen.
    for i, at in enumerate((expected.slopes, expected.keys, expected.keys)):
        spoiled = [x.copy() for x in gradients]
        spoiled[i][0, at[-1]] *= 1.01
        assert expected.errors_of_gradients(*spoiled)[0] == pytest.approx(0.01, rel=0.1)
    spoiled = out.copy()
    spoiled[0, 0, 3] = np.nan
    assert expected.errors(spoiled)[0] == np.inf
    assert expected.errors(out[:, :, :4])[0] == np.inf


def test_keys_that_too_many_queries_see_are_not_checked(monkeypatch):
    monkeypatch.setattr(reference, "_MOST_VIEWERS", 100)
    reference.expected.cache_clear()
    expected = reference.expected(mask_of("causal", 320), "float32", False)
    reference.expected.cache_clear()
    np.testing.assert_array_equal(expected.keys, [3 * 320 // 4, 320 - 16])


# ---- implementations ----

HERE = [i for i in IMPLEMENTATIONS.values() if i.available() is None]


# Some masks that each takes, all of them or windows or strided ones alone.
TAKEN = [
    (implementation, kind)
    for implementation in HERE
    for kind in ("paper", "documents", "band", "strided")
    if implementation.takes(mask_of(kind, n=16))
    and (kind in ("paper", "documents") or not implementation.takes(mask_of("paper", n=16)))
]


@pytest.mark.parametrize(("implementation", "kind"), TAKEN, ids=lambda x: getattr(x, "name", x))
def test_implementations_agree_with_the_reference(implementation, kind):
    problem = mask_of(kind, n=16)  # the least that FlexAttention takes
    for passed in PASSES:
        case = case_of(problem, implementation, implementation.dtypes[0])
        check = case.check(passed)
        assert check.relative_error <= check.limit and check.checked >= 16
        row = case.ran(passed)
        assert row["first_call_s"] > 0 and row["peak_bytes"] > 0
        by_numbers = implementation.causal or implementation.name == "cudnn-window"  # no arrays
        assert (row["mask_ms"] is None) == (row["mask_bytes"] is None) == by_numbers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_within_tolerance(dtype):
    case = case_of(mask_of("band"), IMPLEMENTATIONS["jaxsparse-topology"], dtype)
    for passed in PASSES:
        check = case.check(passed)
        assert check.relative_error <= check.limit


def spoiled(name, passed, result):
    """One of ours, of which one result in one pass is off by two per cent."""
    own = IMPLEMENTATIONS[name]

    def build(problem, dtype, built):
        made = own.build(problem, dtype, built)
        program = made.program

        def wrong(out):
            results = list(program.results(out))
            if built == passed:
                results[result] = results[result] * 1.02
            return tuple(results)

        return dataclasses.replace(made, program=dataclasses.replace(program, results=wrong))

    return dataclasses.replace(own, build=build)


@pytest.mark.parametrize(
    ("passed", "result"), [("forward", 0), ("gradient", 0), ("gradient", 1), ("gradient", 2)]
)
def test_what_is_wrong_is_not_timed(passed, result):
    made = plan_of(spoiled("jaxsparse-topology", passed, result))
    measured, whole = run.execute(made, run.Effort(0.01, 2))
    assert whole and len(measured["results"]) == 2
    for row in measured["results"]:
        assert (row["us"] is None) == (row["pass"] == passed), row
        assert (row["error"] or "").startswith("WrongResult" if row["pass"] == passed else "")


def plan_of(*implementations, kinds=("band",)):
    pairs = tuple((i, i.dtypes[0]) for i in implementations)
    return selection.MaskSelection(tuple(map(mask_of, kinds)), pairs, PASSES, {})


def test_what_takes_the_same_time_is_measured_once():
    built = []

    def build(problem, dtype, passed):
        built.append((problem.kind, passed))
        return IMPLEMENTATIONS["dense"].build(problem, dtype, passed)

    once = Implementation("once", build, causal=True, dtypes=("float32",))
    measured, _ = run.execute(plan_of(once, kinds=("band", "strided")), run.Effort(0.01, 2))
    assert built == [("band", "forward"), ("band", "gradient")]
    rows = measured["results"]
    assert [row["problem"] for row in rows] == ["band32_128_n8"] * 2 + ["strided4_128_n8"] * 2
    assert rows[0]["us"] == rows[2]["us"] and rows[0]["nnz"] != rows[2]["nnz"]


@pytest.mark.parametrize("kind", ["documents", "window", "strided"])
def test_masks_made_in_a_program(kind):
    mask, cost = jax_programs._block_mask(mask_of(kind, 256), regroup=False)
    assert mask.shape == (256, 256) and cost.ms > 0 and cost.nbytes > 128
    if kind == "strided":
        assert cost.in_program_ms is cost.making_bytes is None
    else:
        assert 0 < cost.in_program_ms < 1000 and cost.making_bytes > cost.nbytes


def test_what_stands_beside_a_figure_does_not_end_it(monkeypatch):
    monkeypatch.setattr(jax_programs, "planned_bytes", lambda compiled: 1 // 0)
    case = case_of(mask_of("causal"), IMPLEMENTATIONS["dense"])
    case.check("forward")
    row = case.ran("forward")
    assert row["peak_bytes"] is None and row["first_call_s"] > 0


def test_what_would_take_too_much_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr(jax_programs, "_MOST_BYTES_OF_A_BIAS", 2 * 128**2 - 1)
    with pytest.raises(MemoryError, match="the mask would be a bias of"):
        jax_programs.biased_attention(mask_of("causal"), "bfloat16", "forward")


def test_which_masks_a_peer_takes():
    made = list(problems.problems("gpu", None, None))

    def taken(name):
        return [p.kind for p in made if IMPLEMENTATIONS[name].takes(p)]

    every = list(problems.KINDS)
    assert taken("jaxsparse") == taken("flex") == taken("cudnn-bf16") == every
    assert taken("cudnn-window") == ["band", "window"]
    assert taken("jaxsparse-regrouped") == ["strided"]
    assert taken("cudnn-bias") == taken("dense-bf16") == every[:-1]
    for problem, entries in (made[0], 20_000_000), (made[1], 20_000_001):
        problem.__dict__["nnz"] = entries  # as if it had been counted
    topology = IMPLEMENTATIONS["jaxsparse-topology"]
    assert topology.takes(made[0]) and not topology.takes(made[1])


class Torch:
    """What mask functions use of PyTorch, by NumPy."""

    int32 = np.int32

    class Tensor(np.ndarray):
        def to(self, dtype):
            return self.astype(dtype)

    @classmethod
    def as_tensor(cls, array, device):
        return np.asarray(array).view(cls.Tensor)

    abs = staticmethod(np.abs)


@pytest.mark.parametrize("length", [64, 1000])
@pytest.mark.parametrize("kind", problems.KINDS)
def test_mask_functions_of_flex_attention(kind, length):
    problem = mask_of(kind, length)
    mask_mod = flex.PREDICATES[kind](Torch, "cpu", problem)
    assert mask_mod.__code__.co_argcount == 4  # by which PyTorch knows it
    positions = Torch.as_tensor(np.arange(length), "cpu")
    seen = mask_mod(None, None, positions[:, None], positions[None, :])
    np.testing.assert_array_equal(np.asarray(seen), written_out(problem))


# ---- the command ----


def planned(*options, platform="cpu"):
    asked = choices.Asked("sparse_attention", suites=("masks",), **dict(options))
    return selection.select(asked, platform)


def test_selection():
    made = planned()
    assert [p.kind for p in made.problems] == list(problems.KINDS) and made.passes == PASSES
    assert {dtype for i, dtype in made.candidates if "float32" in i.dtypes} == {"float32"}
    lacking = {name for name, i in IMPLEMENTATIONS.items() if i.available() is not None}
    assert set(made.skipped) == lacking
    names = {case.implementation.name for case in made.cases(made.problems[0])}
    assert {"jaxsparse", "jaxsparse-topology"} <= names and not names & lacking
    dense = [] if "dense" in lacking else [("dense", "float32")]
    asked = ("dtypes", ("float16", "bfloat16")), ("implementations", ("jaxsparse", "dense"))
    made = planned(*asked, ("passes", ("gradient",)), ("names", ("band*", "causal*")))
    assert [(i.name, dtype) for i, dtype in made.candidates] == [
        ("jaxsparse", "float16"), ("jaxsparse", "bfloat16"), *dense,
    ]  # fmt: skip
    assert [p.kind for p in made.problems] == ["band", "causal"] and made.passes == ("gradient",)
    on_gpu = planned(("implementations", ("jaxsparse",)), platform="gpu")
    assert [dtype for _, dtype in on_gpu.candidates] == ["bfloat16"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--suite", "masks", "attention"], "--suite: 'masks' has implementations of its own"),
        (["--suite", "mask"], "--suite: sparse_attention has attention, graphs, masks"),
        (["--suite", "masks", "--sparsity", "0.5"], "--sparsity: the suite 'masks' has masks"),
        (["--suite", "masks", "--length", "31"], r"--length: must be at least 32, got \[31\]"),
        (["--suite", "masks", "--implementation", "bcsr"], "--implementation: .* no 'bcsr'"),
        (["--suite", "masks", "--variant", "zz"], "--variant: .* no 'zz'"),
        (["--suite", "attention", "--length", "64"], "--length: sparse_attention has no steps"),
    ],
)
def test_usage_errors(argv, message, capsys):
    error = refused(["run", "sparse_attention", *argv], capsys)
    assert re.search(message, error), error


def test_other_suites_are_as_they_were(capsys):
    asked = choices.Asked("sparse_attention")
    assert isinstance(selection.select(asked, "cpu"), others.OperationSelection)
    assert main(["run", "sparse_attention", "--list"]) == 0
    text = capsys.readouterr().out
    for part in ("attention ", "masks ", "jaxsparse-xla", "jaxsparse-topology", "cudnn-window"):
        assert part in text


def test_from_command_to_picture(tmp_path, capsys):
    output = tmp_path / "masks.json"
    argv = ["run", "sparse_attention", "--suite", "masks", "--length", "64", "--n", "8", *QUICK]
    dense = "dense" if IMPLEMENTATIONS["dense"].available() is None else "dense-bf16"
    argv += ["--problem", "band*", "strided*", "--implementation", "jaxsparse-topology", dense]
    assert main([*argv, "--quiet", "--output", str(output), "--plot"]) == 0
    shown = capsys.readouterr().out
    assert output.with_suffix(".png").stat().st_size > 10_000
    rows = json.loads(output.read_text())["results"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert row["error"] is None and row["us"] > 0 and row["m"] == row["k"] == 64
        assert row["first_call_s"] > 0 and 0 < row["sparsity"] < 1 and row["rows_checked"]
    for line in (
        r"band16_64_n8 +\d",
        r"band16_64_n8 jaxsparse-topology(?: \w+)? +[\d.]+ +[\d.]+ +[\d.]+ +- +[\d.e-]+ +- +\d",
        r"strided2_64_n8 dense[-\w]* +[\d.]+ +- +- +- +- +- +\d",
    ):
        assert re.search(line, shown), line
    assert main(["table", str(output)]) == 0
    assert capsys.readouterr().out == shown


def test_ratios_by_mask(capsys, tmp_path):
    rows = [
        {"suite": "masks", "problem": problem, "operation": "sparse_attention", "sparsity": 0.9,
         "implementation": name, "dtype": "bfloat16", "pass": "forward", "us": us, "error": None}
        for problem, name, us in (
            ("a", "jaxsparse", 10.0), ("a", "flex", 25.0), ("b", "jaxsparse", 4.0),
            ("b", "flex", None), ("b", "cudnn-bf16", 3.0),
        )
    ]  # fmt: skip
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schema": 1, "environment": {}, "results": rows}))
    assert main(["table", str(path), "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert "| mask | flex bfloat16 | cudnn-bf16 |" in shown
    assert "| a | 2.50 | - |" in shown and "| b | - | 0.75 |" in shown
    assert "before the first result" not in shown


def test_a_program_is_compiled_once(monkeypatch):
    counts = []
    own = jax_programs._compiled
    monkeypatch.setattr(jax_programs, "_compiled", lambda p: counts.append(1) or own(p))
    case = case_of(mask_of("causal"), IMPLEMENTATIONS["dense"])
    case.check("forward")
    program = case.build("forward")
    case.ran("forward")
    assert len(counts) == 1 and isinstance(cases._made(case, "forward"), Made)
    assert program is case.build("forward")
