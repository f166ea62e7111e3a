"""The ways to compute a depthwise layer, in the layout that each wants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.implementations import DTYPES, variants_of
from jaxsparse import depthwise_conv

# Where the axes of (c, n, h, w) are.
CNHW, NCHW, NHWC = (0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 3, 0)


@dataclass(frozen=True)
class Implementation:
    """One way to compute it.

    Args:
        name: what tables and the option ``--implementation`` call it.
        layout: axes of (c, n, h, w), in the order in which it has them.
        convolve: (x, kernel, stride) to y, and with ``bias`` to relu(y + bias).
        dtypes: what it computes in.
    """

    name: str
    layout: tuple[int, ...]
    convolve: Callable[..., jax.Array]
    dtypes: tuple[str, ...] = DTYPES

    def available(self) -> str | None:
        """None: it can be had everywhere."""
        return None

    def dtype(self, asked: str) -> str:
        """What it computes in if that is asked for."""
        return asked if asked in self.dtypes else self.dtypes[0]


def _ours(
    x: Any, kernel: Any, stride: int, bias: Any = None, *, channel_axis: int = 0, **options: Any
) -> jax.Array:
    activation = None if bias is None else "relu"
    return depthwise_conv(
        x,
        kernel,
        bias=bias,
        activation=activation,
        stride=stride,
        channel_axis=channel_axis,
        **options,
    )


def _xla(x: Any, kernel: Any, stride: int, bias: Any = None, *, layout: str) -> jax.Array:
    """XLA's convolution with a group for each channel: cuDNN, or a kernel of XLA's own."""
    if layout == "NCHW":
        kernel, form = kernel[:, None], ("NCHW", "OIHW", "NCHW")
    else:
        kernel, form = kernel.transpose(1, 2, 0)[:, :, None], ("NHWC", "HWIO", "NHWC")
    y: jax.Array = jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=form,
        feature_group_count=kernel.size // 9,
    )
    if bias is None:
        return y
    bias = bias[:, None, None] if layout == "NCHW" else bias
    return jax.nn.relu(y + bias).astype(jnp.result_type(x))


IMPLEMENTATIONS: dict[str, Implementation] = {
    i.name: i
    for i in (
        Implementation("jaxsparse", CNHW, _ours),
        Implementation("jaxsparse-nchw", NCHW, functools.partial(_ours, channel_axis=1)),
        Implementation("plain", CNHW, functools.partial(_ours, implementation="xla")),
        Implementation("conv-nchw", NCHW, functools.partial(_xla, layout="NCHW")),
        Implementation("conv-nhwc", NHWC, functools.partial(_xla, layout="NHWC")),
    )
}


def variants() -> list[str]:
    """The variants that can be forced on this platform."""
    return variants_of("depthwise")


def forced(variant: str) -> Implementation:
    """Our own with a kernel variant forced."""
    convolve = functools.partial(_ours, variant=variant)
    return Implementation(f"jaxsparse[{variant}]", CNHW, convolve)
