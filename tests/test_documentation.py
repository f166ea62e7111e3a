"""What the documentation says of the project is what its sources and its results say."""

from __future__ import annotations

import pathlib
import re
import subprocess

import numpy as np
import pytest

from benchmarks.panels import read_result

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
HEADLINES = " ".join(line for line in README.splitlines() if line.startswith("| a"))


def times(name, dtype=None, direction="forward"):
    """Microseconds by problem and implementation, the least of all dtypes if none is named."""
    found = {}
    for row in read_result(RESULTS / name)["results"]:
        if row["us"] is not None and row["pass"] == direction and dtype in (None, row["dtype"]):
            of_problem = found.setdefault(row["problem"], {})
            name = row["implementation"]
            of_problem[name] = min(row["us"], of_problem.get(name, np.inf))
    return found


def test_figures_of_a_cpu_are_those_measured():
    measured = times("cpu/spmm_square.json", "float32")["1024x1024_n128_s0.9"]
    claim = r"columns: ([\d,]+) us, a dense product takes ([\d,]+)"
    sparse, dense = re.search(claim, HEADLINES).groups()
    assert sparse == f"{measured['jaxsparse']:,.0f}" and dense == f"{measured['dense']:,.0f}"


def test_figures_of_products_on_a_gpu_are_those_measured():
    measured = times("h200/spmm_rnn.json", "float32").values()
    ratios = [of["jaxsparse"] / of["torch"] for of in measured]  # whose product is cuSPARSE's
    (mean,) = re.search(r"on an H200: ([\d.]+) of the time of cuSPARSE", HEADLINES).groups()
    assert mean == f"{np.exp(np.mean(np.log(ratios))):.2f}"


def test_figures_of_recurrent_scans_are_those_measured():
    ratios = [
        min(us for name, us in of.items() if not name.startswith("jaxsparse")) / of["jaxsparse"]
        for of in times("h200/recurrent_layers.json").values()
    ]
    least, most = re.search(r"takes ([\d.]+) to ([\d.]+) times as long", HEADLINES).groups()
    assert (least, most) == (f"{min(ratios):.2f}", f"{max(ratios):.1f}")


def sources():
    """The files that are tracked, but the tests."""
    listed = subprocess.run(
        ["git", "ls-files", "jaxsparse", "ffi", "benchmarks", "examples", "experiments"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines()]


def test_variables_are_documented():
    """Every variable of the environment that is read, and no other."""
    files = [path for path in sources() if path.suffix in (".py", ".cc")]
    texts = [path.read_text() for path in files if "tests" not in path.parts]
    found = {name for text in texts for name in re.findall(r'"(JAXSPARSE_[A-Z_]+)"', text)}
    table = (ROOT / "docs" / "command_line.md").read_text()
    assert found == set(re.findall(r"^\| `(JAXSPARSE_\w+)`", table, flags=re.MULTILINE))
    rows = [line for line in README.splitlines() if line.startswith("| `JAXSPARSE_")]
    assert rows and set(rows) <= set(table.splitlines())


def test_the_layout_names_every_module():
    """The first block of docs/design.md, in which braces stand for several names."""
    text = (ROOT / "docs" / "design.md").read_text().split("```")[1]
    for several in re.findall(r"\w*\{[\w,]+\}[\w.]*", text):
        front, inside, back = re.split(r"[{}]", several)
        text += " ".join(f" {front}{one}{back}" for one in inside.split(","))
    words = set(re.findall(r"[\w.]+", text))
    modules = [path for path in sources() if path.suffix == ".py" and "jaxsparse" in path.parts]
    missing = [path.name for path in modules if path.name not in words]
    assert [name for name in missing if name != "__init__.py"] == []
