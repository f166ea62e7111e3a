"""Tables of dynamic networks: graphs a second by way, and every implementation by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.dynamic.problems import COMPUTED
from benchmarks.panels import OURS, Panel, Table, label
from benchmarks.published import DYNET, DYNET_SOURCE, KHORASANI, KHORASANI_SOURCE
from benchmarks.recurrent.report import FAILURES, fastest, ratios, ways
from benchmarks.run import Row

OUR_WAYS = (OURS, f"{OURS}, kernels", f"{OURS}, one launch")
BY_HAND = "levels by hand"
PLAIN_WAYS = (BY_HAND, "loop, JAX's gradient", "padded, jax.lax.scan")
"""What can be had in JAX without jaxsparse."""

INPUTS = 128  # for which the paper counts loads of weights


def step_us(row: Row) -> float:
    """Microseconds of a step."""
    return float(row["us"] / row["steps"])


def per_second(row: Row) -> float:
    """Graphs, or sentences: examples of all steps."""
    return float(row["batch"] * 1e6 / step_us(row))


def weight_megabytes(row: Row) -> float | None:
    """Of weights, for so many inputs as the paper counts; None where it is not known."""
    loaded = row["weight_bytes"]
    return None if loaded is None else float(loaded * INPUTS / row["batch"] / 1e6)


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
    if panel.passed in COMPUTED:
        yield from _beside_plain_jax(panel)
    if panel.suite == "compile":
        yield _compilation(panel)
        yield from _kernels(panel)
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


def _fastest_of(
    panel: Panel, problem: str, ways: Sequence[str], dtype: str | None = None
) -> Row | None:
    """Of all implementations of these ways, in a dtype or in any; None if none was measured."""
    rows = [
        row
        for (name, _), row in panel.rows.items()
        if name == problem and row["way"] in ways and row["us"] and dtype in (None, row["dtype"])
    ]
    return min(rows, key=step_us, default=None)


def _beside_plain_jax(panel: Panel) -> Iterator[Table]:
    """How many times as fast we are as the fastest plain JAX, and how much memory a program takes.

    Memory beside that of the loop whose derivative is written by hand, the fastest in the same
    dtype. DyNet's steps include packing.
    """
    cells = [
        [
            "net",
            "fastest of ours",
            "fastest plain JAX",
            "times as fast",
            "both in float32",
            "temporaries, of those by hand",
            f"times {DYNET_SOURCE}",
        ]
    ]
    for problem in panel.problems:
        ours = _fastest_of(panel, problem, OUR_WAYS)
        plain = _fastest_of(panel, problem, PLAIN_WAYS)
        if ours is None or plain is None:
            continue
        exact, plain_exact = (
            _fastest_of(panel, problem, ways, "float32") for ways in (OUR_WAYS, PLAIN_WAYS)
        )
        by_hand = _fastest_of(panel, problem, (BY_HAND,), ours["dtype"])
        cells.append(
            [
                problem,
                label(ours),
                label(plain),
                _of_rows("us", plain, ours),
                _of_rows("us", plain_exact, exact),
                _of_rows("temporary_bytes", ours, by_hand),
                _ratio(per_second(ours), _dynet(panel, ours)),
            ]
        )
    if len(cells) > 1:
        yield Table(f"{panel.title}: beside plain JAX", cells, [])


def _of_rows(key: str, a: Row | None, b: Row | None) -> str:
    """The ratio of a figure of two rows."""
    return "-" if a is None or b is None else _ratio(a[key], b[key])


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.3g}" if a and b else "-"


def _dynet(panel: Panel, row: Row) -> float | None:
    """Examples a second that DyNet was recorded with, in training of a net of this size."""
    if panel.passed not in ("training", "end_to_end"):
        return None
    same = row["hidden"] == row["embedding"] == 256
    return DYNET.get((row["model"], row["batch"])) if same else None


def _recorded(panel: Panel) -> dict[str, str]:
    """DyNet's examples a second in training, packing included, by problem."""
    found = {problem: _dynet(panel, row) for (problem, _), row in panel.rows.items()}
    return {problem: _count(rate) for problem, rate in found.items() if rate is not None}


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
    note = "by XLA, without kernels of jaxsparse; the paper's: to compile and to load"
    return Table(f"{panel.title}: seconds of compilation", cells, [note])


def _kernels(panel: Panel) -> Iterator[Table]:
    """What our kernels take apart from XLA's, and a script that a program has not seen."""
    head = [
        "net and implementation",
        "kernels",
        "compiled and loaded, s",
        "loaded from the cache, ms",
        "a new script of a known form, ms",
    ]
    cells = [head]
    for (problem, name), row in panel.rows.items():
        if row.get("kernels") and row["kernel_compile_s"] is not None:
            seconds = [row["kernel_load_s"], row["new_script_s"]]
            times = [f"{1e3 * x:.1f}" for x in seconds]
            compiled = f"{row['kernel_compile_s']:.2f}"
            cells.append([f"{problem} {name}", str(row["kernels"]), compiled, *times])
    if len(cells) > 1:
        note = "one after another, apart from XLA; a new script: its first call without a later one"
        yield Table(f"{panel.title}: kernels of jaxsparse", cells, [note])


def _weight_loads(panel: Panel) -> Table:
    """Megabytes of weights for 128 inputs, counted."""
    cells = [["net", *panel.labels, KHORASANI_SOURCE]]
    for problem in panel.problems:
        rows = [panel.rows.get((problem, name)) for name in panel.labels]
        megabytes = [None if row is None else weight_megabytes(row) for row in rows]
        loads = ["-" if x is None else f"{x:,.1f}" for x in megabytes]
        batch = next(row["batch"] for row in rows if row is not None)
        cells.append([problem, *loads, KHORASANI["weight_loads"].get(batch, "-")])
    note = "counted from scripts: what scans read, of L2 cache or memory"
    return Table(f"{panel.title}: MB of weights for {INPUTS} inputs", cells, [note])


def summaries(panels: Sequence[Panel]) -> Iterator[Table]:
    """What several passes say together, suite by suite."""
    suites: dict[str, dict[str, Panel]] = {}
    for panel in panels:
        if panel.operation == "dynamic":
            suites.setdefault(panel.suite, {})[panel.passed] = panel
    for suite, own in suites.items():
        yield from _from_the_host(suite, own)
    if "breakdown" in suites:
        yield from _parts_of_a_step(suites["breakdown"])


def _from_the_host(suite: str, own: dict[str, Panel]) -> Iterator[Table]:
    """Training end to end, and the packer alone, beside what the device needs."""
    if "training" not in own:
        return
    device = own["training"]
    unit = next(iter(device.rows.values()))["unit"]
    head = ["net and implementation", "device", "end to end", "of the device's", "packer"]
    cells = [[*head, "times the device's"]]
    for key, row in device.rows.items():
        others = (own[p].rows.get(key) if p in own else None for p in ("end_to_end", "pack"))
        rates = [per_second(r) if r and r["us"] else None for r in (row, *others)]
        if rates[0] is None or rates[1:] == [None, None]:
            continue
        whole, packed = (["-" if x is None else _count(x), _ratio(x, rates[0])] for x in rates[1:])
        cells.append([" ".join(key), _count(rates[0]), *whole, *packed])
    if len(cells) > 1:
        yield Table(f"dynamic, {suite}: {unit} a second of training, from graphs", cells, [])


def _parts_of_a_step(own: dict[str, Panel]) -> Iterator[Table]:
    """Microseconds an input of each part of a step."""
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
