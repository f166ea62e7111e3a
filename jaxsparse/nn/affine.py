"""The layers of a cell as matrices: what conversions take of them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxsparse.nn.headwise import HeadwiseLinear
from jaxsparse.nn.linear import SparseLinear, check_call


def check_affine(operation: str, name: str, layer: Any) -> None:
    """Raises TypeError or ValueError for a layer that is more than a product and a bias.

    Args:
        operation: what errors name.
        name: the layer's own.
        layer: what was found there.
    """
    expected = f"{operation}: {name} must be an nnx.Linear, a SparseLinear or a HeadwiseLinear"
    check_call(expected, layer, nnx.Linear, SparseLinear, HeadwiseLinear)
    activation = getattr(layer, "activation", None)
    if activation is not None:
        raise ValueError(f"{operation}: {name} must have no activation, got {activation!r}")
    dot_general = getattr(layer, "dot_general", jax.lax.dot_general)
    if dot_general is not jax.lax.dot_general:
        raise ValueError(
            f"{operation}: {name} must have dot_general=jax.lax.dot_general, got {dot_general}"
        )


def dense_kernel(layer: Any) -> jax.Array:
    """The weights (in_features, out_features), zero where a layer stores none."""
    if isinstance(layer, HeadwiseLinear):
        return layer.matrix
    return layer.weight.todense().T if isinstance(layer, SparseLinear) else layer.kernel[...]
