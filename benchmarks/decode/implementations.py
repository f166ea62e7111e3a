"""The ways to compute a step of decoding, and where each can be had."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode.problems import PAGE, Problem
from benchmarks.implementations import DTYPES, variants_of
from benchmarks.peer_programs import needs_gpu, needs_torch
from jaxsparse.block_mask import BlockMask
from jaxsparse.ops.sparse_attention import sparse_attention
from jaxsparse.timing import Program

_SIXTEEN_BITS = ("bfloat16", "float16")


def _always() -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute it.

    Args:
        name: what tables and the option ``--implementation`` call it.
        build: (problem, dtype) to a program, or an error that says why there is none.
        available: None, or why it is left out here.
        dtypes: what it computes in; the first if it can't in what is asked for.
        takes_ragged: whether sequences may have lengths of their own.
    """

    name: str
    build: Callable[[Problem, str], Program]
    available: Callable[[], str | None] = _always
    dtypes: tuple[str, ...] = DTYPES
    takes_ragged: bool = True

    def dtype(self, asked: str) -> str:
        """What it computes in if that is asked for."""
        return asked if asked in self.dtypes else self.dtypes[0]


def _program(function: Callable[..., Any], operands: tuple[Any, ...], nbytes: int) -> Program:
    """Of arrays that calls do not change, too large for a cache to keep."""
    return Program(
        function=jax.jit(function),
        operands=lambda: operands,
        bytes_read=nbytes,
        wait=jax.block_until_ready,
        results=lambda out: (np.asarray(out, np.float32),),
    )


def _mask(lengths: jax.Array, problem: Problem) -> BlockMask:
    mask = BlockMask.from_lengths(lengths, (1, problem.length))
    return mask.reshape_batch(problem.sequences, 1)


def _jaxsparse(problem: Problem, dtype: str, variant: str | None = None) -> Program:
    """The mask is made in the program, as by each step."""
    x = problem.operands(dtype)

    def step(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return sparse_attention(query, key, value, _mask(lengths, problem), variant=variant)

    lengths = jnp.asarray(problem.lengths)
    return _program(step, (*x.values(), lengths), problem.bytes_read(x["key"].dtype.itemsize))


def _paged(problem: Problem, dtype: str) -> Program:
    """Keys and values in pages, in random order."""
    x = problem.operands(dtype)
    pages = problem.length // PAGE
    if problem.length % PAGE:
        raise ValueError(f"pages have {PAGE} positions, sequences {problem.length}")
    numbers = np.random.default_rng(0).permutation(problem.sequences * pages)
    places = np.argsort(numbers)  # which page of the cache lies at each place of the pool

    def in_pages(cache: jax.Array) -> jax.Array:
        return cache.reshape(-1, PAGE, *cache.shape[2:])[places]

    pools = [jax.jit(in_pages)(x.pop(name)) for name in ("key", "value")]
    of_sequences = jnp.asarray(numbers.reshape(problem.sequences, pages), jnp.int32)

    def step(query: Any, key: Any, value: Any, numbers: Any, lengths: Any) -> Any:
        return sparse_attention(query, key, value, _mask(lengths, problem), pages=numbers)

    operands = (x["query"], *pools, of_sequences, jnp.asarray(problem.lengths))
    return _program(step, operands, problem.bytes_read(pools[0].dtype.itemsize))


def _jax_nn(problem: Problem, dtype: str, implementation: str) -> Program:
    x = problem.operands(dtype)
    attend: Any = jax.nn.dot_product_attention

    def step(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return attend(
            query,
            key,
            value,
            key_value_seq_lengths=lengths if problem.ragged else None,
            implementation=implementation,
        )

    lengths = jnp.asarray(problem.lengths)
    return _program(step, (*x.values(), lengths), problem.bytes_read(x["key"].dtype.itemsize))


def _torch(problem: Problem, dtype: str, compiled: bool) -> Program:
    """PyTorch's own, heads before positions, as it takes them."""
    torch = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = problem.operands(dtype)
    operands = []
    for name in ("query", "key", "value"):
        array = torch.from_dlpack(x.pop(name)).to(device)
        operands.append(array.transpose(1, 2).contiguous())
        del array
    if compiled:
        flex = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
        attend = functools.partial(torch.compile(flex, dynamic=False), enable_gqa=True)
    else:
        attend = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, enable_gqa=True
        )

    def function(*operands: Any) -> Any:
        with torch.no_grad():
            return attend(*operands)

    def wait(out: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return Program(
        function=function,
        operands=lambda: tuple(operands),
        bytes_read=problem.bytes_read(operands[0].element_size()),
        wait=wait,
        results=lambda out: (out.transpose(1, 2).float().cpu().numpy(),),
    )


IMPLEMENTATIONS: dict[str, Implementation] = {
    i.name: i
    for i in (
        Implementation("jaxsparse", _jaxsparse),
        Implementation("jaxsparse-paged", _paged),
        Implementation(
            "cudnn", functools.partial(_jax_nn, implementation="cudnn"), needs_gpu, _SIXTEEN_BITS
        ),
        Implementation("dense", functools.partial(_jax_nn, implementation="xla")),
        Implementation(
            "sdpa", functools.partial(_torch, compiled=False), needs_torch, takes_ragged=False
        ),
        Implementation(
            "flex", functools.partial(_torch, compiled=True), needs_torch, takes_ragged=False
        ),
    )
}


def variants() -> list[str]:
    """The variants that can be forced on this platform."""
    return variants_of("attention")


def forced(variant: str) -> Implementation:
    """Our own with a kernel variant forced."""
    return Implementation(f"jaxsparse[{variant}]", functools.partial(_jaxsparse, variant=variant))
