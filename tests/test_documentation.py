"""What the documentation says of the layout and of the environment is what the sources have."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CODE = (".py", ".cc", ".cu", ".cuh", ".h")
MOST_LINES = 450

# Files of MOST_LINES or more, and why. docs/design.md says it in short.
LONG = {
    "jaxsparse/nn/cells.py": "cells, which users read beside one another",
    "tests/test_bench.py": "one command: its options, its runs, its comparisons",
    "tests/test_explain.py": "one function: every operation and device, every reason for no kernel",
    "tests/test_masks.py": "each kind of mask, by the same checks",
    "tests/test_matmul.py": "spmm and sddmm on the same problems: each is the other's derivative",
    "tests/test_nn_linear.py": "one layer, under everything that Flax does with a layer",
    "tests/test_nn_recurrent.py": "one layer, against Flax's",
    "tests/test_pruning_masks.py": "scores, scopes and structures, which one oracle combines",
    "tests/test_recurrent_engine.py": "kernels of scans on a GPU, against one loop over time",
    "tests/test_recurrent_scan.py": "one function, against one loop over time",
    "tests/test_recurrent_transformations.py": "every transformation, of the same scans",
    "tests/test_saving.py": "every route by which a model is saved and comes back",
    "tests/test_topology.py": "one class, on the host and in a program",
}


def tracked(*folders):
    """The files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    return [pathlib.Path(line) for line in listed.stdout.splitlines()]


def test_files_are_short():
    files = [path for path in tracked() if path.suffix in CODE and (ROOT / path).exists()]
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in files}
    long = [name for name, lines in lengths.items() if lines >= MOST_LINES]
    assert sorted(LONG) == sorted(long)


def read_variables(text):
    """The names that a source gives to getenv or os.environ, in a constant or as they are."""
    constants = dict(re.findall(r'^(\w+) = "(\w+)"$', text, flags=re.MULTILINE))
    asked = re.findall(r'(?:\bgetenv\(|\benviron(?:\.get\(|\[))("?\w+)', text)
    return {x[1:] if x.startswith('"') else constants.get(x) for x in asked} - {None}


def test_variables_are_documented():
    """Every variable of the environment that is read has its row in one table, and no other."""
    files = [ROOT / x for x in tracked("jaxsparse", "ffi", "benchmarks") if "tests" not in x.parts]
    texts = [path.read_text() for path in files if path.suffix in CODE]
    ours = re.compile(r'"(JAXSPARSE_[A-Z_]+)"')
    named = {name for text in texts for name in ours.findall(text)}
    read = {name for text in texts for name in read_variables(text)}
    assert {name for name in read if name.startswith("JAXSPARSE_")} == named
    row = re.compile(r"^\| `(JAXSPARSE_\w+)`", flags=re.MULTILINE)
    assert sorted(row.findall((ROOT / "docs" / "command_line.md").read_text())) == sorted(named)
    readme = (ROOT / "README.md").read_text()
    assert not row.search(readme) and "(docs/command_line.md#environment)" in readme


def layout_words():
    """The names in the first block of docs/design.md, in which braces stand for several."""
    text = (ROOT / "docs" / "design.md").read_text().split("```")[1]
    for several in re.findall(r"[\w.<>]*\{[\w,]+\}[\w.]*", text):
        front, inside, back = re.split(r"[{}]", several)
        text += "".join(f" {front}{one}{back}" for one in inside.split(","))
    return set(re.findall(r"[\w.<>]+", text))


def test_the_layout_names_every_module():
    words = layout_words()
    modules = [path for path in tracked("jaxsparse") if path.suffix == ".py"]
    missing = [str(path) for path in modules if path.name not in words]
    assert [name for name in missing if not name.endswith("__init__.py")] == []


def test_the_layout_names_every_native_source():
    """`<op>` stands for the folder of an operation, `<kernel>` for kernels that are named."""
    words = layout_words()
    missing = []
    for path in tracked("ffi"):
        op, kernel = path.parts[1], path.stem
        names = {path.name, path.name.replace(op, "<op>")}
        if path.parent.name == "kernels" and kernel in words:
            names.add(path.name.replace(kernel, "<kernel>"))
        if "tests" not in path.parts and not names & words:
            missing.append(str(path))
    assert missing == []
