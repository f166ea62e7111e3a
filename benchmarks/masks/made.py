"""What an implementation makes of a problem: a program, and what making it and the mask took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from jaxsparse.timing import Program


@dataclass(frozen=True)
class MaskCost:
    """What it takes to make a mask in the form that an implementation reads.

    Args:
        ms: milliseconds, without compilation.
        first_ms: of the first time, with compilation.
        nbytes: what is kept.
        in_program_ms: of a program on the device that makes it of arrays; None if there is none.
        making_bytes: memory of the device while it is made, what is kept included; None if it is
            made on the host, and by no program.
    """

    ms: float
    first_ms: float
    nbytes: int
    in_program_ms: float | None = None
    making_bytes: int | None = None


@dataclass(frozen=True)
class Made:
    """A program and what is known of it.

    Args:
        program: of the forward pass, or with gradients.
        seconds: of compilation before the first call.
        mask: None where a mask is not made.
        peak_bytes: says how much memory a call takes, operands and results included; None if that
            is not known.
    """

    program: Program
    seconds: float
    mask: MaskCost | None
    peak_bytes: Callable[[], int | None]


T = TypeVar("T")


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """The result, which the function must wait for, and milliseconds."""
    start = time.perf_counter()
    result = function()
    return result, (time.perf_counter() - start) * 1e3
