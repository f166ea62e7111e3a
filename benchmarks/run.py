"""Measures a selection: checks every implementation against the reference, then times it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import environment
from benchmarks.memory import release_memory
from jaxsparse.timing import Program, Timing, measure

SCHEMA = 1

Row = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How figures are taken: for about so many seconds each, in so many repeats."""

    seconds: float
    repeats: int = 9


class Check(NamedTuple):
    """How far a result is from the reference, how far rounding explains, and of how much of it."""

    relative_error: float
    limit: float
    checked: int


class Case(Protocol):
    """One implementation in one dtype on one problem."""

    passes: tuple[str, ...]  # to measure
    counted: str  # the key that says how much was checked
    timer: str  # "device" or "wall": what the figure is, where both are to be had

    @property
    def key(self) -> Hashable:
        """Cases of equal keys take the same time: it is measured once in a run."""

    @property
    def traced(self) -> bool:
        """Whether a device's time is to be had."""

    def description(self, passed: str) -> Row:
        """What a row says of problem and implementation."""

    def check(self, passed: str) -> Check:
        """Compares with the reference."""

    def build(self, passed: str) -> Program:
        """What is timed."""

    def ran(self, passed: str) -> Row:
        """What else a row says after it was timed; raises if it went wrong meanwhile."""


class Problem(Protocol):
    """What is measured."""

    @property
    def suite(self) -> str:
        """The suite's name."""

    @property
    def name(self) -> str:
        """Unique in the suite."""

    def prepare(self) -> None:
        """Raises ValueError or MemoryError if it can't be had."""


class Selection(Protocol):
    """What will be measured, in this order: problems, on each the cases, of each the passes."""

    @property
    def problems(self) -> Sequence[Any]:
        """All of them."""

    @property
    def skipped(self) -> dict[str, str]:
        """Names of implementations that are left out, and why."""

    @property
    def seconds(self) -> float:
        """How long a figure is taken by default."""

    def cases(self, problem: Any) -> Sequence[Case]:
        """Those of a problem."""


def execute(
    selection: Selection,
    effort: Effort,
    *,
    commit: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    save: Callable[[Result], None] = lambda result: None,
) -> tuple[Result, bool]:
    """Measures a selection: the result, as `benchmarks/README.md` documents it, and if it is whole.

    A failure is recorded with its reason, and the run goes on. At Ctrl-C the result is what was
    measured so far, and so it is when the device answers no more. ``save`` gets the result so far
    after every figure.
    """
    result: Result = {
        "schema": SCHEMA,
        "environment": environment(commit),
        "results": [],
        "skipped": dict(selection.skipped),
    }
    for name, why in selection.skipped.items():
        say(f"left out: {name}: {why}")
    known: dict[Hashable, Row] = {}
    try:
        for number, problem in enumerate(selection.problems, 1):
            heading = f"[{number}/{len(selection.problems)}] {problem.suite} {problem.name}"
            try:
                problem.prepare()
            except (ValueError, MemoryError) as error:
                result["skipped"][problem.name] = _reason(error)
                say(f"{heading}: left out: {_reason(error)}")
                continue
            for case in selection.cases(problem):
                for row in _rows(case, effort, known):
                    result["results"].append(row)
                    say(f"{heading} {_spoken(row)}")
                    save(result)
                    if row["error"] and not _device_answers():
                        say("the device is in an error state: nothing more can be measured")
                        return result, False
    except KeyboardInterrupt:
        save(result)
        return result, False
    return result, True


def _device_answers() -> bool:
    """An error of one implementation may be the end of all."""
    try:
        jax.block_until_ready(jnp.arange(3) + 1)
    except Exception:
        return False
    return True


def _rows(case: Case, effort: Effort, known: dict[Hashable, Row]) -> Iterator[Row]:
    """A row for each pass."""
    for passed in case.passes:
        key = (case.key, passed)
        if key not in known:
            known[key] = _measured(case, passed, effort)
            release_memory()
        yield {**case.description(passed), **known[key]}


T = TypeVar("T")


def if_known(function: Callable[[], T | None]) -> T | None:
    """The result, or None for any error: of what stands beside a figure, which it must not end."""
    try:
        return function()
    except Exception:
        return None


class WrongResult(ArithmeticError):
    """A result further from the reference than rounding explains."""


def _measured(case: Case, passed: str, effort: Effort) -> Row:
    """What is found out about a pass: if its result is wrong, or can't be had, it is not timed."""
    timing, reason, error, count = None, None, None, None
    ran: Row = {}
    try:
        check = case.check(passed)
        count = check.checked
        if np.isfinite(check.relative_error):  # JSON has no infinity
            error = check.relative_error
        if not check.relative_error <= check.limit:
            raise WrongResult(
                f"relative error {check.relative_error:.2g}, rounding explains {check.limit:.2g}"
            )
        timing = measure(
            case.build(passed),
            seconds=effort.seconds,
            repeats=effort.repeats,
            on_device=case.traced,
            timer=case.timer,
        )
        ran = case.ran(passed)
    except Exception as failure:  # of any framework: it is recorded, and the run goes on
        timing, reason = None, _reason(failure)
    figures = {"relative_error": error, case.counted: count, "error": reason}
    return {**_figures(timing), **figures, **ran}


def _figures(timing: Timing | None) -> Row:
    """The timing as JSON has it: null if there is none."""
    names = [field.name for field in dataclasses.fields(Timing)]
    values = {name: getattr(timing, name, None) for name in names}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _reason(error: BaseException) -> str:
    """One line, with the kind of the error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _spoken(row: Row) -> str:
    what = f"{row['implementation']} {row['dtype']} {row['pass']}:"
    if row["error"]:
        return f"{what} failed: {row['error']}"
    return f"{what} {row['us']:.4g} us ({row['timer']})"
