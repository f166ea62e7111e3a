"""From what was asked for to the nets that will be run, or to why they can't be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.choices import Asked, UsageError, available, matching, one_of
from benchmarks.dynamic.cases import DynamicCase, are_compiled, compile_side_by_side
from benchmarks.dynamic.implementations import DTYPES, IMPLEMENTATIONS, USUAL, Implementation
from benchmarks.dynamic.problems import PASSES, SUITES, Problem, problems

__all__ = ["DTYPES", "PASSES", "listing", "select"]

_THREADS = 16
"""In which programs are compiled, at most."""


def _threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)


@dataclass(frozen=True)
class DynamicSelection:
    """What will be measured, in this order: nets, on each the implementations.

    Args:
        problems: nets and batches.
        implementations: all of them.
        dtypes: what they are measured in.
        passes: those that were asked for; None for each problem's own.
        skipped: names of implementations that are left out, and why.
    """

    problems: tuple[Problem, ...]
    implementations: tuple[Implementation, ...]
    dtypes: tuple[str, ...]
    passes: tuple[str, ...] | None
    skipped: dict[str, str]
    seconds: float = 0.3

    def cases(self, problem: Problem) -> list[DynamicCase]:
        """Those of a problem, their programs compiled: none is timed while another is compiled."""
        cases = self._cases(problem)
        if problem.suite == "compile":  # what compilation takes is measured alone
            compile_side_by_side(cases, 1)
        elif not are_compiled(cases):
            compile_side_by_side([*cases, *self._ahead(problem, cases)], _threads())
        return cases

    def _cases(self, problem: Problem) -> list[DynamicCase]:
        wanted = self.passes or problem.passes
        return [
            DynamicCase(problem, i, dtype, tuple(p for p in wanted if p in i.passes))
            for i in self.implementations
            if i.ablation == (problem.suite == "ablation") and i.takes(problem)
            for dtype in self.dtypes
            if dtype in i.dtypes
        ]

    def _ahead(self, problem: Problem, cases: list[DynamicCase]) -> Iterator[DynamicCase]:
        """Cases of the next problems, for threads that would have nothing to do in the last round.

        They are fewer programs than threads: the sooner the first problem is timed, the more has a
        run that is cut off.
        """
        idle = -_programs(cases) % _threads()
        for other in self.problems[self.problems.index(problem) + 1 :]:
            if idle == 0 or other.suite == "compile":
                return
            try:
                other.prepare()
            except (ValueError, MemoryError):  # which is said where its turn comes
                continue
            for case in self._cases(other):
                idle -= _programs([case])
                if idle < 0:
                    return
                yield case


def _programs(cases: list[DynamicCase]) -> int:
    """How many there are to compile."""
    return sum(len(case.passes) for case in cases if not are_compiled([case]))


def select(asked: Asked, platform: str) -> DynamicSelection:
    """What the options stand for.

    Raises:
        UsageError: for a name that there isn't, and for options that it has no use for.
    """
    for option, values in (
        ("--n", asked.n),
        ("--sparsity", asked.sparsity),
        ("--variant", asked.variants or None),
    ):
        if values is not None:
            raise UsageError(
                option, f"the suites of dynamic have nets of their own, got {list(values)}"
            )
    if len(asked.lengths or ()) > 1:
        raise UsageError("--length", f"dynamic takes one number of steps, got {asked.lengths}")
    (steps,) = asked.lengths or (None,)
    suites = asked.suites or ("tree_lstm",)
    one_of("--suite", suites, list(SUITES), asked.operation)
    kinds = {name == "ablation" for name in suites}
    usual = tuple(i.name for i in IMPLEMENTATIONS.values() if i.usual and i.ablation in kinds)
    names = asked.implementations or usual
    one_of("--implementation", names, list(IMPLEMENTATIONS), asked.operation)
    usual_dtypes: tuple[str, ...] = USUAL.get(platform, ("tf32", "bfloat16"))
    here, skipped = available([IMPLEMENTATIONS[name] for name in names])
    return DynamicSelection(
        tuple(
            matching([p for name in suites for p in problems(name, platform, steps)], asked.names)
        ),
        tuple(here),
        asked.dtypes or usual_dtypes,
        asked.passes,
        skipped,
    )


def listing(operation: str) -> str:
    """Suites and implementations, with what is left out and why."""
    lines = [f"suites of {operation}, the first by default"]
    lines += [f"  {name:<18}{suite.about}" for name, suite in SUITES.items()]
    lines += ["", "implementations"]
    for name, implementation in IMPLEMENTATIONS.items():
        why = implementation.available()
        about = implementation.way + ("" if implementation.usual else ", if it is named")
        lines.append(f"  {name:<18}{f'left out: {why}' if why else about}")
    lines += ["", f"dtypes: {', '.join(DTYPES)}", f"passes: {', '.join(PASSES)}"]
    return "\n".join(lines)
