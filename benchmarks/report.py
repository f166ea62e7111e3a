"""Results as tables of text or Markdown: figures, and summaries over problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.comparison import Comparison
from benchmarks.decode import report as decode
from benchmarks.dynamic import report as dynamic
from benchmarks.masks import report as masks
from benchmarks.panels import OURS, Panel, Table, geometric_mean, panels, teraflops
from benchmarks.published import SOURCE, over_cusparse, without_technique
from benchmarks.recurrent import report as recurrent
from benchmarks.run import Result, Row
from benchmarks.stacks import report as stacks


def _figure(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["us"] is None:
        return "wrong" if str(row.get("error")).startswith("WrongResult") else "failed"
    us = row["us"]
    return f"{us:,.0f}" if us >= 99.5 else f"{us:.3g}"


def _grouped(panel: Panel) -> dict[str, Sequence[str]]:
    """Groups of problems to summarise, and all of them, which have no name."""
    groups = panel.groups()
    return {**(groups if len(groups) > 1 else {}), "": panel.problems}


def _speedups(panel: Panel) -> Iterator[Table]:
    """How many times as fast our own are as others; by groups, too, but not of forced kernels."""
    cells = [["", "geometric mean", "least", "most", "faster on", "TFLOP/s at most"]]
    ours = [label for label in panel.labels if label.split()[0] == OURS]
    for label, peer in itertools.product(ours, (p for p in panel.labels if p not in ours)):
        groups = {"": panel.problems} if peer.startswith(f"{OURS}[") else _grouped(panel)
        for group, problems in groups.items():
            ratios = panel.speedups(label, peer, problems)
            mean = geometric_mean(ratios)
            if mean is None:
                continue
            rates = [panel.rows[p, label] for p in problems if (p, label) in panel.rows]
            most = max((rate for rate in map(teraflops, rates) if rate), default=None)
            cells.append(
                [
                    f"{label} over {peer}" + (f", {group}" if group else ""),
                    *(f"{ratio:.2f}" for ratio in (mean, min(ratios), max(ratios))),
                    f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}",
                    "-" if most is None else f"{most:.3g}",
                ]
            )
    if len(cells) > 1:
        yield Table(f"{panel.title}: times as fast", cells + list(_published_speedups(panel)), [])


def _published_speedups(panel: Panel) -> Iterator[list[str]]:
    """A paper's, where our own were measured in the same dtype."""
    for label in panel.labels:
        speedup = over_cusparse(panel, label)
        if speedup is not None:
            mean, most, rate = ("-" if x is None else f"{x:g}" for x in speedup)
            yield [f"{label.replace(OURS, SOURCE)}, over cuSPARSE", mean, "-", most, "-", rate]


def _ablations(panel: Panel) -> Iterator[Table]:
    """What is left of a kernel's throughput without one technique, geometric means.

    Below, what a paper says of the same technique.
    """
    for base, without in panel.ablations().items():
        groups = _grouped(panel)
        cells = [["", *(group or "all" for group in groups)]]
        for label in without:
            means = [geometric_mean(panel.speedups(label, base, p)) for p in groups.values()]
            cells.append([label, *("-" if m is None else f"{100 * m:.1f} %" for m in means)])
            theirs = without_technique(panel, label)
            if theirs.keys() & groups.keys():
                percent = (theirs.get(group) for group in groups)
                cells.append([SOURCE, *("-" if p is None else f"{p} %" for p in percent)])
        yield Table(f"{panel.title}: throughput, of that of {base}", cells, [])


def _tables(panel: Panel) -> Iterator[Table]:
    """Problems by implementations, and summaries."""
    timers = dict.fromkeys(row.get("timer") for row in panel.rows.values() if row["us"])
    clock = " and ".join(f"{timer} time" for timer in timers if timer) or "nothing measured"
    cells = [["problem", *panel.labels]]
    cells += [
        [problem, *(_figure(panel.rows.get((problem, label))) for label in panel.labels)]
        for problem in panel.problems
    ]
    yield Table(f"{panel.title}: microseconds, {clock}", cells, [])
    yield from _speedups(panel)
    yield from _ablations(panel)
    if panel.suite in MORE_TABLES:
        yield from MORE_TABLES[panel.suite](panel)


# operation -> its tables, where they are others
TABLES: dict[str, Callable[[Panel], Iterator[Table]]] = {
    "recurrent": recurrent.tables,
    "recurrent_stack": stacks.tables,
    "dynamic": dynamic.tables,
}

# suite -> tables that it has besides
MORE_TABLES: dict[str, Callable[[Panel], Iterator[Table]]] = {
    "masks": masks.tables,
    "decode": decode.tables,
}


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


def _shown(table: Table, markdown: bool) -> Iterator[str]:
    yield from ("", f"{'### ' if markdown else ''}{table.title}")
    if table.cells:
        yield from ("", *_lines(table.cells, markdown))
    if table.notes:
        yield from ("", *(f"{'- ' if markdown else ''}{note}" for note in table.notes))


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
    every = panels(rows)
    for panel in every:
        for made in TABLES.get(panel.operation, _tables)(panel):
            lines += _shown(made, markdown)
    for made in dynamic.summaries(every):
        lines += _shown(made, markdown)
    failed = [
        f"{row['problem']} {row['implementation']} {row['pass']}: {row['error']}"
        for row in rows
        if row.get("error")
    ]
    left_out = [f"{name}: {why}" for name, why in result.get("skipped", {}).items()]
    for title, items in ("failed", failed), ("left out", left_out):
        lines += ["", f"{title}:", *(f"{bullet or '  '}{item}" for item in items)] if items else []
    return "\n".join(lines)


def comparison(compared: Comparison, *, markdown: bool = False) -> str:
    """What became slower and faster."""
    return "\n".join(line for made in compared.tables() for line in _shown(made, markdown))
