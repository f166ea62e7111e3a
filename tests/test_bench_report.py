"""Tables and plots of given results."""

from __future__ import annotations

import json

import pytest
from bench_commands import refused

from benchmarks import panels, plots, report
from benchmarks.__main__ import main
from benchmarks.implementations import PASSES
from benchmarks.merging import merge


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


def test_parts_are_merged_if_they_were_measured_alike(tmp_path, capsys):
    whole = rows({"jaxsparse": [10.0, 1.0], "torch": [20.0, 32.0]})
    here = {"device": "NVIDIA H200", "torch": None, "commit": "abc", "date": "2026-11-26"}
    files = [str(tmp_path / f"{i}.json") for i in range(3)]

    def write(part, own, environment, skipped):
        result = {"schema": 1, "environment": environment, "results": own, "skipped": skipped}
        (tmp_path / f"{part}.json").write_text(json.dumps(result))

    write(0, whole[:3], here, {"torch": "not asked for", "scipy": "runs on a CPU only"})
    write(1, whole[3:], {**here, "torch": "2.11", "date": "2026-11-27"}, {"bcsr": "too slow"})
    assert main(["merge", *files[:2], "--output", str(tmp_path / "all.json")]) == 0
    assert "jaxsparse over torch" in capsys.readouterr().out
    merged = panels.read_result(tmp_path / "all.json")
    assert merged["results"] == whole
    assert merged["environment"] == {**here, "torch": "2.11", "date": "2026-11-27"}
    assert merged["skipped"] == {"scipy": "runs on a CPU only", "bcsr": "too slow"}

    for own, environment, message in (
        (whole[:1], here, "two figures of jaxsparse on crossover"),
        (whole[3:], {**here, "commit": "abd"}, "results of one commit go together, got abc and"),
        (whole[3:], {**here, "device": "cpu"}, "results of one device go together"),
    ):
        write(2, own, environment, {})
        argv = ["merge", files[0], files[2], "--output", str(tmp_path / "none.json")]
        assert message in refused(argv, capsys)
    assert not (tmp_path / "none.json").exists()


def test_reasons_stay_where_merged_parts_leave_gaps():
    ours, theirs = rows({"jaxsparse": [10.0, 1.0]}), rows({"torch": [20.0, 32.0]})
    on = lambda made, s: [row for row in made if row["problem"] == s]  # noqa: E731

    def skipped(*parts):
        parts = [{"schema": 1, "results": own, "skipped": why} for own, why in parts]
        return merge(parts)["skipped"]

    missing = {"torch": "is not installed"}
    # By problems: on the first there is still no figure of it. In either order.
    by_problems = (on(ours, "s0.5"), missing), (on(ours + theirs, "s0.9"), {})
    assert skipped(*by_problems) == skipped(*by_problems[::-1]) == missing
    # By implementations.
    assert skipped((ours, missing), (theirs, {})) == {}
    # Another operation is another table.
    other = [{**row, "operation": "sddmm"} for row in ours + theirs]
    assert skipped((ours, missing), (other, {})) == missing
    # Each part has a reason of its own, and one says the same as another.
    reasons = [{"torch": why} for why in ("is not installed", "runs on a GPU only")]
    halves = [on(ours, s) for s in ("s0.5", "s0.9")]
    both = {"torch": "is not installed; runs on a GPU only"}
    assert skipped(*zip(halves, reasons, strict=True), ([], reasons[0])) == both
    # A problem that was left out, and then measured, with one of two implementations and with both.
    failed = {"s0.9": "MemoryError: "}
    first = on(ours + theirs, "s0.5"), failed
    assert skipped(first, (on(ours, "s0.9"), {})) == failed
    assert skipped(first, (on(ours + theirs, "s0.9"), {})) == {}
    assert skipped(([], failed), (on(ours, "s0.9"), {})) == {}
