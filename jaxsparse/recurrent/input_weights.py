"""The weights of a layer's input: as an edge takes them, with a norm made part of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.precision import accumulator_dtype
from jaxsparse.recurrent.graph import Edge, edge_products
from jaxsparse.recurrent.layers import CheckedLayer


def edge_operands(weights: Any) -> tuple[str, tuple[Any, ...]]:
    """The kind of an edge by these weights, and its operands."""
    if isinstance(weights, CSR):
        return "csr", (weights.values, *weights.topology.operands())
    if weights.ndim == 3 and weights.shape[0] > 1:
        return "heads", (weights,)
    return "dense", (weights.reshape(weights.shape[-2:]),)


def input_products(
    layer: CheckedLayer,
    weights: Any,
    x: Any,
    dtype: Any,
    *,
    precision: Any = None,
    implementation: str | None = None,
) -> Any:
    """The products of features x (t, b, k) by a layer's weights: (t, b, gates * h)."""
    kind, operands = edge_operands(weights)
    edge = Edge(0, 1, (0,), tuple(range(layer.input_gates)), 0, kind)
    z = edge_products(
        edge,
        operands,
        x[:, :, None],
        layer.h,
        dtype,
        transposed=False,
        precision=precision,
        implementation=implementation,
    )
    return z.reshape(*z.shape[:2], layer.input_gates * layer.h)


def scaled(layer: CheckedLayer) -> Any:
    """The weights of the input times the scale of its norm."""
    weights = layer.input
    if layer.norm is None or layer.norm_scale is None:
        return weights
    if isinstance(weights, CSR):
        t = weights.topology
        factors = layer.norm_scale[t.column_indices].astype(weights.dtype)
        # The scale's gradient is a sum over entries: what stands in the padding is none.
        stored = jnp.arange(t.nse) < t.row_offsets[-1]
        return CSR(jnp.where(stored, weights.values, 0) * factors, t)
    factors = layer.norm_scale.astype(weights.dtype).reshape(*weights.shape[:-1], 1)
    return weights * factors


def sums_of_weights(layer: CheckedLayer, dtype: Any) -> Any:
    """The sums over features of the scaled weights: (gates, h)."""
    ones = jnp.ones((1, 1, layer.features), dtype)
    return input_products(layer, scaled(layer), ones, dtype).reshape(-1, layer.h)


def input_biases(layer: CheckedLayer) -> list[Any]:
    """What is added to the products of the input, (gates * h,) each."""
    biases = [] if layer.bias is None else [layer.bias]
    if layer.norm is not None and layer.norm_shift is not None:
        wide = accumulator_dtype(layer.norm_shift.dtype)
        shift = layer.norm_shift.astype(wide)[None, None]
        biases.append(input_products(layer, layer.input, shift, wide)[0, 0])
    return biases
