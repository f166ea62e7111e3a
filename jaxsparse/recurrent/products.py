"""The product that a recurrent scan takes of its state at each step, and that of all steps at once.

The second is what recomputes products, and its transpose is the gradient of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops.arguments import PATTERN
from jaxsparse.ops.bilinear import spmm_p
from jaxsparse.pattern import row_indices
from jaxsparse.precision import accumulator_dtype, promoted
from jaxsparse.primitive import bind, bind_local


def _einsum(axes: str, x: Any, w: Any, precision: Any, out_dtype: Any) -> Any:
    """A product whose sums are in float32 at least, and exact unless a precision is asked for."""
    dtype = promoted(x.dtype, w.dtype)
    z = jnp.einsum(
        axes,
        x.astype(dtype),
        w.astype(dtype),
        precision=jax.lax.Precision.HIGHEST if precision is None else precision,
        preferred_element_type=_sum_dtype(dtype, out_dtype),
    )
    return z.astype(out_dtype)


def _sum_dtype(dtype: Any, out_dtype: Any) -> Any:
    """The dtype that a product of operands of one dtype is asked for in.

    Where the result is as narrow as the operands it is theirs, so that the cotangents, which have
    it too, meet 16-bit operands: products on tensor cores, with the same sums in float32.
    """
    return dtype if dtype == out_dtype else accumulator_dtype(dtype)


def product(
    weights: Sequence[Any],
    x: Any,
    *,
    sparse: bool,
    transposed: bool,
    precision: Any,
    implementation: str | None,
    out_dtype: Any,
    local: bool = False,
) -> Any:
    """The recurrent product of x (..., n, S h): (..., n, P h)."""
    if not sparse:
        axes = "...nk,...mk->...nm" if transposed else "...nk,...km->...nm"
        return _einsum(axes, x, weights[0], precision, out_dtype)
    values, *pattern = weights[: 1 + len(PATTERN)]
    dtype = promoted(x.dtype, values.dtype)
    options: dict[str, Any] = {
        "transpose": transposed,
        "dense_on_left": True,
        "precision": None,
        "columns": None,
        "implementation": implementation,
        "variant": None,
    }
    if local:
        operands = (values.astype(dtype), *pattern, x.astype(dtype))
        wide = accumulator_dtype(dtype)
        return bind_local(spmm_p, *operands, out_dtype=wide, **options)[0].astype(out_dtype)
    mixed = values.dtype != x.dtype
    sum_dtype = out_dtype if mixed else _sum_dtype(dtype, out_dtype)
    z = bind(spmm_p, values, *pattern, x, out_dtype=sum_dtype, **options)[0]
    return z.astype(out_dtype)


# On a GPU the start of XLA's kernels is what a step of a loop waits for, and a dense product takes
# less time than one by the kernels of spmm unless the matrix is very sparse or large. To write it
# out takes as long as some steps.
_FEWEST_STEPS = 16
_LEAST_DENSITY = 1 / 512
_MOST_DENSE_BYTES = 2**28


def dense_form(weights: Sequence[Any], steps: int) -> Any | None:
    """A sparse (m, k) matrix as a dense (k, m) one, if products by that are faster on a GPU."""
    values, row_offsets, columns, _, t_row_offsets = weights[:5]
    m, k, nse = row_offsets.shape[0] - 1, t_row_offsets.shape[0] - 1, values.shape[0]
    too_large = m * k * values.dtype.itemsize > _MOST_DENSE_BYTES
    if steps < _FEWEST_STEPS or nse < _LEAST_DENSITY * m * k or too_large:
        return None
    rows = row_indices(row_offsets, nse)  # padding's is m, which is dropped
    places = columns.astype(jnp.int32), rows
    dense = jnp.zeros((k, m), accumulator_dtype(values.dtype))  # columns may repeat
    return dense.at[places].add(values.astype(dense.dtype), mode="drop").astype(values.dtype)


def products_of_steps(
    weights: Sequence[Any], states: Any, parts: int, dtype: Any, options: Any
) -> Any:
    """The products of every step at once: (..., d, t, b, P, h) of (..., d, t, b, S, h)."""
    *lead, t, b, s, h = states.shape
    x = states.reshape(*lead, t, b, s * h)
    if options["sparse"]:
        # Steps and batch become one dimension, the batch outside so that it may stay sharded.
        x = jnp.swapaxes(x, -3, -2).reshape(*lead, b * t, s * h)
        z = product(weights, x, out_dtype=dtype, **options)
        z = jnp.swapaxes(z.reshape(*z.shape[:-2], b, t, z.shape[-1]), -3, -2)
    else:
        axes = "mk" if options["transposed"] else "km"
        einsum = functools.partial(_einsum, precision=options["precision"], out_dtype=dtype)
        z = _dense_products(einsum, axes, x, weights[0])
    return z.reshape(*z.shape[:-1], parts, z.shape[-1] // parts)


def parts_of(x: Any, parts: Sequence[int]) -> Any:
    """Some of the arrays of x (..., parts, h)."""
    first, count = parts[0], len(parts)
    if tuple(parts) != tuple(range(first, first + count)):
        return jnp.stack([x[..., i, :] for i in parts], -2)
    return x if count == x.shape[-2] else x[..., first : first + count, :]


def _dense_products(einsum: Any, axes: str, x: Any, w: Any) -> Any:
    """The products of x (..., d, t, b, k) by a dense w: (..., d, t, b, m)."""
    if x.ndim > 4 or not _on_one_cpu():
        return einsum(f"...dtbk,...d{axes}->...dtbm", x, w)
    d, t, b, k = x.shape
    parts = [einsum(f"nk,{axes}->nm", x[i].reshape(t * b, k), w[i]) for i in range(d)]
    return jnp.stack(parts).reshape(d, t, b, parts[0].shape[-1])


def _on_one_cpu() -> bool:
    """Whether steps and batch should be one dimension where the weights' gradient contracts them.

    On a CPU XLA transposes a whole operand if they are two. Over several devices a batch that is
    sharded would be gathered if they were one.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1
