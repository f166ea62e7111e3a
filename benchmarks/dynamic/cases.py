"""An implementation in one dtype on one net: its check and its programs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from benchmarks.dynamic import reference
from benchmarks.dynamic.counted import weight_bytes
from benchmarks.dynamic.implementations import Implementation
from benchmarks.dynamic.problems import COMPUTED, SUITES, Problem
from benchmarks.dynamic.programs import Built
from benchmarks.run import Check, Row
from jaxsparse import recurrent
from jaxsparse.timing import Program

# Largest difference over largest value of logits that rounding of products and states explains.
TOLERANCE = {"float32": 2**-14, "tf32": 2**-7, "bfloat16": 2**-5}

# Length of the difference over the length of a gradient, by when that of the weights is summed: at
# once, in float32, or step by step in their own dtype, as a loop that JAX differentiates does.
GRADIENT_TOLERANCE = {
    "at once": {"float32": 2**-12, "tf32": 2**-6, "bfloat16": 2**-5},
    "step by step": {"float32": 2**-12, "tf32": 2**-6, "bfloat16": 2**-3},
}

OF_COMPILATION = ("kernels", "kernel_compile_s", "kernel_load_s", "new_script_s")
"""What rows of the suite `compile` say besides."""


@dataclass(frozen=True)
class DynamicCase:
    """One implementation in one dtype on one net."""

    problem: Problem
    implementation: Implementation
    dtype: str
    passes: tuple[str, ...]

    counted = "steps_checked"
    # A GPU idles between the kernels of a loop, which is part of the time that a step takes.
    timer = "wall"
    traced = False  # of a loop there are too many kernels

    @property
    def key(self) -> object:
        """A net is measured once, whatever suite it is in; programs are compiled anew for one."""
        compiled = self.problem.suite == "compile"
        problem = replace(self.problem, suite="compile" if compiled else "", passes=())
        return self.implementation.name, self.dtype, problem

    def description(self, passed: str) -> Row:
        """What a row says of problem and implementation."""
        p = self.problem
        rounds = p.rounds if passed == "end_to_end" else 1
        steps = rounds * sum(map(len, p.groups()))
        return {
            "suite": p.suite,
            "problem": p.name,
            "operation": "dynamic",
            "model": p.model,
            "data": p.source,
            "unit": SUITES[p.suite].unit,
            "hidden": p.hidden,
            "embedding": p.embedding,
            "batch": p.batch,
            "steps": steps,
            "sparsity": 0.0,
            "dtype": self.dtype,
            "implementation": self.implementation.name,
            "way": self.implementation.way,
            "pass": passed,
            "plan": None,
            "compile_s": None,
            "temporary_bytes": None,
            **(dict.fromkeys(OF_COMPILATION) if p.suite == "compile" else {}),
            "weight_bytes": weight_bytes(p, self.implementation.name, self.dtype, passed),
        }

    def check(self, passed: str) -> Check:
        """Compares the first step of each group of steps with the reference."""
        checked = self._built(passed).checked
        if checked is None:
            return Check(0.0, 0.0, 0)
        kind, problem = self.expected(passed)
        limit = TOLERANCE[self.dtype]
        if kind != "forward":
            limit = GRADIENT_TOLERANCE[self.implementation.sums_weights][self.dtype]
        return Check(reference.error(kind, checked(), problem), limit, len(problem.groups()))

    def expected(self, passed: str) -> tuple[str, Problem]:
        """Of what the reference is: the kind of results, and the net in whatever suite."""
        kind = "training" if passed == "end_to_end" else passed
        return kind, replace(self.problem, suite="", passes=())

    def build(self, passed: str) -> Program:
        """The program that was checked."""
        return self._built(passed).program

    def ran(self, passed: str) -> Row:
        """What compilation and memory took."""
        recurrent.check()
        built = self._built(passed)
        _BUILDS.forget(self, passed)
        return {"compile_s": built.compile_s, **dict(built.facts)}

    def _built(self, passed: str) -> Built:
        return _BUILDS.of(self, passed)


class _Builds:
    """Programs of the next cases, compiled side by side before any of them is timed."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, str], Future[Built]] = {}
        self._measured: set[tuple[object, str]] = set()
        self._lock = threading.Lock()

    def of(self, case: DynamicCase, passed: str) -> Built:
        key = (case.key, passed)
        with self._lock:
            if key not in self._made:
                self._made[key] = Future()
                self._run(case, passed, self._made[key])
        return self._made[key].result()

    def forget(self, case: DynamicCase, passed: str) -> None:
        """What was measured is not built again by `start`: programs may be of several suites."""
        self._made.pop((case.key, passed), None)
        self._measured.add((case.key, passed))

    def known(self, case: DynamicCase, passed: str) -> bool:
        """Whether it is built, or was measured."""
        key = (case.key, passed)
        return key in self._made or key in self._measured

    def start(self, cases: Sequence[DynamicCase], threads: int) -> None:
        """Builds the programs of all cases; what fails does so where it is asked for."""
        todo = {}
        for case in cases:
            for passed in case.passes:
                if not self.known(case, passed):
                    todo[case.key, passed] = (case, passed, Future[Built]())
        self._made.update({key: future for key, (_, _, future) in todo.items()})
        # The reference, in NumPy, takes as long as some programs do.
        expected = {
            case.expected(passed) for case, passed, _ in todo.values() if passed in COMPUTED
        }
        with ThreadPoolExecutor(threads) as pool:
            for kind, problem in sorted(expected, key=str):
                pool.submit(reference.expected, problem, kind)
            list(pool.map(lambda job: self._run(*job), todo.values()))

    @staticmethod
    def _run(case: DynamicCase, passed: str, future: Future[Built]) -> None:
        try:
            made = case.implementation.build(case.problem, case.dtype, passed)
        except Exception as error:  # of any framework: it is recorded where the program is needed
            future.set_exception(error)
        else:
            future.set_result(made)


_BUILDS = _Builds()


def compile_side_by_side(cases: Sequence[DynamicCase], threads: int) -> None:
    """Compiles the programs of cases, so many at a time; their builds are then known."""
    _BUILDS.start(cases, threads)


def are_compiled(cases: Sequence[DynamicCase]) -> bool:
    """Whether the programs of all cases are, or were measured."""
    return all(_BUILDS.known(case, passed) for case in cases for passed in case.passes)
