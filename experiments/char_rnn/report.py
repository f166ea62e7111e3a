"""The table of all models."""

from __future__ import annotations

from itertools import product
from typing import Any

from .throughput import FORMS, PROGRAMS

HEADINGS = ("model", "structure", "eff. units", "recurrent", "all weights", "bits/char")


def table(results: list[dict[str, Any]]) -> str:
    """Scores beside numbers of weights that are not 0, then tokens per second."""
    scores = [
        [
            result["name"],
            result["structure"] or "dense",
            f"{result['effective_units']:.0f}",
            f"{result['recurrent_nonzeros']:,}",
            f"{result['nonzeros']:,}",
            f"{result['bits_per_character']:.3f}",
        ]
        for result in results
    ]
    parts = [_aligned([list(HEADINGS), *scores])]
    for batch, program in product(results[0]["tokens_per_second"], PROGRAMS):
        speeds = []
        for result in results:
            measured = result["tokens_per_second"][batch][program]
            cells = (measured.get(form) for form in FORMS)
            speeds.append([result["name"], *("-" if x is None else f"{x:,.0f}" for x in cells)])
        title = f"{program}, {streams(batch)}, tokens/s"
        parts.append(_aligned([[title, *FORMS], *speeds]))
    return "\n\n".join(parts)


def streams(batch: str) -> str:
    """How many streams a batch has, in words."""
    return f"{batch} stream" if batch == "1" else f"{batch} streams"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )
