"""How long a call takes: device time on a GPU, wall time elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxsparse.bench import trace

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
    copies = copies_to_rotate(program.bytes_read) if on_device else 1
    rotation = itertools.cycle([program.operands() for _ in range(copies)])

    def run(calls: int) -> None:
        for _ in range(calls):
            out = program.function(*next(rotation))
        program.wait(out)

    run(max(2, copies))  # the first call of a CUDA graph is slower: each copy may be one
    start = time.perf_counter()
    run(2)
    estimate = max((time.perf_counter() - start) / 2, 1e-7)
    calls = max(1, int(seconds / repeats / estimate))
    wall = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(calls)
        wall.append((time.perf_counter() - start) / calls * 1e6)
    median = float(np.median(wall))
    busy = None
    if on_device:
        traced = min(_MOST_TRACED_CALLS[timer], max(3, int(seconds / (median * 1e-6))))
        busy = trace.device_times(lambda: run(traced), traced)
    times, count = wall, calls * repeats
    if busy is not None and timer == "device":
        times, count = busy, traced
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
        calls=count,
        copies=copies,
    )
