"""A linear layer with a sparse weight matrix."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes

from jaxsparse.csr import CSR
from jaxsparse.nn.variables import own_topology, topology_of
from jaxsparse.ops.linear import linear
from jaxsparse.topology import Topology

Initializer = Callable[..., jax.Array]


# What a linear layer of Flax, and SparseLinear too, keeps of its constructor's options.
LINEAR_OPTIONS = (
    "use_bias",
    "dtype",
    "param_dtype",
    "precision",
    "promote_dtype",
    "preferred_element_type",
)


class SparseLinear(nnx.Module):
    r"""A linear transformation of the last dimension by a sparse matrix: `nnx.Linear`, pruned.

    .. math:: y_{ni} = f\Bigl(\sum_{j \in P_i} x_{nj}\, a_{ij} + b_i\Bigr)

    The matrix is a `jaxsparse.CSR` of shape (out_features, in_features): a row for each output.
    Attributes: ``values``, an `nnx.Param` ``(nse,)``; ``topology``, a `TopologyVariable`; ``bias``,
    an `nnx.Param` ``(out_features,)`` or None.

    Args:
        in_features: features of the input.
        out_features: features of the output.
        sparsity: share of weights that are left out, in [0, 1): every output gets the same number
            of random inputs, at least one.
        topology: the stored positions instead, of shape (out_features, in_features).
        use_bias: whether to add a bias.
        activation: None, "relu" or "gelu" (the tanh form), fused with the product.
        dtype: of the computation; by default that of inputs and parameters together.
        param_dtype: of the parameters.
        precision: None or ``jax.lax.Precision.HIGHEST``.
        kernel_init: makes a dense kernel (in_features, out_features), of which the stored positions
            are taken. By default LeCun's normal distribution, its variance one over the number of
            weights that the output really has.
        bias_init: makes the bias.
        promote_dtype: brings inputs, values and bias to one dtype.
        preferred_element_type: float32 for the result of 16-bit operands.
        rngs: random keys: the stream "params".
        kernel_metadata, bias_metadata: metadata of the variables ``values`` and ``bias``.

    Raises:
        TypeError: if ``topology`` is no Topology, or a number of features no integer.
        ValueError: unless exactly one of ``sparsity`` and ``topology`` is given, and for values and
            shapes that don't fit.

    Source: the weight-sparse layers of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning".

    >>> layer = SparseLinear(64, 32, sparsity=0.75, activation="relu", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((8, 64))).shape, layer.values.shape
    ((8, 32), (512,))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sparsity: float | None = None,
        topology: Topology | None = None,
        use_bias: bool = True,
        activation: str | None = None,
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
        in_features = as_integer("SparseLinear", "in_features", in_features)
        out_features = as_integer("SparseLinear", "out_features", out_features)
        shape = (out_features, in_features)
        if (sparsity is None) == (topology is None):
            raise ValueError("SparseLinear: needs either sparsity or topology")
        if topology is None:
            assert sparsity is not None
            _check_sparsity("SparseLinear", sparsity)
            topology = _random_topology(rngs.params(), shape, sparsity)
        if not isinstance(topology, Topology):
            raise TypeError(
                f"SparseLinear: topology must be a Topology, got {type(topology).__name__}"
            )
        if topology.shape != shape or topology.batch_shape:
            raise ValueError(
                f"SparseLinear: topology must be one pattern of shape {shape}, (out_features, "
                f"in_features), got shape {topology.shape}, batch {topology.batch_shape}"
            )
        self.topology = own_topology(topology)
        key = rngs.params()
        if kernel_init is None:
            values = _lecun_normal(key, topology, param_dtype)
        else:
            kernel = kernel_init(key, (in_features, out_features), param_dtype)
            values = CSR.fromdense(kernel.T, topology).values
        self.values = nnx.Param(values, **kernel_metadata)
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.activation = activation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @classmethod
    def from_dense(
        cls,
        layer: nnx.Linear,
        *,
        sparsity: float | None = None,
        topology: Topology | None = None,
        activation: str | None = None,
    ) -> SparseLinear:
        """Prunes an `nnx.Linear`: keeps its largest weights, those at a topology, or those not 0.

        Args:
            layer: left as it is; its parameters are copied, without their metadata.
            sparsity: share of weights to leave out, the smallest magnitudes of the whole matrix
                first; of equal ones the later. At least one is kept, and NaN before all others.
            topology: the positions to keep instead, of shape (out_features, in_features). With
                neither, the weights that are not 0 are kept: a layer that was pruned already.
            activation: as in the constructor.

        Raises:
            TypeError: if ``layer`` is no nnx.Linear.
            ValueError: for both ``sparsity`` and ``topology``, values and shapes that don't fit,
                and a layer with a ``dot_general`` of its own, which a sparse product can't follow.

        >>> dense = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        >>> SparseLinear.from_dense(dense, sparsity=0.9).values.shape
        (205,)
        """
        if not isinstance(layer, nnx.Linear):
            raise TypeError(
                f"SparseLinear.from_dense: layer must be an nnx.Linear, got {type(layer).__name__}"
            )
        if sparsity is not None and topology is not None:
            raise ValueError("SparseLinear.from_dense: takes sparsity or topology, got both")
        if layer.dot_general is not jax.lax.dot_general:
            raise ValueError(
                "SparseLinear.from_dense: layer must have dot_general=jax.lax.dot_general, "
                f"got {layer.dot_general}"
            )
        if sparsity is not None:
            _check_sparsity("SparseLinear.from_dense", sparsity)
        kernel = layer.kernel[...]
        bias: Any = None if layer.bias is None else jnp.copy(layer.bias[...])
        if topology is None:
            topology = _topology_of(kernel.T, sparsity)
        return cls(
            layer.in_features,
            layer.out_features,
            topology=topology,
            activation=activation,
            **{name: getattr(layer, name) for name in LINEAR_OPTIONS},
            kernel_init=lambda *_: kernel,
            bias_init=lambda *_: bias,
            rngs=nnx.Rngs(0),
        )

    @property
    def weight(self) -> CSR:
        """The matrix (out_features, in_features)."""
        return CSR(self.values[...], self.pattern)

    @property
    def pattern(self) -> Topology:
        """The stored positions (out_features, in_features)."""
        return topology_of(self.topology, (self.out_features, self.in_features))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps ``(..., in_features)`` to ``(..., out_features)``."""
        bias = None if self.bias is None else self.bias[...]
        inputs, values, bias = self.promote_dtype(
            (inputs, self.values[...], bias), dtype=self.dtype
        )
        return linear(
            inputs,
            CSR(values, self.pattern),
            bias=bias,
            activation=self.activation,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


def as_integer(operation: str, name: str, value: Any) -> int:
    """A Python int of any integer, or TypeError: products of NumPy's narrow ones wrap."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{operation}: {name} must be an integer, got {value!r}") from None


def _check_sparsity(operation: str, sparsity: float) -> None:
    if not 0 <= sparsity < 1:
        raise ValueError(f"{operation}: sparsity must be in [0, 1), got {sparsity}")


def _random_topology(key: jax.Array, shape: tuple[int, int], sparsity: float) -> Topology:
    """Rows of equal length at random columns; also under a trace, where the length is static."""
    m, k = shape
    length = max(round((1 - sparsity) * k), min(k, 1))
    _, columns = jax.lax.top_k(jax.random.uniform(key, shape), length)
    return Topology(np.arange(m + 1) * length, jnp.sort(columns).reshape(-1), shape)


def _topology_of(matrix: jax.Array, sparsity: float | None) -> Topology:
    """The largest entries of a matrix, or those that are not 0."""
    if sparsity is None:
        return Topology.from_mask(matrix != 0)
    kept = max(matrix.size - round(sparsity * matrix.size), min(matrix.size, 1))
    magnitude = jnp.where(jnp.isnan(matrix), jnp.inf, jnp.abs(matrix)).ravel()
    largest = jnp.argsort(-magnitude, stable=True)[:kept]
    mask = jnp.zeros(matrix.size, bool).at[largest].set(True).reshape(matrix.shape)
    return Topology.from_mask(mask, nse=kept)


def _lecun_normal(key: jax.Array, topology: Topology, dtype: Any) -> jax.Array:
    """Truncated normal values of variance 1 / (entries of the row)."""
    lengths = (
        jnp.diff(topology.row_offsets).at[topology.row_indices()].get(mode="fill", fill_value=1)
    )
    # Cutting the normal distribution off at two standard deviations leaves it this much of one.
    unit = jax.random.truncated_normal(key, -2, 2, (topology.nse,), dtype) / 0.87962566103423978
    return unit / jnp.sqrt(lengths).astype(dtype)
