"""From what was asked for to the stacks that will be run, or to why they can't be."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.choices import Asked, matching
from benchmarks.recurrent.table import Selection, chosen
from benchmarks.stacks.cases import StackCase
from benchmarks.stacks.implementations import (
    DTYPES,
    IMPLEMENTATIONS,
    Implementation,
    forced,
    variants,
)
from benchmarks.stacks.problems import SUITES, Problem

StackSelection = Selection[Problem, Implementation, StackCase]


def select(asked: Asked, suites: tuple[str, ...]) -> StackSelection:
    """What the options stand for.

    Raises:
        UsageError: for a name that there isn't.
    """
    here, skipped = chosen(asked, IMPLEMENTATIONS, tuple(IMPLEMENTATIONS), variants(), forced)
    problems = [p for name in suites for stack in SUITES[name].problems for p in _as(stack, asked)]
    # Stacks that only differed in what the options replace are one.
    one = {(p.suite, p.name): p for p in problems}
    problems = matching(list(one.values()), asked.names)
    return StackSelection(tuple(problems), here, asked.passes, skipped, StackCase, DTYPES)


def _as(problem: Problem, asked: Asked) -> list[Problem]:
    """A stack in the dtypes and lengths that were asked for."""
    return [
        replace(problem, length=length, state_dtype=dtype)
        for length in asked.lengths or (problem.length,)
        for dtype in asked.dtypes or (problem.state_dtype,)
    ]


def listing() -> list[str]:
    """Suites and implementations, with what is left out and why."""
    lines = ["", "suites of stacks, which have implementations of their own"]
    lines += [f"  {name:<18}{suite.about}" for name, suite in SUITES.items()]
    lines += ["", "implementations of stacks"]
    for name, implementation in IMPLEMENTATIONS.items():
        why = implementation.available()
        lines.append(f"  {name:<30}{f'left out: {why}' if why else implementation.way}")
    lines += ["", f"variants of stacks: {', '.join(variants())}"]
    return lines
