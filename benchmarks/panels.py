"""Results read from files, and their figures put in order: problems by implementations."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.operations import MEASURED
from benchmarks.run import SCHEMA, Result, Row

OURS = "jaxsparse"
"""The implementation that is measured beside its peers."""

_RENAMED = {
    "jaxsparse[kept_rows]": "jaxsparse[rows_in_registers]",
    "jaxsparse[tensor_cores_unshared]": "jaxsparse[tensor_cores_unsplit]",
    "jaxsparse[tensor_cores_shared]": "jaxsparse[tensor_cores_split_k]",
}
"""Implementations that older results have under another name."""

_NEEDED = ("suite", "problem", "operation", "implementation", "dtype", "pass", "us", "sparsity")


def read_result(path: pathlib.Path) -> Result:
    """A result from a file, with the names that implementations have today.

    Raises:
        ValueError: if it is not one of this schema; names the file.
    """
    try:
        result: Result = json.loads(path.read_text())
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
    for row in rows:
        row["implementation"] = _RENAMED.get(row["implementation"], row["implementation"])
    return result


class Table(NamedTuple):
    """A table to show; the first row of cells is its head. Notes stand below."""

    title: str
    cells: list[list[str]]
    notes: list[str]


@dataclass(frozen=True)
class Panel:
    """The figures of one suite, operation and pass: problems by implementations.

    Args:
        title: names the three.
        suite: the suite's name.
        operation: the operation's name.
        problems: in the order they were measured.
        labels: implementations with their dtypes.
        rows: by (problem, label).
    """

    title: str
    suite: str
    operation: str
    passed: str
    problems: tuple[str, ...]
    labels: tuple[str, ...]
    rows: dict[tuple[str, str], Row]

    def us(self, problem: str, label: str) -> float | None:
        """The figure, None if there is none."""
        row = self.rows.get((problem, label))
        return None if row is None else row["us"]

    def speedups(self, label: str, peer: str, problems: Sequence[str] | None = None) -> list[float]:
        """How many times as fast as a peer, on each problem that both have a figure of."""
        pairs = [
            (self.us(p, label), self.us(p, peer))
            for p in (self.problems if problems is None else problems)
        ]
        return [theirs / ours for ours, theirs in pairs if ours and theirs]

    def groups(self) -> dict[str, list[str]]:
        """The problems by the first folder of their names, "" where there is none."""
        groups: dict[str, list[str]] = {}
        for problem in self.problems:
            groups.setdefault(problem.rpartition("/")[0].partition("/")[0], []).append(problem)
        return groups

    def ablations(self) -> dict[str, list[str]]:
        """Kernels that were forced, and those named after each, which lack a technique of it."""
        forced = {label: known for label in self.labels if (known := forced_variant(label))}
        ablations: dict[str, list[str]] = {}
        for label, (variant, dtype) in forced.items():
            bases = [
                base
                for base, (name, other) in forced.items()
                if other == dtype and variant.startswith(f"{name}_")
            ]
            if bases:
                ablations.setdefault(max(bases, key=len), []).append(label)
        return ablations


_FORCED = re.compile(r".*\[(\w+)\] ?(.*)")


def forced_variant(label: str) -> tuple[str, str] | None:
    """The kernel that was forced and the dtype, which is "" where it is usual; None if none was."""
    match = _FORCED.fullmatch(label)
    return None if match is None else (match[1], match[2])


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def teraflops(row: Row) -> float | None:
    """Multiplications and additions of stored entries, 10^12 a second; None if nothing is known."""
    products = MEASURED[row["operation"]].products if row["operation"] in MEASURED else 0
    if row["pass"] != "forward":
        products *= 3
    work = 2 * products * (row.get("nnz") or 0) * (row.get("n") or 0)
    return work / row["us"] / 1e6 if work and row["us"] else None


def label(row: Row) -> str:
    """The implementation, with its dtype unless that is usual there or part of the name."""
    name, usual = str(row["implementation"]), row.get("state_dtype", "float32")
    return name if row["dtype"] == usual or name.endswith("bf16") else f"{name} {row['dtype']}"


def panels(rows: Sequence[Row]) -> list[Panel]:
    """One for each suite, operation and pass, in the order they were measured.

    Raises:
        ValueError: if there are two figures of the same, as where results overlap.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    seen = set()
    for row in rows:
        group = (row["suite"], row["operation"], row["pass"])
        key = (*group, row["problem"], label(row))
        if key in seen:
            raise ValueError(
                f"two figures of {label(row)} on {row['suite']} {row['problem']}, "
                f"{row['operation']} {row['pass']}: results that overlap don't go together"
            )
        seen.add(key)
        groups.setdefault(group, []).append(row)
    return [
        Panel(
            title=f"{operation}, {suite}, {passed}",
            suite=suite,
            operation=operation,
            passed=passed,
            problems=tuple(dict.fromkeys(row["problem"] for row in group)),
            labels=tuple(dict.fromkeys(label(row) for row in group)),
            rows={(row["problem"], label(row)): row for row in group},
        )
        for (suite, operation, passed), group in groups.items()
    ]
