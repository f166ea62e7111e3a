"""The table of implementations, and on which masks each is measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.implementations import DTYPES, PASSES, variants_of
from benchmarks.masks import jax_programs
from benchmarks.masks.flex import flex_attention
from benchmarks.masks.made import Made
from benchmarks.masks.problems import Problem
from benchmarks.peer_programs import needs_cpu, needs_gpu, needs_tokamax, needs_torch

_SIXTEEN_BITS = ("bfloat16", "float16")
_MOST_ENTRIES = 20_000_000


def _always() -> str | None:
    return None


def _any(problem: Problem) -> bool:
    return True


def _few_entries(problem: Problem) -> bool:
    return problem.nnz <= _MOST_ENTRIES


def _is_window(problem: Problem) -> bool:
    return problem.window is not None


def _is_strided(problem: Problem) -> bool:
    return problem.kind == "strided"


def _is_short(problem: Problem) -> bool:
    """So that all scores fit in memory, with gradients too."""
    return problem.length <= 16_384


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Args:
        name: what tables and the option ``--implementation`` call it.
        build: (problem, dtype, pass) to a program, or an error that says why there is none.
        available: None, or why it is left out here.
        dtypes: what it computes in; the first if it can't in what is asked for.
        takes: whether it is measured on a problem.
        causal: whether it computes causal attention, whatever the mask: then it takes the same time
            on all masks of one length.
    """

    name: str
    build: Callable[[Problem, str, str], Made]
    available: Callable[[], str | None] = _always
    dtypes: tuple[str, ...] = DTYPES
    takes: Callable[[Problem], bool] = _any
    causal: bool = False
    passes: tuple[str, ...] = PASSES

    def dtype(self, asked: str) -> str:
        """What it computes in if that is asked for."""
        return asked if asked in self.dtypes else self.dtypes[0]


def _jax_nn(
    name: str,
    implementation: str,
    available: Callable[[], str | None],
    dtypes: tuple[str, ...],
    *,
    takes: Callable[[Problem], bool] = _any,
    window: bool = False,
    precision: str = "default",
) -> Implementation:
    build = functools.partial(
        jax_programs.dense_attention,
        implementation=implementation,
        window=window,
        precision=precision,
    )
    return Implementation(name, build, available, dtypes, takes, causal=not window)


IMPLEMENTATIONS: dict[str, Implementation] = {
    i.name: i
    for i in (
        Implementation("jaxsparse", jax_programs.by_block_mask),
        Implementation(
            "jaxsparse-regrouped",
            functools.partial(jax_programs.by_block_mask, regroup=True),
            takes=_is_strided,
        ),
        Implementation("jaxsparse-topology", jax_programs.by_topology, takes=_few_entries),
        Implementation("flex", flex_attention, needs_torch),
        _jax_nn("cudnn-bf16", "cudnn", needs_gpu, ("bfloat16",)),
        _jax_nn("cudnn-window", "cudnn", needs_gpu, _SIXTEEN_BITS, takes=_is_window, window=True),
        Implementation(
            "cudnn-bias", jax_programs.biased_attention, needs_gpu, _SIXTEEN_BITS, _is_short
        ),
        _jax_nn("dense", "xla", needs_cpu, ("float32",), takes=_is_short, precision="highest"),
        _jax_nn("dense-bf16", "xla", needs_gpu, ("bfloat16",), takes=_is_short),
        Implementation("tokamax", jax_programs.tokamax_attention, needs_tokamax, _SIXTEEN_BITS),
    )
}


def forced(variant: str) -> Implementation:
    """Our own with a kernel variant forced; in a gradient only its forward pass is."""
    build = functools.partial(jax_programs.by_block_mask, variant=variant)
    return Implementation(f"jaxsparse[{variant}]", build)


def variants() -> list[str]:
    """The variants that can be forced on this platform, of those that take a block mask."""
    return [name for name in variants_of("attention") if not name.startswith("csr")]
