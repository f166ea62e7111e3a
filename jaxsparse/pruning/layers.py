"""Sparse layers from pruned ones, and back."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.nn import PackedLinear, SparseConv1x1, SparseLinear
from jaxsparse.nn.linear import LINEAR_OPTIONS, check_call, obstacle_of_options
from jaxsparse.packed_form import MOST_COLUMNS_OF_GAPS


class SparseLinearGeneral(nnx.Module):
    r"""`nnx.LinearGeneral` with a sparse matrix: a linear transformation of several dimensions.

    .. math:: y_{no} = \sum_{i \in P_o} x_{ni}\, a_{oi} + b_o

    where i runs over the input dimensions together and o over the output dimensions. The
    projections of nnx.MultiHeadAttention are such layers, with outputs (heads, features).

    Args:
        linear: the matrix and the bias, for one input and one output dimension; a
            `jaxsparse.nn.PackedLinear` for packed weights.
        in_features: sizes of the input dimensions.
        out_features: sizes of the output dimensions.
        axis: which dimensions of an input are meant; ``in_features`` are those in rising order.

    Raises:
        ValueError: if the sizes are not those of ``linear``, or there isn't one axis for each input
            dimension.

    >>> dense = nnx.LinearGeneral(8, (2, 3), rngs=nnx.Rngs(0))
    >>> layer = SparseLinearGeneral.from_dense(dense)
    >>> layer(jnp.ones((5, 8))).shape, layer.linear.weight.shape
    ((5, 2, 3), (6, 8))
    """

    def __init__(
        self,
        linear: SparseLinear | PackedLinear,
        in_features: tuple[int, ...],
        out_features: tuple[int, ...],
        *,
        axis: tuple[int, ...] = (-1,),
    ):
        sizes = (math.prod(in_features), math.prod(out_features))
        if sizes != (linear.in_features, linear.out_features):
            raise ValueError(
                f"SparseLinearGeneral: linear must map {sizes[0]} features to {sizes[1]}, "
                f"got {linear.in_features} and {linear.out_features}"
            )
        if len(axis) != len(in_features):
            raise ValueError(
                "SparseLinearGeneral: axis must name a dimension for each of in_features "
                f"{in_features}, got {axis}"
            )
        self.linear = linear
        self.in_features = in_features
        self.out_features = out_features
        self.axis = axis

    @classmethod
    def from_dense(cls, layer: nnx.LinearGeneral) -> SparseLinearGeneral:
        """The weights of an `nnx.LinearGeneral` that are not 0, copied.

        Raises:
            TypeError: if ``layer`` is no nnx.LinearGeneral, or of a subclass with a call of its
                own.
            ValueError: if it has batch axes, or options that a sparse product can't follow, such as
                a ``dot_general`` of its own.
        """
        expected = "SparseLinearGeneral.from_dense: layer must be an nnx.LinearGeneral"
        check_call(expected, layer, nnx.LinearGeneral)
        if reason := obstacle_of_linear_general(layer):
            raise ValueError(f"SparseLinearGeneral.from_dense: {reason}")
        inputs, outputs = math.prod(layer.in_features), math.prod(layer.out_features)
        kernel = layer.kernel[...].reshape(inputs, outputs)
        bias: Any = None if layer.bias is None else layer.bias[...].reshape(outputs)
        flat = nnx.Linear(
            inputs,
            outputs,
            **{name: getattr(layer, name) for name in LINEAR_OPTIONS},
            kernel_init=lambda *_: kernel,
            bias_init=lambda *_: bias,
            rngs=nnx.Rngs(0),
        )
        linear = SparseLinear.from_dense(flat)
        return cls(linear, layer.in_features, layer.out_features, axis=layer.axis)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Maps the dimensions ``axis`` away and puts ``out_features`` at the end."""
        # In rising order, whichever they are named in, as in nnx.LinearGeneral.
        axis = sorted(a % inputs.ndim for a in self.axis)
        x = jnp.moveaxis(inputs, axis, range(-len(axis), 0))
        leading = x.shape[: -len(self.axis)]
        y = self.linear(x.reshape(*leading, self.linear.in_features))
        y = y.reshape(*leading, *self.out_features)
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def obstacle_of_linear(layer: nnx.Linear) -> str | None:
    """Why a linear layer can't be sparse, or None."""
    if layer.kernel[...].ndim != 2:
        return f"its kernel is a stack of shape {layer.kernel[...].shape}, not one matrix"
    if layer.dot_general is not jax.lax.dot_general:
        return "it has a dot_general of its own, which a sparse product can't follow"
    return obstacle_of_options(layer)


def obstacle_of_linear_general(layer: nnx.LinearGeneral) -> str | None:
    """Why a general linear layer can't be sparse, or None."""
    if layer.kernel[...].shape != (*layer.in_features, *layer.out_features):
        return f"its kernel is a stack of shape {layer.kernel[...].shape}, not one matrix"
    if layer.dot_general is not None or layer.dot_general_cls is not None:
        return "it has a dot_general of its own, which a sparse product can't follow"
    return obstacle_of_options(layer)


def packed_linear(
    layer: SparseLinear | PackedLinear, *inputs: Any, dtype: Any = None
) -> dict[str, PackedLinear] | str:
    """The layer with packed weights in each form that may be fastest, or why it has none.

    Nothing must be rounded by that.

    Args:
        layer: the layer.
        inputs: what it is called with: their shapes and dtypes. Where none has more than 16 rows,
            "gaps" are a form beside "cells".
        dtype: of the weights, if that is asked for: only to 8 bits are they rounded.
    """
    if isinstance(layer, PackedLinear):
        return {"gaps" if layer.cell == 0 else "cells": layer}
    own = layer.dtype
    if own is None:
        own = jnp.result_type(layer.values[...].dtype, *(x.dtype for x in inputs))
    own = jnp.dtype(own)
    if own.itemsize != 2:
        return f"it computes in {own}, and packed weights have 16 bits"
    dtype = own if dtype is None else jnp.dtype(dtype)
    if dtype.itemsize == 2 and dtype != own:
        return f"it computes in {own}, not in {dtype}"
    rows = [math.prod(x.shape) // max(layer.in_features, 1) for x in inputs]
    forms: dict[str, int | None] = {"cells": None}
    most = max([1, *rows])
    if most <= MOST_COLUMNS_OF_GAPS:
        forms["gaps"] = 0
    return {
        form: PackedLinear.from_sparse(
            layer, dtype=dtype, cell=cell, columns=most if cell == 0 else None
        )
        for form, cell in forms.items()
    }


def packed_linear_general(
    layer: SparseLinearGeneral, *inputs: Any, dtype: Any = None
) -> dict[str, SparseLinearGeneral] | str:
    """The same of a linear layer of several dimensions."""
    found = packed_linear(layer.linear, *inputs, dtype=dtype)
    if isinstance(found, str):
        return found
    sizes = layer.in_features, layer.out_features
    return {
        form: SparseLinearGeneral(linear, *sizes, axis=layer.axis) for form, linear in found.items()
    }


def dense_linear(layer: SparseLinear | PackedLinear) -> nnx.Linear:
    """An nnx.Linear with a copy of the matrix, zeros in place, and of the bias.

    Raises:
        TypeError: for a subclass with a call of its own, which the dense layer would not have.
        ValueError: if an activation is fused with the product.
    """
    expected = "densify: layer must be a SparseLinear or PackedLinear"
    check_call(expected, layer, SparseLinear, PackedLinear)
    _check_activation("nnx.Linear", layer)
    bias: Any = None if layer.bias is None else jnp.copy(layer.bias[...])
    matrix = layer.weight.todense()
    options = (
        {name: getattr(layer, name) for name in LINEAR_OPTIONS}
        if isinstance(layer, SparseLinear)
        else {
            "use_bias": bias is not None,
            "dtype": layer.dtype,
            "param_dtype": matrix.dtype,
            "preferred_element_type": layer.preferred_element_type,
        }
    )
    return nnx.Linear(
        layer.in_features,
        layer.out_features,
        **options,
        kernel_init=lambda *_: matrix.T,
        bias_init=lambda *_: bias,
        rngs=nnx.Rngs(0),
    )


def dense_conv(layer: SparseConv1x1) -> nnx.Conv:
    """An nnx.Conv of 1 x 1 with a copy of the matrix, zeros in place, and of the bias.

    Raises:
        TypeError: for a subclass with a call of its own, which the dense layer would not have.
        ValueError: if an activation is fused with the product, or channels don't come last.
    """
    check_call("densify: layer must be a SparseConv1x1", layer, SparseConv1x1)
    _check_activation("nnx.Conv", layer)
    if layer.channel_axis != -1:
        raise ValueError(
            "densify: nnx.Conv has its channels last, "
            f"but a SparseConv1x1 was made with channel_axis={layer.channel_axis}"
        )
    bias: Any = None if layer.bias is None else jnp.copy(layer.bias[...])
    return nnx.Conv(
        layer.in_features,
        layer.out_features,
        layer.kernel_size,
        **{name: getattr(layer, name) for name in LINEAR_OPTIONS},
        kernel_init=lambda _, shape, dtype: layer.weight.todense().T.reshape(shape),
        bias_init=lambda *_: bias,
        rngs=nnx.Rngs(0),
    )


def remark_on_conv(layer: SparseConv1x1, inputs: jax.Array, **_: Any) -> str | None:
    """What is to be known of a sparse convolution's time on this device, or None."""
    return "channels last: transposed" if jax.default_backend() == "gpu" else None


def _check_activation(dense: str, layer: SparseLinear | PackedLinear) -> None:
    if layer.activation is not None:
        raise ValueError(
            f"densify: {dense} has no activation, "
            f"but a {type(layer).__name__} was made with activation={layer.activation!r}"
        )


def dense_linear_general(layer: SparseLinearGeneral) -> nnx.LinearGeneral:
    """An nnx.LinearGeneral with a copy of the matrix, zeros in place, and of the bias."""
    flat = dense_linear(layer.linear)
    bias: Any = None if flat.bias is None else flat.bias[...]
    return nnx.LinearGeneral(
        layer.in_features,
        layer.out_features,
        axis=layer.axis,
        **{name: getattr(flat, name) for name in LINEAR_OPTIONS},
        kernel_init=lambda *_: flat.kernel[...],
        bias_init=lambda *_: bias,
        rngs=nnx.Rngs(0),
    )
