"""From what was asked for of attention to what will be measured, or to why it can't be."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import selection
from benchmarks.choices import Asked, UsageError, about, candidates, matching, one_of
from benchmarks.decode import problems as decode_problems
from benchmarks.decode import selection as decode
from benchmarks.implementations import PASSES
from benchmarks.masks.cases import MaskCase
from benchmarks.masks.implementations import IMPLEMENTATIONS, Implementation, forced, variants
from benchmarks.masks.problems import ABOUT, SHORTEST, SUITE, Problem, problems
from benchmarks.problems import suites_of

DTYPE = {"cpu": "float32"}
"""By platform, where none is asked for; on others 16 bits, which alone peers take."""


@dataclass(frozen=True)
class MaskSelection:
    """What will be measured, in this order: masks, on each the candidates, of each the passes.

    Args:
        problems: the masks.
        candidates: implementations, each with a dtype.
        passes: "forward", "gradient" or both.
        skipped: names of implementations that are left out, and why.
    """

    problems: tuple[Problem, ...]
    candidates: tuple[tuple[Implementation, str], ...]
    passes: tuple[str, ...]
    skipped: dict[str, str]
    seconds: float = 0.3

    def cases(self, problem: Problem) -> list[MaskCase]:
        """The candidates that take a mask."""
        return [
            MaskCase(problem, i, dtype, self.passes)
            for i, dtype in self.candidates
            if i.takes(problem)
        ]


def select(
    asked: Asked, platform: str
) -> MaskSelection | decode.DecodeSelection | selection.OperationSelection:
    """What the options stand for: the suite of masks, that of decoding, or others of attention.

    Raises:
        UsageError: for a name that there isn't, and for options that a suite has no use for.
    """
    own = (SUITE, decode_problems.SUITE)
    chosen_suites = asked.suites or ()
    one_of("--suite", chosen_suites, [*suites_of(asked.operation), *own], asked.operation)
    apart = [name for name in own if name in chosen_suites]
    if not apart:
        return selection.select(asked, platform)
    if len(chosen_suites) > 1:
        raise UsageError("--suite", f"{apart[0]!r} has implementations of its own: give it alone")
    if apart == [decode_problems.SUITE]:
        return decode.select(asked, platform)
    if asked.sparsity is not None:
        raise UsageError("--sparsity", f"the suite {SUITE!r} has masks of its own")
    if min(asked.lengths or (SHORTEST,)) < SHORTEST:
        raise UsageError(
            "--length", f"must be at least {SHORTEST}, got {list(asked.lengths or ())}"
        )
    dtype = DTYPE.get(platform, "bfloat16")
    chosen, skipped = candidates(asked, IMPLEMENTATIONS, variants(), forced, dtype)
    return MaskSelection(
        tuple(matching(list(problems(platform, asked.lengths, asked.n)), asked.names)),
        chosen,
        asked.passes or PASSES,
        skipped,
    )


def listing(operation: str) -> str:
    """Suites, implementations and variants, with what is left out and why."""
    lines = [selection.listing(operation), "", f"  {SUITE:<16}{ABOUT}; its implementations"]
    lines += [*about(IMPLEMENTATIONS, 20), *decode.listing()]
    suites = f"{SUITE} and {decode_problems.SUITE}"
    lines += ["", f"variants of {suites}: {', '.join(variants()) or 'none'}"]
    return "\n".join(lines)
