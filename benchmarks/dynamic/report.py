"""Tables of dynamic networks: graphs a second by way, and every implementation by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.panels import OURS, Panel, Table, label
from benchmarks.published import DYNET, DYNET_SOURCE, KHORASANI, KHORASANI_SOURCE
from benchmarks.recurrent.report import FAILURES, fastest, ratios, ways
from benchmarks.run import Row

OUR_WAYS = (OURS, f"{OURS}, kernels")
_INPUTS = 128  # for which the paper counts loads of weights


def step_us(row: Row) -> float:
    """Microseconds of a step."""
    return float(row["us"] / row["steps"])


def per_second(row: Row) -> float:
    """Graphs, or sentences: examples of all steps."""
    return float(row["batch"] * 1e6 / step_us(row))


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def tables(panel: Panel) -> Iterator[Table]:
    """The fastest of each way, what a suite is about, and all implementations."""
    shown = ways(panel)
    recorded = _recorded(panel)
    unit = next(iter(panel.rows.values()))["unit"]
    cells = [["net", *shown, *([DYNET_SOURCE] if recorded else [])]]
    for problem in panel.problems:
        best = [fastest(panel, problem, way) for way in shown]
        figures = ["-" if row is None else _count(per_second(row)) for row in best]
        cells.append([problem, *figures, *([recorded.get(problem, "-")] if recorded else [])])
    notes = [line for way in OUR_WAYS if way in shown for line in ratios(panel, way, "net")]
    sources = dict.fromkeys(row["data"] for row in panel.rows.values())
    title = f"{panel.title}: {unit} a second, the fastest of each way"
    yield Table(title, cells, [*notes, f"{unit}: {', '.join(sources)}"])
    if panel.suite == "compile":
        yield _compilation(panel)
    if panel.suite == "weight_loads":
        yield _weight_loads(panel)
    head = ["implementation", "us a step", f"{unit} a second", "compiled in, s", "temporary, MB"]
    for problem in panel.problems:
        rows = [row for (p, _), row in panel.rows.items() if p == problem]
        whole = [head, *([label(row), *_figures(row)] for row in rows)]
        plans = [f"{label(row)}: {row['plan']}" for row in rows if row["plan"]]
        yield Table(f"{panel.title}: {problem}", whole, plans)


def _figures(row: Row) -> list[str]:
    if row["us"] is None:
        return [FAILURES.get(row["error"].partition(":")[0], "failed"), *["-"] * 3]
    seconds, memory = row["compile_s"], row["temporary_bytes"]
    return [
        _count(step_us(row)),
        _count(per_second(row)),
        "-" if seconds is None else f"{seconds:.2f}",
        "-" if memory is None else f"{memory / 1e6:,.1f}",
    ]


def _recorded(panel: Panel) -> dict[str, str]:
    """DyNet's examples a second in training, packing included, by problem."""
    if panel.passed not in ("training", "end_to_end"):
        return {}
    found = {}
    for (problem, _), row in panel.rows.items():
        rate = DYNET.get((row["model"], row["batch"]))
        if rate is not None and row["hidden"] == row["embedding"] == 256:
            found[problem] = _count(rate)
    return found


def _compilation(panel: Panel) -> Table:
    """Seconds until the program of a step is compiled."""
    cells = [["net", *panel.labels, KHORASANI_SOURCE]]
    for problem in panel.problems:
        rows = [panel.rows.get((problem, name)) for name in panel.labels]
        seconds = [
            "-" if row is None or row["compile_s"] is None else f"{row['compile_s']:.2f}"
            for row in rows
        ]
        model = next(row["model"] for row in rows if row is not None)
        cells.append([problem, *seconds, KHORASANI["compile"].get(model, "-")])
    note = "ours as the cache of kernels is found; the paper's: to compile and to load"
    return Table(f"{panel.title}: seconds of compilation", cells, [note])


def _weight_loads(panel: Panel) -> Table:
    """Megabytes of weights for 128 inputs, counted."""
    cells = [["net", *panel.labels, KHORASANI_SOURCE]]
    for problem in panel.problems:
        rows = [panel.rows.get((problem, name)) for name in panel.labels]
        loads = [
            "-"
            if row is None or row["weight_bytes"] is None
            else f"{row['weight_bytes'] * _INPUTS / row['batch'] / 1e6:,.1f}"
            for row in rows
        ]
        batch = next(row["batch"] for row in rows if row is not None)
        cells.append([problem, *loads, KHORASANI["weight_loads"].get(batch, "-")])
    note = "counted from scripts: what scans read, of L2 cache or memory"
    return Table(f"{panel.title}: MB of weights for {_INPUTS} inputs", cells, [note])


def summaries(panels: Sequence[Panel]) -> Iterator[Table]:
    """Of the suite `breakdown`, microseconds an input of each part of a step."""
    own = {panel.passed: panel for panel in panels if panel.suite == "breakdown"}
    if not own:
        return
    parts = ("pack", "copy", "dispatch", "forward", "backward", "update", "end to end")
    cells = [["net and implementation", *parts]]
    keys = dict.fromkeys(key for panel in own.values() for key in panel.rows)
    for key in keys:
        us: dict[str, float] = {}
        for passed, panel in own.items():
            row = panel.rows.get(key)
            if row is not None and row["us"]:
                us[passed] = step_us(row) / row["batch"]
        # The backward pass is what a gradient takes beside the forward one, and so on.
        for part, whole, before in (
            ("backward", "gradient", "forward"),
            ("update", "training", "gradient"),
        ):
            if whole in us and before in us:
                us[part] = us[whole] - us[before]
        if "end_to_end" in us:
            us["end to end"] = us["end_to_end"]
        if len(us) > 1:
            cells.append([" ".join(key), *(f"{us[p]:.3g}" if p in us else "-" for p in parts)])
    notes = ["backward: gradient without forward; update: training without gradient"]
    yield Table("dynamic, breakdown: microseconds an input", cells, notes)
