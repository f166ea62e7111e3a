"""A scan as a loop of XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.recurrent.primitive.operands import Operands, runs_of_order, split
from jaxsparse.recurrent.products import dense_form, product
from jaxsparse.recurrent.step import Step

_UNROLLED = 8  # steps of a loop on a GPU, where it waits for the start of kernels


def plain_scan(
    *operands: Any, reversed: tuple[bool, ...], on_gpu: bool = False, **params: Any
) -> list[Any]:
    """The scan as loops of XLA.

    Dense directions of one order in time that lie side by side share a loop, whose products are
    batched.
    """

    def loop(reverse: bool, *own: Any) -> list[Any]:
        return _plain_direction(split(own, params), reverse=reverse, on_gpu=on_gpu, **params)

    runs = runs_of_order(reversed)
    if params["sparse"]:
        runs = [(slice(d, d + 1), reverse) for d, reverse in enumerate(reversed)]
    results = []
    for run, reverse in runs:
        if run.stop - run.start > 1:
            results.append(jax.vmap(functools.partial(loop, reverse))(*(x[run] for x in operands)))
        else:
            own = loop(reverse, *(x[run.start] for x in operands))
            results.append([jnp.expand_dims(x, 0) for x in own])
    return [jnp.concatenate(parts) for parts in zip(*results, strict=True)]


def _plain_direction(
    operands: Operands,
    *,
    on_gpu: bool,
    step: Step,
    sparse: bool,
    transposed: bool,
    reverse: bool,
    spans: tuple[str, ...],
    precision: Any,
    implementation: str | None,
    length: int,
    **_: Any,
) -> list[Any]:
    weights, state, carries, inputs = operands
    b, _, h = state.shape
    accumulator = carries[0].dtype
    dtypes = [state.dtype, *(accumulator if w else state.dtype for w in step.wide_outputs)]
    densifies = on_gpu and sparse and implementation is None
    if densifies and (dense := dense_form(weights, length)) is not None:
        weights, sparse = (dense,), False

    steps_of = [x.reshape(*x.shape[:2], -1) for x in inputs]

    def group(x: Any, count: int, span: str, t: Any) -> list[Any]:
        """The arrays of an input at a step, (b, h) each.

        Each is cut out at once: on a CPU XLA does not vectorise what reads a slice of a slice.
        """
        rows, units = x.shape[1], x.shape[2] // count
        cut = functools.partial(
            jax.lax.dynamic_slice, x, slice_sizes=(1, rows, units), allow_negative_indices=False
        )
        at = t if "t" in span else 0
        arrays = [cut(start_indices=(at, 0, j * units))[0] for j in range(count)]
        return [jnp.broadcast_to(array.astype(accumulator), (b, h)) for array in arrays]

    def body(before: Any, t: Any) -> Any:
        state, carries = before
        z = product(
            weights,
            state,
            sparse=sparse,
            transposed=transposed,
            precision=precision,
            implementation=implementation,
            out_dtype=accumulator,
            local=True,
        )
        products = [z[:, p * h : (p + 1) * h] for p in range(step.products)]
        at_this_step = [
            group(*of_input, t) for of_input in zip(steps_of, step.inputs, spans, strict=True)
        ]
        states, carries, outputs = step(products, carries, at_this_step)
        # Joined here, while they are in a cache: products read them so, and the gradient of xs is.
        state, *joined = (
            jnp.concatenate(xs, 1).astype(own)
            for xs, own in zip((states, *outputs), dtypes, strict=True)
        )
        return (state, [c.astype(accumulator) for c in carries]), (state, joined)

    first: Any = (state.reshape(b, -1), list(carries))
    # XLA's CPU compiler unrolls a loop of two steps itself, and its gradient over several
    # directions can come out wrong (jaxlib 0.10.2 and 0.11.2, not as tests compile).
    unroll = max(_UNROLLED if on_gpu else 1, 2 if length == 2 else 1)
    (_, last), (states, outputs) = jax.lax.scan(
        body, first, jnp.arange(length), reverse=reverse, unroll=unroll
    )
    stacked = (x.reshape(length, b, -1, h) for x in (states, *outputs))
    return [next(stacked), *last, *stacked]
