"""An implementation in one dtype on one stack: its check and its programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax

from benchmarks.memory import memory_limit
from benchmarks.run import Check, Row, if_known
from benchmarks.stacks import reference
from benchmarks.stacks.implementations import Implementation
from benchmarks.stacks.problems import Problem
from jaxsparse import recurrent
from jaxsparse.timing import Program


@dataclass(frozen=True)
class StackCase:
    """One implementation in one dtype on one stack."""

    problem: Problem
    implementation: Implementation
    dtype: str
    passes: tuple[str, ...]

    counted = "steps_checked"
    # A GPU idles between the kernels of a loop, which is part of the time that a step takes.
    timer = "wall"

    @property
    def _ran(self) -> Problem:
        """The stack with the weights that the implementation takes."""
        return self.problem.with_dense_weights() if self.implementation.dense else self.problem

    @property
    def key(self) -> object:
        """A stack is measured once, whatever suite it is in."""
        problem = replace(self._ran, suite="", gradient=False)
        return self.implementation.name, self.dtype, problem

    @property
    def traced(self) -> bool:
        """Whether there is a GPU, and a trace of it that does not take too long."""
        return jax.default_backend() == "gpu" and self.implementation.traced

    def description(self, passed: str) -> Row:
        """What a row says of problem and implementation."""
        p = self.problem
        return {
            "suite": p.suite,
            "problem": p.name,
            "operation": "recurrent_stack",
            "cell": p.cell,
            "layers": p.layers,
            "hidden": p.hidden,
            "features": p.inputs(0),
            "directions": p.directions,
            "skip": p.skip,
            "norm": p.norm,
            "heads": p.heads,
            "resets": p.resets,
            "batch": p.batch,
            "length": p.length,
            "state_dtype": p.state_dtype,
            "nnz": p.weights,
            "sparsity": p.sparsity,
            "operations": p.operations(passed),
            "dtype": self.dtype,
            "implementation": self.implementation.name,
            "way": self.implementation.way,
            "devices": self.implementation.devices,
            "pass": passed,
            "plan": None,
            "peak_bytes": None,
        }

    def ran(self, passed: str) -> Row:
        """The plan that it ran by, and the memory that it took."""
        recurrent.check()
        return {
            "plan": if_known(lambda: self.implementation.plan(self._ran, passed)),
            "peak_bytes": if_known(lambda: self.implementation.peak_bytes(self.build(passed))),
        }

    def check(self, passed: str) -> Check:
        """Compares all steps, or all gradients, with the reference."""
        self._check_size(passed)
        program = self.build(passed)
        results = program.results(program.function(*program.operands()))
        if passed == "forward":
            error = reference.forward_error(self._ran, results[0])
            return Check(error, reference.TOLERANCE[self.dtype], self.problem.length)
        error = reference.gradient_error(self._ran, results)
        limits = reference.GRADIENT_TOLERANCE[self.implementation.sums_weights]
        return Check(error, limits[self.dtype], self.problem.length)

    def _check_size(self, passed: str) -> None:
        """Raises MemoryError where arrays of all steps would not fit, in 4 bytes each."""
        p = self.problem
        arrays = p.gates + 1 if passed == "forward" else 2 * (p.gates + 2) * p.layers
        needed, limit = 4 * arrays * p.length * p.batch * p.width, memory_limit()
        if needed > limit:
            raise MemoryError(
                f"it needs {needed / 2**30:.1f} GiB, half of the device's memory is "
                f"{limit / 2**30:.1f} GiB"
            )

    def build(self, passed: str) -> Program:
        """The program of a pass: the one that was checked is the one that is timed."""
        return _built(self.implementation, self._ran, self.dtype, passed)


@functools.lru_cache(maxsize=1)
def _built(implementation: Implementation, problem: Problem, dtype: str, passed: str) -> Program:
    return implementation.build(problem, dtype, passed)
