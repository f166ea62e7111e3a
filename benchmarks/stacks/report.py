"""Tables of stacks: milliseconds by way, and every implementation by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.panels import Panel, Table, label
from benchmarks.recurrent.report import FAILURES, fastest, ratios, ways
from benchmarks.run import Row

OURS = ("jaxsparse", "jaxsparse, layer by layer")
"""Ways of jaxsparse: of those that were measured the first is compared with all others."""

_FIRST_RUNG = "ladder-naive"


def cell_us(row: Row) -> float:
    """Microseconds for a step of a layer and direction."""
    return float(row["us"] / (row["length"] * row["layers"] * row["directions"]))


def teraflops(row: Row) -> float:
    """Multiplications and additions of all products, 10^12 a second."""
    return float(row["operations"] / row["us"] / 1e6)


def tables(panel: Panel) -> Iterator[Table]:
    """The fastest of each way, and all of them with what a cell takes."""
    shown = ways(panel)
    cells = [["stack", *shown]]
    for problem in panel.problems:
        best = [fastest(panel, problem, way) for way in shown]
        cells.append([problem, *("-" if row is None else f"{row['us'] / 1e3:.3g}" for row in best)])
    ours = next((way for way in OURS if way in shown), None)
    compared = [] if ours is None else ratios(panel, ours, "stack")
    notes = [*compared, *_weak_scaling(panel)]
    yield Table(f"{panel.title}: milliseconds, the fastest of each way", cells, notes)
    for problem in panel.problems:
        rows = [row for (p, _), row in panel.rows.items() if p == problem]
        yield _whole(f"{panel.title}: {problem}", rows)


def _whole(title: str, rows: Sequence[Row]) -> Table:
    """Every implementation; beside a ladder, how many times as fast as its first rung."""
    naive = {row["dtype"]: row["us"] for row in rows if row["implementation"] == _FIRST_RUNG}
    head = ["implementation", "ms", "us a cell", "TFLOP/s", "GPU busy, ms", "memory, MB"]
    cells = [head + (["over naive"] if naive else [])]
    for row in rows:
        line = [label(row), *_figures(row)]
        if naive:
            base = naive.get(row["dtype"])
            line.append(f"{base / row['us']:.3g}x" if base and row["us"] else "-")
        cells.append(line)
    return Table(title, cells, [f"{label(row)}: {row['plan']}" for row in rows if row["plan"]])


def _figures(row: Row) -> list[str]:
    if row["us"] is None:
        kind = row["error"].partition(":")[0]
        return [FAILURES.get(kind, "failed"), *["-"] * 4]
    busy, peak = row["device_us"], row["peak_bytes"]
    return [
        f"{row['us'] / 1e3:.3f}",
        f"{cell_us(row):.3g}",
        f"{teraflops(row):.3g}",
        "-" if busy is None else f"{busy / 1e3:.3f}",
        "-" if peak is None else f"{peak / 1e6:,.0f}",
    ]


def _weak_scaling(panel: Panel) -> Iterator[str]:
    """How much longer several devices take for as many times the batch of one."""
    rows = [row for row in panel.rows.values() if row["us"] is not None]
    alike = ("cell", "layers", "hidden", "length", "skip", "norm", "state_dtype", "dtype")
    for many in (row for row in rows if row["implementation"] == "jaxsparse-sharded"):
        for one in (row for row in rows if row["implementation"] == "jaxsparse"):
            same = all(one[key] == many[key] for key in alike)
            if same and one["batch"] * many["devices"] == many["batch"]:
                yield (
                    f"{many['problem']} on {many['devices']} devices: "
                    f"{100 * one['us'] / many['us']:.1f} % of {many['devices']} times the "
                    f"throughput of one with {one['problem']}"
                )
