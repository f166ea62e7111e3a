"""Tables of recurrent scans: microseconds a step by way, and every implementation by itself."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.panels import OURS, Panel, Table, label
from benchmarks.run import Row

# kind of error -> what stands for a figure
FAILURES = {"WrongResult": "wrong", "CudnnError": "refused"}


def step_us(row: Row) -> float:
    """Microseconds of a step."""
    return float(row["us"] / row["length"])


def ways(panel: Panel) -> list[str]:
    """In the order they were measured."""
    return list(dict.fromkeys(row["way"] for row in panel.rows.values()))


def fastest(panel: Panel, problem: str, way: str) -> Row | None:
    """Of the implementations that are one way; None if none was measured."""
    rows = [
        row
        for (name, _), row in panel.rows.items()
        if name == problem and row["way"] == way and row["us"]
    ]
    return min(rows, key=lambda row: row["us"], default=None)


def tables(panel: Panel) -> Iterator[Table]:
    """The fastest of each way, all of them, and the plans of our own."""
    shown = ways(panel)
    cells = [["layer", "exchange floor", *shown]]
    for problem in panel.problems:
        floor = next(row["floor_us"] for (p, _), row in panel.rows.items() if p == problem)
        best = [fastest(panel, problem, way) for way in shown]
        times = ["-" if row is None else f"{step_us(row):.3g}" for row in best]
        cells.append([problem, "-" if floor is None else f"{floor:.2f}", *times])
    title = f"{panel.title}: microseconds a step, the fastest of each way"
    yield Table(title, cells, list(ratios(panel, OURS, "layer")))
    head = ["implementation", "ms", "us a step", "GPU busy, ms"]
    for problem in panel.problems:
        rows = [row for (p, _), row in panel.rows.items() if p == problem]
        yield Table(
            f"{panel.title}: {problem}",
            [head, *([label(row), *_figures(row)] for row in rows)],
            [f"{label(row)}: {row['plan']}" for row in rows if row["plan"]],
        )


def _figures(row: Row) -> list[str]:
    if row["us"] is None:
        kind = row["error"].partition(":")[0]
        return [FAILURES.get(kind, "failed"), "-", "-"]
    busy = row["device_us"]
    return [
        f"{row['us'] / 1e3:.3f}",
        f"{step_us(row):.3g}",
        "-" if busy is None else f"{busy / 1e3:.3f}",
    ]


def ratios(panel: Panel, ours: str, kind: str) -> Iterator[str]:
    """How many times as fast one way is as each other, the fastest of each, on layers or stacks."""
    for way in ways(panel):
        pairs = [(fastest(panel, p, ours), fastest(panel, p, way)) for p in panel.problems]
        found = [theirs["us"] / own["us"] for own, theirs in pairs if own and theirs]
        if found and way != ours:
            yield (
                f"{ours}: {min(found):.2f} to {max(found):.2f} times as fast as {way} "
                f"({len(found)} {kind}{'s' * (len(found) > 1)})"
            )
