"""Measures a plan: checks every implementation against the reference, then times it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.bench.environment import environment, memory_limit
from jaxsparse.bench.implementations import Implementation, release_memory
from jaxsparse.bench.operations import (
    COMPUTATIONS,
    OPERATIONS,
    TOLERANCE,
    relative_error,
    rows_to_check,
)
from jaxsparse.bench.plan import Plan
from jaxsparse.bench.problems import Problem
from jaxsparse.bench.timing import Timing, measure

SCHEMA = 1

Row = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How figures are taken: for about so many seconds each, in so many repeats."""

    seconds: float = 0.4
    repeats: int = 9


@dataclass(frozen=True)
class Case:
    """One implementation in one dtype on one problem."""

    problem: Problem
    implementation: Implementation
    dtype: str


def execute(
    plan: Plan,
    effort: Effort,
    *,
    commit: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    save: Callable[[Result], None] = lambda result: None,
) -> tuple[Result, bool]:
    """Measures a plan; the result as `benchmarks/README.md` documents it, and whether it is whole.

    A failure is recorded with its reason, and the run goes on. At Ctrl-C the result is what was
    measured so far. ``save`` gets the result so far after every problem and at Ctrl-C.
    """
    result: Result = {
        "schema": SCHEMA,
        "environment": environment(commit),
        "results": [],
        "skipped": dict(plan.skipped),
    }
    for name, why in plan.skipped.items():
        say(f"left out: {name}: {why}")
    try:
        for number, problem in enumerate(plan.problems, 1):
            heading = f"[{number}/{len(plan.problems)}] {problem.suite} {problem.name}"
            try:
                problem.topology()
            except (ValueError, MemoryError) as error:
                result["skipped"][problem.name] = _reason(error)
                say(f"{heading}: left out: {_reason(error)}")
                continue
            for implementation, dtype in plan.candidates:
                for row in _rows(Case(problem, implementation, dtype), plan.passes, effort):
                    result["results"].append(row)
                    say(f"{heading} {_spoken(row)}")
            save(result)
    except KeyboardInterrupt:
        save(result)
        return result, False
    return result, True


def _rows(case: Case, passes: tuple[str, ...], effort: Effort) -> Iterator[Row]:
    """A row for each pass; if the forward result is wrong, or can't be had, none is timed."""
    failure: Exception | None = None
    checked: Row = {"relative_error": None, "rows_checked": None}
    try:
        _check_memory(case, "forward")
        checked["relative_error"], checked["rows_checked"] = _check(case)
        _check_tolerance(case, checked["relative_error"])
    except Exception as error:  # of any framework: it is recorded, and the run goes on
        failure = error
    if not np.isfinite(checked["relative_error"] or 0):
        checked["relative_error"] = None  # JSON has no infinity
    for passed in passes:
        if passed not in case.implementation.passes:
            continue
        timing, reason = None, failure
        if reason is None:
            try:
                timing = _timed(case, passed, effort)
            except Exception as error:
                reason = error
            release_memory()
        yield {
            **_description(case.problem),
            "dtype": case.dtype,
            "implementation": case.implementation.name,
            "pass": passed,
            **_figures(timing),
            **checked,
            "error": None if reason is None else _reason(reason),
        }


class WrongResult(ArithmeticError):
    """A result further from the reference than rounding explains."""


def _check(case: Case) -> tuple[float, int]:
    """The relative error of the forward result, and of how many rows."""
    program = case.implementation.build(case.problem, case.dtype, "forward")
    (actual,) = program.results(program.function(*program.operands()))
    name = case.implementation.computes or OPERATIONS[case.problem.operation].computes
    part = rows_to_check(case.problem.topology(), case.problem.heads)
    expected = _expected(case.problem, name, case.dtype)
    return relative_error(COMPUTATIONS[name].part(actual, part), expected), part.rows.size


@functools.lru_cache(maxsize=4)  # of one problem: the implementations share them
def _expected(problem: Problem, computation: str, dtype: str) -> np.ndarray:
    operands = {
        name: array.astype(jnp.dtype(dtype)).astype(np.float64)
        for name, array in problem.operands().items()
    }
    part = rows_to_check(problem.topology(), problem.heads)
    return COMPUTATIONS[computation].reference(operands, part)


def _check_tolerance(case: Case, error: float) -> None:
    limit = TOLERANCE[case.implementation.precision or case.dtype]
    if not error <= limit:
        raise WrongResult(f"relative error {error:.2g}, rounding explains {limit:.2g}")


def _check_memory(case: Case, passed: str) -> None:
    needed = 4 * case.implementation.elements(case.problem, passed)
    limit = memory_limit()
    if needed > limit:
        raise MemoryError(
            f"it needs {needed / 2**30:.1f} GiB, half of the device's memory is "
            f"{limit / 2**30:.1f} GiB"
        )


def _timed(case: Case, passed: str, effort: Effort) -> Timing:
    _check_memory(case, passed)
    program = case.implementation.build(case.problem, case.dtype, passed)
    on_device = jax.default_backend() == "gpu" and OPERATIONS[case.problem.operation].on_device
    return measure(program, seconds=effort.seconds, repeats=effort.repeats, on_device=on_device)


def _description(problem: Problem) -> Row:
    topology = problem.topology()
    m, k = topology.shape
    return {
        "suite": problem.suite,
        "problem": problem.name,
        "operation": problem.operation,
        "m": m,
        "k": k,
        "n": problem.n,
        "heads": problem.heads,
        "nnz": topology.nnz,
        "sparsity": topology.sparsity,
    }


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
