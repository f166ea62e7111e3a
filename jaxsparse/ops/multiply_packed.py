"""The product that `spmm`, `linear` and ``@`` are for a packed matrix: its checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jaxsparse import backend
from jaxsparse.ops import arguments
from jaxsparse.ops.packed_places import SIXTEEN_BITS
from jaxsparse.ops.packed_product import packed_epilogue_p, packed_product_p
from jaxsparse.ops.plain_products import check_activation
from jaxsparse.primitive import bind

if TYPE_CHECKING:
    from jaxsparse.packed import Packed


def multiply_packed(
    operation: str,
    a: Packed,
    x: Any,
    *,
    x_on_left: bool,
    bias: Any = None,
    activation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    variant: str | None = None,
) -> jax.Array:
    """A x, or with a dense matrix (n, k) on the left (A x^T)^T."""
    x = arguments.as_array(operation, "x", x, 2)
    arguments.as_precision(operation, precision)
    backend.check_implementation(operation, implementation)
    m, k = a.shape
    if x.shape[-1 if x_on_left else -2] != k:
        side = "columns" if x_on_left else "rows"
        raise ValueError(
            f"{operation}: x of shape {x.shape} must have {k} {side} for a packed matrix of shape "
            f"{a.shape}"
        )
    if a.quantized and x.dtype not in SIXTEEN_BITS:
        raise TypeError(
            f"{operation}: x must be bfloat16 or float16 for a packed matrix of {a.dtype}, got "
            f"{x.dtype}: cast it"
        )
    if not a.quantized and x.dtype != a.dtype:
        raise TypeError(
            f"{operation}: x must be {a.dtype}, as the packed matrix is, got {x.dtype}: cast it, "
            "or pack the matrix in its dtype"
        )
    check_activation(operation, activation)
    matrix, rest = (a.values, a.masks, a.starts, a.panels, a.rows), []
    if bias is not None:
        bias = arguments.as_array(operation, "bias", bias, 1)
        arguments.check_floating(operation, bias=bias)
        if bias.shape != (m,):
            raise ValueError(
                f"{operation}: bias must have shape ({m},), one for each row, got {bias.shape}"
            )
        rest.append(bias.astype(x.dtype))
    if a.scales is not None:
        besides = [a.scales]
    elif a.sources is not None and a.topology is not None:
        besides = [a.sources, *a.topology.operands()]
    else:
        besides = []
    params: dict[str, Any] = {
        "trainable": bool(besides) and not a.quantized,
        "quantized": a.quantized,
        "cell": a.cell,
        "parts": a.parts,
        "x_on_left": x_on_left,
        "out_dtype": arguments.result_dtype(operation, x.dtype, preferred_element_type),
        "implementation": implementation,
        "variant": variant,
    }
    primitive = packed_product_p
    if bias is not None or activation is not None:
        primitive = packed_epilogue_p
        params |= {"has_bias": bias is not None, "activation": activation}

    def product(x: jax.Array) -> jax.Array:
        result: jax.Array = bind(primitive, *matrix, x, *rest, *besides, **params)[0]
        return result

    for _ in range(x.ndim - 2):
        product = jax.vmap(product)
    return product(x)
