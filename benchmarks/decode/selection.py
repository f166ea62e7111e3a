"""From what was asked for of decoding to what will be measured, or to why it can't be."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.choices import Asked, UsageError, about, candidates, matching
from benchmarks.decode.cases import DecodeCase
from benchmarks.decode.implementations import IMPLEMENTATIONS, Implementation, forced, variants
from benchmarks.decode.problems import ABOUT, SUITE, Problem, problems

DTYPE = {"cpu": "float32"}
"""By platform, where none is asked for; on others 16 bits, as caches have."""


@dataclass(frozen=True)
class DecodeSelection:
    """What will be measured, in this order: problems, on each the candidates.

    Args:
        problems: the caches.
        candidates: implementations, each with a dtype.
        skipped: names of implementations that are left out, and why.
    """

    problems: tuple[Problem, ...]
    candidates: tuple[tuple[Implementation, str], ...]
    skipped: dict[str, str]
    seconds: float = 0.3

    def cases(self, problem: Problem) -> list[DecodeCase]:
        """The candidates that take a problem."""
        return [
            DecodeCase(problem, i, dtype)
            for i, dtype in self.candidates
            if i.takes_ragged or not problem.ragged
        ]


def select(asked: Asked, platform: str) -> DecodeSelection:
    """What the options stand for.

    Raises:
        UsageError: for a name that there isn't, and for options that there is no use for.
    """
    if asked.sparsity is not None:
        raise UsageError("--sparsity", f"the suite {SUITE!r} has lengths of its own")
    if "gradient" in (asked.passes or ()):
        raise UsageError("--pass", f"the suite {SUITE!r} has only forward passes")
    dtype = DTYPE.get(platform, "bfloat16")
    chosen, skipped = candidates(asked, IMPLEMENTATIONS, variants(), forced, dtype)
    return DecodeSelection(
        tuple(matching(list(problems(platform, asked.lengths, asked.n)), asked.names)),
        chosen,
        skipped,
    )


def listing() -> list[str]:
    """The suite and its implementations, with what is left out and why."""
    return ["", f"  {SUITE:<16}{ABOUT}; its implementations", *about(IMPLEMENTATIONS, 20)]
