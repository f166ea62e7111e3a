"""A linear layer with packed weights, for inference with few columns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.csr import CSR
from jaxsparse.nn.linear import SparseLinear, check_call
from jaxsparse.nn.variables import own_topology, topology_of
from jaxsparse.ops.linear import linear
from jaxsparse.ops.packed_places import SIXTEEN_BITS
from jaxsparse.packed import Packed
from jaxsparse.packed_checks import check_shapes


class PackedArray(nnx.Variable[jax.Array]):
    """Holds an array of packed weights: an argument of jitted programs, and no parameter."""


class PackedLinear(nnx.Module):
    r"""`SparseLinear` with weights that are packed for few columns on a GPU, mostly for inference.

    .. math:: y_{ni} = f\Bigl(\sum_{j \in P_i} x_{nj}\, a_{ij} + b_i\Bigr)

    The matrix is a `jaxsparse.Packed` of shape (out_features, in_features). Its arrays are
    variables of a type of their own, `PackedArray`, so gradients and optimizers see the bias alone;
    gradients of the inputs pass through. Attributes: ``values``, ``masks``, ``starts``, ``panels``,
    ``rows``, as in `Packed`; ``bias``, an `nnx.Param` ``(out_features,)`` or None.

    Of a trainable matrix (`CSR.pack` with ``trainable=True``) ``values`` is an `nnx.Param`, too.
    It trains in 16 bits, where it stands: numbers that are no entry have gradients of 0, so they
    stay 0 with every optimizer that leaves a 0 without a gradient alone, weight decay included.
    ``sources`` and ``topology`` come along, for gradients; they take several times the bytes of
    the values. For training with many rows of inputs `SparseLinear` is faster.

    Weights of 8 bits, in cells or by gaps, have ``scales``, a `PackedArray`, too; they are
    multiplied by inputs of 16 bits, and are never parameters.

    Args:
        weight: the matrix.
        bias: ``(out_features,)`` or None.
        activation: None, "relu" or "gelu" (the tanh form), fused with the product.
        preferred_element_type: of the result; by default that of the inputs.
        dtype: what inputs are rounded to, bfloat16 or float16; by default the weights' dtype,
            bfloat16 if those have 8 bits.

    Raises:
        TypeError: if ``weight`` is no Packed.
        ValueError: if ``dtype`` is not one that is multiplied by the weights.

    >>> layer = SparseLinear(64, 32, sparsity=0.75, rngs=nnx.Rngs(0))
    >>> packed = PackedLinear.from_sparse(layer, dtype=jnp.bfloat16)
    >>> packed(jnp.ones((8, 64))).shape, packed.weight.dtype
    ((8, 32), dtype(bfloat16))
    """

    def __init__(
        self,
        weight: Packed,
        *,
        bias: jax.Array | None = None,
        activation: str | None = None,
        preferred_element_type: Any = None,
        dtype: Any = None,
    ):
        if not isinstance(weight, Packed):
            raise TypeError(f"PackedLinear: weight must be Packed, got {type(weight).__name__}")
        fitting = SIXTEEN_BITS if weight.quantized else (weight.dtype,)
        dtype = fitting[0] if dtype is None else jnp.dtype(dtype)
        if dtype not in fitting:
            raise ValueError(
                f"PackedLinear: dtype must be {' or '.join(map(str, fitting))} for weights in "
                f"{weight.dtype}, got {dtype}"
            )
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape
        self.cell, self.parts = weight.cell, weight.parts
        self.values: nnx.Variable[jax.Array] = PackedArray(weight.values)
        self.masks = PackedArray(weight.masks)
        self.starts = PackedArray(weight.starts)
        self.panels = PackedArray(weight.panels)
        self.rows = PackedArray(weight.rows)
        self.scales = nnx.data(None)
        if weight.scales is not None:
            self.scales = PackedArray(weight.scales)
        self.sources, self.topology = nnx.data(None), nnx.data(None)
        if weight.sources is not None and weight.topology is not None:
            if not weight.quantized:
                self.values = nnx.Param(weight.values)
            self.sources = PackedArray(weight.sources)
            self.topology = own_topology(weight.topology)
        self.bias = nnx.data(None)
        if bias is not None:
            self.bias = nnx.Param(bias)
        self.activation = activation
        self.preferred_element_type = preferred_element_type

    @classmethod
    def from_sparse(
        cls,
        layer: SparseLinear,
        *,
        dtype: Any = None,
        cell: int | None = None,
        columns: int | None = None,
        trainable: bool = False,
    ) -> PackedLinear:
        """Packs the weights of a `SparseLinear`, which is left as it is.

        Args:
            layer: its pattern must be known. Results have its ``preferred_element_type``, or else
                its ``dtype``, if it has one of these.
            dtype: of the weights, bfloat16, float16, int8 or float8_e4m3fn, as in `CSR.pack`: by
                default that in which the layer computes. Those of 8 bits are multiplied by inputs
                in the layer's ``dtype`` if that has 16 bits, else in bfloat16.
            cell: how places of weights are stored, as in `CSR.pack`: 0 for up to 16 rows of inputs.
            columns: how many rows inputs will mostly have, for which ``cell`` is then chosen.
            trainable: whether the weights have gradients, and are parameters.

        Raises:
            TypeError: if ``layer`` is no SparseLinear, or of a subclass with a call of its own.
            ValueError: as `jaxsparse.CSR.pack`, for a layer that computes in float32 for instance
                if no dtype is given.
        """
        check_call("PackedLinear.from_sparse: layer must be a SparseLinear", layer, SparseLinear)
        a: CSR = layer.weight
        wanted = layer.preferred_element_type
        options: dict[str, Any] = {"cell": cell, "columns": columns, "trainable": trainable}
        weight = a.pack(layer.dtype if dtype is None else dtype, **options)
        own = None if layer.dtype is None else jnp.dtype(layer.dtype)
        return cls(
            weight,
            bias=None if layer.bias is None else jnp.copy(layer.bias[...]),
            activation=layer.activation,
            preferred_element_type=layer.dtype if wanted is None else wanted,
            dtype=own if weight.quantized and own in SIXTEEN_BITS else None,
        )

    @property
    def weight(self) -> Packed:
        """The matrix (out_features, in_features).

        Raises:
            ValueError: if a state of another layer was put in.
        """
        arrays = (self.values, self.masks, self.starts, self.panels, self.rows)
        shape = (self.out_features, self.in_features)
        leaves = [array[...] for array in arrays]
        entries: tuple[Any, Any] = (None, None)
        if self.sources is not None and self.topology is not None:
            entries = self.sources[...], topology_of(self.topology, shape)
        scales = None if self.scales is None else self.scales[...]
        weight = Packed(*leaves, scales, *entries, shape=shape, cell=self.cell, parts=self.parts)
        check_shapes("PackedLinear", weight)  # a state may be that of another layer
        return weight

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Maps ``(..., in_features)`` to ``(..., out_features)``.

        Args:
            inputs: of any number of leading dimensions; they are rounded to ``dtype``.
            out_sharding: of the result, a NamedSharding or PartitionSpec of explicit axes.

        Raises:
            TypeError, ValueError: as `jaxsparse.linear`.
        """
        weight, wanted = self.weight, self.preferred_element_type
        wanted = inputs.dtype if wanted is None else jax.dtypes.canonicalize_dtype(wanted)
        outputs = linear(
            inputs.astype(self.dtype),
            weight,
            bias=None if self.bias is None else self.bias[...],
            activation=self.activation,
            preferred_element_type=None if wanted == self.dtype else jnp.float32,
        ).astype(wanted)
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)
