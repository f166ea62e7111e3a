"""The suite of depthwise layers: its implementations and the command."""

from __future__ import annotations

import json

import pytest
from bench_commands import refused

from benchmarks.__main__ import main
from benchmarks.depthwise.cases import PASSES, DepthwiseCase
from benchmarks.depthwise.implementations import IMPLEMENTATIONS
from benchmarks.depthwise.problems import Problem, problems


def test_problems():
    for platform in ("cpu", "gpu"):
        made = list(problems(platform))
        assert len({p.name for p in made}) == len(made) == 18


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_implementations_agree(name):
    for stride in 1, 2:
        case = DepthwiseCase(Problem(3, 6, stride, 4), IMPLEMENTATIONS[name], "float32", ())
        of_x, of_kernel = 3 * 2 * 36, 2 * 9
        checked = {
            "forward": 3 * 2 * case.problem.out**2,
            "gradient": of_x + of_kernel,
            "input": of_x,
            "kernel": of_kernel,
        }
        assert tuple(checked) == PASSES
        for passed, values in checked.items():
            check = case.check(passed)
            assert check.relative_error <= check.limit
            assert check.checked == values


def test_command(tmp_path, capsys):
    output = tmp_path / "result.json"
    command = ["run", "depthwise", "--problem", "1024x7_stride1_batch1", "--pass", "forward"]
    quick = ["--seconds", "0.01", "--repeats", "2", "--quiet", "--output", str(output)]
    assert main([*command, "--implementation", "jaxsparse", *quick]) == 0
    (row,) = json.loads(output.read_text())["results"]
    assert (row["operation"], row["bytes"]) == ("depthwise", 2 * 4 * 1024 * 49)
    assert "1024x7_stride1_batch1" in capsys.readouterr().out


def test_sizes_are_its_own(capsys):
    message = refused(["run", "depthwise", "--n", "3"], capsys)
    assert "the suite 'mobilenet' has sizes of its own" in message
