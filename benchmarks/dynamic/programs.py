"""Programs of JAX: loops over steps on the device, and parts of a step on the host.

A program has all steps of a problem, one after another, so that the time of a call is that of the
device and not of Python. The one that is checked is the one that is timed: with batches of no
graphs behind the first ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsparse
from benchmarks.dynamic import training
from benchmarks.dynamic.batches import Batches, stacked
from benchmarks.dynamic.kernels import kernels_of, loading_seconds
from benchmarks.dynamic.models import Params
from benchmarks.dynamic.problems import Problem
from benchmarks.run import if_known
from jaxsparse import dynamic
from jaxsparse.dynamic.explained import ExplainedDynamicScan
from jaxsparse.timing import Program

# dtype -> precision of products of float32; TF32 is JAX's default on a GPU
PRECISION = {"float32": "highest"}
ARRAYS = {"tf32": "float32"}
"""The dtype of arrays, where it is another."""

TOGETHER = 8
"""Steps of one dispatch, at most, where they come from the host; more of them if they are small."""

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Way:
    """How batches are laid out, and a loss of them.

    Args:
        batches: the layout.
        loss: (problem, dtype) to a function of parameters but for the table, embedded words and a
            batch, as `training` takes it; its arrays have the dtype.
        word_ids: (problem, batch) to words, -1 for padding.
        explained: whether its scans are jaxsparse's, whose plans a row says.
    """

    batches: Batches
    loss: Callable[[Problem, str], training.Loss]
    word_ids: Callable[[Problem, Any], Any] = lambda problem, batch: problem.net.word_ids(batch)
    explained: bool = False


@dataclass(frozen=True)
class Built:
    """A program, and what is known before it is timed.

    Args:
        program: what is timed.
        checked: runs it on the first step of each group: logits, gradients, or what was added to
            parameters; None for parts of a step that give no such result.
        compile_s: seconds of tracing and compilation.
        facts: what else a row says, by its keys.
    """

    program: Program
    checked: Callable[[], Arrays] | None
    compile_s: float | None = None
    facts: tuple[tuple[str, Any], ...] = ()


def _cast(loss: training.Loss, dtype: str) -> training.Loss:
    """A loss whose parameters may be in float32 outside."""

    def cast(params: Params, rows: Any, batch: Any) -> Any:
        params, rows = jax.tree.map(lambda x: x.astype(_of_arrays(dtype)), (params, rows))
        return loss(params, rows, batch)

    return cast


def _of_arrays(dtype: str) -> str:
    return ARRAYS.get(dtype, dtype)


def _step(problem: Problem, way: Way, dtype: str, passed: str) -> Callable[[Params, Any, Any], Any]:
    """(parameters, what is carried, batch) to the new one and a result of the step."""
    loss = _cast(way.loss(problem, dtype), dtype)

    def step(params: Params, carried: Any, batch: Any) -> tuple[Any, Any]:
        words = way.word_ids(problem, batch)
        if passed == "forward":
            rows = training.embedded(params, words)
            return carried, loss(training.without_table(params), rows, batch)
        if passed == "gradient":
            value, grads = training.gradients(loss, params, words, batch)
            return carried.added(grads, words, 1.0), value
        value, grads = training.gradients(loss, carried.read, words, batch)
        return carried.added(grads, words, -training.RATE), value

    return step


def _precisely(dtype: str) -> Any:
    return jax.default_matmul_precision(PRECISION.get(dtype, "default"))


def _start(problem: Problem) -> Params:
    return {name: jnp.asarray(x) for name, x in problem.net.parameters(problem.sizes).items()}


def steps_program(problem: Problem, dtype: str, passed: str, way: Way) -> Built:
    """All steps in one dispatch."""
    groups, batches = problem.groups(), way.batches
    rooms = [batches.room(problem, steps) for steps in groups]
    step = _step(problem, way, dtype, passed)

    def carried_of(params: Params) -> Any:
        if passed == "gradient":
            return training.State.of(jax.tree.map(jnp.zeros_like, params), "float32")
        return None if passed == "forward" else training.State.of(params, _of_arrays(dtype))

    def run(params: Params, every: Any) -> Any:
        carried, made = carried_of(params), []
        for group in every:
            carried, results = jax.lax.scan(functools.partial(step, params), carried, group)
            made.append(results)
        return carried, made

    def arrays(used: int | None = None) -> Any:
        return [
            stacked(batches, problem, steps, len(steps) if used is None else used, room)
            for steps, room in zip(groups, rooms, strict=True)
        ]

    params, every = _start(problem), arrays()
    begin = time.perf_counter()
    with _precisely(dtype):
        lowered = jax.jit(run).lower(params, every)
        compiled = lowered.compile()
    compile_s = time.perf_counter() - begin
    given = jax.device_put(every)

    def checked() -> Arrays:
        carried, made = compiled(params, jax.device_put(arrays(1)))
        if passed != "forward":
            return _difference(carried.params, params if passed == "training" else None)
        return (
            np.concatenate(
                [
                    batches.logits(problem, steps[0], np.asarray(logits[0], np.float64))
                    for (_, logits), steps in zip(made, groups, strict=True)
                ]
            ),
        )

    program = _program(compiled, lambda: (params, given))
    facts = _memory(compiled)
    if way.explained:
        one = jax.tree.map(lambda x: x[0], every[0])
        facts += (("plan", if_known(lambda: _plans(step, params, carried_of(params), one))),)
    if problem.suite == "compile":
        facts += _kernels(lowered)
        again = functools.partial(compiled, params)
        facts += (("new_script_s", _first_less_later(again, given, jax.device_put(arrays(0)))),)
    return Built(program, checked, compile_s, facts)


def _kernels(lowered: Any) -> tuple[tuple[str, Any], ...]:
    """What those of jaxsparse take, which are compiled apart from XLA's; none without a GPU."""
    if jax.default_backend() != "gpu":
        return ()
    every = kernels_of(lowered)
    names = ("kernel_compile_s", "kernel_load_s")
    seconds = loading_seconds(every) if every else (None, None)
    return (("kernels", len(every)), *zip(names, seconds, strict=True))


def _first_less_later(call: Callable[[Any], Any], known: Any, new: Any) -> float:
    """Seconds that the first call with other batches of a known form takes longer than a second."""

    def seconds(batches: Any) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(call(batches))
        return time.perf_counter() - begin

    for _ in range(2):  # what the program itself loads at its first calls
        seconds(known)
    return seconds(new) - seconds(new)


def _difference(params: Params, start: Params | None) -> Arrays:
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(params)]
    if start is not None:
        first = [np.asarray(x, np.float64) for x in jax.tree.leaves(start)]
        leaves = [a - b for a, b in zip(leaves, first, strict=True)]
    return tuple(leaves)


def _plans(step: Callable[..., Any], *operands: Any) -> str | None:
    """What its scans run as on this machine's GPU; None without one."""
    if jax.default_backend() != "gpu":
        return None
    calls = jaxsparse.explain(step, *operands)
    return "; ".join(str(call.plan) for call in calls if isinstance(call, ExplainedDynamicScan))


def _memory(compiled: Any) -> tuple[tuple[str, Any], ...]:
    analysis = compiled.memory_analysis()
    return () if analysis is None else (("temporary_bytes", analysis.temp_size_in_bytes),)


def _program(function: Callable[..., Any], operands: Callable[[], tuple[Any, ...]]) -> Program:
    return Program(
        function=function,
        operands=operands,
        bytes_read=0,
        wait=jax.block_until_ready,
        results=lambda out: (),
    )


def end_to_end_program(problem: Problem, dtype: str, passed: str, way: Way) -> Built:
    """Training from graphs on the host: packing, copies, Python; several steps in one dispatch.

    Scripts are packed ahead by `dynamic.prefetch`; other layouts by this thread, while the device
    works on the steps before.
    """
    batches, rounds = way.batches, problem.rounds
    most = max(TOGETHER, 64 // problem.batch)
    calls = [(_calls(steps, most), batches.room(problem, steps)) for steps in problem.groups()]
    step = _step(problem, way, dtype, "training")

    def several(state: training.State, every: Any) -> training.State:
        state, _ = jax.lax.scan(functools.partial(step, {}), state, every)
        return state

    jitted = jax.jit(several, donate_argnums=0)
    start = _start(problem)

    def first(params: Params) -> training.State:
        return training.State.of(jax.tree.map(jnp.copy, params), _of_arrays(dtype))

    def first_steps(params: Params) -> Params:
        state = first(params)
        for every, room in calls:
            state = jitted(state, jax.device_put(stacked(batches, problem, every[0], 1, room)))
        return state.params

    def run(params: Params) -> Params:
        state = first(params)
        for every, room in calls:
            for batch in _sent(problem, way, every * rounds, room):
                state = jitted(state, batch)
        return state.params

    begin = time.perf_counter()
    with _precisely(dtype):
        jax.block_until_ready(first_steps(start))
    compile_s = time.perf_counter() - begin

    def timed(params: Params) -> Params:
        with _precisely(dtype):
            return run(params)

    def checked() -> Arrays:
        with _precisely(dtype):
            return _difference(first_steps(start), start)

    return Built(_program(timed, lambda: (start,)), checked, compile_s)


def _calls(steps: Sequence[np.ndarray], most: int) -> list[Sequence[np.ndarray]]:
    """The steps of each dispatch: as many of all, and as many as can be up to ``most``."""
    each = max(n for n in range(1, most + 1) if len(steps) % n == 0)
    return [steps[i : i + each] for i in range(0, len(steps), each)]


def _sent(problem: Problem, way: Way, calls: Sequence[Sequence[np.ndarray]], room: Any) -> Any:
    """The batches of each dispatch on the device, one after another."""
    form = getattr(room, "script", None)
    layout = getattr(way.batches, "layout", None)
    if form is None or layout is None or room.letters is not None:
        for steps in calls:
            yield jax.device_put(stacked(way.batches, problem, steps, len(steps), room))
        return
    ids = [np.stack([problem.ids(step) for step in steps]) for steps in calls]
    for script in dynamic.prefetch(problem.graphs, ids, layout(problem), form=form, depth=2):
        yield room._replace(script=script)


def pack_program(problem: Problem, dtype: str, passed: str, way: Way) -> Built:
    """Batches of all steps on the host."""
    groups = problem.groups()
    rooms = [way.batches.room(problem, steps) for steps in groups]

    def run() -> None:
        for steps, room in zip(groups, rooms, strict=True):
            for step in steps:
                way.batches.one(problem, step, room)

    return Built(_program(run, tuple), None)


def copy_program(problem: Problem, dtype: str, passed: str, way: Way) -> Built:
    """Batches of all steps to the device, one after another."""
    every = _ready(problem, way)
    return Built(_program(lambda: [jax.device_put(batch) for batch in every], tuple), None)


def dispatch_program(problem: Problem, dtype: str, passed: str, way: Way) -> Built:
    """Calls of a program that takes what a step takes, and does nothing."""
    every = [jax.device_put(batch) for batch in _ready(problem, way)]
    params = _start(problem)
    nothing = jax.jit(lambda params, batch: jax.tree.leaves(batch)[0].ravel()[:1])
    return Built(
        _program(lambda: [nothing(params, batch) for batch in every], tuple),
        None,
    )


def _ready(problem: Problem, way: Way) -> list[Any]:
    groups = problem.groups()
    rooms = [way.batches.room(problem, steps) for steps in groups]
    return [
        way.batches.one(problem, step, room)
        for steps, room in zip(groups, rooms, strict=True)
        for step in steps
    ]


PROGRAMS: dict[str, Callable[[Problem, str, str, Way], Built]] = {
    "forward": steps_program,
    "gradient": steps_program,
    "training": steps_program,
    "end_to_end": end_to_end_program,
    "pack": pack_program,
    "copy": copy_program,
    "dispatch": dispatch_program,
}


def build(problem: Problem, dtype: str, passed: str, way: Way) -> Built:
    """The program of a pass."""
    return PROGRAMS[passed](problem, dtype, passed, way)
