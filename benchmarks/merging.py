"""Results of parts of a measurement, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.panels import panels
from benchmarks.run import SCHEMA, Result


def merge(parts: Sequence[Result]) -> Result:
    """The figures of results that were measured alike: on one kind of device, at one commit.

    Raises:
        ValueError: if environments differ, naming in what, or two parts have the same figure.
    """
    rows = [row for part in parts for row in part["results"]]
    panels(rows)
    measured = {row[key] for row in rows for key in ("implementation", "problem")}
    skipped = {name: why for part in parts for name, why in part.get("skipped", {}).items()}
    return {
        "schema": SCHEMA,
        "environment": _environment([part.get("environment", {}) for part in parts]),
        "results": rows,
        "skipped": {name: why for name, why in skipped.items() if name not in measured},
    }


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
