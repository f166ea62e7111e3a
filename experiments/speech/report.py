"""What the runs of each model come to, and the table of it."""

from __future__ import annotations

from statistics import mean
from typing import Any

# Table 1 of the paper: word error rates in %, of models with skips over so many layers.
PAPER = {
    "48": 100.0, "48:1": 38.77, "48:2": 33.28, "48:3": 30.32, "48:4": 29.40, "48:5": 29.82,
    "48:6": 30.04, "48:7": 29.87, "48:8": 27.44, "8:4": 35.69, "24:4": 31.32,
}  # fmt: skip
HEADINGS = ("model", "layers", "skip", "CER %", "of seeds", "WER %", "of seeds", "paper's WER %")


def summaries(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model, in the order of the first seed, its runs and the means of their errors."""
    names = list(dict.fromkeys(result["name"] for result in results))
    rows = []
    for name in names:
        runs = [result for result in results if result["name"] == name]
        means = {rate: mean(run[rate] for run in runs) for rate in ("cer", "wer")}
        shared = {key: runs[0][key] for key in ("name", "layers", "skip")}
        rows.append({**shared, **means, "runs": runs})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Mean error rates of each model, and the least and the largest of its seeds."""
    lines = [list(HEADINGS)]
    for row in rows:
        paper = PAPER.get(row["name"])
        lines.append(
            [
                row["name"] + "*" * any(run["diverged"] for run in row["runs"]),
                str(row["layers"]),
                str(row["skip"] or "none"),
                *_rate(row, "cer"),
                *_rate(row, "wer"),
                "-" if paper is None else f"{paper:.2f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join(
        "  ".join([x[0].ljust(widths[0]), *map(str.rjust, x[1:], widths[1:])]) for x in lines
    )
    if any("*" in line[0] for line in lines):
        text += "\n* the loss stopped being finite with some seed, which counts as 100 %"
    return text


def _rate(row: dict[str, Any], name: str) -> list[str]:
    values = [100 * run[name] for run in row["runs"]]
    spread = "-" if len(values) == 1 else f"{min(values):.1f} to {max(values):.1f}"
    return [f"{100 * row[name]:.1f}", spread]
