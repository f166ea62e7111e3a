"""An implementation in one dtype on one layer: its check and its programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks import copies
from benchmarks.depthwise.implementations import Implementation
from benchmarks.depthwise.problems import Problem
from benchmarks.device_case import DeviceCase
from benchmarks.operations import TOLERANCE
from benchmarks.run import Check, Row
from jaxsparse.timing import Program

# Of the results of a gradient, those in x and in the kernel, what each pass computes.
_GRADIENTS = {"gradient": (0, 1), "input": (0,), "kernel": (1,)}
PASSES = ("forward", *_GRADIENTS)

ENDS = [0, -1]  # of images and of channels, which are checked


@dataclass(frozen=True)
class DepthwiseCase(DeviceCase):
    """One implementation in one dtype on one layer."""

    problem: Problem
    implementation: Implementation
    dtype: str
    passes: tuple[str, ...]

    counted = "values_checked"

    def description(self, passed: str) -> Row:
        """What a row says of problem and implementation."""
        problem = self.problem
        return {
            "suite": problem.suite,
            "problem": problem.name,
            "operation": "depthwise",
            "m": problem.channels,
            "k": problem.size,
            "n": problem.images,
            "stride": problem.stride,
            "dtype": self.dtype,
            "implementation": self.implementation.name,
            "pass": passed,
        }

    def check(self, passed: str) -> Check:
        """Compares the first and last images, and channels of a kernel's gradient, with float64."""
        program = _built(self, passed)
        actual = program.results(program.function(*program.operands()))
        pairs = list(zip(actual, _expected(self.problem, self.dtype, passed), strict=True))
        errors = [np.abs(a - e).max() / np.abs(e).max() for a, e in pairs]
        return Check(float(max(errors)), TOLERANCE[self.dtype], sum(e.size for _, e in pairs))

    def build(self, passed: str) -> Program:
        """The program that was checked."""
        return _built(self, passed)

    def ran(self, passed: str) -> Row:
        """What passes through memory at least and, on a GPU, how fast the device copies."""
        itemsize = np.dtype("float32").itemsize if self.dtype == "float32" else 2
        row: Row = {"bytes": self.problem.bytes(itemsize) * (2 if passed == "gradient" else 1)}
        if self.traced:
            row["copied_bytes_per_us"] = copies.bytes_per_us()
        return row


@functools.lru_cache(maxsize=1)  # it is checked and then timed
def _built(case: DepthwiseCase, passed: str) -> Program:
    """Forward: relu(y + bias). Else gradients of y in x, in the kernel or in both."""
    problem, implementation = case.problem, case.implementation
    x = problem.operands(case.dtype)
    layout, back = implementation.layout, np.argsort(implementation.layout)
    images, cotangent = (x[name].transpose(layout) for name in ("x", "cotangent"))

    def forward(x: Any, kernel: Any, bias: Any) -> Any:
        return implementation.convolve(x, kernel, problem.stride, bias)

    def gradient(x: Any, kernel: Any, cotangent: Any) -> Any:
        def convolve(x: Any, kernel: Any) -> Any:
            return implementation.convolve(x, kernel, problem.stride)

        both = jax.vjp(convolve, x, kernel)[1](cotangent)
        return tuple(both[i] for i in _GRADIENTS[passed])

    def some_images(out: Any) -> Any:
        return np.asarray(out.transpose(back)[:, np.array(ENDS)], np.float64)

    def results(out: Any) -> tuple[Any, ...]:
        if passed == "forward":
            return (some_images(out),)
        read = some_images, lambda of_kernel: np.asarray(of_kernel, np.float64)[ENDS]
        return tuple(read[i](z) for i, z in zip(_GRADIENTS[passed], out, strict=True))

    last = x["bias"] if passed == "forward" else cotangent
    operands = (images, x["kernel"], last)
    return Program(
        function=jax.jit(forward if passed == "forward" else gradient),
        operands=lambda: operands,
        bytes_read=sum(z.nbytes for z in operands),
        wait=jax.block_until_ready,
        results=results,
    )


@functools.lru_cache(maxsize=2)  # implementations of a problem follow each other
def _expected(problem: Problem, dtype: str, passed: str) -> tuple[np.ndarray, ...]:
    """In NumPy, tap by tap."""
    x = problem.operands(dtype)
    ends, kernel = np.array(ENDS), np.asarray(x["kernel"], np.float64)
    total = max(0, (problem.out - 1) * problem.stride + 3 - problem.size)
    before = total // 2
    size, span = problem.size, (problem.out - 1) * problem.stride + 1
    room = ((0, 0), (0, 0), *[(before, max(0, span + 2 - size - before))] * 2)

    def windows(padded: np.ndarray) -> Any:
        for i in range(3):
            for j in range(3):
                place = np.s_[:, :, i : i + span : problem.stride, j : j + span : problem.stride]
                yield (i, j), padded[place]

    def numbers(name: str, where: Any) -> np.ndarray:
        return np.asarray(x[name][where], np.float64)

    if passed == "forward":
        padded = np.pad(numbers("x", np.s_[:, ends]), room)
        y = sum(w * kernel[:, None, None, None, *t] for t, w in windows(padded))
        return (np.maximum(y + numbers("bias", np.s_[:])[:, None, None, None], 0),)
    of_x = np.pad(np.zeros((problem.channels, 2, size, size)), room)
    cotangent = numbers("cotangent", np.s_[:, ends])
    for tap, window in windows(of_x):
        window += cotangent * kernel[:, None, None, None, *tap]
    of_x = of_x[:, :, before : before + size, before : before + size]
    padded, ct = np.pad(numbers("x", ends), room), numbers("cotangent", ends)
    sums = [np.sum(w * ct, (1, 2, 3)) for _, w in windows(padded)]
    both = of_x, np.stack(sums, -1).reshape(2, 3, 3)
    return tuple(both[i] for i in _GRADIENTS[passed])
