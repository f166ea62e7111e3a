"""The table of implementations: what a stack is measured with, in which dtypes, and where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.implementations import PASSES
from benchmarks.memory import most_bytes, planned_bytes
from benchmarks.peer_programs import needs_flax, needs_gpu, needs_torch
from benchmarks.stacks import cudnn, jax_programs, ladder, ours, torch_programs
from benchmarks.stacks.problems import SUITES, Problem
from jaxsparse.recurrent.graph.choice import STACK_VARIANTS
from jaxsparse.recurrent.plan import VARIANTS
from jaxsparse.timing import Program


def _always() -> str | None:
    return None


def _no_plan(problem: Problem, passed: str) -> str | None:
    return None


def _unknown(program: Program) -> int | None:
    return None


def _any(problem: Problem) -> bool:
    return True


def _plain(problem: Problem) -> bool:
    return problem.is_plain


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
class Implementation:
    """One way to run a stack.

    Args:
        name: what tables and the option ``--implementation`` call it.
        way: which of a few ways it is; a plot shows the fastest of each.
        build: (problem, dtype, pass) to a program.
        available: None, or why it is left out here.
        dtypes: a key of ``DTYPES``.
        passes: "forward" and "gradient" or one of them.
        dense: it takes dense weights, whatever the problem's.
        takes: whether it can run a problem, dense if it has to be, and differs from the others.
        plan: what it runs, for a pass.
        peak_bytes: memory of a call, operands and results included; None where it is not known.
        traced: whether a profiler counts the time that a GPU is busy with it.
        sums_weights: when it adds up the gradient of the weights: a key of
            ``reference.GRADIENT_TOLERANCE``.
    """

    name: str
    way: str
    build: Callable[[Problem, str, str], Program]
    available: Callable[[], str | None] = _always
    dtypes: str = "own"
    passes: tuple[str, ...] = PASSES
    dense: bool = True
    takes: Callable[[Problem], bool] = _any
    plan: Callable[[Problem, str], str | None] = _no_plan
    peak_bytes: Callable[[Program], int | None] = _unknown
    traced: bool = True
    sums_weights: str = "at once"


def _jax(
    name: str,
    way: str,
    build: Callable[[Problem, str, str], Program],
    takes: Callable[[Problem], bool] = _any,
    available: Callable[[], str | None] = _always,
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
    available: Callable[[], str | None] = _always,
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
    return problem.is_uniform and problem.layers > 1


def _cudnn(
    algorithm: str,
    dtypes: str = "persistent",
    fill: int = 1,
    takes: Callable[[Problem], bool] = _plain,
) -> Implementation:
    return Implementation(
        f"cudnn-{algorithm}" + (f"-b{fill}" if fill > 1 else ""),
        "cuDNN, forced",
        functools.partial(cudnn.stack, algorithm=algorithm, fill=fill),
        available=needs_torch,
        dtypes=dtypes,
        takes=takes,
    )


def _filled(fill: int) -> Implementation:
    """Statically persistent kernels use tensor cores for batches of 8 and 16, in float16."""
    return _cudnn(
        "static",
        fill=fill,
        takes=lambda p: p.is_plain and p.batch % fill != 0 and p.state_dtype != "float32",
    )


def _on_the_ladder(problem: Problem) -> bool:
    of_suite = problem.suite in SUITES and SUITES[problem.suite].ladder
    lstm = problem.cell == "LSTM" and problem.directions == 1
    return of_suite and lstm and problem.is_plain


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
            takes=lambda problem: problem.is_plain and problem.directions == 1,
            available=needs_flax,
        ),
        _jax(
            "jax.experimental.rnn",
            "jax.experimental.rnn",
            jax_programs.experimental_rnn,
            takes=lambda problem: problem.is_plain and problem.cell == "LSTM",
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
