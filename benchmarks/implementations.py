"""The table of implementations: what is measured for each operation, and when it is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax

from benchmarks import cusparse, jax_programs, jax_sparse, peer_programs, reductions
from benchmarks.operations import MEASURED
from benchmarks.peer_programs import needs_cpu, needs_cupy, needs_gpu, needs_torch
from benchmarks.problems import Problem
from jaxsparse import backend
from jaxsparse.timing import Program

PASSES = ("forward", "gradient")
DTYPES = ("float32", "bfloat16", "float16")


def _always() -> str | None:
    return None


def _little(problem: Problem, passed: str) -> int:
    return 0


def _dense(problem: Problem, passed: str) -> int:
    """The matrix, and with gradients its gradient and what that is made of."""
    m, k = problem.topology().shape
    return m * k * problem.heads * (1 if passed == "forward" else 3)


def _dense_on_cpu(problem: Problem, passed: str) -> int:
    """A packed matrix is written out where there is no kernel."""
    return 0 if jax.default_backend() == "gpu" else _dense(problem, passed)


def _dense_gradient(problem: Problem, passed: str) -> int:
    """BCSR's gradient of the values is gathered from a dense product."""
    return 0 if passed == "forward" else _dense(problem, "forward")


def _gathered(problem: Problem, passed: str) -> int:
    """Plain XLA gathers a row of x for every entry of a matrix that is too large to densify."""
    return problem.topology().nse * (problem.n or 1) * problem.heads


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Args:
        name: what tables and the option ``--implementation`` call it.
        operation: a key of ``MEASURED``.
        build: (problem, dtype, pass) to a program.
        available: None, or why it is left out here.
        dtypes: what it computes in; the first if it can't in what is asked for.
        passes: "forward" and "gradient" or one of them.
        precision: a key of ``TOLERANCE``; its dtype by default.
        leeway: how many times as far from the reference as that says it may be.
        computes: a key of ``COMPUTATIONS``; what the operation computes by default.
        elements: how many numbers it holds at least beside operands and results.
    """

    name: str
    operation: str
    build: Callable[[Problem, str, str], Program]
    available: Callable[[], str | None] = _always
    dtypes: tuple[str, ...] = ("float32",)
    passes: tuple[str, ...] = PASSES
    precision: str | None = None
    leeway: float = 1
    computes: str | None = None
    elements: Callable[[Problem, str], int] = _little

    def dtype(self, asked: str) -> str:
        """What it computes in if that is asked for."""
        return asked if asked in self.dtypes else self.dtypes[0]


_JAXSPARSE = {
    "spmm": jax_programs.jaxsparse_spmm,
    "spmm_bias_relu": jax_programs.jaxsparse_bias_relu,
    "spmm_pullback": jax_programs.jaxsparse_pullback,
    "sddmm": jax_programs.jaxsparse_sddmm,
    "sparse_softmax": jax_programs.jaxsparse_softmax,
    "reduce_rows": reductions.jaxsparse_rows,
    "sparse_attention": jax_programs.jaxsparse_attention,
}


def _ours(
    operation: str, passes: tuple[str, ...] = PASSES
) -> tuple[Implementation, Implementation]:
    build = _JAXSPARSE[operation]
    xla = functools.partial(build, implementation="xla")
    return (
        Implementation("jaxsparse", operation, build, dtypes=DTYPES, passes=passes),
        Implementation(
            "jaxsparse-xla", operation, xla, dtypes=DTYPES, passes=passes, elements=_gathered
        ),
    )


def forced(operation: str, variant: str) -> Implementation:
    """Our own with a kernel variant forced; in a gradient only its forward product is."""
    build = functools.partial(_JAXSPARSE[operation], variant=variant)
    return Implementation(f"jaxsparse[{variant}]", operation, build, dtypes=DTYPES)


def variants(operation: str) -> list[str]:
    """The variants that can be forced on this platform."""
    kernel = MEASURED[operation].kernel
    return [] if kernel is None else variants_of(kernel)


def variants_of(target: str) -> list[str]:
    """The variants of a target's kernels that this platform has."""
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    return list(backend.TARGETS[target]["variants"].get(platform, []))


def _dense_products(
    operation: str, build: Callable[..., Program], passes: tuple[str, ...] = PASSES
) -> tuple[Implementation, Implementation, Implementation]:
    """In float32, TF32 and bfloat16: XLA's default precision on a GPU is TF32."""
    exact, fast = (functools.partial(build, precision=p) for p in ("highest", "default"))
    return (
        Implementation("dense", operation, exact, passes=passes, elements=_dense),
        Implementation(
            "dense-tf32",
            operation,
            fast,
            available=needs_gpu,
            passes=passes,
            precision="tensorfloat32",
            elements=_dense,
        ),
        Implementation(
            "dense-bf16", operation, fast, dtypes=("bfloat16",), passes=passes, elements=_dense
        ),
    )


# cuSPARSE's products in float16 are further off than rounding of exact sums explains.
_CUSPARSE_LEEWAY = 4


def _dense_attention(name: str, dtype: str, precision: str, implementation: str) -> Implementation:
    build = functools.partial(
        jax_programs.dense_attention, precision=precision, implementation=implementation
    )
    return Implementation(
        name,
        "sparse_attention",
        build,
        available=needs_gpu if implementation == "cudnn" else _always,
        dtypes=(dtype,),
        computes="causal_attention",
        elements=_little if implementation == "cudnn" else _dense,
    )


# Weights are packed once, for inference: in x's dtype, or in 8 bits; in the form that is predicted
# to be fastest, or in one of the two.
_PACKED = tuple(
    Implementation(
        name,
        "spmm",
        functools.partial(jax_programs.packed_spmm, x_on_left=left, weights=weights, form=form),
        dtypes=("bfloat16", "float16"),
        passes=("forward",),
        precision=weights,
        elements=_dense_on_cpu,
    )
    for name, left, weights, form in (
        ("packed", False, None, None),
        ("packed-left", True, None, None),
        ("packed-cells", False, None, "cells"),
        ("packed-gaps", False, None, "gaps"),
        ("packed-int8", False, "int8", None),
        ("packed-e4m3", False, "float8_e4m3fn", None),
    )
)
_DENSE_QUANTIZED = tuple(
    Implementation(
        name,
        "spmm",
        functools.partial(jax_programs.dense_quantized_spmm, weights=weights),
        dtypes=("bfloat16", "float16"),
        passes=("forward",),
        precision=weights,
        elements=_dense,
    )
    for name, weights in (("dense-int8", "int8"), ("dense-e4m3", "float8_e4m3fn"))
)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *_ours("spmm"),
    *_PACKED,
    *_dense_products("spmm", jax_programs.dense_spmm),
    *_DENSE_QUANTIZED,
    Implementation("bcsr", "spmm", jax_sparse.bcsr_spmm, elements=_dense_gradient),
    Implementation("bcoo", "spmm", jax_sparse.bcoo_spmm, elements=_gathered),
    Implementation("segments", "spmm", jax_sparse.segments_spmm, elements=_gathered),
    Implementation(
        "scipy", "spmm", peer_programs.scipy_spmm, available=needs_cpu, passes=("forward",)
    ),
    Implementation(
        "torch",
        "spmm",
        peer_programs.torch_spmm,
        available=needs_torch,
        dtypes=DTYPES,
        leeway=_CUSPARSE_LEEWAY,
    ),
    Implementation(
        "cupy", "spmm", peer_programs.cupy_spmm, available=needs_cupy, passes=("forward",)
    ),
    *(
        Implementation(
            f"cusparse-alg{algorithm}",
            "spmm",
            functools.partial(cusparse.cusparse_spmm, algorithm=algorithm),
            available=needs_torch,
            dtypes=DTYPES,
            passes=("forward",),
            leeway=_CUSPARSE_LEEWAY,
        )
        for algorithm in cusparse.ALGORITHMS
    ),
    *_ours("spmm_bias_relu"),
    Implementation(
        "product",
        "spmm_bias_relu",
        jax_programs.jaxsparse_spmm,
        dtypes=DTYPES,
        computes="spmm",
    ),
    Implementation(
        "unfused",
        "spmm_bias_relu",
        functools.partial(jax_programs.jaxsparse_bias_relu, fused=False),
        dtypes=DTYPES,
    ),
    *_dense_products("spmm_bias_relu", jax_programs.dense_bias_relu),
    *_ours("spmm_pullback", ("forward",)),
    Implementation(
        "parts",
        "spmm_pullback",
        jax_programs.parts_of_pullback,
        dtypes=DTYPES,
        passes=("forward",),
    ),
    *_dense_products("spmm_pullback", jax_programs.dense_pullback, ("forward",)),
    Implementation(
        "torch",
        "spmm_pullback",
        peer_programs.torch_pullback,
        available=needs_torch,
        passes=("forward",),
    ),
    *_ours("sddmm"),
    *_dense_products("sddmm", jax_programs.dense_sddmm),
    Implementation("torch", "sddmm", peer_programs.torch_sddmm, available=needs_torch),
    *_ours("sparse_softmax"),
    Implementation(
        "copy",
        "sparse_softmax",
        jax_programs.copy_of_values,
        dtypes=DTYPES,
        passes=("forward",),
        computes="copy",
    ),
    *_ours("reduce_rows"),
    Implementation("segments", "reduce_rows", reductions.segments, dtypes=DTYPES),
    *(
        Implementation(
            name,
            "reduce_rows",
            functools.partial(build, reduction="logsumexp"),
            dtypes=DTYPES,
            computes="logsumexp",
        )
        for name, build in (
            ("logsumexp", reductions.jaxsparse_rows),
            ("logsumexp-segments", reductions.segments),
        )
    ),
    *_ours("sparse_attention"),
    Implementation("composed", "sparse_attention", jax_programs.composed_attention, dtypes=DTYPES),
    _dense_attention("dense", "float32", "highest", "xla"),
    _dense_attention("dense-bf16", "bfloat16", "default", "xla"),
    _dense_attention("cudnn-bf16", "bfloat16", "default", "cudnn"),
    *(
        Implementation(
            name,
            "dispatch",
            functools.partial(jax_programs.dispatched, jitted=name == "jitted"),
            passes=("forward",),
        )
        for name in ("eager", "jitted")
    ),
)


def implementations_of(operation: str) -> dict[str, Implementation]:
    """Those of an operation, by name."""
    return {i.name: i for i in IMPLEMENTATIONS if i.operation == operation}
