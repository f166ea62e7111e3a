"""Sums, maxima and the like of what each row stores: products with a column of ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from jaxsparse import backend
from jaxsparse.csr import CSR
from jaxsparse.ops import arguments
from jaxsparse.ops.multiply import multiply
from jaxsparse.precision import accumulator_dtype
from jaxsparse.topology import Topology


def reduce_rows(
    values: Any, topology: Topology, reduction: str = "sum", *, implementation: str | None = None
) -> jax.Array:
    r"""What the stored entries of each row come to.

    .. math:: y_i = \sum_{e \in \mathrm{row}(i)} v_e

    for "sum", and accordingly for the others: a node of a graph aggregates what comes along its
    edges. A row without entries gets 0, of "max" and "logsumexp" -inf. Padding counts nothing.
    Results repeat bitwise, on a GPU too, where the order of the sums of ``jax.ops.segment_sum`` is
    any. Sums are taken in float32, or float64 for float64. Differentiable to any order; the
    derivative of a maximum is shared by all entries that equal it, as that of ``jnp.max``.

    Args:
        values: ``(..., nse)``, float32, float64, bfloat16 or float16; batch dimensions broadcast.
        topology: whose rows they are of; may have leading batch dimensions.
        reduction: "sum", "mean", "max" or "logsumexp".
        implementation: of the sums: None (the platform's own), "cpu", "cuda" or "xla".

    Returns:
        ``(..., m)``, of the dtype of the values.

    Raises:
        TypeError: for values that are no array of these dtypes, or no topology.
        ValueError: for another number of values, and a reduction that does not exist; at lowering,
            for an implementation that can't be had.

    >>> import jax.numpy as jnp
    >>> topology = Topology([0, 2, 2, 3], [0, 2, 1], (3, 4))
    >>> reduce_rows(jnp.array([1.0, 3.0, 5.0]), topology, "mean")
    Array([2., 0., 5.], dtype=float32)
    """
    operation = "reduce_rows"
    if not isinstance(topology, Topology):
        raise TypeError(f"{operation}: topology must be a Topology, got {type(topology).__name__}")
    values = arguments.as_array(operation, "values", values, 1)
    dtype = arguments.check_floating(operation, values=values)
    backend.check_implementation(operation, implementation)
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"{operation}: reduction must be one of {list(_REDUCTIONS)}, got {reduction!r}"
        )
    if values.shape[-1] != topology.nse:
        raise ValueError(
            f"{operation}: values must have shape (..., {topology.nse}), one for each stored "
            f"entry, got {values.shape}"
        )
    batch = jnp.broadcast_shapes(values.shape[:-1], topology.batch_shape)
    values = jnp.broadcast_to(values, (*batch, topology.nse))
    # What padding holds must not reach a derivative.
    stored = topology.row_indices < topology.shape[0]
    values = jnp.where(stored, values, 0).astype(accumulator_dtype(dtype))
    sums = functools.partial(_sums, topology=topology, implementation=implementation)
    return _REDUCTIONS[reduction](values, topology, sums).astype(dtype)


_Sums = Callable[[jax.Array], jax.Array]


def _sums(values: jax.Array, topology: Topology, implementation: str | None) -> jax.Array:
    ones = jnp.ones((topology.shape[1], 1), values.dtype)
    options: Any = {"transpose": False, "dense_on_left": False, "implementation": implementation}
    return multiply("reduce_rows", CSR(values, topology), ones, **options)[..., 0]


def _mean(values: jax.Array, topology: Topology, sums: _Sums) -> jax.Array:
    lengths = jnp.diff(topology.row_offsets)
    return sums(values) / jnp.maximum(lengths, 1).astype(values.dtype)


def _most(values: jax.Array, topology: Topology) -> jax.Array:
    """The maximum of each row, which no derivative goes through. It does not depend on an order."""

    def one(v: jax.Array, rows: jax.Array) -> jax.Array:
        nothing = jnp.full(topology.shape[0], -jnp.inf, v.dtype)
        return nothing.at[rows].max(v, mode="drop")

    rows = jnp.broadcast_to(topology.row_indices, values.shape)
    most: jax.Array = jnp.vectorize(one, signature="(e),(e)->(m)")(stop_gradient(values), rows)
    return most


def _spread(of_rows: jax.Array, topology: Topology) -> jax.Array:
    """For every entry what its row has; 0 for padding."""
    with_padding = jnp.pad(of_rows, [(0, 0)] * (of_rows.ndim - 1) + [(0, 1)])
    rows = jnp.broadcast_to(topology.row_indices, (*of_rows.shape[:-1], topology.nse))
    return jnp.take_along_axis(with_padding, rows, axis=-1)


def _max(values: jax.Array, topology: Topology, sums: _Sums) -> jax.Array:
    most = _most(values, topology)
    equal = (stop_gradient(values) == _spread(most, topology)).astype(values.dtype)
    shares = equal / _spread(jnp.maximum(sums(equal), 1), topology)
    # Of this mean of equal ones only the derivative counts: it may be rounded.
    mean = sums(jnp.where(equal > 0, shares * values, 0))
    return jnp.where(jnp.isfinite(most), most + (mean - stop_gradient(mean)), most)


def _logsumexp(values: jax.Array, topology: Topology, sums: _Sums) -> jax.Array:
    most = _most(values, topology)
    most = jnp.where(jnp.isfinite(most), most, 0)
    return most + jnp.log(sums(jnp.exp(values - _spread(most, topology))))


_REDUCTIONS: dict[str, Callable[[jax.Array, Topology, _Sums], jax.Array]] = {
    "sum": lambda values, topology, sums: sums(values),
    "mean": _mean,
    "max": _max,
    "logsumexp": _logsumexp,
}
