"""The primitives behind sparse-dense and sampled dense-dense products.

Both products are bilinear and each other's derivative, so every order of derivative comes from the
two primitives alone. With A the stored matrix of values v at the positions P:

- ``spmm``:  y = A x.        dv -> A(dv) x,  dx -> A dx;  transposed: v <- sddmm(y, x),  x <- A^T y.
- ``sddmm``: v = (x y^T)|P.  transposed: x <- A(v) y,  y <- A(v)^T x.

The stored values always stand in the order of A's rows: a product by A^T walks the transposed
pattern and finds them by its permutation, or walks over A as it is stored, so no rule permutes or
scatters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jaxsparse.device import AnyDevice
from jaxsparse.ops.arguments import (
    CUTS,
    ROWS,
    STARTS,
    TRANSPOSED,
    TRANSPOSED_CUTS,
    operands_of_pattern,
)
from jaxsparse.ops.dense_product import (
    DENSE_IS_FASTER,
    dense_sddmm,
    dense_sddmm_pays,
    dense_spmm,
    dense_spmm_pays,
    reason_for_dense_spmm,
)
from jaxsparse.ops.epilogue import define_epilogue_jvp, multiplied
from jaxsparse.ops.plain_products import ACTIVATIONS, sddmm_xla, spmm_xla
from jaxsparse.ops.whole_vectors import with_whole_vectors
from jaxsparse.pattern import transpose_is_missing
from jaxsparse.precision import accumulator_dtype, common_dtype, cotangent_params
from jaxsparse.primitive import (
    OPERATIONS,
    Fallback,
    FfiCall,
    Operation,
    Signature,
    bind,
    define_multilinear_jvp,
    define_transpose,
    gathered,
    make_primitive,
    typed_call,
    undefined,
)


def _out_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    return [params["out_dtype"]] * (2 if params.get("with_preactivation") else 1)


# ---- spmm: out = A x ----


def _spmm_signature(params: dict[str, Any]) -> Signature:
    rows, inner = ("k", "m") if params["transpose"] else ("m", "k")
    left = params["dense_on_left"]
    x, out = (f"n {inner}", f"n {rows}") if left else (f"{inner} n", f"{rows} n")
    bias = (("bias", rows),) if params.get("has_bias") else ()
    preactivation = (("preactivation", out),) if params.get("with_preactivation") else ()
    pattern = operands_of_pattern(params["columns"])
    return Signature((("values", "e"), *pattern, ("x", x), *bias), (("out", out), *preactivation))


_VALUES = 0


def _x_of(params: dict[str, Any]) -> int:
    """The position of x among the operands; behind it a bias may be."""
    return 1 + len(operands_of_pattern(params["columns"]))


_WITH_X_ON_THE_LEFT = "generic_dots"  # the CUDA variant that takes it so


def _spmm_ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> FfiCall | Fallback:
    free = params["implementation"] is None and params["variant"] is None
    remark = ""
    if device.platform == "cuda" and free and dense_spmm_pays(params, avals):
        reason = reason_for_dense_spmm(avals[_x_of(params)].dtype, params["precision"])
        if reason is not None:
            compute = functools.partial(
                dense_spmm,
                primitive=spmm_epilogue_p if "activation" in params else spmm_p,
                activate=ACTIVATIONS[params.get("activation")],
            )
            return Fallback(reason, compute)
        remark = "a dense product is taken to be faster in TF32, but this one is to be exact"
    transpose = params["transpose"]
    rows, cuts = (TRANSPOSED, TRANSPOSED_CUTS) if transpose else (ROWS, CUTS)
    operands = ("values", "x", *rows, STARTS, cuts)
    if params.get("has_bias"):
        operands = (*operands, "bias")
    # Most of a GPU's kernels read what stands in the columns of x where it is on the left: they get
    # it transposed.
    left = params["dense_on_left"]
    swap = left and device.platform == "cuda" and params["variant"] != _WITH_X_ON_THE_LEFT
    attributes = {
        "permuted": transpose,
        "dense_on_left": left and not swap,
        "activation": params.get("activation") or "none",
    }
    swapped = ("x", "out", "preactivation") if swap else ()
    made = FfiCall(operands, attributes, workspace=None, swapped=swapped, remark=remark)
    primitive = spmm_epilogue_p if "activation" in params else spmm_p
    return with_whole_vectors(typed_call(OPERATIONS[primitive], params, avals), made, "n", device)


def _spmm_cast(
    params: dict[str, Any], avals: Sequence[ShapedArray]
) -> tuple[dict[str, Any], list[Any]]:
    """Values and x may differ in dtype, so that their cotangents can be narrow where x is.

    The wider one is what is multiplied in, unless values are rounded, for the cotangent's sake
    alone in a wider dtype.
    """
    dtypes = [a.dtype for a in avals]
    x = _x_of(params)
    if params.get("rounds_values"):
        dtypes[_VALUES] = dtypes[x]
    if dtypes[_VALUES] != dtypes[x]:
        dtypes[_VALUES] = dtypes[x] = common_dtype(dtypes[_VALUES], dtypes[x])
        params = {**params, "out_dtype": dtypes[x]}
    return params, dtypes


_LINEAR = ("transpose", "dense_on_left", "out_dtype", "precision", "columns")

spmm_p = make_primitive(
    Operation(
        name="spmm",
        target="spmm",
        params=_LINEAR,
        signature=_spmm_signature,
        result_dtypes=_out_dtypes,
        shardable=("n",),
        xla=spmm_xla,
        ffi=_spmm_ffi,
        cast=_spmm_cast,
    )
)


def _spmm_transpose(
    ct: jax.Array,
    operands: Any,
    *,
    transpose: bool,
    dense_on_left: bool,
    precision: str | None,
    columns: int | None,
    cotangent_dtype: Any = None,
    rounds_values: bool = False,
    **params: Any,
) -> tuple[int, jax.Array]:
    values, *pattern, x = operands
    ct = ct if cotangent_dtype is None else ct.astype(cotangent_dtype)
    params = {"implementation": params["implementation"], "variant": None}
    if undefined(values):
        params = cotangent_params(ct, values, ct.ndim - 2, **params)
        x = x.astype(ct.dtype)
        if dense_on_left:
            x, ct = jnp.swapaxes(x, -1, -2), jnp.swapaxes(ct, -1, -2)
        # The columns of spmm may be sharded; sddmm sums over them.
        x, ct = gathered(x, -1), gathered(ct, -1)
        pair = (x, ct) if transpose else (ct, x)
        params["columns"] = columns
        return _VALUES, bind(sddmm_p, *pair, *pattern, scaled=False, **params)[0]
    if columns is not None:
        raise transpose_is_missing("spmm: the gradient with respect to x")
    if not rounds_values:
        values = values.astype(common_dtype(ct.dtype, values.dtype))
    return len(operands) - 1, bind(
        spmm_p,
        values,
        *pattern,
        ct,
        transpose=not transpose,
        dense_on_left=dense_on_left,
        precision=precision,
        columns=None,
        rounds_values=rounds_values,
        **cotangent_params(ct, x, ct.ndim - 2, **params),
    )[0]


define_multilinear_jvp(spmm_p, lambda **params: (_VALUES, _x_of(params)))
define_transpose(spmm_p, _spmm_transpose)


# ---- spmm with a fused epilogue: out = activation(A x + bias) ----

spmm_epilogue_p = make_primitive(
    Operation(
        name="spmm_epilogue",
        target="spmm",
        params=(*_LINEAR, "has_bias", "activation", "with_preactivation"),
        signature=_spmm_signature,
        result_dtypes=_out_dtypes,
        shardable=("n",),
        xla=spmm_xla,
        ffi=_spmm_ffi,
    )
)


define_epilogue_jvp(
    spmm_epilogue_p,
    spmm_p,
    lambda **params: (_VALUES, _x_of(params)),
    lambda *, dense_on_left, **_: -1 if dense_on_left else -2,
)


# ---- sddmm: values = (x y^T) at the pattern ----


def _sddmm_signature(params: dict[str, Any]) -> Signature:
    scale_by = (("scale_by", "e"),) if params["scaled"] else ()
    pattern = operands_of_pattern(params["columns"])
    return Signature((("x", "m d"), ("y", "k d"), *pattern, *scale_by), (("values", "e"),))


def _sddmm_ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> FfiCall | Fallback:
    operands = ("x", "y", *ROWS, STARTS, *(("scale_by",) if params["scaled"] else ()))
    names = [name for name, _ in _sddmm_signature(params).operands]
    types = [avals[names.index(name)] for name in operands]
    free = params["implementation"] is None and params["variant"] is None
    if device.platform == "cuda" and free and dense_sddmm_pays(types, params["out_dtype"]):
        return Fallback(DENSE_IS_FASTER, dense_sddmm)
    made = FfiCall(operands, {}, workspace=None)
    return with_whole_vectors(typed_call(OPERATIONS[sddmm_p], params, avals), made, "d", device)


sddmm_p = make_primitive(
    Operation(
        name="sddmm",
        target="sddmm",
        params=("scaled", "out_dtype", "columns"),
        signature=_sddmm_signature,
        result_dtypes=_out_dtypes,
        shardable=(),
        xla=sddmm_xla,
        ffi=_sddmm_ffi,
        summed=("d",),
    )
)
_SDDMM_X, _SDDMM_Y = 0, 1


def _scale_by_of(params: dict[str, Any]) -> int:
    """The position of scale_by among the operands, if there is one."""
    return 2 + len(operands_of_pattern(params["columns"]))


def _sddmm_transpose(
    ct: jax.Array,
    operands: Any,
    *,
    scaled: bool,
    columns: int | None,
    cotangent_dtype: Any = None,
    **params: Any,
) -> tuple[int, jax.Array]:
    params = {
        "columns": columns,
        "implementation": params["implementation"],
        "variant": None,
    }
    scale_by = _scale_by_of(params)
    x, y, *pattern = operands[:scale_by]
    ct = ct if cotangent_dtype is None else ct.astype(cotangent_dtype)
    if scaled and undefined(operands[scale_by]):
        of_sums = multiplied({**params, "out_dtype": ct.dtype})
        (product,) = bind(sddmm_p, x, y, *pattern, scaled=False, **of_sums)
        return scale_by, ct.astype(product.dtype) * product
    if scaled:
        wide = accumulator_dtype(ct.dtype)
        product = ct.astype(wide) * operands[scale_by].astype(wide)
        ct = product if ct.dtype == jnp.float16 else product.astype(ct.dtype)  # as in multiplied
    position, dense, transpose = (_SDDMM_X, y, False) if undefined(x) else (_SDDMM_Y, x, True)
    if transpose and columns is not None:
        raise transpose_is_missing("sddmm: the gradient with respect to y")
    return position, bind(
        spmm_p,
        ct,
        *pattern,
        dense.astype(ct.dtype),
        transpose=transpose,
        dense_on_left=False,
        precision=None,
        **cotangent_params(ct, operands[position], ct.ndim - 1, **params),
    )[0]


def _varying_of_sddmm(scaled: bool, **params: Any) -> tuple[int, ...]:
    return (_SDDMM_X, _SDDMM_Y, *((_scale_by_of(params),) if scaled else ()))


define_multilinear_jvp(sddmm_p, _varying_of_sddmm)
define_transpose(sddmm_p, _sddmm_transpose)
