"""How long calls take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def median_seconds(call: Callable[[], Any], calls: int) -> float:
    """The median time of a call, until its result is there."""
    return median_seconds_in_turns([call], calls)[0]


def median_seconds_in_turns(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The same of several: other work on the machine then slows none of them alone."""
    for call in calls:
        jax.block_until_ready(call())
    seconds = np.empty((rounds, len(calls)))
    for i in range(rounds):
        for j, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[i, j] = time.perf_counter() - start
    return np.median(seconds, 0).tolist()
