"""Programs of JAX: jaxsparse by a block mask and by a topology, cuDNN, XLA, tokamax."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.jax_programs import composition, program_of
from benchmarks.masks.made import Made, MaskCost, timed
from benchmarks.masks.problems import Problem
from benchmarks.memory import planned_bytes
from benchmarks.run import if_known
from jaxsparse.block_mask import BlockMask
from jaxsparse.ops.sparse_attention import sparse_attention
from jaxsparse.timing import Program
from jaxsparse.topology import Topology

_MOST_BYTES_OF_A_BIAS = 2**31
_TIMES = 5


def _made(
    function: Callable[..., jax.Array],
    problem: Problem,
    dtype: str,
    passed: str,
    rest: Sequence[Any] = (),
    mask: MaskCost | None = None,
    read: Sequence[jax.Array] | None = None,
) -> Made:
    """Of a function of query, key, value and other arrays, of which some are read; compiled."""
    operands = problem.operands()
    dense = tuple(operands[name] for name in ("query", "key", "value"))
    program = program_of(function, dense, rest, passed, dtype, read=read)
    compiled, ms = timed(lambda: _compiled(program))
    return Made(
        dataclasses.replace(program, function=compiled),
        ms / 1e3,
        mask,
        lambda: planned_bytes(compiled),
    )


def _compiled(program: Program) -> Any:
    function: Any = program.function
    return function.lower(*program.operands()).compile()


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


# ---- jaxsparse ----


@functools.lru_cache(maxsize=1)  # the passes of a problem share it
def _block_mask(problem: Problem, regroup: bool) -> tuple[BlockMask, MaskCost]:
    shape = (problem.length, problem.length)
    made, ms = timed(
        lambda: jax.block_until_ready(BlockMask.from_mask(problem.mask, shape, regroup=regroup))
    )
    in_program = if_known(lambda: _in_program(problem, made)) or (None, None)
    return made, MaskCost(ms, ms, _nbytes(made), *in_program)


def _in_program(problem: Problem, like: BlockMask) -> tuple[float, int | None] | None:
    """Of a program that makes the mask of an array, with room for just that: ms, and its bytes."""
    if problem.traced is None:
        return None
    array, mask_of = problem.traced
    room = {"max_tiles": like.rows.entries.shape[-1], "max_cells": like.rows.bits.shape[-2]}
    make = jax.jit(lambda array: BlockMask.from_mask(mask_of(array), like.shape, **room))
    compiled = make.lower(array).compile()
    times = [timed(lambda: jax.block_until_ready(compiled(array)))[1] for _ in range(1 + _TIMES)]
    return statistics.median(times[1:]), if_known(lambda: planned_bytes(compiled))


def by_block_mask(
    problem: Problem, dtype: str, passed: str, *, regroup: bool = False, **options: Any
) -> Made:
    """`sparse_attention`, with its options, by a block mask that is made before."""
    mask, cost = _block_mask(problem, regroup)
    return _made(
        lambda q, k, v, mask: sparse_attention(q, k, v, mask, **options),
        problem,
        dtype,
        passed,
        (mask,),
        cost,
        [*mask.rows, *(() if passed == "forward" else mask.columns)],
    )


@functools.lru_cache(maxsize=1)
def _topology(problem: Problem) -> tuple[Topology, MaskCost]:
    shape = (problem.length, problem.length)
    made, ms = timed(lambda: jax.block_until_ready(Topology.from_mask(problem.mask, shape)))
    return made, MaskCost(ms, ms, _nbytes(made))


def by_topology(problem: Problem, dtype: str, passed: str) -> Made:
    """Attention composed of `sddmm`, `sparse_softmax` and `spmm`: scores of what is stored."""
    topology, cost = _topology(problem)
    return _made(composition, problem, dtype, passed, (topology,), cost)


# ---- peers ----


def dense_attention(
    problem: Problem,
    dtype: str,
    passed: str,
    *,
    implementation: Any,
    window: bool = False,
    precision: str = "default",
) -> Made:
    """`jax.nn.dot_product_attention` over all earlier positions, or a window of them."""
    seen: Any = (problem.window, 0) if window else None

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=seen, implementation=implementation
            )

    return _made(attention, problem, dtype, passed)


@functools.lru_cache(maxsize=1)
def _written_out(problem: Problem) -> tuple[jax.Array, MaskCost]:
    """All positions (1, 1, T, T), bool.

    Raises:
        MemoryError: if they are too many for a bias.
    """
    length = problem.length
    needed = 2 * length**2
    if needed > _MOST_BYTES_OF_A_BIAS:
        raise MemoryError(f"the mask would be a bias of {needed / 2**30:.1f} GiB")
    positions = jnp.arange(length)
    make = jax.jit(lambda positions: problem.mask(positions[:, None], positions)[None, None])
    _, first = timed(lambda: jax.block_until_ready(make(positions)))
    made, ms = timed(lambda: jax.block_until_ready(make(positions)))
    return made, MaskCost(ms, first, made.nbytes)


def biased_attention(problem: Problem, dtype: str, passed: str) -> Made:
    """Attention by cuDNN over an array of all positions, which JAX makes a bias of."""
    mask, cost = _written_out(problem)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")

    return _made(attention, problem, dtype, passed, (mask,), cost)


def tokamax_attention(problem: Problem, dtype: str, passed: str) -> Made:
    """What tokamax chooses: causal, a window, or by an array of all positions."""
    tokamax = importlib.import_module("tokamax")
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    if problem.kind == "causal" or problem.window is not None:
        window = None if problem.window is None else (problem.window, 0)

        def of_window(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            out: jax.Array = tokamax.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=window
            )
            return out

        return _made(of_window, problem, dtype, passed)
    mask, cost = _written_out(problem)

    def by_mask(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        out: jax.Array = tokamax.dot_product_attention(q, k, v, mask=mask)
        return out

    return _made(by_mask, problem, dtype, passed, (mask,), cost)
