"""How long a call takes: device time on a GPU, wall time elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxsparse.timing import trace

# A GPU reads its operands from memory, as in a network, if calls in turn read more than twice what
# its L2 cache holds (60 MB on an H200).
ROTATED_BYTES = 2**27
MOST_COPIES = 2048  # so calls that read less than 64 KiB may find their operands in the cache

_MOST_TRACED_CALLS = {"device": 200, "wall": 10}  # by what the figure is


@dataclass(frozen=True)
class Program:
    """Something to time, of any framework.

    Args:
        function: computes on device arrays.
        operands: makes a fresh copy of the operands; what a call does not read is shared.
        bytes_read: of one copy, each array counted once.
        wait: returns when a result is there.
        results: NumPy arrays of a result, for comparison: the output, or the gradients, with
            weights as one value for each stored entry.
    """

    function: Callable[..., Any]
    operands: Callable[[], tuple[Any, ...]]
    bytes_read: int
    wait: Callable[[Any], Any]
    results: Callable[[Any], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Timing:
    """Microseconds for each call.

    Args:
        us: the median.
        us_quartiles: first and third.
        us_range: least and most.
        wall_us: the median of the wall time, whatever the timer.
        device_us: the median of what a GPU was busy, whatever the timer; None if none was traced.
        timer: "device" or "wall": which of the two ``us`` is.
        calls: how many the figure is taken of.
        copies: of the operands, through which calls go in turn.
    """

    us: float
    us_quartiles: tuple[float, float]
    us_range: tuple[float, float]
    wall_us: float
    device_us: float | None
    timer: str
    calls: int
    copies: int


def copies_to_rotate(bytes_read: int) -> int:
    """Of how many copies a GPU's cache can't keep what is read, unless that is too many.

    As what is not read is shared, they take less than ``ROTATED_BYTES`` and one copy more.
    """
    return min(MOST_COPIES, ROTATED_BYTES // max(1, bytes_read) + 1)


def measure(
    program: Program, *, seconds: float, repeats: int, on_device: bool, timer: str = "device"
) -> Timing:
    """Times a program, compilation and first calls left out.

    Wall time is the median over repeats of the mean time of a few calls, which follow each other
    without a wait; all repeats take about so many seconds. A repeat's first call and the wait for
    its last one add about 0.4 ms on a GPU, so repeats should take much longer than that. Device
    time, if asked for and to be had, is the median over calls in a profiler's trace: as many, at
    most 200, or a few if the wall time is the figure.
    """
    return measure_in_turns(
        [program], seconds=seconds, repeats=repeats, on_device=on_device, timer=timer
    )[0]


def measure_in_turns(
    programs: Sequence[Program],
    *,
    seconds: float,
    repeats: int,
    on_device: bool,
    timer: str = "device",
) -> list[Timing]:
    """Times programs that are to be compared, each as `measure` does, one repeat of each in turn.

    What else the machine does then falls on all of them alike.
    """
    runners = [_Runner(program, on_device) for program in programs]
    calls = [runner.calls_in(seconds / repeats) for runner in runners]
    wall: list[list[float]] = [[] for _ in runners]
    for _ in range(repeats):
        for runner, count, times in zip(runners, calls, wall, strict=True):
            start = time.perf_counter()
            runner.run(count)
            times.append((time.perf_counter() - start) / count * 1e6)
    return [
        _timing(runner, count * repeats, times, seconds, on_device, timer)
        for runner, count, times in zip(runners, calls, wall, strict=True)
    ]


class _Runner:
    """Calls a program, on copies of its operands in turn."""

    def __init__(self, program: Program, on_device: bool):
        self.copies = copies_to_rotate(program.bytes_read) if on_device else 1
        self._program = program
        self._rotation = itertools.cycle([program.operands() for _ in range(self.copies)])

    def run(self, calls: int) -> None:
        for _ in range(calls):
            out = self._program.function(*next(self._rotation))
        self._program.wait(out)

    def calls_in(self, seconds: float) -> int:
        """How many calls take about so long, first calls left out."""
        self.run(max(2, self.copies))  # the first call of a CUDA graph is slower: each copy may be
        start = time.perf_counter()
        self.run(2)
        estimate = max((time.perf_counter() - start) / 2, 1e-7)
        return max(1, int(seconds / estimate))


def _timing(
    runner: _Runner, calls: int, wall: list[float], seconds: float, on_device: bool, timer: str
) -> Timing:
    median = float(np.median(wall))
    busy = None
    if on_device:
        traced = min(_MOST_TRACED_CALLS[timer], max(3, int(seconds / (median * 1e-6))))
        busy = trace.device_times(lambda: runner.run(traced), traced)
    times = wall
    if busy is not None and timer == "device":
        times, calls = busy, traced
    else:
        timer = "wall"
    low, middle, high = (float(q) for q in np.quantile(times, (0.25, 0.5, 0.75)))
    return Timing(
        us=middle,
        us_quartiles=(low, high),
        us_range=(min(times), max(times)),
        wall_us=median,
        device_us=None if busy is None else float(np.median(busy)),
        timer=timer,
        calls=calls,
        copies=runner.copies,
    )
