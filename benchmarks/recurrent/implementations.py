"""The table of implementations: what a layer is measured with, in which dtypes, and where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peer_programs import needs_gpu, needs_torch
from benchmarks.recurrent import cudnn, jax_programs, torch_programs
from benchmarks.recurrent.problems import Problem
from benchmarks.recurrent.table import Row, always, forced_cudnn
from jaxsparse.recurrent.plan import VARIANTS


def _no_plans(problem: Problem, passed: str) -> tuple[None, None]:
    return None, None


def _sparse(problem: Problem) -> bool:
    return problem.density is not None


def _sparse_but_fits(problem: Problem) -> bool:
    """Where a kernel takes it as a dense layer: else it would be another loop of XLA."""
    return _sparse(problem) and jax_programs.has_plan(problem.with_dense_weights())


# choice -> dtype of the state -> those that a peer is measured in. A 16-bit layer may be run in any
# dtype that holds as much: which of them are fast differs between libraries.
DTYPES: dict[str, dict[str, tuple[str, ...]]] = {
    "own": {dtype: (dtype,) for dtype in ("float32", "bfloat16", "float16")},
    "float32": dict.fromkeys(("float32", "bfloat16", "float16"), ("float32",)),
    "16 bits": {
        "float32": ("float32",),
        "bfloat16": ("bfloat16", "float16"),
        "float16": ("float16",),
    },
    # cuDNN's persistent algorithms take bfloat16 too, but run as its standard one does then.
    "persistent": {
        "float32": ("float32",),
        "bfloat16": ("float16", "float32"),
        "float16": ("float16", "float32"),
    },
    "float16 alone": {"float32": (), "bfloat16": ("float16",), "float16": ("float16",)},
}


@dataclass(frozen=True)
class Implementation(Row[Problem]):
    """One way to scan a layer, as a row says it.

    Args:
        narrow: its input has one feature.
        usual_on: the platforms where it is measured without being asked for.
        plans: what it runs and the predicted time of a step, for a pass.
    """

    narrow: bool = False
    usual_on: tuple[str, ...] = ("cpu", "gpu")
    plans: Callable[[Problem, str], tuple[str | None, float | None]] = _no_plans


def _ours(name: str, variant: str | None = None, *, dense: bool = False) -> Implementation:
    return Implementation(
        name,
        "jaxsparse, dense" if dense else "jaxsparse, forced" if variant else "jaxsparse",
        functools.partial(jax_programs.jaxsparse_scan, variant=variant),
        available=always if variant is None else needs_gpu,
        dense=dense,
        takes=_sparse_but_fits if dense else lambda problem: True,
        plans=functools.partial(jax_programs.jaxsparse_plans, variant=variant),
    )


# One upon the other: loads of 4 bytes in the pattern's order and a barrier of all blocks; as many
# bytes as the batch has; entries ordered by banks; the data as their own flag.
_STEPS: dict[str, tuple[str, jax_programs.Layout]] = {
    "plain": ("sparse_pairs_barrier", (("piece_bytes", 4), ("bank_aware", False))),
    "wide-loads": ("sparse_pairs_barrier", (("bank_aware", False),)),
    "bank-aware": ("sparse_pairs_barrier", ()),
    "data-flags": ("sparse_pairs", ()),
}


def _step(name: str) -> Implementation:
    variant, layout = _STEPS[name]
    return Implementation(
        name,
        name,
        functools.partial(jax_programs.jaxsparse_scan, variant=variant, layout=layout),
        available=needs_gpu,
        dense=False,
        takes=lambda problem: problem.suite == "ablation",
        plans=functools.partial(jax_programs.jaxsparse_plans, variant=variant, layout=layout),
    )


def forced(variant: str) -> Implementation:
    """Our own with a kernel forced."""
    return _ours(f"jaxsparse[{variant}]", variant)


def variants() -> list[str]:
    """Those that can be forced."""
    return list(VARIANTS)


_cudnn = functools.partial(forced_cudnn, Implementation, cudnn.scan)


def _filled(fill: int) -> Implementation:
    """Statically persistent kernels use tensor cores for batches of 8 and 16, in float16."""
    return _cudnn("static", "float16 alone", fill, takes=lambda problem: problem.batch % fill != 0)


IMPLEMENTATIONS: dict[str, Implementation] = {
    i.name: i
    for i in (
        _ours("jaxsparse"),
        _ours("jaxsparse-dense", dense=True),
        *map(_step, _STEPS),
        Implementation(
            "lax.scan",
            "jax.lax.scan",
            functools.partial(jax_programs.lax_scan, unroll=1),
            sums_weights="step by step",
        ),
        Implementation(
            "lax.scan-unrolled",
            "jax.lax.scan",
            functools.partial(jax_programs.lax_scan, unroll=8),
            sums_weights="step by step",
        ),
        Implementation(
            "torch",
            "cuDNN by PyTorch",
            functools.partial(torch_programs.module, narrow=False),
            available=needs_torch,
            dtypes="16 bits",
        ),
        Implementation(
            "torch-narrow",
            "cuDNN by PyTorch",
            functools.partial(torch_programs.module, narrow=True),
            available=needs_torch,
            dtypes="16 bits",
            narrow=True,
            usual_on=(),
        ),
        _cudnn("standard", "16 bits"),
        _cudnn("static"),
        _filled(4),
        _filled(8),
        _filled(16),
        _cudnn("dynamic"),
        _cudnn("small-h"),
        Implementation(
            "cublas-graph",
            "graph of cuBLAS",
            torch_programs.cublas_graph,
            available=needs_torch,
            passes=("forward",),
        ),
        Implementation(
            "cusparse-graph",
            "graph of cuSPARSE",
            torch_programs.cusparse_graph,
            available=needs_torch,
            dtypes="float32",
            passes=("forward",),
            dense=False,
            takes=_sparse,
        ),
    )
}
