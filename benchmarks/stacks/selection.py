"""From what was asked for to the stacks that will be run, or to why they can't be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.choices import Asked, UsageError, available, matching, named, one_of
from benchmarks.implementations import PASSES
from benchmarks.stacks.cases import StackCase
from benchmarks.stacks.implementations import (
    DTYPES,
    IMPLEMENTATIONS,
    Implementation,
    forced,
    variants,
)
from benchmarks.stacks.problems import SUITES, Problem


@dataclass(frozen=True)
class StackSelection:
    """What will be measured, in this order: stacks, on each the implementations.

    Args:
        problems: the stacks.
        implementations: each in its dtypes.
        passes: those that were asked for; None for each stack's own.
        skipped: names of implementations that are left out, and why.
    """

    problems: tuple[Problem, ...]
    implementations: tuple[Implementation, ...]
    passes: tuple[str, ...] | None
    skipped: dict[str, str]
    seconds: float = 0.3

    def cases(self, problem: Problem) -> list[StackCase]:
        """Those that can be told apart on a stack."""
        passes = self.passes or (PASSES if problem.gradient else ("forward",))
        return [
            StackCase(problem, i, dtype, tuple(p for p in passes if p in i.passes))
            for i in self.implementations
            if i.takes(problem.with_dense_weights() if i.dense else problem)
            for dtype in DTYPES[i.dtypes][problem.state_dtype]
        ]


def select(asked: Asked, suites: tuple[str, ...]) -> StackSelection:
    """What the options stand for.

    Raises:
        UsageError: for a name that there isn't.
    """
    names = asked.implementations or tuple(IMPLEMENTATIONS)
    one_of("--implementation", names, list(IMPLEMENTATIONS), asked.operation)
    kernels = named("--variant", asked.variants, variants(), asked.operation)
    chosen = [IMPLEMENTATIONS[name] for name in names] + [forced(name) for name in kernels]
    here, skipped = available(chosen)
    if asked.passes is not None:
        for i in here:
            if not set(asked.passes) & set(i.passes):
                skipped[i.name] = f"has no {' or '.join(asked.passes)} pass"
        here = [i for i in here if i.name not in skipped]
    if not here:
        raise UsageError("--pass", f"no implementation of {asked.operation} has it")
    problems = [p for name in suites for stack in SUITES[name].problems for p in _as(stack, asked)]
    # Stacks that only differed in what the options replace are one.
    one = {(p.suite, p.name): p for p in problems}
    return StackSelection(
        tuple(matching(list(one.values()), asked.names)), tuple(here), asked.passes, skipped
    )


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
