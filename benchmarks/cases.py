"""An implementation of an operation in one dtype on one problem: its check and its programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from benchmarks.device_case import DeviceCase
from benchmarks.implementations import Implementation
from benchmarks.memory import memory_limit
from benchmarks.operations import (
    COMPUTATIONS,
    MEASURED,
    TOLERANCE,
    Rows,
    relative_error,
    rows_to_check,
)
from benchmarks.problems import Problem
from benchmarks.run import Check, Row
from jaxsparse.timing import Program


@dataclass(frozen=True)
class OperationCase(DeviceCase):
    """One implementation in one dtype on one problem."""

    problem: Problem
    implementation: Implementation
    dtype: str
    passes: tuple[str, ...]

    counted = "rows_checked"

    @property
    def traced(self) -> bool:
        """Whether the device's time is meant, and there is a device."""
        return super().traced and MEASURED[self.problem.operation].on_device

    def description(self, passed: str) -> Row:
        """What a row says of problem and implementation."""
        problem, topology = self.problem, self.problem.topology()
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
            "dtype": self.dtype,
            "implementation": self.implementation.name,
            "pass": passed,
        }

    def ran(self, passed: str) -> Row:
        """Nothing more."""
        return {}

    def check(self, passed: str) -> Check:
        """Compares some rows of the forward result, whatever the pass, with the reference."""
        return _checked(self)

    def build(self, passed: str) -> Program:
        """The program of a pass."""
        needed = 4 * self.implementation.elements(self.problem, passed)
        limit = memory_limit()
        if needed > limit:
            raise MemoryError(
                f"it needs {needed / 2**30:.1f} GiB, half of the device's memory is "
                f"{limit / 2**30:.1f} GiB"
            )
        return self.implementation.build(self.problem, self.dtype, passed)


@functools.lru_cache(maxsize=1)  # the passes of a case follow each other
def _checked(case: OperationCase) -> Check:
    program = case.build("forward")
    results = program.results(program.function(*program.operands()))
    name = case.implementation.computes or MEASURED[case.problem.operation].computes
    compared = [
        (relative_error(computation.part(actual, part), expected), part.rows.size)
        for actual, computation, (expected, part) in zip(
            results, COMPUTATIONS[name], _expected(case.problem, name, case.dtype), strict=True
        )
    ]
    implementation = case.implementation
    limit = TOLERANCE[implementation.precision or case.dtype] * implementation.leeway
    return Check(max(error for error, _ in compared), limit, sum(rows for _, rows in compared))


@functools.lru_cache(maxsize=4)  # of one problem: the implementations share them
def _expected(problem: Problem, name: str, dtype: str) -> list[tuple[np.ndarray, Rows]]:
    """The results for some rows, and for which."""
    operands = {
        name: array.astype(jnp.dtype(dtype)).astype(np.float64)
        for name, array in problem.operands().items()
    }
    topology, compared = problem.topology(), []
    for computation in COMPUTATIONS[name]:
        part = rows_to_check(
            topology, problem.heads, problem.n or 1, transposed=computation.transposed
        )
        compared.append((computation.reference(operands, part), part))
    return compared
