"""Tables of implementations, of layers and of stacks: rows, their cases, and what is chosen.

A row is measured in dtypes of its own, which follow from the problem's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from benchmarks import run
from benchmarks.choices import Asked, UsageError, available, named, one_of
from benchmarks.implementations import PASSES
from benchmarks.peer_programs import needs_torch
from jaxsparse.timing import Program


class Problem(run.Problem, Protocol):
    """Layers with a state of some dtype."""

    def __hash__(self) -> int:
        """Its programs are kept."""

    @property
    def length(self) -> int:
        """Steps."""

    @property
    def state_dtype(self) -> str:
        """That of the state, and of what is read and written."""

    @property
    def gradient(self) -> bool:
        """Whether the gradient is measured where nothing else is asked for."""


P = TypeVar("P", bound=Problem)


def always() -> str | None:
    """Nothing is left out."""
    return None


@dataclass(frozen=True)
class Row(Generic[P]):
    """One way to run a problem.

    Args:
        name: what tables and the option ``--implementation`` call it.
        way: which of a few ways it is; a plot shows the fastest of each.
        build: (problem, dtype, pass) to a program.
        available: None, or why it is left out here.
        dtypes: a key of the table's ``DTYPES``.
        passes: "forward" and "gradient" or one of them.
        dense: it takes dense weights, whatever the problem's.
        takes: whether it can run a problem, and is another than the rest of the table on it.
        sums_weights: when it adds up the gradient of the weights: a key of
            ``reference.GRADIENT_TOLERANCE``.
    """

    name: str
    way: str
    build: Callable[[P, str, str], Program]
    available: Callable[[], str | None] = always
    dtypes: str = "own"
    passes: tuple[str, ...] = PASSES
    dense: bool = True
    takes: Callable[[P], bool] = lambda problem: True
    sums_weights: str = "at once"


R = TypeVar("R", bound=Row[Any])


@dataclass(frozen=True)
class RowCase(Generic[P, R]):
    """A row in one dtype on one problem."""

    problem: P
    implementation: R
    dtype: str
    passes: tuple[str, ...]

    counted = "steps_checked"
    # A GPU idles between the kernels of a loop, which is part of the time that a step takes.
    timer = "wall"

    @property
    def ran_problem(self) -> P:
        """The problem with the weights that the row takes."""
        raise NotImplementedError

    def error(self, passed: str, results: tuple[np.ndarray, ...]) -> tuple[float, float]:
        """How far results are from the reference, and how far rounding explains."""
        raise NotImplementedError

    def check(self, passed: str) -> run.Check:
        """Compares all steps, or all gradients, with the reference."""
        program = self.build(passed)
        results = program.results(program.function(*program.operands()))
        return run.Check(*self.error(passed, results), self.problem.length)

    def build(self, passed: str) -> Program:
        """The program of a pass: the one that was checked is the one that is timed."""
        return _built(self.implementation, self.ran_problem, self.dtype, passed)


@functools.lru_cache(maxsize=1)
def _built(row: Row[Any], problem: Problem, dtype: str, passed: str) -> Program:
    return row.build(problem, dtype, passed)


C = TypeVar("C")


def forced_cudnn(
    row: Callable[..., R],
    program: Callable[..., Program],
    algorithm: str,
    dtypes: str = "persistent",
    fill: int = 1,
    **others: Any,
) -> R:
    """By one of the algorithms of cuDNN, with batches filled up to a multiple of ``fill``.

    Args:
        row: makes the table's rows.
        program: builds one, of the algorithm and the filling.
        others: what else the row says.
    """
    return row(
        f"cudnn-{algorithm}" + (f"-b{fill}" if fill > 1 else ""),
        "cuDNN, forced",
        functools.partial(program, algorithm=algorithm, fill=fill),
        available=needs_torch,
        dtypes=dtypes,
        **others,
    )


@dataclass(frozen=True)
class Selection(Generic[P, R, C]):
    """What will be measured, in this order: problems, on each the implementations.

    Args:
        problems: layers or stacks.
        implementations: each in its dtypes.
        passes: those that were asked for; None for each problem's own.
        skipped: names of implementations that are left out, and why.
        case: of a problem, an implementation, a dtype and passes.
        dtypes: the table's ``DTYPES``: those of an implementation, by the problem's.
    """

    problems: tuple[P, ...]
    implementations: tuple[R, ...]
    passes: tuple[str, ...] | None
    skipped: dict[str, str]
    case: Callable[[P, R, str, tuple[str, ...]], C]
    dtypes: Mapping[str, Mapping[str, tuple[str, ...]]]
    seconds: float = 0.3

    def cases(self, problem: P) -> list[C]:
        """Those that can be told apart on a problem."""
        passes = self.passes or (PASSES if problem.gradient else ("forward",))
        return [
            self.case(problem, i, dtype, tuple(p for p in passes if p in i.passes))
            for i in self.implementations
            if i.takes(problem)
            for dtype in self.dtypes[i.dtypes][problem.state_dtype]
        ]


def chosen(
    asked: Asked,
    table: Mapping[str, R],
    usual: Sequence[str],
    variants: Sequence[str],
    forced: Callable[[str], R],
) -> tuple[tuple[R, ...], dict[str, str]]:
    """Implementations of a table and forced variants; and what is left out, and why.

    ``usual`` are taken where none is asked for.

    Raises:
        UsageError: for a name that there isn't, and if none can be had here or has the passes.
    """
    names = asked.implementations or usual
    one_of("--implementation", names, list(table), asked.operation)
    kernels = named("--variant", asked.variants, variants, asked.operation)
    here, skipped = available([table[name] for name in names] + [forced(x) for x in kernels])
    if asked.passes is not None:
        for i in here:
            if not set(asked.passes) & set(i.passes):
                skipped[i.name] = f"has no {' or '.join(asked.passes)} pass"
        here = [i for i in here if i.name not in skipped]
    if not here:
        raise UsageError("--pass", f"no implementation of {asked.operation} has it")
    return tuple(here), skipped
