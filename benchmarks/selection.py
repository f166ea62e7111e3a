"""From what was asked for to what will be measured, or to why it can't be."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import OperationCase
from benchmarks.choices import Asked, UsageError, about, available, matching, named, one_of
from benchmarks.implementations import (
    PASSES,
    Implementation,
    forced,
    implementations_of,
    variants,
)
from benchmarks.operations import MEASURED
from benchmarks.problems import SUITES, Problem, Request, suites_of


@dataclass(frozen=True)
class OperationSelection:
    """What will be measured, in this order: problems, on each the candidates, of each the passes.

    Args:
        problems: with the suites' sizes.
        candidates: implementations, each with a dtype.
        passes: "forward", "gradient" or both.
        skipped: names of implementations that are left out, and why.
    """

    problems: tuple[Problem, ...]
    candidates: tuple[tuple[Implementation, str], ...]
    passes: tuple[str, ...]
    skipped: dict[str, str]
    seconds: float = 0.4

    def cases(self, problem: Problem) -> list[OperationCase]:
        """The candidates on a problem."""
        return [
            OperationCase(
                problem, i, dtype, tuple(passed for passed in self.passes if passed in i.passes)
            )
            for i, dtype in self.candidates
        ]


def select(asked: Asked, platform: str) -> OperationSelection:
    """What the options stand for.

    Raises:
        UsageError: for a name that there isn't, a size that a suite has not, and for options that
            leave nothing to measure.
    """
    problems = _problems(asked, platform)
    passes = asked.passes or PASSES
    candidates, skipped = _candidates(asked, passes)
    return OperationSelection(problems, candidates, passes, skipped)


def listing(operation: str) -> str:
    """Suites, implementations and variants of an operation, with what is left out and why."""
    lines = [f"suites of {operation}, the first by default"]
    lines += [f"  {name:<16}{SUITES[name].about}" for name in suites_of(operation)]
    lines += ["", "implementations", *about(implementations_of(operation), 16)]
    lines += ["", f"variants: {', '.join(variants(operation)) or 'none'}"]
    return "\n".join(lines)


def _problems(asked: Asked, platform: str) -> tuple[Problem, ...]:
    known = suites_of(asked.operation)
    names = known[:1] if asked.suites is None else asked.suites
    one_of("--suite", names, known, asked.operation)
    if asked.lengths is not None:
        raise UsageError("--length", f"{asked.operation} has no steps, got {list(asked.lengths)}")
    if asked.n is not None and (asked.operation == "dispatch" or not _has_n(asked.operation)):
        raise UsageError("--n", f"{asked.operation} has no size to choose, got {list(asked.n)}")
    request = Request(asked.operation, platform, asked.n, asked.sparsity)
    problems: list[Problem] = []
    for name in dict.fromkeys(names):
        if asked.sparsity is not None and not SUITES[name].has_sparsity:
            raise UsageError("--sparsity", f"the suite {name!r} has patterns of its own")
        try:
            problems += SUITES[name].problems(request)
        except ValueError as error:
            raise UsageError("--suite", f"{name!r} {error}") from None
    return tuple(matching(problems, asked.names))


def _has_n(operation: str) -> bool:
    return MEASURED[operation].has_n


def _candidates(
    asked: Asked, passes: tuple[str, ...]
) -> tuple[tuple[tuple[Implementation, str], ...], dict[str, str]]:
    table = implementations_of(asked.operation)
    names = list(table) if asked.implementations is None else asked.implementations
    one_of("--implementation", names, list(table), asked.operation)
    kernels = named("--variant", asked.variants, variants(asked.operation), asked.operation)
    chosen = [table[name] for name in dict.fromkeys(names)]
    chosen += [forced(asked.operation, name) for name in kernels]
    chosen, skipped = available(chosen)
    for i in chosen:
        if not set(passes) & set(i.passes):
            skipped[i.name] = f"has no {' or '.join(passes)} pass"
    pairs = {
        (i.name, dtype): (i, dtype)
        for i in chosen
        if i.name not in skipped
        for dtype in map(i.dtype, asked.dtypes or ("float32",))
    }
    if not pairs:
        raise UsageError("--pass", f"no implementation of {asked.operation} has it")
    return tuple(pairs.values()), skipped
