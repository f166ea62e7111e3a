"""Depthwise convolution: the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxsparse import backend
from jaxsparse.integers import integer
from jaxsparse.ops import arguments
from jaxsparse.ops.depthwise import depthwise_epilogue_p, depthwise_p
from jaxsparse.ops.plain_depthwise import Window
from jaxsparse.ops.plain_products import check_activation
from jaxsparse.primitive import bind

_OPERATION = "depthwise_conv"


def depthwise_conv(
    x: Any,
    kernel: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    stride: int | Sequence[int] = 1,
    channel_axis: int = 0,
    padding: str | Sequence[Sequence[int]] = "SAME",
    implementation: str | None = None,
    variant: str | None = None,
) -> jax.Array:
    r"""Convolution of each channel with a kernel of its own, with bias and activation fused.

    .. math:: y_{cnhw} = f\Bigl(\sum_{ij} x_{c,n,\,s h - p + i,\,s w - p + j}\, k_{cij} + b_c\Bigr)

    As in every network library this is a correlation: the kernel is not flipped. What lies outside
    an image is 0.

    With channels first (``channel_axis=0``) a 1 x 1 convolution of a whole batch is one product,
    ``spmm(a, x.reshape(c, n * h * w))``, and nothing is transposed between the layers of a
    separable network. There are kernels for 3 x 3 numbers and strides of 1 and 2, in up to 32 bits;
    all else is computed by XLA, as a shifted multiply-add for each number of ``kernel``. So are
    small float32 images on a GPU and most images of 16 bits, where that is taken to be faster;
    ``explain`` says it. Sums of 16-bit operands are taken in float32, and so are derivatives until
    they are rounded.
    Differentiable to any order in ``x``, ``kernel`` and ``bias``.

    Args:
        x: images ``(c, n, h, w)``, or ``(n, c, h, w)`` with ``channel_axis=1``; float32, float64,
            bfloat16 or float16. `jax.vmap` serves further dimensions.
        kernel: ``(c, kh, kw)``, a kernel for each channel.
        bias: ``(c,)``.
        activation: None, "relu" or "gelu" (the tanh form), applied last.
        stride: the distance between windows, along both axes or (along h, along w).
        channel_axis: 0 or 1, where the channels of ``x`` and of the result are.
        padding: "SAME", "SAME_LOWER" or "VALID" as in ``jax.lax``, or the numbers of rows and
            columns of zeros ``((above, below), (left, right))``. "SAME" with a stride s makes
            ``ceil(h / s)`` rows; of an even size and stride 2 it adds zeros behind the image alone.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``.

    Returns:
        ``(c, n, h', w')``, or ``(n, c, h', w')`` with ``channel_axis=1``.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes.
        ValueError: for shapes that don't fit and options that don't exist; at lowering, for an
            implementation or variant that can't be had.

    Method: the layers of Howard et al. 2017, "MobileNets: Efficient Convolutional Neural Networks
    for Mobile Vision Applications", in the layout of Gale et al. 2020, "Sparse GPU Kernels for Deep
    Learning", section VII-D.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(9.0).reshape(1, 1, 3, 3)
    >>> depthwise_conv(x, jnp.ones((1, 3, 3)), stride=2)[0, 0]
    Array([[ 8., 12.],
           [20., 24.]], dtype=float32)
    """
    x = arguments.as_array(_OPERATION, "x", x, 4)
    kernel = arguments.as_array(_OPERATION, "kernel", kernel, 3)
    if channel_axis not in (0, 1):
        raise ValueError(f"{_OPERATION}: channel_axis must be 0 or 1, got {channel_axis!r}")
    if x.ndim != 4 or kernel.ndim != 3 or kernel.shape[0] != x.shape[channel_axis]:
        images = "(c, n, h, w)" if channel_axis == 0 else "(n, c, h, w)"
        raise ValueError(
            f"{_OPERATION}: x and kernel must have shapes {images} and (c, kh, kw), "
            f"got {x.shape} and {kernel.shape}"
        )
    check_activation(_OPERATION, activation)
    backend.check_implementation(_OPERATION, implementation)
    dense = {"x": x, "kernel": kernel}
    if bias is not None:
        dense["bias"] = arguments.as_array(_OPERATION, "bias", bias, 1)
        if dense["bias"].shape != kernel.shape[:1]:
            raise ValueError(
                f"{_OPERATION}: bias must have shape {kernel.shape[:1]}, one for each channel, "
                f"got {dense['bias'].shape}"
            )
    dtype = arguments.check_floating(_OPERATION, **dense)
    operands = [operand.astype(dtype) for operand in dense.values()]
    params: dict[str, Any] = {
        "window": _window(x.shape[2:], kernel.shape[1:], stride, padding),
        "channel_axis": channel_axis,
        "out_dtype": dtype,
        "implementation": implementation,
        "variant": variant,
    }
    primitive = depthwise_p
    if bias is not None or activation is not None:
        primitive = depthwise_epilogue_p
        params |= {"has_bias": bias is not None, "activation": activation}
        params["with_preactivation"] = False
    out: jax.Array = bind(primitive, *operands, **params)[0]
    return out


def _window(image: Any, kernel: Any, stride: Any, padding: Any) -> Window:
    """Where windows stand, as the options say it."""
    if not all(isinstance(size, int) for size in (*image, *kernel)):
        raise ValueError(
            f"{_OPERATION}: sizes of images and kernels must be numbers when a program is traced, "
            f"got {image} and {kernel}"
        )
    if 0 in kernel:
        raise ValueError(f"{_OPERATION}: a kernel must have elements, got (c, *{kernel})")
    vertical, horizontal = stride if _is_pair(stride) else (stride, stride)
    down, across = (integer(_OPERATION, "stride", s, 1) for s in (vertical, horizontal))
    strides = (down, across)
    pads = _pads(image, kernel, strides, padding)
    out = [
        max(0, (size + sum(pad) - taps) // step + 1)
        for size, pad, taps, step in zip(image, pads, kernel, strides, strict=True)
    ]
    (above, _), (left, _) = pads
    return Window(tuple(image), tuple(kernel), strides, (above, left), (out[0], out[1]))


def _pads(image: Any, kernel: Any, strides: Any, padding: Any) -> list[tuple[int, int]]:
    """Zeros before and behind, along both axes."""
    if isinstance(padding, str):
        try:
            return list(jax.lax.padtype_to_pads(image, kernel, strides, padding))
        except (RuntimeError, ValueError):
            pass  # a string that names none
    elif _is_pair(padding) and all(map(_is_pair, padding)):
        (a, b), (c, d) = ([integer(_OPERATION, "padding", n, 0) for n in p] for p in padding)
        return [(a, b), (c, d)]
    raise ValueError(
        f"{_OPERATION}: padding must be 'SAME', 'SAME_LOWER', 'VALID' or "
        f"((above, below), (left, right)), got {padding!r}"
    )


def _is_pair(option: Any) -> bool:
    return isinstance(option, tuple | list) and len(option) == 2
