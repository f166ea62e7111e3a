"""From what was asked for of depthwise layers to what will be measured, or to why it can't be."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.choices import Asked, UsageError, about, candidates, matching, one_of
from benchmarks.depthwise.cases import PASSES, DepthwiseCase
from benchmarks.depthwise.implementations import IMPLEMENTATIONS, Implementation, forced, variants
from benchmarks.depthwise.problems import ABOUT, SUITE, Problem, problems
from benchmarks.implementations import PASSES as USUAL_PASSES

__all__ = ["PASSES", "listing", "select"]


@dataclass(frozen=True)
class DepthwiseSelection:
    """What will be measured, in this order: layers, on each the candidates, of each the passes.

    Args:
        problems: the layers.
        candidates: implementations, each with a dtype.
        passes: of `PASSES`.
        skipped: names of implementations that are left out, and why.
    """

    problems: tuple[Problem, ...]
    candidates: tuple[tuple[Implementation, str], ...]
    passes: tuple[str, ...]
    skipped: dict[str, str]
    seconds: float = 0.2

    def cases(self, problem: Problem) -> list[DepthwiseCase]:
        """The candidates on a layer."""
        return [DepthwiseCase(problem, i, dtype, self.passes) for i, dtype in self.candidates]


def select(asked: Asked, platform: str) -> DepthwiseSelection:
    """What the options stand for.

    Raises:
        UsageError: for a name that there isn't, and for options that there is no use for.
    """
    one_of("--suite", asked.suites or (), [SUITE], asked.operation)
    for option, given in (
        ("--n", asked.n),
        ("--sparsity", asked.sparsity),
        ("--length", asked.lengths),
    ):
        if given is not None:
            raise UsageError(option, f"the suite {SUITE!r} has sizes of its own")
    chosen, skipped = candidates(asked, IMPLEMENTATIONS, variants(), forced, "float32")
    layers = tuple(matching(list(problems(platform)), asked.names))
    return DepthwiseSelection(layers, chosen, asked.passes or USUAL_PASSES, skipped)


def listing(operation: str) -> str:
    """The suite, implementations and variants."""
    lines = [f"suites of {operation}", f"  {SUITE:<16}{ABOUT}", "", "implementations"]
    lines += [*about(IMPLEMENTATIONS, 16), "", f"variants: {', '.join(variants()) or 'none'}"]
    return "\n".join(lines)
