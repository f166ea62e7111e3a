"""The sparse-dense and the sampled product in plain jnp, and the activations behind a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.arguments import matrix_shape, operands_of_pattern
from jaxsparse.pattern import row_indices
from jaxsparse.precision import accumulator_dtype

# From here on gelu is 0 or its argument to the last bit, in float64 too; powers of the argument
# that its formula and derivatives hold would overflow much farther out.
_GELU_IS_RELU = 16


@jax.jit
def _gelu(z: jax.Array) -> jax.Array:
    # The formula, and so the kernels, have NaN for negative infinity.
    straight = (jnp.abs(z) >= _GELU_IS_RELU) & (z != -jnp.inf)
    curved = jax.nn.gelu(jnp.where(straight, 0, z), approximate=True)
    return jnp.where(straight, jax.nn.relu(z), curved)


ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda z: z,
    "relu": jax.nn.relu,
    "gelu": _gelu,
}


def check_activation(operation: str, activation: Any) -> None:
    """Raises ValueError unless an operation can apply it."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{operation}: activation must be one of {list(ACTIVATIONS)}, got {activation!r}"
        )


# The xla implementation multiplies a densified matrix where that has at most so many elements.
_DENSE_ELEMENTS = 2**22


def spmm_xla(
    values: jax.Array,
    *operands: jax.Array,
    transpose: bool,
    dense_on_left: bool,
    out_dtype: Any,
    precision: str | None,
    columns: int | None,
    has_bias: bool = False,
    activation: str | None = None,
    with_preactivation: bool = False,
) -> list[jax.Array]:
    """One A x, with the params of the primitives; `transpose` makes it A^T x."""
    size = len(operands_of_pattern(columns))
    pattern, (x, *bias) = operands[:size], operands[size:]
    row_offsets, indices = pattern[:2]
    rows = row_indices(row_offsets, values.shape[0])
    m, k = matrix_shape(pattern, columns)
    accumulator = accumulator_dtype(values.dtype)
    stored = rows < m
    v = jnp.where(stored, values, 0).astype(accumulator)
    x = (x.T if dense_on_left else x).astype(accumulator)
    indices = indices.astype(jnp.int32)
    out_rows, source = (indices, rows) if transpose else (rows, indices)
    size = k if transpose else m
    # Out-of-range targets are dropped: that is where padding goes.
    target = jnp.where(stored, out_rows, size)

    def by_entries(x: jax.Array) -> jax.Array:
        terms = v[:, None] * x.at[source].get(mode="fill", fill_value=0)
        return jnp.zeros((size, x.shape[1]), accumulator).at[target].add(terms, mode="drop")

    def densified(x: jax.Array) -> jax.Array:
        dense = jnp.zeros((size, x.shape[0]), accumulator).at[target, source].add(v, mode="drop")
        return jnp.dot(dense, x, precision=jax.lax.Precision.HIGHEST)

    if not m * k:
        z = jnp.zeros((size, x.shape[1]), accumulator)
    elif m * k > _DENSE_ELEMENTS:
        z = by_entries(x)
    else:
        # 0 * NaN would spread through a dense product, so it is taken for finite x only.
        z = jax.lax.cond(jnp.all(jnp.isfinite(x)), densified, by_entries, x)
    if has_bias:
        z = z + bias[0].astype(accumulator)[:, None]
    y = ACTIVATIONS[activation](z).astype(out_dtype)
    z = z.astype(out_dtype)
    results = [y, z] if with_preactivation else [y]
    return [r.T for r in results] if dense_on_left else results


def sddmm_xla(
    x: jax.Array,
    y: jax.Array,
    row_offsets: jax.Array,
    indices: jax.Array,
    *operands: jax.Array,
    scaled: bool,
    out_dtype: Any,
    columns: int | None,
) -> list[jax.Array]:
    """One (x y^T) at a pattern, with the params of the primitive."""
    m, k = x.shape[0], y.shape[0]
    rows = row_indices(row_offsets, indices.shape[0])
    accumulator = accumulator_dtype(x.dtype)
    indices = indices.astype(jnp.int32)
    if not m * k:
        values = jnp.zeros(indices.shape, accumulator)
    elif m * k <= _DENSE_ELEMENTS or (
        isinstance(x.shape[1], int) and m * k <= indices.size * x.shape[1]
    ):
        product = jnp.einsum(
            "md,kd->mk",
            x,
            y,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=accumulator,
        )
        values = product.at[rows, indices].get(mode="clip")
    else:
        x, y = x.astype(accumulator), y.astype(accumulator)
        values = jnp.sum(x.at[rows].get(mode="clip") * y.at[indices].get(mode="clip"), axis=-1)
    if scaled:
        values = values * operands[-1].astype(accumulator)
    return [jnp.where(rows < m, values, 0).astype(out_dtype)]
