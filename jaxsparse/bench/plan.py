"""From what was asked for to what will be measured, or to why it can't be."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from jaxsparse.bench.implementations import (
    PASSES,
    Implementation,
    forced,
    implementations_of,
    variants,
)
from jaxsparse.bench.operations import OPERATIONS
from jaxsparse.bench.problems import SUITES, Problem, Request, suites_of


class UsageError(ValueError):
    """An option that can't be had; names it."""

    def __init__(self, option: str, message: str):
        super().__init__(f"argument {option}: {message}")


@dataclass(frozen=True)
class Asked:
    """The options of the command that choose what is measured; None leaves a choice open.

    ``names`` are globs, of which a problem's name matches one.
    """

    operation: str
    suites: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    implementations: tuple[str, ...] | None = None
    variants: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    n: tuple[int, ...] | None = None
    sparsity: tuple[float, ...] | None = None
    passes: tuple[str, ...] = PASSES


@dataclass(frozen=True)
class Plan:
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


def make_plan(asked: Asked, platform: str) -> Plan:
    """What the options stand for.

    Raises:
        UsageError: for a name that there isn't, a size that a suite has not, and for options that
            leave nothing to measure.
    """
    problems = _problems(asked, platform)
    candidates, skipped = _candidates(asked)
    return Plan(problems, candidates, asked.passes, skipped)


def _one_of(option: str, asked: Sequence[str], known: Sequence[str], operation: str) -> None:
    for name in asked:
        if name not in known:
            raise UsageError(
                option, f"{operation} has {', '.join(known) or 'none'}, there is no {name!r}"
            )


def _problems(asked: Asked, platform: str) -> tuple[Problem, ...]:
    known = suites_of(asked.operation)
    names = known[:1] if asked.suites is None else asked.suites
    _one_of("--suite", names, known, asked.operation)
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
    return tuple(problems if asked.names is None else _matching(problems, asked.names))


def _matching(problems: Sequence[Problem], globs: Sequence[str]) -> list[Problem]:
    """In their own order, each once."""
    for glob in globs:
        if not any(fnmatch.fnmatchcase(p.name, glob) for p in problems):
            examples = ", ".join(p.name for p in problems[:3])
            raise UsageError("--problem", f"{glob!r} matches none of {examples}, ...")
    return [p for p in problems if any(fnmatch.fnmatchcase(p.name, glob) for glob in globs)]


def _has_n(operation: str) -> bool:
    return OPERATIONS[operation].has_n


def _candidates(
    asked: Asked,
) -> tuple[tuple[tuple[Implementation, str], ...], dict[str, str]]:
    table = implementations_of(asked.operation)
    names = list(table) if asked.implementations is None else asked.implementations
    _one_of("--implementation", names, list(table), asked.operation)
    _one_of("--variant", asked.variants, variants(asked.operation), asked.operation)
    chosen = [table[name] for name in dict.fromkeys(names)]
    chosen += [forced(asked.operation, name) for name in dict.fromkeys(asked.variants)]
    skipped = {i.name: why for i in chosen if (why := i.available()) is not None}
    chosen = [i for i in chosen if i.name not in skipped]
    if not chosen:
        reasons = ", ".join(f"{name} {why}" for name, why in skipped.items())
        raise UsageError("--implementation", f"none can be had here: {reasons}")
    for i in chosen:
        if not set(asked.passes) & set(i.passes):
            skipped[i.name] = f"has no {' or '.join(asked.passes)} pass"
    pairs = {
        (i.name, dtype): (i, dtype)
        for i in chosen
        if i.name not in skipped
        for dtype in map(i.dtype, asked.dtypes)
    }
    if not pairs:
        raise UsageError("--pass", f"no implementation of {asked.operation} has it")
    return tuple(pairs.values()), skipped
