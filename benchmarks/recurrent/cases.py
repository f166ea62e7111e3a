"""An implementation in one dtype on one layer: its check and its programs."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from benchmarks.recurrent import reference
from benchmarks.recurrent.floor import exchange_floor
from benchmarks.recurrent.implementations import Implementation
from benchmarks.recurrent.problems import Problem
from benchmarks.recurrent.table import RowCase
from benchmarks.run import Row
from jaxsparse import recurrent


class ScanCase(RowCase[Problem, Implementation]):
    """One implementation in one dtype on one layer."""

    @property
    def ran_problem(self) -> Problem:
        """The layer with the weights that the implementation takes, whatever suite it is in."""
        if self.implementation.dense:
            return self.problem.with_dense_weights()
        return replace(self.problem, suite="", gradient=False)

    @property
    def key(self) -> object:
        """A layer is measured once, and one with dense weights whatever it stands beside."""
        return self.implementation.name, self.dtype, self.ran_problem

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
        plan, predicted_us = self.implementation.plans(self.ran_problem, passed)
        return {"plan": plan, "predicted_us": predicted_us}

    def error(self, passed: str, results: tuple[np.ndarray, ...]) -> tuple[float, float]:
        """Of all steps, or of their gradients."""
        narrow = self.implementation.narrow
        if passed == "forward":
            error = reference.forward_error(self.ran_problem, results[0], narrow=narrow)
            return error, reference.TOLERANCE[self.dtype]
        error = reference.gradient_error(self.ran_problem, results, narrow=narrow)
        return error, reference.GRADIENT_TOLERANCE[self.implementation.sums_weights][self.dtype]
