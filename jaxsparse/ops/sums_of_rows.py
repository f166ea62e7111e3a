"""Sums of rows' values, and what rows have spread over their entries: for derivative rules.

They are products with a column of ones, so that derivatives of any order have kernels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.arguments import matrix_shape
from jaxsparse.ops.bilinear import sddmm_p, spmm_p
from jaxsparse.primitive import bind


def sums_of_rows(
    values: jax.Array,
    pattern: Any,
    columns: int | None,
    implementation: str | None,
    variant: str | None = None,
) -> jax.Array:
    """For every row ``(..., m, 1)`` the sum of its values ``(..., nse)``."""
    product = {"transpose": False, "dense_on_left": False, "precision": None}
    params = _params(values, columns, implementation) | {"variant": variant}
    return bind(spmm_p, values, *pattern, _ones(values, pattern, columns), **product, **params)[0]


def spread_over_entries(
    of_rows: jax.Array, pattern: Any, columns: int | None, implementation: str | None
) -> jax.Array:
    """For every entry ``(..., nse)`` what its row has in ``(..., m, 1)``; 0 for padding."""
    params = _params(of_rows, columns, implementation)
    ones = _ones(of_rows[..., 0], pattern, columns)
    return bind(sddmm_p, of_rows, ones, *pattern, scaled=False, **params)[0]


def _ones(values: jax.Array, pattern: Any, columns: int | None) -> jax.Array:
    _, k = matrix_shape(pattern, columns)
    return jnp.ones((*(1,) * (values.ndim - 1), k, 1), values.dtype)


def _params(operand: jax.Array, columns: int | None, implementation: str | None) -> dict[str, Any]:
    return {
        "out_dtype": operand.dtype,
        "columns": columns,
        "implementation": implementation,
        "variant": None,
    }
