"""An implementation in one dtype on one layer: its check and its programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax

from benchmarks.recurrent import reference
from benchmarks.recurrent.floor import exchange_floor
from benchmarks.recurrent.implementations import Implementation
from benchmarks.recurrent.problems import Problem
from benchmarks.run import Check, Row
from jaxsparse import recurrent
from jaxsparse.timing import Program


@dataclass(frozen=True)
class ScanCase:
    """One implementation in one dtype on one layer."""

    problem: Problem
    implementation: Implementation
    dtype: str
    passes: tuple[str, ...]

    counted = "steps_checked"
    # A GPU idles between the kernels of a loop, which is part of the time that a step takes.
    timer = "wall"

    @property
    def _ran(self) -> Problem:
        """The layer with the weights that the implementation takes, whatever suite it is in."""
        if self.implementation.dense:
            return self.problem.with_dense_weights()
        return replace(self.problem, suite="", gradient=False)

    @property
    def key(self) -> object:
        """A layer is measured once, and one with dense weights whatever it stands beside."""
        return self.implementation.name, self.dtype, self._ran

    @property
    def traced(self) -> bool:
        """Whether there is a GPU."""
        return jax.default_backend() == "gpu"

    def description(self, passed: str) -> Row:
        """What a row says of problem and implementation."""
        p = self.problem
        return {
            "suite": p.suite,
            "problem": p.name,
            "operation": "recurrent",
            "cell": p.cell,
            "hidden": p.hidden,
            "batch": p.batch,
            "length": p.length,
            "weight_dtype": p.weight_dtype,
            "state_dtype": p.state_dtype,
            "nnz": p.nnz,
            "sparsity": 1 - p.nnz / (p.gates * p.hidden**2),
            "floor_us": exchange_floor(p, passed),
            "dtype": self.dtype,
            "implementation": self.implementation.name,
            "way": self.implementation.way,
            "pass": passed,
            "plan": None,
            "predicted_us": None,
        }

    def ran(self, passed: str) -> Row:
        """The plan that it ran by, and the time of a step that was predicted."""
        recurrent.check()
        plan, predicted_us = self.implementation.plans(self._ran, passed)
        return {"plan": plan, "predicted_us": predicted_us}

    def check(self, passed: str) -> Check:
        """Compares all steps, or their gradients, with the reference."""
        program = self.build(passed)
        results = program.results(program.function(*program.operands()))
        narrow = self.implementation.narrow
        if passed == "forward":
            error = reference.forward_error(self._ran, results[0], narrow=narrow)
            return Check(error, reference.TOLERANCE[self.dtype], self.problem.length)
        error = reference.gradient_error(self._ran, results, narrow=narrow)
        limits = reference.GRADIENT_TOLERANCE[self.implementation.sums_weights]
        return Check(error, limits[self.dtype], self.problem.length)

    def build(self, passed: str) -> Program:
        """The program of a pass: the one that was checked is the one that is timed."""
        return _built(self.implementation, self._ran, self.dtype, passed)


@functools.lru_cache(maxsize=1)
def _built(implementation: Implementation, problem: Problem, dtype: str, passed: str) -> Program:
    return implementation.build(problem, dtype, passed)
