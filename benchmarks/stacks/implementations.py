"""The table of implementations: what a stack is measured with, in which dtypes, and where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.memory import most_bytes, planned_bytes
from benchmarks.peer_programs import needs_flax, needs_gpu, needs_torch
from benchmarks.recurrent.table import Row, always, forced_cudnn
from benchmarks.stacks import cudnn, devices, jax_programs, ladder, ours, torch_programs
from benchmarks.stacks.problems import SUITES, Problem
from jaxsparse.recurrent.graph.choice import STACK_VARIANTS
from jaxsparse.recurrent.plan import VARIANTS
from jaxsparse.timing import Program


def _no_plan(problem: Problem, passed: str) -> str | None:
    return None


def _unknown(program: Program) -> int | None:
    return None


def _any(problem: Problem) -> bool:
    return True


def _plain(problem: Problem) -> bool:
    return problem.with_dense_weights().is_plain


# choice -> dtype of the problem -> those that an implementation is measured in. A 16-bit stack may
# be run in any dtype that holds as much: which of them are fast differs between libraries.
DTYPES: dict[str, dict[str, tuple[str, ...]]] = {
    "own": {
        "float32": ("float32", "tf32"),
        "bfloat16": ("bfloat16",),
        "float16": ("float16",),
    },
    "16 bits": {
        "float32": ("float32", "tf32"),
        "bfloat16": ("bfloat16", "float16"),
        "float16": ("float16",),
    },
    # cuDNN's persistent algorithms take bfloat16 too, but run as its standard one does then.
    "persistent": {
        "float32": ("float32",),
        "bfloat16": ("float16",),
        "float16": ("float16",),
    },
    "float32 alone": {
        "float32": ("float32", "tf32"),
        "bfloat16": ("tf32",),
        "float16": ("tf32",),
    },
    "exact": {
        "float32": ("float32",),
        "bfloat16": ("bfloat16",),
        "float16": ("float16",),
    },
}


@dataclass(frozen=True)
class Implementation(Row[Problem]):
    """One way to run a stack, as a row says it.

    Args:
        plan: what it runs, for a pass.
        peak_bytes: memory of a call, operands and results included; None where it is not known.
        traced: whether a profiler counts the time that a GPU is busy with it.
        devices: how many it runs on.
    """

    plan: Callable[[Problem, str], str | None] = _no_plan
    peak_bytes: Callable[[Program], int | None] = _unknown
    traced: bool = True
    devices: int = 1


def _jax(
    name: str,
    way: str,
    build: Callable[[Problem, str, str], Program],
    takes: Callable[[Problem], bool] = _any,
    available: Callable[[], str | None] = always,
    dtypes: str = "own",
    sums_weights: str = "step by step",
) -> Implementation:
    return Implementation(
        name,
        way,
        build,
        available=available,
        dtypes=dtypes,
        takes=takes,
        peak_bytes=lambda program: planned_bytes(program.function),
        sums_weights=sums_weights,
    )


def _ours(
    name: str,
    way: str,
    build: Callable[[Problem, str, str], Program],
    plan: Callable[[Problem, str], str | None],
    available: Callable[[], str | None] = always,
) -> Implementation:
    return Implementation(
        name,
        way,
        build,
        available=available,
        dense=False,
        plan=plan,
        peak_bytes=lambda program: planned_bytes(program.function),
    )


def _over_devices(
    name: str,
    way: str,
    build: Callable[[Problem, str, str], Program],
    takes: Callable[[Problem], bool],
    plan: Callable[[Problem, str], str | None],
    sums_weights: str,
) -> Implementation:
    return Implementation(
        name,
        f"jaxsparse, {way} over {devices.COUNT} devices",
        build,
        available=devices.needs_devices,
        takes=lambda problem: _of_suite(problem, "devices") and takes(problem),
        plan=plan,
        peak_bytes=lambda program: planned_bytes(program.function),
        traced=False,  # of one of them it would say little
        devices=devices.COUNT,
        sums_weights=sums_weights,
    )


def _of_suite(problem: Problem, flag: str) -> bool:
    return problem.suite in SUITES and bool(getattr(SUITES[problem.suite], flag))


def forced(variant: str) -> Implementation:
    """Our own with a kernel forced, of single layers or of several."""
    return _ours(
        f"jaxsparse[{variant}]",
        "jaxsparse, forced",
        functools.partial(ours.stack_scan, variant=variant),
        functools.partial(ours.stack_plan, variant=variant),
        available=needs_gpu,
    )


def variants() -> list[str]:
    """Those that can be forced."""
    return [*VARIANTS, *STACK_VARIANTS]


def _several_of_one_form(problem: Problem) -> bool:
    return problem.with_dense_weights().is_uniform and problem.layers > 1


_cudnn = functools.partial(forced_cudnn, Implementation, cudnn.stack, takes=_plain)


def _filled(fill: int) -> Implementation:
    """Statically persistent kernels use tensor cores for batches of 8 and 16, in float16."""
    return _cudnn(
        "static",
        fill=fill,
        takes=lambda p: _plain(p) and p.batch % fill != 0 and p.state_dtype != "float32",
    )


def _on_the_ladder(problem: Problem) -> bool:
    lstm = problem.cell == "LSTM" and problem.directions == 1
    return _of_suite(problem, "ladder") and lstm and _plain(problem)


def _rung(rung: str, *, graph: bool) -> Implementation:
    return Implementation(
        f"ladder-{rung}" + ("-graph" if graph else ""),
        f"{rung}, graph" if graph else rung,
        functools.partial(ladder.lstm, rung=rung, graph=graph),
        available=needs_torch,
        passes=("forward",),
        takes=_on_the_ladder,
        traced=False,  # of tens of thousands of kernels a trace takes far longer than the call
    )


IMPLEMENTATIONS: dict[str, Implementation] = {
    i.name: i
    for i in (
        *(_rung(rung, graph=graph) for graph in (False, True) for rung in ladder.RUNGS),
        _ours("jaxsparse", "jaxsparse", ours.stack_scan, ours.stack_plan),
        _ours("jaxsparse-layers", "jaxsparse, layer by layer", ours.scans, ours.scans_plan),
        _over_devices(
            "jaxsparse-sharded",
            "the batch",
            devices.sharded,
            devices.can_shard,
            devices.sharded_plan,
            sums_weights="at once",
        ),
        _over_devices(
            "jaxsparse-pipelined",
            "the layers",
            devices.pipelined,
            devices.can_pipeline,
            devices.pipelined_plan,
            sums_weights="at once",
        ),
        _jax("lax.scan", "jax.lax.scan, layer by layer", jax_programs.lax_scan),
        _jax(
            "lax.scan-wavefront",
            "jax.lax.scan, wavefront",
            jax_programs.wavefront,
            takes=_several_of_one_form,
        ),
        _jax(
            "flax",
            "flax.nnx.RNN",
            jax_programs.flax_rnn,
            takes=lambda problem: _plain(problem) and problem.directions == 1,
            available=needs_flax,
        ),
        _jax(
            "jax.experimental.rnn",
            "jax.experimental.rnn",
            jax_programs.experimental_rnn,
            takes=lambda problem: _plain(problem) and problem.cell == "LSTM",
            available=needs_gpu,
            dtypes="float32 alone",
            sums_weights="at once",
        ),
        Implementation(
            "torch",
            "cuDNN by PyTorch",
            torch_programs.module,
            available=needs_torch,
            dtypes="16 bits",
            takes=_plain,
            peak_bytes=lambda program: most_bytes(lambda: program.function(*program.operands())),
        ),
        _cudnn("standard", "16 bits"),
        _cudnn("static"),
        _filled(8),
        _filled(16),
        _cudnn("dynamic"),
        _cudnn("small-h"),
    )
}
