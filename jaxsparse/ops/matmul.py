"""Sparse-dense and sampled dense-dense products: spmm and sddmm.

Both are bilinear and each other's derivative, so every order of derivative comes from the two
primitives alone. With A the stored matrix of values v at the positions P:

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

from jaxsparse import backend
from jaxsparse.csr import CSR
from jaxsparse.ops import arguments
from jaxsparse.ops.arguments import PATTERN, ROWS, STARTS, TRANSPOSED
from jaxsparse.ops.dense_product import (
    DENSE_IS_FASTER,
    allowed_precision,
    dense_sddmm,
    dense_sddmm_pays,
    dense_spmm,
    dense_spmm_pays,
    reason_for_dense_spmm,
)
from jaxsparse.ops.workspace import sddmm_bytes, spmm_bytes
from jaxsparse.pattern import row_indices
from jaxsparse.primitive import (
    FfiCall,
    Instead,
    Operation,
    Signature,
    bind,
    define_multilinear_jvp,
    define_transpose,
    gathered,
    make_primitive,
    undefined,
)
from jaxsparse.topology import Topology

ACTIVATIONS = {
    None: lambda z: z,
    "relu": jax.nn.relu,
    "gelu": lambda z: jax.nn.gelu(z, approximate=True),
}

# The xla implementation multiplies a densified matrix where that has at most so many elements.
_DENSE_ELEMENTS = 2**22


def spmm(
    a: CSR,
    x: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    variant: str | None = None,
) -> jax.Array:
    r"""Sparse matrix times dense matrix, with bias and activation fused.

    .. math:: y_{ij} = f\Bigl(\sum_{k \in P_i} a_{ik} x_{kj} + b_i\Bigr)

    Only stored entries are read: a NaN or infinity in row k of ``x`` reaches only the rows of the
    result that store a value in column k. The kernels' results repeat bitwise. Sums of 16-bit
    operands are taken in float32. Differentiable to any order in the values, ``x`` and ``bias``; a
    differentiated call with an activation also keeps its argument, in the result's dtype.

    On a GPU the matrix is written out, and a dense product taken, where that is faster: for many
    columns of ``x`` and matrices that are not very sparse, in 16 bits, and in float32 if
    ``jax.default_matmul_precision`` is set to "tensorfloat32" or less. The matrix takes at most 256
    MiB, and about 12 bytes more for each entry; a kernel does it after all where ``x`` is not
    finite.

    Args:
        a: a matrix (m, k); its values and its pattern may have leading batch dimensions.
        x: ``(..., k, n)``, float32, float64, bfloat16 or float16; batch dimensions broadcast.
        bias: ``(m,)`` or ``(..., m)``, added to every column.
        activation: None, "relu" or "gelu" (the tanh form), applied last.
        precision: None or ``jax.lax.Precision.HIGHEST``: float32 products are as exact as
            float32. With None, and only where ``jax.default_matmul_precision`` was set and allows
            it, a GPU may multiply in TF32.
        preferred_element_type: float32 for 16-bit operands, else their own dtype.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``.

    Returns:
        ``(..., m, n)``.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes.
        ValueError: for shapes that don't fit and options that don't exist; at lowering, for an
            implementation or variant that can't be had.

    Method: rows of A by 1-D tiles of the result, after Gale et al. 2020, "Sparse GPU Kernels for
    Deep Learning".

    >>> import jax.numpy as jnp
    >>> a = CSR.fromdense(jnp.array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]))
    >>> spmm(a, jnp.ones((3, 2)), bias=jnp.array([0.0, -1.0]), activation="relu")
    Array([[3., 3.],
           [0., 0.]], dtype=float32)
    """
    return product(
        "spmm",
        a,
        x,
        transpose=False,
        dense_on_left=False,
        bias=bias,
        activation=activation,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
        variant=variant,
    )


def product(
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
    if not isinstance(a, CSR):
        raise TypeError(f"{operation}: a must be a CSR matrix, got {type(a).__name__}")
    x = arguments.as_array(operation, "x", x, 2)
    arguments.check_precision(operation, precision)
    backend.check_implementation(operation, implementation)
    m, k = a.shape
    inner, rows = (m, k) if transpose else (k, m)
    if x.shape[-1 if dense_on_left else -2] != inner:
        side = "columns" if dense_on_left else "rows"
        raise ValueError(
            f"{operation}: x of shape {x.shape} must have {inner} {side} for a matrix of shape "
            f"{a.shape}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{operation}: activation must be one of {list(ACTIVATIONS)}, got {activation!r}"
        )
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


def sddmm(
    x: Any,
    y: Any,
    topology: Topology,
    *,
    scale_by: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    variant: str | None = None,
) -> CSR:
    r"""Sampled dense-dense product: the entries of :math:`x y^T` at the stored positions only.

    .. math:: v_e = s_e \sum_d x_{i_e d}\, y_{j_e d}

    Every entry is one dot product, so a NaN or infinity in a row of ``x`` or ``y`` reaches only the
    entries of that row or column. Padding gets 0. The kernels' results repeat bitwise; sums of
    16-bit operands are taken in float32. On a GPU the dense product is computed, and its entries
    picked, where that is faster: for more than 256 features and patterns that are not very sparse.
    Differentiable to any order in ``x``, ``y`` and ``scale_by``.

    Args:
        x: ``(..., m, d)``, float32, float64, bfloat16 or float16; batch dimensions broadcast.
        y: ``(..., n, d)``.
        topology: stored positions of an (m, n) matrix; may have leading batch dimensions.
        scale_by: values ``(..., nse)`` to multiply with, entry by entry.
        precision: None or ``jax.lax.Precision.HIGHEST``: float32 products are as exact as
            float32, never TF32.
        preferred_element_type: float32 for 16-bit operands, else their own dtype.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``.

    Returns:
        A CSR matrix of shape (m, n) on ``topology``, with values ``(..., nse)``.

    Raises:
        TypeError: for operands that are no arrays or not of these dtypes.
        ValueError: for shapes that don't fit and options that don't exist; at lowering, for an
            implementation or variant that can't be had.

    Method: as in Gale et al. 2020, "Sparse GPU Kernels for Deep Learning", section VI.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> sddmm(x, x, Topology([0, 1, 2], [1, 0], (2, 2))).values
    Array([11., 11.], dtype=float32)
    """
    operation = "sddmm"
    if not isinstance(topology, Topology):
        raise TypeError(f"sddmm: topology must be a Topology, got {type(topology).__name__}")
    x, y = (arguments.as_array(operation, n, v, 2) for n, v in (("x", x), ("y", y)))
    arguments.check_precision(operation, precision)
    backend.check_implementation(operation, implementation)
    m, n = topology.shape
    if x.shape[-2] != m or y.shape[-2] != n or x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"sddmm: x and y must have shapes (..., {m}, d) and (..., {n}, d) for a topology of "
            f"shape {topology.shape}, got {x.shape} and {y.shape}"
        )
    dense = {"x": x, "y": y}
    if scale_by is not None:
        scale_by = dense["scale_by"] = arguments.as_array(operation, "scale_by", scale_by, 1)
        if scale_by.shape[-1] != topology.nse:
            raise ValueError(
                f"sddmm: scale_by must have shape (..., {topology.nse}), one for each stored "
                f"entry, got {scale_by.shape}"
            )
    dtype = arguments.check_floating(operation, **dense)
    ranks = (2, 2) if scale_by is None else (2, 2, 1)
    (x, y, *rest), pattern = arguments.align(dense.values(), ranks, dtype, topology)
    values = bind(
        sddmm_p,
        x,
        y,
        *pattern,
        *rest,
        scaled=scale_by is not None,
        out_dtype=arguments.result_dtype(operation, dtype, preferred_element_type),
        implementation=implementation,
        variant=variant,
    )[0]
    return CSR(values, topology)


def _out_dtypes(avals: Any, params: dict[str, Any]) -> list[Any]:
    return [params["out_dtype"]] * (2 if params.get("with_preactivation") else 1)


# ---- spmm: out = A x ----


def _spmm_signature(params: dict[str, Any]) -> Signature:
    rows, inner = ("k", "m") if params["transpose"] else ("m", "k")
    left = params["dense_on_left"]
    x, out = (f"n {inner}", f"n {rows}") if left else (f"{inner} n", f"{rows} n")
    bias = (("bias", rows),) if params.get("has_bias") else ()
    preactivation = (("preactivation", out),) if params.get("with_preactivation") else ()
    return Signature((("values", "e"), *PATTERN, ("x", x), *bias), (("out", out), *preactivation))


def _spmm_xla(
    values: jax.Array,
    *operands: jax.Array,
    transpose: bool,
    dense_on_left: bool,
    out_dtype: Any,
    precision: str | None,
    has_bias: bool = False,
    activation: str | None = None,
    with_preactivation: bool = False,
) -> list[jax.Array]:
    row_offsets, columns, _, t_row_offsets, *_, x = operands[:_X]
    rows = row_indices(row_offsets, values.shape[0])
    m, k = row_offsets.shape[0] - 1, t_row_offsets.shape[0] - 1
    accumulator = arguments.accumulator_dtype(values.dtype)
    stored = rows < m
    v = jnp.where(stored, values, 0).astype(accumulator)
    x = (x.T if dense_on_left else x).astype(accumulator)
    columns = columns.astype(jnp.int32)
    out_rows, source = (columns, rows) if transpose else (rows, columns)
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
        z = z + operands[_BIAS - 1].astype(accumulator)[:, None]
    y = ACTIVATIONS[activation](z).astype(out_dtype)
    z = z.astype(out_dtype)
    results = [y, z] if with_preactivation else [y]
    return [r.T for r in results] if dense_on_left else results


_WITH_X_ON_THE_LEFT = "generic_dots"  # the CUDA variant that takes it so


def _spmm_ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], platform: str
) -> FfiCall | Instead:
    free = params["implementation"] is None and params["variant"] is None
    remark = ""
    if platform == "cuda" and free and dense_spmm_pays(params, avals):
        reason = reason_for_dense_spmm(avals[_X].dtype, params["precision"])
        if reason is not None:
            compute = functools.partial(
                dense_spmm,
                primitive=spmm_epilogue_p if "activation" in params else spmm_p,
                activate=ACTIVATIONS[params.get("activation")],
            )
            return Instead(reason, compute)
        remark = "a dense product is taken to be faster in TF32, but this one is to be exact"
    transpose = params["transpose"]
    operands = ("values", "x", *(TRANSPOSED if transpose else ROWS), STARTS)
    if params.get("has_bias"):
        operands = (*operands, "bias")
    # Most of a GPU's kernels read what stands in the columns of x where it is on the left: they get
    # it transposed.
    left = params["dense_on_left"]
    swap = left and platform == "cuda" and params["variant"] != _WITH_X_ON_THE_LEFT
    x = avals[_X]
    n, k = x.shape[-2:] if left else x.shape[:-3:-1]
    workspace = 0
    if platform == "cuda" and (swap or not left):
        pattern = avals[1 : 1 + len(PATTERN)]
        rows = avals[4 if transpose else 1].shape[-1] - 1
        workspace = spmm_bytes(params["variant"], avals[_VALUES], pattern, x, (k, n), rows)
    attributes = {
        "permuted": transpose,
        "dense_on_left": left and not swap,
        "activation": params.get("activation") or "none",
        "workspace": workspace,
    }
    swapped = ("x", "out", "preactivation") if swap else ()
    return FfiCall(operands, attributes, workspace, swapped, remark)


def _spmm_cast(
    params: dict[str, Any], avals: Sequence[ShapedArray]
) -> tuple[dict[str, Any], list[Any]]:
    """Values and x may differ in dtype, so that their cotangents can be narrow where x is."""
    dtypes = [a.dtype for a in avals]
    if dtypes[_VALUES] != dtypes[_X]:
        dtypes[_VALUES] = dtypes[_X] = arguments.promoted(dtypes[_VALUES], dtypes[_X])
        params = {**params, "out_dtype": arguments.accumulator_dtype(dtypes[_X])}
    return params, dtypes


_LINEAR = ("transpose", "dense_on_left", "out_dtype", "precision")
_VALUES, _X, _BIAS = 0, 1 + len(PATTERN), 2 + len(PATTERN)

spmm_p = make_primitive(
    Operation(
        name="spmm",
        target="spmm",
        params=_LINEAR,
        signature=_spmm_signature,
        result_dtypes=_out_dtypes,
        shardable=("n",),
        xla=_spmm_xla,
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
    out_dtype: Any,
    precision: str | None,
    **params: Any,
) -> tuple[int, jax.Array]:
    values, *pattern, x = operands
    params = {"implementation": params["implementation"], "variant": None}
    if undefined(values):
        x = x.astype(ct.dtype)
        if dense_on_left:
            x, ct = jnp.swapaxes(x, -1, -2), jnp.swapaxes(ct, -1, -2)
        # The columns of spmm may be sharded; sddmm sums over them.
        x, ct = gathered(x, -1), gathered(ct, -1)
        pair = (x, ct) if transpose else (ct, x)
        dtype = arguments.promoted(ct.dtype, values.aval.dtype)
        return _VALUES, bind(sddmm_p, *pair, *pattern, scaled=False, out_dtype=dtype, **params)[0]
    return _X, bind(
        spmm_p,
        values.astype(arguments.promoted(ct.dtype, values.dtype)),
        *pattern,
        ct,
        transpose=not transpose,
        dense_on_left=dense_on_left,
        out_dtype=ct.dtype,
        precision=precision,
        **params,
    )[0]


define_multilinear_jvp(spmm_p, lambda **params: (_VALUES, _X))
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
        xla=_spmm_xla,
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
    emit = activation is not None or with_preactivation
    results = bind(
        spmm_epilogue_p,
        *primals,
        has_bias=has_bias,
        activation=activation,
        with_preactivation=emit,
        **params,
    )
    y, z = results[0], results[-1]
    dz: Any = ad.Zero(jax.typeof(z).to_tangent_aval())
    linear = primals[:_BIAS]
    linear_params = {**params, "variant": None}
    for i in (_VALUES, _X):
        if type(tangents[i]) is not ad.Zero:
            operands = (*linear[:i], tangents[i], *linear[i + 1 :])
            dz = ad.add_tangents(dz, bind(spmm_p, *operands, **linear_params)[0])
    if has_bias and type(tangents[_BIAS]) is not ad.Zero:
        column = jnp.expand_dims(
            tangents[_BIAS].astype(z.dtype), -2 if params["dense_on_left"] else -1
        )
        dz = ad.add_tangents(dz, column + jnp.zeros_like(z))
    dy = dz if type(dz) is ad.Zero else jax.jvp(ACTIVATIONS[activation], (z,), (dz,))[1]
    return ([y, z], [dy, dz]) if with_preactivation else ([y], [dy])


ad.primitive_jvps[spmm_epilogue_p] = _spmm_epilogue_jvp


# ---- sddmm: values = (x y^T) at the pattern ----


def _sddmm_signature(params: dict[str, Any]) -> Signature:
    scale_by = (("scale_by", "e"),) if params["scaled"] else ()
    return Signature((("x", "m d"), ("y", "k d"), *PATTERN, *scale_by), (("values", "e"),))


def _sddmm_xla(
    x: jax.Array,
    y: jax.Array,
    row_offsets: jax.Array,
    columns: jax.Array,
    *operands: jax.Array,
    scaled: bool,
    out_dtype: Any,
) -> list[jax.Array]:
    m, k = x.shape[0], y.shape[0]
    rows = row_indices(row_offsets, columns.shape[0])
    accumulator = arguments.accumulator_dtype(x.dtype)
    columns = columns.astype(jnp.int32)
    if not m * k:
        values = jnp.zeros(columns.shape, accumulator)
    elif m * k <= _DENSE_ELEMENTS or (
        isinstance(x.shape[1], int) and m * k <= columns.size * x.shape[1]
    ):
        product = jnp.einsum(
            "md,kd->mk",
            x,
            y,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=accumulator,
        )
        values = product.at[rows, columns].get(mode="clip")
    else:
        x, y = x.astype(accumulator), y.astype(accumulator)
        values = jnp.sum(x.at[rows].get(mode="clip") * y.at[columns].get(mode="clip"), axis=-1)
    if scaled:
        values = values * operands[-1].astype(accumulator)
    return [jnp.where(rows < m, values, 0).astype(out_dtype)]


def _sddmm_ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], platform: str
) -> FfiCall | Instead:
    operands = ("x", "y", *ROWS, STARTS, *(("scale_by",) if params["scaled"] else ()))
    names = [name for name, _ in _sddmm_signature(params).operands]
    types = [avals[names.index(name)] for name in operands]
    free = params["implementation"] is None and params["variant"] is None
    if platform == "cuda" and free and dense_sddmm_pays(types, params["out_dtype"]):
        return Instead(DENSE_IS_FASTER, dense_sddmm)
    workspace = 0
    if platform == "cuda":
        pattern = avals[2 : 2 + len(PATTERN)]
        workspace = sddmm_bytes(params["variant"], pattern, avals[_SDDMM_Y])
    return FfiCall(operands, {"workspace": workspace}, workspace)


sddmm_p = make_primitive(
    Operation(
        name="sddmm",
        target="sddmm",
        params=("scaled", "out_dtype"),
        signature=_sddmm_signature,
        result_dtypes=_out_dtypes,
        shardable=(),
        xla=_sddmm_xla,
        ffi=_sddmm_ffi,
        summed=("d",),
    )
)
_SDDMM_X, _SDDMM_Y, _SCALE_BY = 0, 1, 2 + len(PATTERN)


def _sddmm_transpose(
    ct: jax.Array, operands: Any, *, scaled: bool, out_dtype: Any, **params: Any
) -> tuple[int, jax.Array]:
    x, y, *pattern = operands[:_SCALE_BY]
    params = {"implementation": params["implementation"], "variant": None}
    if scaled and undefined(operands[_SCALE_BY]):
        product = bind(
            sddmm_p,
            x.astype(ct.dtype),
            y.astype(ct.dtype),
            *pattern,
            scaled=False,
            out_dtype=ct.dtype,
            **params,
        )[0]
        return _SCALE_BY, ct * product
    if scaled:
        ct = ct * operands[_SCALE_BY].astype(ct.dtype)
    position, dense, transpose = (_SDDMM_X, y, False) if undefined(x) else (_SDDMM_Y, x, True)
    return position, bind(
        spmm_p,
        ct,
        *pattern,
        dense.astype(ct.dtype),
        transpose=transpose,
        dense_on_left=False,
        out_dtype=ct.dtype,
        precision=None,
        **params,
    )[0]


define_multilinear_jvp(
    sddmm_p, lambda scaled, **params: (_SDDMM_X, _SDDMM_Y, *((_SCALE_BY,) if scaled else ()))
)
define_transpose(sddmm_p, _sddmm_transpose)
