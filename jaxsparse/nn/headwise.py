"""A linear layer whose units are divided among heads: a block-diagonal matrix, stored as blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxsparse.nn.linear import Initializer, as_integer
from jaxsparse.ops import arguments


class HeadwiseLinear(nnx.Module):
    r"""A linear transformation of the last dimension by a block-diagonal matrix for each gate.

    .. math:: y_{n,g,k} = x_{n,k} W_{k,g} + b_{g,k}

    for each head k: its part of the input gives its part of each gate g. Gates lie side by side,
    and so do the heads of a gate. Attributes: ``kernel``, an `nnx.Param`
    (heads, in_features / heads, out_features / heads), whose last dimension has the gates side by
    side; ``bias``, an `nnx.Param` (out_features,) or None.

    Args:
        in_features: features of the input, a multiple of ``heads``.
        out_features: features of the output, a multiple of ``gates * heads``.
        heads: how many blocks there are.
        gates: how many matrices.
        use_bias: whether to add a bias.
        dtype: of the computation; by default that of inputs and parameters together.
        param_dtype: of the parameters.
        precision: None or a ``jax.lax.Precision``.
        kernel_init: makes the block of one head; by default LeCun's normal distribution.
        bias_init: makes the bias.
        promote_dtype: brings inputs, kernel and bias to one dtype.
        preferred_element_type: of the result.
        rngs: random keys: the stream "params", one key for the kernel and one for the bias.
        kernel_metadata, bias_metadata: metadata of the parameters.

    Raises:
        TypeError: for sizes that are no integers.
        ValueError: for features that heads and gates do not divide, other precisions, and
            initializers with metadata.

    Source: the headwise linear maps of Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory".

    >>> layer = HeadwiseLinear(6, 12, heads=3, gates=2, rngs=nnx.Rngs(0))
    >>> layer.kernel.shape, layer(jnp.ones((5, 6))).shape
    ((3, 2, 4), (5, 12))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        heads: int,
        gates: int = 1,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        sizes = {
            "in_features": in_features,
            "out_features": out_features,
            "heads": heads,
            "gates": gates,
        }
        in_features, out_features, heads, gates = (
            as_integer("HeadwiseLinear", name, size) for name, size in sizes.items()
        )
        if min(heads, gates) < 1 or in_features % heads or out_features % (gates * heads):
            raise ValueError(
                "HeadwiseLinear: heads must divide in_features, and gates * heads out_features, "
                f"got {heads} heads, {gates} gates, {in_features} and {out_features} features"
            )
        arguments.as_precision("HeadwiseLinear", precision)
        block = in_features // heads, out_features // heads
        keys = jax.random.split(rngs.params(), heads)
        # One after the other: an initializer of a user's may not be one that vmap takes.
        init: Any = nnx.initializers.lecun_normal() if kernel_init is None else kernel_init
        blocks = [init(key, block, param_dtype) for key in keys]
        if any(isinstance(x, nnx.VariableMetadata) for x in blocks):
            raise ValueError(
                "HeadwiseLinear: kernel_init must make the array of a head, without metadata, "
                "which those of all heads have in kernel_metadata"
            )
        kernel = jnp.stack(blocks)
        self.kernel = nnx.Param(kernel, **kernel_metadata)
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.heads = heads
        self.gates = gates
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @property
    def matrix(self) -> jax.Array:
        """The kernel with its zeros, (in_features, out_features)."""
        heads, d, width = self.kernel.shape
        blocks = self.kernel[...].reshape(heads, d, self.gates, width // self.gates)
        eye = jnp.eye(heads, dtype=blocks.dtype)
        # Zeros, not products by zero, beside a NaN.
        every = jnp.where(eye[:, None, None, :, None] != 0, blocks[:, :, :, None], 0)
        return every.reshape(self.in_features, self.out_features)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps ``(..., in_features)`` to ``(..., out_features)``.

        Args:
            inputs: of any number of leading dimensions.

        Raises:
            ValueError: for another number of features.
        """
        if inputs.shape[-1] != self.in_features:
            raise ValueError(
                f"HeadwiseLinear: inputs must have {self.in_features} features, "
                f"got {inputs.shape[-1]}"
            )
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype(
            (inputs, self.kernel[...], bias), dtype=self.dtype
        )
        heads, d, width = kernel.shape
        outputs = jnp.einsum(
            "...kd,kdgu->...gku",
            inputs.reshape(*inputs.shape[:-1], heads, d),
            kernel.reshape(heads, d, self.gates, width // self.gates),
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        ).reshape(*inputs.shape[:-1], self.out_features)
        return outputs if bias is None else outputs + bias
