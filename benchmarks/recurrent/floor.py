"""What a step can't do without: every multiprocessor has to get the whole state."""

from __future__ import annotations

import jax
import numpy as np

from benchmarks.recurrent.problems import Problem

# Microseconds in which 132 blocks or fewer of an H200 hand each other a state of so many bytes
# through the L2 cache, with the flag in the data: the fastest that was measured. (A barrier of all
# blocks alone takes 0.92 to 0.98.) Above that size blocks can share what they receive.
_MEASURED_ON = "H200"
_BYTES, _MICROSECONDS = (4096, 8192, 16384, 32768), (0.61, 0.66, 0.89, 1.05)

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def exchange_floor(problem: Problem, passed: str) -> float | None:
    """Microseconds of a step; of a gradient, those of the way back too. None if not known here.

    On the way back the gradients of all gates are exchanged.
    """
    if _MEASURED_ON not in jax.devices()[0].device_kind:
        return None
    state = problem.batch * problem.hidden * _ITEM_BYTES[problem.state_dtype]
    exchanged = [state] if passed == "forward" else [state, problem.gates * state]
    return float(sum(np.interp(np.log2(exchanged), np.log2(_BYTES), _MICROSECONDS)))
