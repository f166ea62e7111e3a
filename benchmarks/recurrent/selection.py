"""From what was asked for to the layers that will be scanned, or to why they can't be."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.choices import Asked, UsageError, matching, one_of
from benchmarks.recurrent.cases import ScanCase
from benchmarks.recurrent.implementations import (
    DTYPES,
    IMPLEMENTATIONS,
    Implementation,
    forced,
    variants,
)
from benchmarks.recurrent.problems import SUITES, Problem
from benchmarks.recurrent.table import Selection, chosen
from benchmarks.stacks import selection as stacks
from benchmarks.stacks.problems import SUITES as STACK_SUITES

DEFAULT_SUITE = {"cpu": "small"}


ScanSelection = Selection[Problem, Implementation, ScanCase]


def select(asked: Asked, platform: str) -> ScanSelection | stacks.StackSelection:
    """What the options stand for: suites of single layers, or of stacks.

    Raises:
        UsageError: for a name that there isn't, and for options that it has no use for.
    """
    for option, values in ("--n", asked.n), ("--sparsity", asked.sparsity):
        if values is not None:
            raise UsageError(
                option, f"the suites of recurrent have layers of their own, got {list(values)}"
            )
    suites = asked.suites or (DEFAULT_SUITE.get(platform, "layers"),)
    one_of("--suite", suites, [*SUITES, *STACK_SUITES], asked.operation)
    of_stacks = tuple(name for name in suites if name in STACK_SUITES)
    if of_stacks:
        if of_stacks != suites:
            message = f"{of_stacks[0]!r} has implementations of its own: give stacks alone"
            raise UsageError("--suite", message)
        return stacks.select(asked, of_stacks)
    usual = tuple(i.name for i in IMPLEMENTATIONS.values() if platform in i.usual_on)
    here, skipped = chosen(asked, IMPLEMENTATIONS, usual, variants(), forced)
    problems = [p for name in suites for layer in SUITES[name].problems for p in _as(layer, asked)]
    # Layers that only differed in what the options replace are one.
    one: dict[tuple[str, str], Problem] = {}
    for p in problems:
        gradient = p.gradient or ((p.suite, p.name) in one and one[p.suite, p.name].gradient)
        one[p.suite, p.name] = replace(p, gradient=gradient)
    problems = matching(list(one.values()), asked.names)
    return ScanSelection(tuple(problems), here, asked.passes, skipped, ScanCase, DTYPES)


def _as(problem: Problem, asked: Asked) -> list[Problem]:
    """A layer in the dtypes and lengths that were asked for."""
    dtypes = (
        [(problem.state_dtype, problem.weight_dtype)]
        if asked.dtypes is None
        else [(dtype, dtype) for dtype in asked.dtypes]
    )
    return [
        replace(problem, length=length, state_dtype=state, weight_dtype=weights)
        for length in asked.lengths or (problem.length,)
        for state, weights in dtypes
    ]


def listing(operation: str) -> str:
    """Suites, implementations and variants, with what is left out and why."""
    defaults = "layers by default, small on a CPU"
    lines = [f"suites of {operation}, {defaults}"]
    lines += [f"  {name:<18}{suite.about}" for name, suite in SUITES.items()]
    lines += ["", "implementations"]
    for name, implementation in IMPLEMENTATIONS.items():
        why, usual = implementation.available(), ", ".join(implementation.usual_on)
        about = implementation.way + ("" if usual else ", if it is named")
        lines.append(f"  {name:<18}{f'left out: {why}' if why else about}")
    lines += ["", f"variants: {', '.join(variants())}", *stacks.listing()]
    return "\n".join(lines)
