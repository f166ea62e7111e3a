"""Results as tables of text or Markdown, and how many times as fast jaxsparse is as its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jaxsparse.bench.panels import Panel, Table, panels
from jaxsparse.bench.recurrent import report as recurrent
from jaxsparse.bench.run import Result, Row

OURS = "jaxsparse"


def _figure(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["us"] is None:
        return "wrong" if str(row.get("error")).startswith("WrongResult") else "failed"
    us = row["us"]
    return f"{us:,.0f}" if us >= 99.5 else f"{us:.3g}"


def _speedups(panel: Panel) -> Iterator[str]:
    ours = [label for label in panel.labels if label.split()[0] == OURS]
    for label in ours:
        for peer in panel.labels:
            speedup = None if peer in ours else panel.speedup(label, peer)
            if speedup is not None:
                many = "problem" if speedup[1] == 1 else "problems"
                yield f"{label}: {speedup[0]:.2f} times as fast as {peer} ({speedup[1]} {many})"


def _tables(panel: Panel) -> Iterator[Table]:
    """Problems by implementations."""
    timers = dict.fromkeys(row.get("timer") for row in panel.rows.values() if row["us"])
    clock = " and ".join(f"{timer} time" for timer in timers if timer) or "nothing measured"
    cells = [["problem", *panel.labels]]
    cells += [
        [problem, *(_figure(panel.rows.get((problem, label))) for label in panel.labels)]
        for problem in panel.problems
    ]
    yield Table(f"{panel.title}: microseconds, {clock}", cells, list(_speedups(panel)))


# operation -> its tables, where they are others
TABLES: dict[str, Callable[[Panel], Iterator[Table]]] = {"recurrent": recurrent.tables}


def _lines(cells: list[list[str]], markdown: bool) -> Iterator[str]:
    """A table whose first row is its head: the first column to the left, others to the right."""
    if markdown:
        head, *body = (f"| {' | '.join(row)} |" for row in cells)
        yield from (head, "|---" + "|---:" * (len(cells[0]) - 1) + "|", *body)
        return
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        yield first.ljust(widths[0]) + "".join(
            "  " + cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)
        )


def _machine(environment: dict[str, Any]) -> str:
    left_out = ("platform", "machine", "nvrtc", "jaxlib", "numpy")
    return ", ".join(
        f"{name} {value}"
        for name, value in environment.items()
        if value is not None and name not in left_out
    )


def table(result: Result, *, markdown: bool = False) -> str:
    """Figures by problem and implementation, speedups, failures, and what they hold for."""
    rows = result["results"]
    bullet = "- " if markdown else ""
    lines = [_machine(result.get("environment", {}))]
    for panel in panels(rows):
        for made in TABLES.get(panel.operation, _tables)(panel):
            lines += ["", f"{'### ' if markdown else ''}{made.title}", ""]
            lines += _lines(made.cells, markdown)
            lines += ["", *(f"{bullet}{note}" for note in made.notes)] if made.notes else []
    failed = [
        f"{row['problem']} {row['implementation']} {row['pass']}: {row['error']}"
        for row in rows
        if row.get("error")
    ]
    left_out = [f"{name}: {why}" for name, why in result.get("skipped", {}).items()]
    for title, items in ("failed", failed), ("left out", left_out):
        lines += ["", f"{title}:", *(f"{bullet or '  '}{item}" for item in items)] if items else []
    return "\n".join(lines)
