"""The two layers of a separable convolution: depthwise, and 1 x 1 with a sparse matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxsparse.integers import integer
from jaxsparse.nn.linear import (
    LINEAR_OPTIONS,
    Initializer,
    SparseLinear,
    check_call,
    obstacle_of_options,
)
from jaxsparse.ops.depthwise_conv import depthwise_conv
from jaxsparse.ops.linear import linear
from jaxsparse.ops.matmul import spmm
from jaxsparse.topology import Topology

# The variance of each output is that of the inputs: one over the size of the window.
_LECUN = nnx.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=(1, 2), out_axis=0
)


class DepthwiseConv(nnx.Module):
    r"""Convolution of each channel with a kernel of its own, with bias and activation fused.

    .. math:: y_{cnhw} = f\Bigl(\sum_{ij} x_{c,n,\,s h - p + i,\,s w - p + j}\, k_{cij} + b_c\Bigr)

    It is `jaxsparse.depthwise_conv` as a layer. Attributes: ``kernel``, an `nnx.Param`
    ``(features, kh, kw)``; ``bias``, an `nnx.Param` ``(features,)`` or None.

    Args:
        features: channels of inputs and outputs.
        stride: the distance between windows, along both axes or (along h, along w).
        kernel_size: of the window (kh, kw).
        padding: "SAME", "SAME_LOWER", "VALID" or ``((above, below), (left, right))``.
        channel_axis: 0 for images ``(c, n, h, w)``, 1 for ``(n, c, h, w)``.
        use_bias: whether to add a bias.
        activation: None, "relu" or "gelu" (the tanh form), fused with the convolution.
        dtype: of the computation; by default that of inputs and parameters together.
        param_dtype: of the parameters.
        kernel_init: makes the kernel. By default LeCun's normal distribution, its variance one over
            the size of the window.
        bias_init: makes the bias.
        promote_dtype: brings inputs, kernel and bias to one dtype.
        rngs: random keys: the stream "params", one for the kernel and one for the bias.
        kernel_metadata, bias_metadata: metadata of the variables.

    Raises:
        TypeError: if ``features`` or the sizes of the window are no integers.
        ValueError: if there are none of them, or the window has not two sizes.

    Source: Howard et al. 2017, "MobileNets: Efficient Convolutional Neural Networks for Mobile
    Vision Applications".

    >>> layer = DepthwiseConv(8, stride=2, activation="relu", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((8, 1, 6, 6))).shape
    (8, 1, 3, 3)
    """

    def __init__(
        self,
        features: int,
        stride: int | Sequence[int] = 1,
        *,
        kernel_size: Sequence[int] = (3, 3),
        padding: str | Sequence[Sequence[int]] = "SAME",
        channel_axis: int = 0,
        use_bias: bool = True,
        activation: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = _LECUN,
        bias_init: Initializer = nnx.initializers.zeros,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        features = integer("DepthwiseConv", "features", features, 1)
        if not isinstance(kernel_size, tuple | list) or len(kernel_size) != 2:
            raise ValueError(f"DepthwiseConv: kernel_size must be (kh, kw), got {kernel_size!r}")
        kh, kw = (integer("DepthwiseConv", "kernel_size", size, 1) for size in kernel_size)
        kernel = kernel_init(rngs.params(), (features, kh, kw), param_dtype)
        self.kernel = nnx.Param(kernel, **kernel_metadata)
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (features,), param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)
        self.features = features
        self.stride = stride
        self.kernel_size = (kh, kw)
        self.padding = padding
        self.channel_axis = channel_axis
        self.use_bias = use_bias
        self.activation = activation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps ``(c, n, h, w)`` to ``(c, n, h', w')``, or with ``channel_axis=1`` by images.

        Raises:
            TypeError, ValueError: as `jaxsparse.depthwise_conv`.
        """
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype(
            (inputs, self.kernel[...], bias), dtype=self.dtype
        )
        return depthwise_conv(
            inputs,
            kernel,
            bias=bias,
            activation=self.activation,
            stride=self.stride,
            channel_axis=self.channel_axis,
            padding=self.padding,
        )


class SparseConv1x1(SparseLinear):
    r"""Convolution of 1 x 1 with a sparse matrix: the channels of each pixel by themselves.

    .. math:: y_{c p} = f\Bigl(\sum_{j \in P_c} a_{cj}\, x_{j p} + b_c\Bigr)

    where p runs over pixels of all images. With channels first that is a single product,
    ``spmm(a, x.reshape(in_features, n * h * w))``, and nothing is transposed. The matrix, the bias
    and their attributes are those of `SparseLinear`, and so are all options.

    Args:
        in_features: channels of the input.
        out_features: channels of the output.
        channel_axis: 0 for images ``(c, n, h, w)``, -1 for ``(..., c)`` as in `nnx.Conv`, for which
            a GPU transposes inputs and outputs.
        options: those of `SparseLinear`: ``sparsity`` or ``topology``, ``activation``, ``rngs``...

    Raises:
        TypeError, ValueError: as `SparseLinear`; ValueError for another channel axis.

    Source: section VII-D of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning".

    >>> layer = SparseConv1x1(8, 16, sparsity=0.75, activation="relu", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((8, 1, 6, 6))).shape, layer.values.shape
    ((16, 1, 6, 6), (32,))
    """

    def __init__(
        self, in_features: int, out_features: int, *, channel_axis: int = 0, **options: Any
    ):
        _check_axis("SparseConv1x1", channel_axis)
        super().__init__(in_features, out_features, **options)
        self.channel_axis = channel_axis
        self.kernel_size: tuple[int, ...] = (1, 1)

    @classmethod
    def from_dense(  # type: ignore[override]
        cls,
        layer: nnx.Conv,
        *,
        sparsity: float | None = None,
        topology: Topology | None = None,
        activation: str | None = None,
        channel_axis: int = -1,
    ) -> SparseConv1x1:
        """Prunes an `nnx.Conv` of 1 x 1, as `SparseLinear.from_dense` does a linear layer.

        Args:
            layer: left as it is; its parameters are copied, without their metadata.
            sparsity, topology, activation: as in `SparseLinear.from_dense`.
            channel_axis: as in the constructor; where the sparse layer has its channels. Those of
                an nnx.Conv come last.

        Raises:
            TypeError: if ``layer`` is no nnx.Conv, or of a subclass with a call of its own.
            ValueError: for a window, a stride or groups other than 1, for padding, for another
                channel axis, and as `SparseLinear.from_dense`.

        >>> dense = nnx.Conv(64, 32, (1, 1), rngs=nnx.Rngs(0))
        >>> SparseConv1x1.from_dense(dense, sparsity=0.9).values.shape
        (205,)
        """
        _check_axis("SparseConv1x1.from_dense", channel_axis)
        check_call("SparseConv1x1.from_dense: layer must be an nnx.Conv", layer, nnx.Conv)
        if reason := obstacle_of_conv(layer):
            raise ValueError(f"SparseConv1x1.from_dense: {reason}")
        sparse = super().from_dense(
            _flat(layer), sparsity=sparsity, topology=topology, activation=activation
        )
        assert isinstance(sparse, SparseConv1x1)
        sparse.channel_axis = channel_axis
        sparse.kernel_size = layer.kernel_size
        return sparse

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Maps ``(in_features, ...)`` to ``(out_features, ...)``, or the last dimension.

        Args:
            inputs: images, or anything else with channels along the layer's axis.
            out_sharding: of the result, a NamedSharding or PartitionSpec of explicit axes.

        Raises:
            TypeError, ValueError: as `jaxsparse.spmm` and `jaxsparse.linear`, and ValueError for
                another number of channels.
        """
        axis = self.channel_axis
        if inputs.ndim == 0 or inputs.shape[axis] != self.in_features:
            raise ValueError(
                f"SparseConv1x1: inputs must have {self.in_features} channels along axis {axis}, "
                f"got shape {inputs.shape}"
            )
        inputs, weight, options = self._operands(inputs)
        if axis == 0:
            pixels = inputs.shape[1:]
            x = inputs.reshape(self.in_features, math.prod(pixels))
            outputs = spmm(weight, x, **options).reshape(self.out_features, *pixels)
        else:
            outputs = linear(inputs, weight, **options)
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)


def obstacle_of_conv(layer: nnx.Conv) -> str | None:
    """Why a convolution can't be a sparse 1 x 1 one, or None."""
    shape = layer.kernel[...].shape
    if shape != layer.kernel_shape:
        return f"its kernel is a stack of shape {shape}, not one matrix"
    if any(size != 1 for size in layer.kernel_size):
        return f"its window is {' x '.join(map(str, layer.kernel_size))}, and only 1 x 1 is sparse"
    for name in ("strides", "input_dilation"):
        value = getattr(layer, name)
        if any(x not in (1, None) for x in ([value] if _is_single(value) else value)):
            return f"its {name} must be 1 to be sparse, got {value}"
    if layer.feature_group_count != 1:
        return f"it has {layer.feature_group_count} groups of channels, not one"
    padding = layer.padding
    if not isinstance(padding, str) and any(jax.tree.leaves(padding)):
        return f"it pads its inputs by {padding}"
    if layer.mask is not None:
        return "it has a mask of its kernel"
    if layer.conv_general_dilated is not jax.lax.conv_general_dilated:
        return "it has a conv_general_dilated of its own, which a sparse product can't follow"
    return obstacle_of_options(_flat(layer))


def _check_axis(operation: str, axis: Any) -> None:
    if axis not in (0, -1):
        raise ValueError(f"{operation}: channel_axis must be 0 or -1, got {axis!r}")


def _is_single(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _flat(layer: nnx.Conv) -> nnx.Linear:
    """The linear layer that a convolution of 1 x 1 is to each pixel."""
    kernel = layer.kernel[...].reshape(layer.in_features, layer.out_features)
    bias: Any = None if layer.bias is None else layer.bias[...]
    return nnx.Linear(
        layer.in_features,
        layer.out_features,
        **{name: getattr(layer, name) for name in LINEAR_OPTIONS},
        kernel_init=lambda *_: kernel,
        bias_init=lambda *_: bias,
        rngs=nnx.Rngs(0),
    )
