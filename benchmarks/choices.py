"""The options that choose what is measured, and the errors that name them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from benchmarks.run import Problem


class UsageError(ValueError):
    """An option that can't be had; names it."""

    def __init__(self, option: str, message: str):
        super().__init__(f"argument {option}: {message}")


@dataclass(frozen=True)
class Asked:
    """The options of the command that choose what is measured; None leaves a choice open.

    ``names`` are globs, of which a problem's name matches one, and so are ``variants``.
    """

    operation: str
    suites: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    implementations: tuple[str, ...] | None = None
    variants: tuple[str, ...] = ()
    dtypes: tuple[str, ...] | None = None
    n: tuple[int, ...] | None = None
    sparsity: tuple[float, ...] | None = None
    lengths: tuple[int, ...] | None = None
    passes: tuple[str, ...] | None = None


def one_of(option: str, asked: Sequence[str], known: Sequence[str], operation: str) -> None:
    """Raises UsageError for a name that an operation has not."""
    for name in asked:
        if name not in known:
            raise UsageError(
                option, f"{operation} has {', '.join(known) or 'none'}, there is no {name!r}"
            )


def named(option: str, globs: Sequence[str], known: Sequence[str], operation: str) -> list[str]:
    """The names that globs match, each once, in the order of the globs.

    Raises:
        UsageError: for a glob that matches none.
    """
    found = {glob: fnmatch.filter(known, glob) for glob in globs}
    one_of(option, [glob for glob, names in found.items() if not names], known, operation)
    return list(dict.fromkeys(name for names in found.values() for name in names))


P = TypeVar("P", bound=Problem)


def matching(problems: Sequence[P], globs: Sequence[str] | None) -> list[P]:
    """Those whose name a glob matches, or all; in their own order, each once."""
    if globs is None:
        return list(problems)
    for glob in globs:
        if not any(fnmatch.fnmatchcase(p.name, glob) for p in problems):
            examples = ", ".join(p.name for p in problems[:3])
            raise UsageError("--problem", f"{glob!r} matches none of {examples}, ...")
    return [p for p in problems if any(fnmatch.fnmatchcase(p.name, glob) for glob in globs)]


class Implementation(Protocol):
    """A way to compute something, which may not be had everywhere."""

    @property
    def name(self) -> str:
        """What the options call it."""

    @property
    def available(self) -> Callable[[], str | None]:
        """Says None, or why it is left out here."""


I = TypeVar("I", bound=Implementation)


def available(chosen: Sequence[I]) -> tuple[list[I], dict[str, str]]:
    """Those that can be had here, and why the others can't.

    Raises:
        UsageError: if none can.
    """
    skipped = {i.name: why for i in chosen if (why := i.available()) is not None}
    here = [i for i in chosen if i.name not in skipped]
    if not here:
        reasons = ", ".join(f"{name} {why}" for name, why in skipped.items())
        raise UsageError("--implementation", f"none can be had here: {reasons}")
    return here, skipped


class TypedImplementation(Implementation, Protocol):
    """One that computes in some dtypes."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """All of them."""

    def dtype(self, asked: str) -> str:
        """What it computes in if that is asked for."""


T = TypeVar("T", bound=TypedImplementation)


def candidates(
    asked: Asked,
    table: Mapping[str, T],
    variants: Sequence[str],
    forced: Callable[[str], T],
    dtype: str,
) -> tuple[tuple[tuple[T, str], ...], dict[str, str]]:
    """Implementations of a table and forced variants, each with a dtype; what is left out, and why.

    ``dtype`` is taken where none is asked for.

    Raises:
        UsageError: for a name that there isn't, and if none can be had here.
    """
    names = list(table) if asked.implementations is None else asked.implementations
    one_of("--implementation", names, list(table), asked.operation)
    kernels = named("--variant", asked.variants, variants, asked.operation)
    chosen, skipped = available([table[name] for name in names] + [forced(x) for x in kernels])
    pairs = {
        (i.name, own): (i, own) for i in chosen for own in map(i.dtype, asked.dtypes or (dtype,))
    }
    return tuple(pairs.values()), skipped


def about(table: Mapping[str, TypedImplementation], width: int) -> list[str]:
    """A line for each implementation: its name so wide, then dtypes, or why it is left out here."""
    lines = []
    for name, implementation in table.items():
        why = implementation.available()
        of = f"left out: {why}" if why else ", ".join(implementation.dtypes)
        lines.append(f"  {name:<{width}}{of}")
    return lines
