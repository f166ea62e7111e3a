"""Device time from JAX's profiler, whose CUPTI records see every kernel of the process.

So kernels of PyTorch and CuPy are timed as JAX's are.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable

import jax
import numpy as np


def device_times(run: Callable[[], None], calls: int, attempts: int = 3) -> list[float] | None:
    """Microseconds that a GPU is busy for each of so many equal calls; None if no GPU was traced.

    ``run`` makes the calls and waits for them. If every call has as many kernels and copies, the
    records are shared out among the calls in order of time. Else (a record lost, or work that
    differs between calls) tracing is repeated, and after the last attempt the means over the calls
    of each trace stand in.
    """
    means = []
    for attempt in range(attempts):
        events = _trace(run, light=attempt == 0)
        if not len(events):
            continue
        if len(events) % calls == 0:
            per_call = len(events) // calls
            return [busy(events[i : i + per_call]) for i in range(0, len(events), per_call)]
        means.append(busy(events) / calls)
    return means or None


def busy(events: np.ndarray) -> float:
    """Microseconds in at least one of the events (start, end) in nanoseconds, sorted by start."""
    starts, ends = events.T
    covered = np.maximum.accumulate(np.concatenate([[starts[0]], ends[:-1]]))
    return float(np.sum(np.maximum(0, ends - np.maximum(starts, covered)))) / 1e3


def _trace(run: Callable[[], None], light: bool) -> np.ndarray:
    """(start, end) of what ran on the GPUs, in nanoseconds, sorted by start."""
    options = jax.profiler.ProfileOptions()
    if light:  # of the host nothing is needed
        options.host_tracer_level = 0
        options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="jaxsparse_trace_") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError:  # no CUPTI, or another profiler at work
            return np.empty((0, 2))
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        events = [
            event
            for path in pathlib.Path(folder).rglob("*.xplane.pb")
            for event in _stream_events(jax.profiler.ProfileData.from_file(str(path)))
        ]
    array = np.array(sorted(events), np.float64)
    return array.reshape(len(events), 2)


def _stream_events(profile: jax.profiler.ProfileData) -> list[tuple[float, float]]:
    """Kernels, copies and fills: only lines of streams, as other lines repeat them by XLA op."""
    return [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
