"""Results as tables of text or Markdown, and how many times as fast jaxsparse is as its peers."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsparse.bench.run import SCHEMA, Result, Row

OURS = "jaxsparse"

_NEEDED = ("suite", "problem", "operation", "implementation", "dtype", "pass", "us", "sparsity")


def read_result(path: pathlib.Path) -> Result:
    """A result from a file.

    Raises:
        ValueError: if it is not one of this schema; names the file.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable result: {error}") from error
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: not a result of schema {SCHEMA}, got schema {schema!r}")
    rows = result.get("results")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and set(_NEEDED) <= set(row) for row in rows
    ):
        raise ValueError(f"{path}: every entry of results must have {', '.join(_NEEDED)}")
    return result


@dataclass(frozen=True)
class Panel:
    """The figures of one suite, operation and pass: problems by implementations.

    Args:
        title: names the three.
        problems: in the order they were measured.
        labels: implementations with their dtypes.
        rows: by (problem, label).
    """

    title: str
    passed: str
    problems: tuple[str, ...]
    labels: tuple[str, ...]
    rows: dict[tuple[str, str], Row]

    def us(self, problem: str, label: str) -> float | None:
        """The figure, None if there is none."""
        row = self.rows.get((problem, label))
        return None if row is None else row["us"]

    def speedup(self, label: str, peer: str) -> tuple[float, int] | None:
        """How many times as fast as a peer: the geometric mean, and over how many problems."""
        pairs = [(self.us(p, label), self.us(p, peer)) for p in self.problems]
        logs = [math.log(theirs / ours) for ours, theirs in pairs if ours and theirs]
        return (math.exp(sum(logs) / len(logs)), len(logs)) if logs else None


def _label(row: Row) -> str:
    """The implementation, with its dtype unless that is float32 or part of the name."""
    name = str(row["implementation"])
    return name if row["dtype"] == "float32" or name.endswith("bf16") else f"{name} {row['dtype']}"


def panels(rows: Sequence[Row]) -> list[Panel]:
    """One for each suite, operation and pass, in the order they were measured.

    Raises:
        ValueError: if there are two figures of the same, as where results overlap.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    seen = set()
    for row in rows:
        group = (row["suite"], row["operation"], row["pass"])
        key = (*group, row["problem"], _label(row))
        if key in seen:
            raise ValueError(
                f"two figures of {_label(row)} on {row['suite']} {row['problem']}, "
                f"{row['operation']} {row['pass']}: results that overlap don't go together"
            )
        seen.add(key)
        groups.setdefault(group, []).append(row)
    return [
        Panel(
            title=f"{operation}, {suite}, {passed}",
            passed=passed,
            problems=tuple(dict.fromkeys(row["problem"] for row in group)),
            labels=tuple(dict.fromkeys(_label(row) for row in group)),
            rows={(row["problem"], _label(row)): row for row in group},
        )
        for (suite, operation, passed), group in groups.items()
    ]


def _figure(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["us"] is None:
        return "wrong" if str(row.get("error")).startswith("WrongResult") else "failed"
    us = row["us"]
    return f"{us:,.0f}" if us >= 99.5 else f"{us:.3g}"


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


def _speedups(panel: Panel) -> Iterator[str]:
    ours = [label for label in panel.labels if label.split()[0] == OURS]
    for label in ours:
        for peer in panel.labels:
            speedup = None if peer in ours else panel.speedup(label, peer)
            if speedup is not None:
                many = "problem" if speedup[1] == 1 else "problems"
                yield f"{label}: {speedup[0]:.2f} times as fast as {peer} ({speedup[1]} {many})"


def _machine(environment: dict[str, Any]) -> str:
    left_out = ("platform", "machine", "nvrtc", "jaxlib", "numpy")
    return ", ".join(
        f"{name} {value}"
        for name, value in environment.items()
        if value is not None and name not in left_out
    )


def table(result: Result, *, markdown: bool = False) -> str:
    """Microseconds by problem and implementation, speedups, failures, and what they hold for."""
    rows = result["results"]
    bullet = "- " if markdown else ""
    lines = [_machine(result.get("environment", {}))]
    for panel in panels(rows):
        timers = dict.fromkeys(row.get("timer") for row in panel.rows.values() if row["us"])
        clock = " and ".join(f"{timer} time" for timer in timers if timer) or "nothing measured"
        cells = [["problem", *panel.labels]]
        cells += [
            [problem, *(_figure(panel.rows.get((problem, label))) for label in panel.labels)]
            for problem in panel.problems
        ]
        lines += ["", f"{'### ' if markdown else ''}{panel.title}: microseconds, {clock}", ""]
        lines += _lines(cells, markdown)
        speedups = list(_speedups(panel))
        lines += ["", *(f"{bullet}{line}" for line in speedups)] if speedups else []
    failed = [
        f"{row['problem']} {row['implementation']} {row['pass']}: {row['error']}"
        for row in rows
        if row.get("error")
    ]
    left_out = [f"{name}: {why}" for name, why in result.get("skipped", {}).items()]
    for title, items in ("failed", failed), ("left out", left_out):
        lines += ["", f"{title}:", *(f"{bullet or '  '}{item}" for item in items)] if items else []
    return "\n".join(lines)
