"""A linear layer with a sparse weight matrix."""

from __future__ import annotations

import dataclasses
import inspect
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
from jaxsparse.ops import arguments
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
        precision: None or a ``jax.lax.Precision``, as in `jaxsparse.spmm`: products of float32 are
            as exact as float32.
        kernel_init: makes a dense kernel (in_features, out_features), of which the stored positions
            are taken. By default LeCun's normal distribution, its variance one over the number of
            weights that the output really has.
        bias_init: makes the bias.
        dot_general: must be ``jax.lax.dot_general``.
        promote_dtype: brings inputs, values and bias to one dtype.
        preferred_element_type: of the result: that of the operands or a wider one.
        rngs: random keys: the stream "params", one for the weights and their pattern and one for
            the bias, as many as nnx.Linear draws.
        kernel_metadata, bias_metadata: metadata of the variables ``values`` and ``bias``, as are
            those of initializers by `nnx.with_metadata` and `nnx.with_partitioning`. A sharding of
            two dimensions is left out: the kernel's do not fit the values.

    Raises:
        TypeError: if ``topology`` is no Topology, a number of features no integer, or the dtype
            none of `jaxsparse.spmm`.
        ValueError: unless exactly one of ``sparsity`` and ``topology`` is given, for values and
            shapes that don't fit, and for options that no sparse product can follow.

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
        dot_general: Callable[..., jax.Array] = jax.lax.dot_general,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        name = type(self).__name__
        in_features = as_integer(name, "in_features", in_features)
        out_features = as_integer(name, "out_features", out_features)
        _check_options(name, dot_general, precision, dtype, param_dtype, preferred_element_type)
        shape = (out_features, in_features)
        key = rngs.params()
        if (sparsity is None) == (topology is None):
            raise ValueError(f"{name}: needs either sparsity or topology")
        if topology is None:
            assert sparsity is not None
            _check_sparsity(name, sparsity)
            # Of the kernel's key: layers that are made after this one get the keys that they would
            # get behind an nnx.Linear.
            topology = _random_topology(jax.random.fold_in(key, 1), shape, sparsity)
        if not isinstance(topology, Topology):
            raise TypeError(f"{name}: topology must be a Topology, got {type(topology).__name__}")
        if topology.shape != shape or topology.batch_shape:
            raise ValueError(
                f"{name}: topology must be one pattern of shape {shape}, (out_features, "
                f"in_features), got shape {topology.shape}, batch {topology.batch_shape}"
            )
        self.topology = own_topology(topology)
        values: Any
        if kernel_init is None:
            values = _lecun_normal(key, topology, param_dtype)
        else:
            kernel = kernel_init(key, (in_features, out_features), param_dtype)
            values = _stored(kernel, topology)
        self.values = nnx.Param(values, **_metadata_of_values(kernel_metadata))
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
            TypeError: if ``layer`` is no nnx.Linear, or of a subclass with a call of its own.
            ValueError: for both ``sparsity`` and ``topology``, values and shapes that don't fit,
                and a layer whose options no sparse product can follow: a ``dot_general`` of its
                own, a dot algorithm as ``precision``, or a ``preferred_element_type`` that is
                narrower than the operands.

        >>> dense = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        >>> SparseLinear.from_dense(dense, sparsity=0.9).values.shape
        (205,)
        """
        name = f"{cls.__name__}.from_dense"
        check_call(f"{name}: layer must be an nnx.Linear", layer, nnx.Linear)
        if sparsity is not None and topology is not None:
            raise ValueError(f"{name}: takes sparsity or topology, got both")
        _check_options(name, *_options_of(layer))
        if sparsity is not None:
            _check_sparsity(name, sparsity)
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

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Maps ``(..., in_features)`` to ``(..., out_features)``.

        Args:
            inputs: of any number of leading dimensions.
            out_sharding: of the result, a NamedSharding or PartitionSpec of explicit axes.

        Raises:
            TypeError, ValueError: as `jaxsparse.linear`.
        """
        inputs, weight, options = self._operands(inputs)
        outputs = linear(inputs, weight, **options)
        return outputs if out_sharding is None else jax.sharding.reshard(outputs, out_sharding)

    def _operands(self, inputs: jax.Array) -> tuple[jax.Array, CSR, dict[str, Any]]:
        """The inputs and the matrix in the dtype of the computation, and options of the product."""
        bias = None if self.bias is None else self.bias[...]
        inputs, values, bias = self.promote_dtype(
            (inputs, self.values[...], bias), dtype=self.dtype
        )
        wide = _operand_dtype(inputs.dtype, self.preferred_element_type)
        if wide != inputs.dtype:
            inputs, values = inputs.astype(wide), values.astype(wide)
            bias = None if bias is None else bias.astype(wide)
        options = {
            "bias": bias,
            "activation": self.activation,
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
        }
        return inputs, CSR(values, self.pattern), options


def obstacle_of_options(layer: nnx.Linear | nnx.LinearGeneral) -> str | None:
    """Why no sparse layer can have the options of a dense one, or None."""
    try:
        _check_options("SparseLinear", *_options_of(layer))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def has_call_of(module: Any, *classes: type) -> bool:
    """Whether a module is of one of these classes and computes what they do: calls as they call.

    What wraps that call, to record it for instance, computes the same.
    """
    calls = [inspect.unwrap(vars(cls)["__call__"]) for cls in classes]
    return isinstance(module, classes) and inspect.unwrap(type(module).__call__) in calls


def check_call(expected: str, module: Any, *classes: type) -> None:
    """Raises TypeError unless a module, which will not be called, computes what one of these does.

    Args:
        expected: what errors say: the operation, what must be what.
        module: what came.
        classes: what it may be, or of a subclass that leaves the call alone.
    """
    if not has_call_of(module, *classes):
        got = type(module).__name__
        if isinstance(module, classes):
            got += ", a subclass, whose own call would be left out"
        raise TypeError(f"{expected}, got {got}")


def as_integer(operation: str, name: str, value: Any) -> int:
    """A Python int of any integer, or TypeError: products of NumPy's narrow ones wrap."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{operation}: {name} must be an integer, got {value!r}") from None


def _options_of(layer: nnx.Linear | nnx.LinearGeneral) -> tuple[Any, ...]:
    """What `_check_options` takes of a layer."""
    names = ("dot_general", "precision", "dtype", "param_dtype", "preferred_element_type")
    return tuple(getattr(layer, name) for name in names)


def _check_options(
    operation: str,
    dot_general: Any,
    precision: Any,
    dtype: Any,
    param_dtype: Any,
    preferred_element_type: Any,
) -> None:
    """Raises TypeError or ValueError for options of a linear layer that no call could honour."""
    if dot_general not in (None, jax.lax.dot_general):
        raise ValueError(
            f"{operation}: dot_general must be jax.lax.dot_general, which a sparse product stands "
            f"for, got {dot_general}"
        )
    arguments.as_precision(operation, precision)
    # Inputs that are wider than the parameters may widen the operands still.
    operands = jax.dtypes.canonicalize_dtype(param_dtype if dtype is None else dtype)
    if jnp.issubdtype(operands, jnp.inexact):
        arguments.check_floating(operation, operands=jax.ShapeDtypeStruct((), operands))
    if preferred_element_type is not None:
        preferred = jax.dtypes.canonicalize_dtype(preferred_element_type)
        wider = jnp.issubdtype(preferred, jnp.floating) and preferred.itemsize > operands.itemsize
        if preferred != operands and not wider:
            raise ValueError(
                f"{operation}: preferred_element_type must be {operands}, the operands' dtype, or "
                f"a wider one, got {preferred}"
            )


def _operand_dtype(dtype: Any, preferred: Any) -> Any:
    """The dtype of operands whose product can have the preferred one."""
    if preferred is None:
        return dtype
    preferred = jax.dtypes.canonicalize_dtype(preferred)
    native = dtype.itemsize == 2 and preferred == jnp.float32
    return preferred if preferred.itemsize > dtype.itemsize and not native else dtype


def _stored(kernel: Any, topology: Topology) -> Any:
    """The values of a kernel at the stored positions, with the metadata of its initializer."""
    if not isinstance(kernel, nnx.VariableMetadata):
        return CSR.fromdense(kernel.T, topology).values
    return dataclasses.replace(
        kernel,
        raw_value=_stored(kernel.raw_value, topology),
        metadata=_metadata_of_values(kernel.metadata),
    )


# How Flax names the sharding of a variable, now and formerly.
_SHARDINGS = ("out_sharding", "sharding", "sharding_names")


def _metadata_of_values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel's metadata without a sharding of its two dimensions: values have one."""

    def fits(sharding: Any) -> bool:
        return sharding is None or len(getattr(sharding, "spec", sharding)) <= 1

    return {k: v for k, v in metadata.items() if k not in _SHARDINGS or fits(v)}


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
    lengths = jnp.diff(topology.row_offsets).at[topology.row_indices].get(mode="fill", fill_value=1)
    # Cutting the normal distribution off at two standard deviations leaves it this much of one.
    unit = jax.random.truncated_normal(key, -2, 2, (topology.nse,), dtype) / 0.87962566103423978
    return unit / jnp.sqrt(lengths).astype(dtype)
