"""Results of parts of a measurement, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.panels import panels
from benchmarks.run import SCHEMA, Result, Row


def merge(parts: Sequence[Result]) -> Result:
    """The figures of results that were measured alike, and why others were left out.

    Alike means on one kind of machine, with the same versions and at one commit: environments say
    the same of device, driver, processor, cores and all else but the date.

    Raises:
        ValueError: if environments differ, naming in what, or two parts have the same figure.
    """
    rows = [row for part in parts for row in part["results"]]
    panels(rows)  # Raises the ValueError where two parts have the same figure.
    return {
        "schema": SCHEMA,
        "environment": _environment([part.get("environment", {}) for part in parts]),
        "results": rows,
        "skipped": _skipped(parts, rows),
    }


class _Place(NamedTuple):
    """Where tables have a figure, of each pass."""

    suite: str
    operation: str
    problem: str
    implementation: str


def _places(rows: Sequence[Row]) -> set[_Place]:
    return {_Place(*(row[name] for name in _Place._fields)) for row in rows}


def _skipped(parts: Sequence[Result], rows: Sequence[Row]) -> dict[str, str]:
    """Why implementations and problems were left out, by name; several reasons one after another.

    A reason goes if other parts fill the gap: the implementation was measured on all problems of
    the part that left it out, or the problem with all its implementations.
    """
    measured = _places(rows)
    reasons: dict[str, dict[str, None]] = {}  # Each once, in order.
    for part in parts:
        own = _places(part["results"]) or measured
        for name, why in part.get("skipped", {}).items():
            gaps = (
                {place._replace(implementation=name) for place in own},
                {place._replace(problem=name) for place in own},
            )
            if not any(gap <= measured for gap in gaps):
                reasons.setdefault(name, {})[why] = None
    return {name: "; ".join(each) for name, each in reasons.items()}


def _environment(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all have in common; a library that a part did not import has no version there."""
    common: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in environments for name in each):
        known = [each[name] for each in environments if each.get(name) is not None]
        if name == "date":
            known = [max(known)] if known else []
        values = list(dict.fromkeys(known))
        if len(values) > 1:
            raise ValueError(f"results of one {name} go together, got {values[0]} and {values[1]}")
        common[name] = values[0] if values else None
    return common
