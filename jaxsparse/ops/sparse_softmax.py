"""Softmax over the stored entries of each row.

With y = softmax(s v) along a row, the Jacobian s (diag(y) - y y^T) is symmetric: one primitive,
linear in its tangent and its own transpose, serves forward and reverse mode. Its derivative in y is
composed of row sums and their spread over the entries, which are spmm and sddmm with a column of
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxsparse import backend
from jaxsparse.csr import CSR, check_csr
from jaxsparse.ops import arguments
from jaxsparse.ops.arguments import CUTS, ROWS, operands_of_pattern
from jaxsparse.ops.sums_of_rows import spread_over_entries, sums_of_rows
from jaxsparse.pattern import row_indices
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import (
    FfiCall,
    Operation,
    Signature,
    bind,
    define_transpose,
    make_primitive,
)


def sparse_softmax(
    a: CSR, *, scale: Any = 1.0, implementation: str | None = None, variant: str | None = None
) -> CSR:
    r"""Softmax of each row over its stored entries.

    .. math:: y_e = \frac{\exp(s\, v_e)}{\sum_{e' \in \mathrm{row}(e)} \exp(s\, v_{e'})}

    What is not stored counts as masked out, as in ``jax.nn.softmax(x, where=mask)``; a stored -inf
    gets 0, and a row that stores nothing but -inf gets NaN. Rows without entries stay empty,
    padding gets 0. Sums are taken in float32, or float64 for float64. Differentiable to any order.

    Args:
        a: a matrix with values ``(..., nse)``, float32, float64, bfloat16 or float16.
        scale: multiplies the values first; a number is fused, an array multiplied beforehand.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``.

    Returns:
        A CSR matrix on the same topology.

    Raises:
        TypeError: if ``a`` is no CSR matrix of these dtypes.
        ValueError: for options that don't exist; at lowering, for an implementation or variant that
            can't be had.

    Method: the sparse softmax of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning",
    section VII.

    >>> import jax.numpy as jnp
    >>> a = CSR.fromdense(jnp.array([[1.0, 1.0, 0.0], [0.0, 0.0, 5.0]]))
    >>> sparse_softmax(a).values
    Array([0.5, 0.5, 1. ], dtype=float32)
    """
    operation = "sparse_softmax"
    check_csr(operation, a)
    backend.check_implementation(operation, implementation)
    values = a.values
    dtype = arguments.check_floating(operation, values=values)
    scale = arguments.as_scale(operation, scale)
    if not isinstance(scale, float):
        wide = accumulator_dtype(dtype)
        values = jnp.multiply(*jnp.broadcast_arrays(values.astype(wide), scale.astype(wide)))
        scale = 1.0
    (values,), pattern = arguments.align([values], [1], values.dtype, a.topology)
    params = {
        "scale": scale,
        "columns": arguments.columns_alone(a.topology),
        "implementation": implementation,
        "variant": variant,
    }
    (out,) = bind(sparse_softmax_p, values, *pattern, **params)
    return CSR(out.astype(dtype), a.topology)


def _values_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    return [avals[0].dtype]


# ---- y = softmax(scale * values) ----


def _signature(params: dict[str, Any], *values: str) -> Signature:
    operands = tuple((name, "e") for name in values)
    return Signature((*operands, *operands_of_pattern(params["columns"])), (("out", "e"),))


def _ffi_call(values: str, *tangent: str) -> Callable[..., FfiCall]:
    operands = (values, *ROWS, CUTS, *tangent)
    return lambda params, *_: FfiCall(operands, {"scale": params["scale"]}, workspace=None)


def _row_sums(values: jax.Array, rows: jax.Array, size: int) -> jax.Array:
    return jnp.zeros((size,), values.dtype).at[rows].add(values, mode="drop")


def _softmax_xla(
    values: jax.Array,
    row_offsets: jax.Array,
    *pattern: jax.Array,
    scale: float,
    columns: int | None,
) -> list[jax.Array]:
    size = row_offsets.shape[0] - 1
    if not size:
        return [jnp.zeros_like(values)]
    rows = row_indices(row_offsets, values.shape[0])
    accumulator = accumulator_dtype(values.dtype)
    v = values.astype(accumulator) * jnp.asarray(scale, accumulator)
    most = jnp.full((size,), -jnp.inf, accumulator).at[rows].max(v, mode="drop")
    e = jnp.exp(v - most.at[rows].get(mode="fill", fill_value=0))
    y = e / _row_sums(e, rows, size).at[rows].get(mode="fill", fill_value=1)
    return [jnp.where(rows < size, y, 0).astype(values.dtype)]


sparse_softmax_p = make_primitive(
    Operation(
        name="sparse_softmax",
        target="sparse_softmax",
        params=("scale", "columns"),
        signature=lambda params: _signature(params, "values"),
        result_dtypes=_values_dtypes,
        shardable=(),
        xla=_softmax_xla,
        ffi=_ffi_call("values"),
    )
)


def _softmax_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (values, *pattern), tangent = primals, tangents[0]
    dtype = values.dtype
    # The derivative takes y before it is rounded to 16 bits.
    wide = accumulator_dtype(dtype)
    (y,) = bind(sparse_softmax_p, values.astype(wide), *pattern, **params)
    if type(tangent) is ad.Zero:
        return [y.astype(dtype)], [ad.Zero(jax.typeof(values).to_tangent_aval())]
    params = {**params, "variant": None}
    (dy,) = bind(sparse_softmax_derivative_p, y, tangent.astype(wide), *pattern, **params)
    return [y.astype(dtype)], [dy.astype(dtype)]


ad.primitive_jvps[sparse_softmax_p] = _softmax_jvp


# ---- scale * y * (t - sum over the row of y t) ----


def _derivative_xla(
    y: jax.Array,
    tangent: jax.Array,
    row_offsets: jax.Array,
    *pattern: jax.Array,
    scale: float,
    columns: int | None,
) -> list[jax.Array]:
    size = row_offsets.shape[0] - 1
    if not size:
        return [jnp.zeros_like(y)]
    rows = row_indices(row_offsets, y.shape[0])
    accumulator = accumulator_dtype(y.dtype)
    y_, t = y.astype(accumulator), tangent.astype(accumulator)
    sums = _row_sums(y_ * t, rows, size).at[rows].get(mode="fill", fill_value=0)
    out = jnp.asarray(scale, accumulator) * y_ * (t - sums)
    return [jnp.where(rows < size, out, 0).astype(y.dtype)]


sparse_softmax_derivative_p = make_primitive(
    Operation(
        name="sparse_softmax_derivative",
        target="sparse_softmax",
        params=("scale", "columns"),
        signature=lambda params: _signature(params, "y", "tangent"),
        result_dtypes=_values_dtypes,
        shardable=(),
        xla=_derivative_xla,
        ffi=_ffi_call("y", "tangent"),
    )
)


def _sum_and_spread(
    values: jax.Array, pattern: Any, columns: int | None, implementation: str | None
) -> jax.Array:
    """For every entry, the sum of its row."""
    by = (pattern, columns, implementation)
    return spread_over_entries(sums_of_rows(values, *by), *by)


def _derivative_jvp(primals: Any, tangents: Any, *, scale: float, **params: Any) -> Any:
    y, t, *pattern = primals
    dy, dt = tangents[:2]
    params = {**params, "scale": scale}
    (out,) = bind(sparse_softmax_derivative_p, *primals, **params)
    params["variant"] = None
    tangent: Any = ad.Zero(jax.typeof(out).to_tangent_aval())
    if type(dt) is not ad.Zero:
        tangent = bind(sparse_softmax_derivative_p, y, dt, *pattern, **params)[0]
    if type(dy) is not ad.Zero:
        by = (params["columns"], params["implementation"])
        # d/dy of s y (t - <y, t>):  s (dy (t - <y, t>) - y <dy, t>)
        first = dy * (t - _sum_and_spread(y * t, pattern, *by))
        second = y * _sum_and_spread(dy * t, pattern, *by)
        tangent = ad.add_tangents(tangent, jnp.asarray(scale, y.dtype) * (first - second))
    return [out], [tangent]


def _derivative_transpose(ct: jax.Array, operands: Any, **params: Any) -> tuple[int, jax.Array]:
    y, _, *pattern = operands
    params = {**params, "variant": None}
    return 1, bind(sparse_softmax_derivative_p, y, ct, *pattern, **params)[0]


ad.primitive_jvps[sparse_softmax_derivative_p] = _derivative_jvp
define_transpose(sparse_softmax_derivative_p, _derivative_transpose)
