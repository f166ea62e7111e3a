"""Depthwise convolutions in plain jnp: a shifted multiply-add for each number of a kernel.

With y[t] = sum over taps s of x[stride t - before + s] k[s] along both axes of an image, the three
functions are y of (x, k) and its two transposes: x of (y, k) and k of (x, y).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse.ops.plain_products import ACTIVATIONS
from jaxsparse.precision import accumulator_dtype


class Window(NamedTuple):
    """Where the window of a convolution stands; pairs are (along H, along W)."""

    image: tuple[int, int]  # the size of x
    kernel: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]  # zeros in front of x
    out: tuple[int, int]  # the size of the result; zeros behind x are as many as that takes

    def taps(self) -> Iterator[tuple[int, int]]:
        """The places of the kernel's numbers."""
        rows, columns = map(range, self.kernel)
        return ((row, column) for row in rows for column in columns)

    def spans(self) -> tuple[int, int]:
        """How many places there are from that of the first result to that of the last."""
        down, across = ((n - 1) * s + 1 for n, s in zip(self.out, self.stride, strict=True))
        return down, across


def _shifted(x: jax.Array, window: Window) -> Iterator[tuple[tuple[int, int], jax.Array]]:
    """For each tap what the results find there."""
    spans = window.spans()
    pads = [
        (before, taps - 1 + span - size - before, 0)
        for before, taps, span, size in zip(
            window.before, window.kernel, spans, window.image, strict=True
        )
    ]
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *pads])
    for tap in window.taps():
        ends = [place + span for place, span in zip(tap, spans, strict=True)]
        limits = (*x.shape[:2], *ends)
        yield tap, jax.lax.slice(padded, (0, 0, *tap), limits, (1, 1, *window.stride))


def _of_channels(numbers: jax.Array, channel_axis: int) -> jax.Array:
    """One number for each channel, beside (C, N, H, W) or (N, C, H, W)."""
    return numbers.reshape((-1, 1, 1, 1) if channel_axis == 0 else (-1, 1, 1))


def depthwise_plain(
    x: jax.Array,
    kernel: jax.Array,
    *bias: jax.Array,
    window: Window,
    channel_axis: int,
    out_dtype: Any,
    has_bias: bool = False,
    activation: str | None = None,
    with_preactivation: bool = False,
) -> list[jax.Array]:
    """The convolution of one batch, with the params of the primitives."""
    accumulator = accumulator_dtype(x.dtype, kernel.dtype)
    x, kernel = x.astype(accumulator), kernel.astype(accumulator)
    if min(window.out) == 0:
        z = jnp.zeros((*x.shape[:2], *window.out), accumulator)
    else:
        terms = (_of_channels(kernel[:, *tap], channel_axis) * s for tap, s in _shifted(x, window))
        z = functools.reduce(jnp.add, terms)
    if has_bias:
        z = z + _of_channels(bias[0].astype(accumulator), channel_axis)
    y = ACTIVATIONS[activation](z).astype(out_dtype)
    return [y, z.astype(out_dtype)] if with_preactivation else [y]


# Of `depthwise_plain` on a GPU, as XLA fuses it: microseconds to start, and by bytes of a number
# how many bytes of x and y and numbers of y a microsecond; whichever takes longer. Fitted to the
# layers of MobileNetV1 to which ffi/depthwise/cost.h fits the kernels: in float32 within 15 % on
# one image, on 256 within 9 % but for four of nine layers, which take 22 to 32 % longer than this
# says; in 16 bits, of 256 images, within 12 % but for planes of 14 x 14 and 7 x 7 with stride 1,
# which take 1.8 times as long.
_START = 1.26
_RATES = {4: (3.0e6, 2.7e5), 2: (2.0e6, 3.6e5)}


def plain_microseconds(x: ShapedArray, y: ShapedArray) -> float:
    """What `depthwise_plain` is predicted to take on a GPU; infinity for what is not measured."""
    if x.dtype.itemsize not in _RATES:
        return math.inf
    results = math.prod(y.shape)
    moved = (math.prod(x.shape) + results) * x.dtype.itemsize
    bytes_rate, numbers_rate = _RATES[x.dtype.itemsize]
    return float(_START + max(moved / bytes_rate, results / numbers_rate))


def depthwise_input_plain(
    g: jax.Array, kernel: jax.Array, *, window: Window, channel_axis: int, out_dtype: Any
) -> list[jax.Array]:
    """Its transpose in x: each tap's part of the cotangent, moved back and spread by the stride."""
    accumulator = accumulator_dtype(g.dtype, kernel.dtype)
    g, kernel = g.astype(accumulator), kernel.astype(accumulator)
    if min(window.out) == 0:
        return [jnp.zeros((*g.shape[:2], *window.image), out_dtype)]
    zero, spans = jnp.zeros((), accumulator), window.spans()

    def part(tap: tuple[int, int]) -> jax.Array:
        pads = [
            (place - before, size - span - (place - before), stride - 1)
            for place, before, size, span, stride in zip(
                tap, window.before, window.image, spans, window.stride, strict=True
            )
        ]
        back = jax.lax.pad(g, zero, [(0, 0, 0), (0, 0, 0), *pads])
        return _of_channels(kernel[:, *tap], channel_axis) * back

    return [functools.reduce(jnp.add, map(part, window.taps())).astype(out_dtype)]


def depthwise_kernel_plain(
    x: jax.Array, g: jax.Array, *, window: Window, channel_axis: int, out_dtype: Any
) -> list[jax.Array]:
    """Its transpose in the kernel: for each tap a sum over images and places."""
    accumulator = accumulator_dtype(x.dtype, g.dtype)
    x, g = x.astype(accumulator), g.astype(accumulator)
    channels = x.shape[channel_axis]
    if min(window.out) == 0:
        return [jnp.zeros((channels, *window.kernel), out_dtype)]
    summed = (1 - channel_axis, 2, 3)
    sums = [jnp.sum(s * g, summed) for _, s in _shifted(x, window)]
    return [jnp.stack(sums, -1).reshape(channels, *window.kernel).astype(out_dtype)]
