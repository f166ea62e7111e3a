"""The product that `spmm`, `linear` and ``@`` are: its checks, and which primitive it binds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jaxsparse import backend
from jaxsparse.ops import arguments
from jaxsparse.ops.bilinear import spmm_epilogue_p, spmm_p
from jaxsparse.ops.dense_product import allowed_precision
from jaxsparse.ops.plain_products import check_activation
from jaxsparse.primitive import bind

if TYPE_CHECKING:
    from jaxsparse.csr import CSR


def multiply(
    operation: str,
    a: CSR,
    x: Any,
    *,
    transpose: bool,
    dense_on_left: bool,
    bias: Any = None,
    activation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    variant: str | None = None,
) -> jax.Array:
    """A x, A^T x, or with the dense matrix (..., n, k) on the left (A x^T)^T and (A^T x^T)^T."""
    x = arguments.as_array(operation, "x", x, 2)
    precision = arguments.as_precision(operation, precision)
    backend.check_implementation(operation, implementation)
    m, k = a.shape
    inner, rows = (m, k) if transpose else (k, m)
    if x.shape[-1 if dense_on_left else -2] != inner:
        side = "columns" if dense_on_left else "rows"
        raise ValueError(
            f"{operation}: x of shape {x.shape} must have {inner} {side} for a matrix of shape "
            f"{a.shape}"
        )
    check_activation(operation, activation)
    if transpose:
        a.topology.check_transpose(f"{operation}: a product by the transposed matrix")
    dense = {"values": a.values, "x": x}
    if bias is not None:
        bias = dense["bias"] = arguments.as_array(operation, "bias", bias, 1)
        if bias.shape[-1] != rows:
            raise ValueError(
                f"{operation}: bias must have shape (..., {rows}), one for each row, "
                f"got {bias.shape}"
            )
    dtype = arguments.check_floating(operation, **dense)
    params = {
        "transpose": transpose,
        "dense_on_left": dense_on_left,
        "out_dtype": arguments.result_dtype(operation, dtype, preferred_element_type),
        "precision": allowed_precision(precision),
        "columns": arguments.columns_alone(a.topology),
        "implementation": implementation,
        "variant": variant,
    }
    ranks = (1, 2) if bias is None else (1, 2, 1)
    (values, x, *rest), pattern = arguments.align(dense.values(), ranks, dtype, a.topology)
    if bias is None and activation is None:
        return bind(spmm_p, values, *pattern, x, **params)[0]
    return bind(
        spmm_epilogue_p,
        values,
        *pattern,
        x,
        *rest,
        **params,
        has_bias=bias is not None,
        activation=activation,
        with_preactivation=False,
    )[0]
