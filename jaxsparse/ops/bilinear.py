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
from jax.interpreters import ad

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
from jaxsparse.ops.plain_products import ACTIVATIONS, sddmm_xla, spmm_xla
from jaxsparse.pattern import transpose_is_missing
from jaxsparse.precision import accumulator_dtype, common_dtype, cotangent_params, unrounded
from jaxsparse.primitive import (
    Fallback,
    FfiCall,
    Operation,
    Signature,
    bind,
    define_multilinear_jvp,
    define_transpose,
    gathered,
    make_primitive,
    undefined,
)


def _out_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    return [params["out_dtype"]] * (2 if params.get("with_preactivation") else 1)


def _multiplied(params: dict[str, Any]) -> dict[str, Any]:
    """As `unrounded`, of a product that is then multiplied by more than ones and zeros.

    So is its cotangent, which may leave float16's range and is not rounded to that.
    """
    wide = unrounded(params)
    return {**wide, "cotangent_dtype": None} if params["out_dtype"] == jnp.float16 else wide


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
    return FfiCall(operands, attributes, workspace=None, swapped=swapped, remark=remark)


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


def _spmm_epilogue_jvp(
    primals: Any,
    tangents: Any,
    *,
    has_bias: bool,
    activation: str | None,
    with_preactivation: bool,
    **params: Any,
) -> Any:
    # z = A x + b, y = f(z):  dz = A(dv) x + A dx + db,  dy = f'(z) dz. The tangent is plain spmm.
    of_sums = _multiplied(params) if activation == "gelu" else unrounded(params)
    of_epilogue = functools.partial(bind, spmm_epilogue_p, *primals, has_bias=has_bias)
    if activation is None and not with_preactivation:
        z = y = of_epilogue(activation=None, with_preactivation=False, **params)[0]
    elif of_sums is params:
        y, z = of_epilogue(activation=activation, with_preactivation=True, **params)
    else:
        # A kernel would round z to 16 bits, and f'(z) needs its float32 sums.
        z = of_epilogue(activation=None, with_preactivation=False, **of_sums)[0]
        y = ACTIVATIONS[activation](z).astype(params["out_dtype"])
    bias = _x_of(params) + 1
    varying = [i for i in (_VALUES, bias - 1) if type(tangents[i]) is not ad.Zero]
    bias_varies = has_bias and type(tangents[bias]) is not ad.Zero
    of_term = params if activation is None and len(varying) + bias_varies == 1 else of_sums
    of_term = {**of_term, "variant": None}
    terms = [
        bind(spmm_p, *primals[:i], tangents[i], *primals[i + 1 : bias], **of_term)[0]
        for i in varying
    ]
    if varying or bias_varies:
        dy, dz = _epilogue_tangents(
            z,
            terms,
            tangents[bias] if bias_varies else None,
            activation=activation,
            of_columns=params["dense_on_left"],
            dtype=of_term["out_dtype"],
            out_dtype=y.dtype,
        )
    else:
        dy = dz = ad.Zero(jax.typeof(y).to_tangent_aval())
    return ([y, z.astype(y.dtype)], [dy, dz]) if with_preactivation else ([y], [dy])


@functools.partial(jax.jit, static_argnames=("activation", "of_columns", "dtype", "out_dtype"))
def _epilogue_tangents(
    z: jax.Array,
    terms: list[jax.Array],
    bias: jax.Array | None,
    *,
    activation: str | None,
    of_columns: bool,
    dtype: Any,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """The tangents dy and dz, of terms of dz: one program where nothing is compiled around it."""
    if bias is not None:
        column = jnp.expand_dims(bias.astype(dtype), -2 if of_columns else -1)
        terms = [*terms, column + jnp.zeros_like(z, dtype)]
    dz = functools.reduce(jnp.add, terms)
    dy = jax.jvp(ACTIVATIONS[activation], (z.astype(dtype),), (dz,))[1]
    return dy.astype(out_dtype), dz.astype(out_dtype)


ad.primitive_jvps[spmm_epilogue_p] = _spmm_epilogue_jvp


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
    return FfiCall(operands, {}, workspace=None)


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
        of_sums = _multiplied({**params, "out_dtype": ct.dtype})
        (product,) = bind(sddmm_p, x, y, *pattern, scaled=False, **of_sums)
        return scale_by, ct.astype(product.dtype) * product
    if scaled:
        wide = accumulator_dtype(ct.dtype)
        product = ct.astype(wide) * operands[scale_by].astype(wide)
        ct = product if ct.dtype == jnp.float16 else product.astype(ct.dtype)  # as in _multiplied
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
