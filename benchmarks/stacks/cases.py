"""An implementation in one dtype on one stack: its check and its programs."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from benchmarks.memory import memory_limit
from benchmarks.recurrent.table import RowCase
from benchmarks.run import Check, Row, if_known
from benchmarks.stacks import reference
from benchmarks.stacks.implementations import Implementation
from benchmarks.stacks.problems import Problem
from jaxsparse import recurrent


class StackCase(RowCase[Problem, Implementation]):
    """One implementation in one dtype on one stack."""

    @property
    def ran_problem(self) -> Problem:
        """The stack with the weights that the implementation takes."""
        return self.problem.with_dense_weights() if self.implementation.dense else self.problem

    @property
    def key(self) -> object:
        """A stack is measured once, whatever suite it is in."""
        problem = replace(self.ran_problem, suite="", gradient=False)
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
            "plan": if_known(lambda: self.implementation.plan(self.ran_problem, passed)),
            "peak_bytes": if_known(lambda: self.implementation.peak_bytes(self.build(passed))),
        }

    def check(self, passed: str) -> Check:
        """Compares all steps, or all gradients, with the reference, if their arrays fit."""
        self._check_size(passed)
        return super().check(passed)

    def error(self, passed: str, results: tuple[np.ndarray, ...]) -> tuple[float, float]:
        """Of all steps, or of all gradients."""
        if passed == "forward":
            error = reference.forward_error(self.ran_problem, results[0])
            return error, reference.TOLERANCE[self.dtype]
        error = reference.gradient_error(self.ran_problem, results)
        return error, reference.GRADIENT_TOLERANCE[self.implementation.sums_weights][self.dtype]

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
