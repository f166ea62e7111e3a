"""An implementation in one dtype on one mask: its check and its programs."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from benchmarks.device_case import DeviceCase
from benchmarks.masks import reference
from benchmarks.masks.implementations import Implementation
from benchmarks.masks.made import Made, timed
from benchmarks.masks.problems import Problem
from benchmarks.operations import TOLERANCE
from benchmarks.run import Check, Row, if_known
from jaxsparse.timing import Program


@dataclass(frozen=True)
class MaskCase(DeviceCase):
    """One implementation in one dtype on one mask."""

    problem: Problem
    implementation: Implementation
    dtype: str
    passes: tuple[str, ...]

    counted = "rows_checked"

    @property
    def key(self) -> Hashable:
        """What sees all earlier positions takes the same time on all masks of one length."""
        if self.implementation.causal:
            return (self.implementation.name, self.dtype, self.problem.length, self.problem.n)
        return super().key

    def description(self, passed: str) -> Row:
        """What a row says of problem and implementation."""
        problem, positions = self.problem, self.problem.length**2
        return {
            "suite": problem.suite,
            "problem": problem.name,
            "operation": "sparse_attention",
            "m": problem.length,
            "k": problem.length,
            "n": problem.n,
            "heads": problem.heads,
            "nnz": problem.nnz,
            "sparsity": 1 - problem.nnz / positions,
            "dtype": self.dtype,
            "implementation": self.implementation.name,
            "pass": passed,
        }

    def check(self, passed: str) -> Check:
        """Compares some rows of the result, or of the gradients, with the reference."""
        return _examined(self, passed)[0]

    def build(self, passed: str) -> Program:
        """The program that was checked."""
        return _made(self, passed).program

    def ran(self, passed: str) -> Row:
        """What the first call, the mask and the memory cost."""
        made, (_, seconds) = _made(self, passed), _examined(self, passed)
        mask = made.mask
        return {
            "first_call_s": seconds,
            "peak_bytes": if_known(made.peak_bytes),
            "mask_ms": mask and mask.ms,
            "mask_first_ms": mask and mask.first_ms,
            "mask_in_program_ms": mask and mask.in_program_ms,
            "mask_bytes": mask and mask.nbytes,
            "mask_making_bytes": mask and mask.making_bytes,
        }


@functools.lru_cache(maxsize=1)  # it is checked and then timed, compiled once
def _made(case: MaskCase, passed: str) -> Made:
    return case.implementation.build(case.problem, case.dtype, passed)


@functools.lru_cache(maxsize=1)
def _examined(case: MaskCase, passed: str) -> tuple[Check, float]:
    """The check, and seconds of compilation and the first call."""
    made = _made(case, passed)
    program, operands = made.program, made.program.operands()

    def call() -> Any:
        out = program.function(*operands)
        program.wait(out)
        return out

    out, ms = timed(call)
    expected = reference.expected(case.problem, case.dtype, case.implementation.causal)
    compare = expected.errors_of_gradients if passed == "gradient" else expected.errors
    error, checked = compare(*program.results(out))
    return Check(error, TOLERANCE[case.dtype], checked), made.seconds + ms / 1e3
