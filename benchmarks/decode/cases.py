"""An implementation in one dtype on one problem: its check and its program."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from benchmarks import copies
from benchmarks.decode.implementations import Implementation
from benchmarks.decode.problems import KEY_HEADS, Problem
from benchmarks.device_case import DeviceCase
from benchmarks.operations import TOLERANCE
from benchmarks.run import Check, Row
from jaxsparse.timing import Program

_CHECKED = 2  # sequences


@dataclass(frozen=True)
class DecodeCase(DeviceCase):
    """One implementation in one dtype on one problem."""

    problem: Problem
    implementation: Implementation
    dtype: str

    passes = ("forward",)
    counted = "rows_checked"

    def description(self, passed: str) -> Row:
        """What a row says of problem and implementation."""
        problem = self.problem
        return {
            "suite": problem.suite,
            "problem": problem.name,
            "operation": "sparse_attention",
            "m": problem.sequences,
            "k": problem.length,
            "n": problem.n,
            "heads": problem.heads,
            "key_heads": KEY_HEADS,
            "nnz": problem.nnz,
            "sparsity": 1 - problem.nnz / (problem.sequences * problem.length),
            "dtype": self.dtype,
            "implementation": self.implementation.name,
            "pass": passed,
        }

    def check(self, passed: str) -> Check:
        """Compares the first and the last sequence with float64 on the host."""
        program = _built(self)
        (out,) = program.results(program.function(*program.operands()))
        expected = _expected(self.problem, self.dtype)
        actual = out[_checked(self.problem)].astype(np.float64)
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        return Check(float(error), TOLERANCE[self.dtype], len(expected) * self.problem.heads)

    def build(self, passed: str) -> Program:
        """The program that was checked."""
        return _built(self)

    def ran(self, passed: str) -> Row:
        """What a call has to read and, on a GPU, how fast the device copies."""
        row: Row = {"bytes_read": self.problem.bytes_read(jnp.dtype(self.dtype).itemsize)}
        if self.traced:
            row["copied_bytes_per_us"] = copies.bytes_per_us()
        return row


def _checked(problem: Problem) -> slice:
    return slice(None, None, max(1, (problem.sequences - 1) // (_CHECKED - 1)))


@functools.lru_cache(maxsize=1)  # it is checked and then timed
def _built(case: DecodeCase) -> Program:
    return case.implementation.build(case.problem, case.dtype)


@functools.lru_cache(maxsize=1)  # implementations of a problem follow each other
def _expected(problem: Problem, dtype: str) -> np.ndarray:
    x = problem.operands(dtype)
    some = _checked(problem)
    arrays = [np.asarray(x.pop(name)[some].astype(jnp.float32)) for name in tuple(x)]
    results = []
    for query, key, value, length in zip(*arrays, problem.lengths[some], strict=True):
        q = query[0].reshape(KEY_HEADS, -1, problem.n).astype(np.float64)
        k, v = (np.swapaxes(x[:length], 0, 1).astype(np.float64) for x in (key, value))
        scores = q @ np.swapaxes(k, 1, 2) / np.sqrt(problem.n)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = weights @ v / weights.sum(-1, keepdims=True)
        results.append(out.reshape(1, problem.heads, problem.n))
    return np.stack(results)
