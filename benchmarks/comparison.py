"""A result against an earlier one: what became slower and what faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.panels import OURS, Table, geometric_mean, panels
from benchmarks.run import Result, Row

MARGIN = 0.05
"""By how much a figure must differ."""


class Pair(NamedTuple):
    """One figure then and now."""

    title: str  # of its panel
    problem: str
    label: str
    before: Row
    now: Row

    @property
    def is_ours(self) -> bool:
        """Whether it is a figure of jaxsparse."""
        return bool(self.now["implementation"].startswith(OURS))

    @property
    def ratio(self) -> float:
        """Time now over time before; infinite if it fails now."""
        return self.now["us"] / self.before["us"] if self.now["us"] else float("inf")

    @property
    def is_clearly_slower(self) -> bool:
        """By the margin, and by more than both vary."""
        return self.ratio > 1 + MARGIN and _is_apart(self.before, self.now)

    @property
    def is_clearly_faster(self) -> bool:
        """By the margin, and by more than both vary."""
        return self.ratio < 1 / (1 + MARGIN) and _is_apart(self.now, self.before)


def _is_apart(fast: Row, slow: Row) -> bool:
    """Whether the middle halves of the two timings don't overlap."""
    if not slow["us"]:
        return True
    (_, high), (low, _) = (row.get("us_quartiles") or [row["us"]] * 2 for row in (fast, slow))
    return bool(high < low)


@dataclass(frozen=True)
class Comparison:
    """Figures that two results share.

    Args:
        pairs: those that the earlier one has a time of.
        unshared: how many figures only one of the two has.
    """

    pairs: tuple[Pair, ...]
    unshared: int

    @property
    def ours(self) -> list[Pair]:
        """The figures of jaxsparse."""
        return [pair for pair in self.pairs if pair.is_ours]

    @property
    def slower(self) -> list[Pair]:
        """What of jaxsparse became slower, or fails now: the worst first."""
        return sorted((p for p in self.ours if p.is_clearly_slower), key=lambda p: -p.ratio)

    @property
    def faster(self) -> list[Pair]:
        """What of jaxsparse became faster: the most first."""
        return sorted((p for p in self.ours if p.is_clearly_faster), key=lambda p: p.ratio)

    def tables(self) -> Iterator[Table]:
        """What became slower and faster, and how the peers, whose code is the same, moved."""
        ours = self.ours
        peers = [pair for pair in self.pairs if not pair.is_ours]
        moved = (
            f"{name}: {mean:.3f} times the time before, the geometric mean of {len(pairs)} figures"
            for name, pairs in ((OURS, ours), ("peers", peers))
            if (mean := geometric_mean([p.ratio for p in pairs if p.now["us"]])) is not None
        )
        notes = [*moved, f"figures that only one of the two has: {self.unshared}"]
        for kind, pairs in ("slower", self.slower), ("faster", self.faster):
            title = f"{kind} than before: {len(pairs)} of {len(ours)} figures of {OURS}"
            cells = [["problem", "implementation", "before, us", "now, us", "ratio"]]
            for pair in pairs:
                now = f"{pair.now['us']:.4g}" if pair.now["us"] else "failed"
                before = f"{pair.before['us']:.4g}"
                name = f"{pair.problem} ({pair.title})"
                cells.append([name, pair.label, before, now, f"{pair.ratio:.2f}"])
            yield Table(title, cells if pairs else [], notes if kind == "slower" else [])


def compare(now: Result, before: Result) -> Comparison:
    """Puts figures of the same suite, problem, operation, pass, implementation and dtype in pairs.

    Raises:
        ValueError: if they share no figure.
    """
    old, new = ({key: row for key, row in _figures(result)} for result in (before, now))
    timed = {key for key, row in old.items() if row["us"]}
    pairs = tuple(Pair(*key, old[key], row) for key, row in new.items() if key in timed)
    if not pairs:
        raise ValueError("the two results share no figure")
    return Comparison(pairs, len(timed ^ new.keys()))


def check_device(environment: dict[str, Any], before: Result) -> None:
    """Raises ValueError if figures from here can't be held against those of an earlier result."""
    here, there = map(_device, (environment, before.get("environment", {})))
    if here != there:
        raise ValueError(f"it was measured on {there}, and can't be compared with {here}")


def _device(environment: dict[str, Any]) -> str:
    """All processors are one kind to JAX: of these the model, the cores and the instructions."""
    device = environment.get("device")
    if device != "cpu":
        return str(device)
    return "{processor}, {cores} cores, {isa}".format_map(
        {name: environment.get(name) for name in ("processor", "cores", "isa")}
    )


def _figures(result: Result) -> Iterator[tuple[tuple[str, str, str], Row]]:
    for panel in panels(result["results"]):
        for (problem, label), row in panel.rows.items():
            yield (panel.title, problem, label), row
