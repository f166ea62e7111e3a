"""How long calls take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def median_seconds(call: Callable[[], Any], calls: int) -> float:
    """The median time of a call, until its result is there."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
