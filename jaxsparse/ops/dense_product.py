"""spmm and sddmm by a dense product of cuBLAS, where that is taken to be faster on a GPU.

For spmm the matrix is written out densely; for sddmm entries are picked from the product. Whether
it pays is known from shapes and types; whether the operands allow it, only when it runs: if not, a
kernel computes spmm after all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from jaxsparse.batching import over_batch
from jaxsparse.device import H200
from jaxsparse.ops.arguments import matrix_shape, operands_of_pattern
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind_local

DENSE_IS_FASTER = "a dense product by cuBLAS is taken to be faster"

_MOST_BYTES = 2**28  # that a dense matrix or product may take


def _places(row_offsets: jax.Array, columns: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Where entries stand in the matrix, row by row, padding behind it; and whether they rise."""
    nse = columns.shape[0]
    # As `row_indices`, whose search takes up to eight times as long on a GPU.
    begun = jnp.zeros(nse, jnp.int32).at[row_offsets[1:-1]].add(1, mode="drop")
    rows = jnp.cumsum(begun)
    entries = jnp.arange(nse, dtype=jnp.int32)
    stored = entries < row_offsets[-1]
    beyond = (row_offsets.shape[0] - 1) * k
    places = jnp.where(stored, rows * k + columns.astype(jnp.int32), beyond)
    return places, jnp.all((places[1:] > places[:-1]) | ~stored[1:])


# ---- spmm ----


def _split(operands: Sequence[Any], columns: int | None) -> tuple[Any, Any, Any, Any]:
    """The values, the pattern, x, and the bias, if there is one."""
    end = 1 + len(operands_of_pattern(columns))
    return operands[0], operands[1:end], operands[end], operands[end + 1 :]


# What jax.default_matmul_precision may be for TF32 to be precise enough.
_ALLOW_TF32 = {
    *("tensorfloat32", "high", "TF32_TF32_F32"),
    *("bfloat16", "default", "BF16_BF16_F32"),
}


def allowed_precision(precision: Any) -> str | None:
    """The default precision if it was set to one that allows TF32. JAX keys its caches by it."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    fast = precision in (None, jax.lax.Precision.DEFAULT)
    return default if fast and default in _ALLOW_TF32 else None


class _Costs(NamedTuple):
    """Microseconds of spmm on an H200: for 10^9 multiply-adds, or 10^6 entries or places."""

    # Of kernels: of a dense product if they write its tiles out, times 1 and the density squared;
    # of the stored entries if these are taken by themselves.
    tiles: float
    fullness: float
    entries: float
    # Of the dense product, of entries that are written out for it, and places that are cleared.
    product: float
    written: float
    cleared: float


# Fitted to the device time of 144 products by kernels and 80 dense ones: 2048 x 2048 to 16384 x
# 4096, 50 to 98 % sparse, 128 to 2048 columns. Most of them are within 10 %, and at 95 % and more
# the kernels are up to 1.5 times slower. Behind a permutation they are slower, too.
_IN_16_BITS = _Costs(9.6, 33, 185, 2.45, 16.5, 1.2)
_COSTS = {
    "float32": _Costs(19.3, 46, 210, 5.5, 17, 1.95),
    "bfloat16": _IN_16_BITS,
    "float16": _IN_16_BITS,
}
# To start programs of XLA, and up to 60 for the host to learn whether x is finite, while the GPU
# waits.
_START = 27 + 60


def dense_spmm_pays(params: dict[str, Any], avals: Sequence[ShapedArray]) -> bool:
    """Whether it is taken to be faster, in TF32 for float32."""
    values, pattern, x, _ = _split(avals, params["columns"])
    cost = _COSTS.get(x.dtype.name)
    if cost is None or not all(isinstance(size, int) for a in avals for size in a.shape):
        return False
    m, k = matrix_shape(pattern, params["columns"])
    n, indices = x.shape[-2 if params["dense_on_left"] else -1], pattern[1]
    nse = indices.shape[-1]
    of_matrix = jnp.broadcast_shapes(values.shape[:-1], indices.shape[:-1])
    matrices = math.prod(of_matrix)
    products = math.prod(jnp.broadcast_shapes(of_matrix, x.shape[:-2]))
    if min(k if params["transpose"] else m, n) < 2:
        return False  # XLA rounds each term of a product with one row or column to 16 bits
    size = m * k
    if not size or matrices * size * x.dtype.itemsize > _MOST_BYTES:
        return False
    density, work = nse / size, products * size * n / 1e9
    kernel = min(cost.tiles + cost.fullness * density**2, cost.entries * density) * work
    written = matrices * (nse * cost.written + size * cost.cleared) / 1e6
    return bool(kernel > _START + written + cost.product * work)


def reason_for_dense_spmm(dtype: Any, precision: str | None) -> str | None:
    """Why it is computed where it pays, or None where it would not be precise enough."""
    if dtype.itemsize == 2:
        precise = "sums in float32 there, too"
    elif precision is not None:
        precise = f"jax.default_matmul_precision {precision!r} allows TF32"
    else:
        return None
    return f"{DENSE_IS_FASTER}, and {precise}; a kernel where x is not finite"


def dense_spmm(
    *operands: jax.Array,
    primitive: Primitive,
    activate: Callable[[jax.Array], jax.Array],
    transpose: bool,
    dense_on_left: bool,
    out_dtype: Any,
    precision: str | None,
    columns: int | None,
    **epilogue: Any,
) -> list[jax.Array]:
    """A dense product where x is finite and no column stands twice, else that of the kernels.

    0 * NaN would spread through a dense product. Of entries in one place their sum would be rounded
    to 16 bits, and to add them up would need atomic additions, which have no order.

    Operands and other params are those of the primitive, and ``activate`` is its activation.
    """
    values, pattern, x, bias = _split(operands, columns)
    rank = values.ndim - 1
    m, k = matrix_shape(pattern, columns)
    places, rise = over_batch(functools.partial(_places, k=k), rank, *pattern[:2])
    # With an epilogue, rounded after it only.
    sums = accumulator_dtype(values.dtype) if epilogue else out_dtype

    def one(values: jax.Array, places: jax.Array, x: jax.Array, *bias: jax.Array) -> Any:
        matrix = jnp.zeros(m * k, values.dtype)
        matrix = matrix.at[places].set(
            values,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
            wrap_negative_indices=False,
        )
        matrix, inner = matrix.reshape(m, k), 0 if transpose else 1
        left, right = (x, matrix) if dense_on_left else (matrix, x)
        contracted = ((1,), (inner,)) if dense_on_left else ((inner,), (0,))
        z = jax.lax.dot_general(
            left,
            right,
            (contracted, ((), ())),
            # Of any that allow TF32: of less, x might not be finite.
            precision="tensorfloat32" if precision else jax.lax.Precision.DEFAULT,
            preferred_element_type=sums,
        )
        if bias:
            z = z + jnp.expand_dims(bias[0].astype(sums), 0 if dense_on_left else 1)
        y = activate(z).astype(out_dtype)
        return [y, z.astype(out_dtype)] if epilogue.get("with_preactivation") else [y]

    def by_dense_product() -> list[jax.Array]:
        return over_batch(one, rank, values, places, x, *bias)

    def by_kernel() -> list[jax.Array]:
        return bind_local(
            primitive,
            *operands,
            transpose=transpose,
            dense_on_left=dense_on_left,
            out_dtype=out_dtype,
            precision=precision,
            columns=columns,
            implementation="cuda",
            variant=None,
            **epilogue,
        )

    usual = jnp.all(rise) & jnp.all(jnp.isfinite(x))
    results: list[jax.Array] = jax.lax.cond(usual, by_dense_product, by_kernel)
    return results


# ---- sddmm ----


class _SampledCosts(NamedTuple):
    """Microseconds of sddmm by a dense product on an H200."""

    start: float  # of XLA's programs
    product: float  # 10^9 multiply-adds
    # Of kernels over what is predicted of them: of so many features that was fitted to float32.
    kernel: float


_PLACES, _PICKED = 0.95, 19  # for 10^6 of the product to be written, and entries to be picked

# Fitted to the device time of 54 problems: 512 x 512 to 8192 x 2048, 64 x 576 to 512 x 256, 70 to
# 98 % sparse, d = 512 to 3136. In float32 it is within 9 %, in 16 bits half within 14 %: XLA's
# programs start in 11 to 19 us. The faster way is chosen but for 5, which take 12 to 25 % longer.
_SAMPLED_IN_16_BITS = _SampledCosts(17, 2.2, 1.3)
_SAMPLED_COSTS = {
    "float32": _SampledCosts(20, 39, 1),
    "bfloat16": _SAMPLED_IN_16_BITS,
    "float16": _SAMPLED_IN_16_BITS,
}
# Up to 256 other kernels stage y or use tensor cores. With so many, on 8192 x 2048, the dense
# product takes 0.85 to 2.5 times as long in 16 bits, 1.1 to 2.4 times in float32.
_LEAST_FEATURES = 257


def dense_sddmm_pays(operands: Sequence[ShapedArray], out_dtype: Any) -> bool:
    """Whether it is taken to be faster than the kernel that would be chosen for these operands."""
    x, y, *vectors = operands
    cost = _SAMPLED_COSTS.get(x.dtype.name)
    if cost is None or not all(isinstance(size, int) for a in operands for size in a.shape):
        return False
    (m, d), k, nse = x.shape[-2:], y.shape[-2], vectors[1].shape[-1]
    of_product = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    batch = jnp.broadcast_shapes(of_product, *(a.shape[:-1] for a in vectors))
    places, picked = math.prod(of_product) * m * k, math.prod(batch) * nse
    if d < _LEAST_FEATURES or not 0 < 4 * places <= _MOST_BYTES:
        return False
    values = ShapedArray((*batch, nse), out_dtype)
    attributes = {"variant": "", "workspace": 0}  # so many features need none: no tensor cores
    (_, kernel), *_ = H200.choose_variant("sddmm", operands, [values], attributes)
    dense = cost.start + (places * (_PLACES + cost.product * d / 1e3) + picked * _PICKED) / 1e6
    return bool(kernel * cost.kernel > dense)


def dense_sddmm(
    *operands: jax.Array, scaled: bool, out_dtype: Any, columns: int | None
) -> list[jax.Array]:
    """The entries of a dense product."""

    def one(
        x: jax.Array, y: jax.Array, offsets: jax.Array, indices: jax.Array, *scale_by: jax.Array
    ) -> list[jax.Array]:
        accumulator = accumulator_dtype(x.dtype)
        product = jax.lax.dot_general(
            x,
            y,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=accumulator,
        )
        places, _ = _places(offsets, indices, y.shape[0])
        values = product.reshape(-1).at[places].get(mode="fill", fill_value=0)
        if scaled:
            values = jnp.where(places < product.size, values * scale_by[0].astype(accumulator), 0)
        return [values.astype(out_dtype)]

    x, y, offsets, indices = operands[:4]
    scale_by = operands[-1:] if scaled else ()
    return over_batch(one, x.ndim - 2, x, y, offsets, indices, *scale_by)
