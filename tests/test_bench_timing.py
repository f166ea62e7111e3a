"""How programs are timed: by the wall clock, and by a GPU's profiler."""

from __future__ import annotations

import time

import jax
import numpy as np
from bench_problems import edge_case

from benchmarks.implementations import implementations_of
from jaxsparse import timing
from jaxsparse.timing import measurement, trace


def test_wall_time_is_proportional_to_work():
    def program(seconds):
        return timing.Program(
            lambda x: time.sleep(seconds), lambda: (0,), 1, lambda out: out, lambda out: ()
        )

    short, long = (
        timing.measure(program(s), seconds=0.1, repeats=3, on_device=False) for s in (1e-3, 1e-2)
    )
    assert 5 < long.us / short.us < 15 and 1000 < short.us < 3000
    assert short.timer == "wall" and short.us == short.wall_us and short.copies == 1


def test_programs_take_turns():
    seen = []

    def program(name, seconds):
        def function(x):
            seen.append(name)
            time.sleep(seconds)

        return timing.Program(function, lambda: (0,), 1, lambda out: out, lambda out: ())

    programs = [program("a", 1e-3), program("b", 3e-3)]
    a, b = timing.measure_in_turns(programs, seconds=3e-3, repeats=3, on_device=False)
    assert b.us > 2 * a.us and a.calls == b.calls == 3
    assert seen[-6:] == ["a", "b"] * 3


def test_operands_are_rotated_on_a_gpu(monkeypatch):
    made, seen = iter(range(1000)), []
    program = timing.Program(
        seen.append,
        lambda: (next(made),),
        measurement.ROTATED_BYTES // 3,
        lambda x: x,
        lambda x: (),
    )
    monkeypatch.setattr(trace, "device_times", lambda run, calls: [2.0, 4.0, 9.0])
    figure = timing.measure(program, seconds=1e-6, repeats=1, on_device=True)
    assert figure.copies == 4 and seen[:5] == [0, 1, 2, 3, 0]  # 3 would be a little too few
    assert figure.timer == "device" and figure.us == 4 and figure.us_range == (2, 9)
    monkeypatch.setattr(trace, "device_times", lambda run, calls: None)
    assert timing.measure(program, seconds=1e-6, repeats=1, on_device=True).timer == "wall"
    assert measurement.copies_to_rotate(0) == measurement.MOST_COPIES
    assert measurement.copies_to_rotate(2**30) == 1


def test_device_time_is_of_streams_alone():
    text = """planes { name: "/device:GPU:0"
      lines { name: "Stream #7(Compute)" timestamp_ns: 1000
        events { metadata_id: 1 offset_ps: 0 duration_ps: 5000000 }
        events { metadata_id: 1 offset_ps: 9000000 duration_ps: 7000000 } }
      lines { name: "XLA Ops" events { metadata_id: 1 offset_ps: 0 duration_ps: 5000000 } } }
      planes { name: "/host:CPU"
      lines { name: "Stream" events { metadata_id: 1 offset_ps: 0 duration_ps: 5000000 } } }"""
    events = trace._stream_events(jax.profiler.ProfileData.from_text_proto(text))
    assert events == [(1000, 6000), (10000, 17000)]
    # Two that overlap count once.
    assert trace.busy(np.array([[0, 4000], [1000, 2000], [3000, 5000], [9000, 10000]])) == 6


def test_device_times_of_calls(monkeypatch):
    events = np.array([[i * 10_000, i * 10_000 + 1000 * (1 + i % 2)] for i in range(8)])
    monkeypatch.setattr(trace, "_trace", lambda run, light: events)
    assert trace.device_times(None, 4) == [3.0, 3.0, 3.0, 3.0]
    assert trace.device_times(None, 3) == [4.0, 4.0, 4.0]  # a record lost: means of three traces
    monkeypatch.setattr(trace, "_trace", lambda run, light: np.empty((0, 2)))
    assert trace.device_times(None, 3) is None


def test_tracing():
    """Of a GPU if there is one; else there is nothing to see, and the wall clock is used."""
    program = implementations_of("spmm")["jaxsparse"].build(
        edge_case("square"), "float32", "forward"
    )
    on_gpu = jax.default_backend() == "gpu"
    figure = timing.measure(program, seconds=0.01, repeats=2, on_device=True)
    assert figure.timer == ("device" if on_gpu else "wall")
    if on_gpu:
        assert 0.5 < figure.us <= figure.wall_us
