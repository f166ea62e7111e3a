"""The suite of decoding: its problems, its implementations and the command."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_commands import refused
from checks import PLATFORM

from benchmarks import choices, copies
from benchmarks.__main__ import main
from benchmarks.decode import implementations, problems, report
from benchmarks.decode.cases import DecodeCase
from benchmarks.masks import selection
from benchmarks.panels import Panel

QUICK = ["--seconds", "0.01", "--repeats", "2", "--quiet"]


def test_problems():
    for platform in ("cpu", "gpu"):
        made = list(problems.problems(platform, None, None))
        assert len({p.name for p in made}) == len(made)
        for p in made:
            assert p.lengths.shape == (p.sequences,) and p.lengths.min() >= 1
            assert (p.lengths.max() <= p.length) and (p.nnz == p.sequences * p.length) != p.ragged


@pytest.mark.parametrize("name", ["jaxsparse", "jaxsparse-paged", "dense"])
@pytest.mark.parametrize("ragged", [False, True])
def test_implementations_agree(name, ragged):
    problem = problems.Problem(3, 128, 16, 8, ragged)
    case = DecodeCase(problem, implementations.IMPLEMENTATIONS[name], "float32")
    check = case.check("forward")
    assert check.relative_error <= check.limit and check.checked == 2 * 16


def test_a_wrong_result_is_seen(monkeypatch):
    """The reference is that of the lengths of the problem."""
    problem = problems.Problem(2, 128, 8, 8, True)
    case = DecodeCase(problem, implementations.IMPLEMENTATIONS["jaxsparse"], "float32")
    full = np.full(2, 128, np.int32)
    with monkeypatch.context() as patched:
        patched.setattr(problems.Problem, "lengths", full)
        case.build("forward")
    check = case.check("forward")
    assert check.relative_error > check.limit


def test_speeds_are_compared_with_a_copy():
    x = jax.random.bits(jax.random.key(0), (999,), "uint32")
    for copy in copies.COPIES.values():
        out = jax.jit(copy)(x)
        assert out.nbytes == x.nbytes
        assert out.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    assert 0 < copies.bytes_per_us(2**20) < 1e9
    row = {"bytes_read": 3e9, "us": 1000.0, "copied_bytes_per_us": 4e6}
    old = {"bytes_read": 3e9, "us": 1000.0}
    rows = {("a", "jaxsparse"): row, ("b", "jaxsparse"): old}
    panel = Panel("", "decode", "sparse_attention", "forward", ("a", "b"), ("jaxsparse",), rows)
    (table,) = report.tables(panel)
    assert table.cells[1:] == [
        ["a jaxsparse", "3", "3,000", "0.75"],
        ["b jaxsparse", "3", "3,000", ""],
    ]


def test_selection():
    asked = choices.Asked("sparse_attention", suites=("decode",))
    made = selection.select(asked, "gpu")
    assert {dtype for _, dtype in made.candidates} == {"bfloat16"}
    assert len(made.problems) == 7
    assert ("cudnn" in made.skipped) == (PLATFORM != "cuda")
    (ragged,) = (p for p in made.problems if p.ragged)
    names = {case.implementation.name for case in made.cases(ragged)}
    assert {"jaxsparse", "jaxsparse-paged", "dense"} <= names and not {"sdpa", "flex"} & names


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["decode", "masks"], "--suite: 'masks' has implementations of its own"),
        (["decode", "--sparsity", "0.5"], "--sparsity: the suite 'decode' has lengths"),
        (["decode", "--pass", "gradient"], "--pass: the suite 'decode' has only forward"),
    ],
)
def test_usage_errors(argv, message, capsys):
    assert message in refused(["run", "sparse_attention", "--suite", *argv], capsys)


def test_from_command_to_result(tmp_path, capsys):
    output = tmp_path / "decode.json"
    argv = ["run", "sparse_attention", "--suite", "decode", "--length", "64", "--n", "8", *QUICK]
    assert main([*argv, "--implementation", "jaxsparse", "--output", str(output)]) == 0
    assert "keys and values read" in capsys.readouterr().out
    rows = json.loads(output.read_text())["results"]
    assert len({row["problem"] for row in rows}) == len(rows) == (6 if PLATFORM == "cuda" else 3)
    for row in rows:
        assert row["error"] is None and row["us"] > 0 and row["key_heads"] == 8
        assert row["dtype"] == ("bfloat16" if PLATFORM == "cuda" else "float32")
        assert row["bytes_read"] == 2 * row["nnz"] * 8 * 8 * jnp.dtype(row["dtype"]).itemsize
        assert ("copied_bytes_per_us" in row) == (PLATFORM == "cuda")
    assert main(["run", "sparse_attention", "--list"]) == 0
    assert "jaxsparse-paged" in capsys.readouterr().out
