"""The product of a packed matrix and a dense one with few columns, as primitives.

- ``packed_product``: y = A x, linear in the numbers of A and in x.
- ``packed_transposed``: x = A^T y, its transpose in x, whose own transpose in y is A x again. It
  has no kernel: the matrix is written out.

The transposes in the numbers take these from an outer product: of a trainable matrix only what its
pattern has (`sddmm`), by the entry of each number. So derivatives of every order come from the two.

Numbers of 8 bits, ``quantized``, are multiplied as they are: sums of rows are scaled, in float32.
They have no derivatives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching

from jaxsparse.device import AnyDevice
from jaxsparse.ops.arguments import PATTERN
from jaxsparse.ops.bilinear import sddmm_p
from jaxsparse.ops.packed_places import gathered_in, numbers_of_row, slots, taken, unpacked
from jaxsparse.ops.packed_unpack import (
    MATRIX,
    ONLY_ON_GPUS,
    matrix_of,
    packed_unpack_p,
    refuse_derivatives,
    written_out,
)
from jaxsparse.ops.plain_products import ACTIVATIONS
from jaxsparse.precision import common_dtype, unrounded
from jaxsparse.primitive import (
    Fallback,
    FfiCall,
    Operation,
    Signature,
    bind,
    bind_local,
    define_multilinear_jvp,
    define_transpose,
    gathered,
    make_primitive,
    undefined,
)
from jaxsparse.quantization import dequantized

# By cell: up to how many columns kernels are faster than to write the matrix out and multiply it.
_MOST_COLUMNS = {0: 32, 1: 128, 2: 128}
_VECTOR = 8  # numbers of x that a kernel copies at once

_VALUES, _X, _BIAS = 0, len(MATRIX), len(MATRIX) + 1


def _besides(params: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The last operands, of matrices that have more than `MATRIX`."""
    if params["quantized"]:
        return (("scales", "m"),)
    # Only derivatives read what a trainable one has.
    sources = ("sources", f"w {numbers_of_row(params['cell'])}")
    return (sources, *PATTERN) if params["trainable"] else ()


def _signature(params: dict[str, Any]) -> Signature:
    left = params["x_on_left"]
    x, out = ("n k", "n m") if left else ("k n", "m n")
    bias = (("bias", "m"),) if params.get("has_bias") else ()
    operands = (*matrix_of(params), ("x", x), *bias, *_besides(params))
    return Signature(operands, (("out", out),))


def _product(matrix: jax.Array, stored: jax.Array, x: jax.Array) -> jax.Array:
    """Matrix times x of the same dtype, in float32; 0 * NaN is no term of it."""
    x = x.astype(matrix.dtype)

    def dense(x: jax.Array) -> jax.Array:
        product: jax.Array = jnp.dot(
            matrix, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return product

    def by_columns(x: jax.Array) -> jax.Array:
        wide = matrix.astype(jnp.float32)

        def of_column(column: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(stored, wide * column, 0), 1)

        columns: jax.Array = jax.lax.map(of_column, x.astype(jnp.float32).T)
        return columns.T

    if not matrix.size or not x.shape[1]:
        return jnp.zeros((matrix.shape[0], x.shape[1]), jnp.float32)
    product: jax.Array = jax.lax.cond(jnp.all(jnp.isfinite(x)), dense, by_columns, x)
    return product


def _plain(
    values: jax.Array,
    masks: jax.Array,
    starts: jax.Array,
    panels: jax.Array,
    rows: jax.Array,
    x: jax.Array,
    *rest: jax.Array,
    cell: int,
    parts: int,
    x_on_left: bool,
    trainable: bool,
    quantized: bool,
    **epilogue: Any,
) -> list[jax.Array]:
    """Through the matrix written out in float32, with the params of the primitives."""
    x = x.T if x_on_left else x
    form = {"columns": x.shape[0], "cell": cell, "parts": parts}
    matrix, stored = unpacked(values.astype(jnp.float32), masks, starts, rows, **form)
    z = _product(matrix, stored, x)
    z = z * rest[-1][:, None] if quantized else z
    return [_finished(z.T if x_on_left else z, rest, x_on_left, **epilogue)]


def _finished(
    z: jax.Array,
    rest: Sequence[jax.Array],
    x_on_left: bool,
    *,
    out_dtype: Any,
    has_bias: bool = False,
    activation: str | None = None,
) -> jax.Array:
    """The result of a product in float32; a bias is the first operand behind x."""
    if has_bias:
        bias = rest[0].astype(z.dtype)
        z = z + (bias if x_on_left else bias[:, None])
    y: jax.Array = ACTIVATIONS[activation](z).astype(out_dtype)
    return y


def _dense_on_gpu(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """By XLA's dot where x is finite, else by the kernel: 0 * NaN would spread."""
    matrix, x, rest = operands[:_X], operands[_X], operands[_BIAS:]
    left = params["x_on_left"]
    form = {name: params[name] for name in ("cell", "parts", "quantized")}
    by_name = {"implementation": "cuda", "variant": None}

    def by_dot() -> list[jax.Array]:
        k = x.shape[1 if left else 0]
        (a,) = bind_local(packed_unpack_p, *matrix, columns=k, dtype=x.dtype, **form, **by_name)
        factors = (x, a.T) if left else (a, x)
        z = jnp.dot(*factors, preferred_element_type=jnp.float32)
        if params["quantized"]:
            z = z * (rest[-1] if left else rest[-1][:, None])
        others = (*form, "x_on_left", "trainable")
        epilogue = {name: params[name] for name in params if name not in others}
        return [_finished(z, rest, left, **epilogue)]

    def by_kernel() -> list[jax.Array]:
        primitive = packed_epilogue_p if "activation" in params else packed_product_p
        return bind_local(primitive, *operands, **params, **by_name)

    results: list[jax.Array] = jax.lax.cond(jnp.all(jnp.isfinite(x)), by_dot, by_kernel)
    return results


_TOO_WIDE = Fallback("its parts are too wide for the shared memory of this GPU")


def _ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> FfiCall | Fallback:
    n = avals[_X].shape[0 if params["x_on_left"] else 1]
    if not isinstance(n, int):
        return Fallback("the number of columns is not known when the program is compiled")
    free = params["implementation"] is None and params["variant"] is None
    most = _MOST_COLUMNS[params["cell"]]
    if free and n > most:
        return Fallback(
            f"for more than {most} columns it is faster",
            _dense_on_gpu,
            called="the matrix written out, and XLA's dot",
        )
    # A kernel copies whole vectors of x: where a row has no multiple of 8 numbers, its columns do.
    # That by gaps copies rows of 2 and 4 numbers, too, and one column is a line either way.
    whole = n % _VECTOR == 0 or (params["cell"] == 0 and n in (1, 2, 4))
    swap = not params["x_on_left"] and not whole
    more = [
        name for name, has in (("scales", "quantized"), ("bias", "has_bias")) if params.get(has)
    ]
    return FfiCall(
        ("values", "x", "masks", "starts", "panels", "rows", *more),
        {
            "cell": params["cell"],
            "parts": params["parts"],
            "x_on_left": params["x_on_left"] or swap,
            "activation": params.get("activation") or "none",
        },
        workspace=None,
        swapped=("x", "out") if swap else (),
        fallback=_TOO_WIDE if params["cell"] == 0 else None,
    )


def _stored(params: dict[str, Any], operands: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    shape = operands["rows"].shape[0], operands["x"].shape[-1 if params["x_on_left"] else -2]
    numbers = f"{math.prod(operands['values'].shape)} numbers"
    numbers += f" in {operands['values'].dtype}" * params["quantized"]
    return f"packed matrix {shape} of {numbers}, {params['parts']} parts", shape


_LINEAR = ("cell", "parts", "x_on_left", "out_dtype", "trainable", "quantized")
_PLAIN = "the matrix written out by XLA, and its dot"


def _made(name: str, *more: str) -> Any:
    return make_primitive(
        Operation(
            name=name,
            target="packed_product",
            params=(*_LINEAR, *more),
            signature=_signature,
            result_dtypes=lambda avals, params: [params["out_dtype"]],
            shardable=("n",),
            xla=_plain,
            ffi=_ffi,
            on_cpu=Fallback("only GPUs have a kernel that multiplies packed matrices"),
            plain=_PLAIN,
            stored=_stored,
        )
    )


packed_product_p = _made("packed_product")
packed_epilogue_p = _made("packed_epilogue", "has_bias", "activation")


# ---- The transposed product ----


def _transposed_signature(params: dict[str, Any]) -> Signature:
    k, left = params["columns"], params["x_on_left"]
    x, out = ("n m", f"n {k}") if left else ("m n", f"{k} n")
    operands = (*matrix_of(params), ("x", x), *_besides(params))
    return Signature(operands, (("out", out),))


def _transposed(
    *operands: jax.Array,
    columns: int,
    cell: int,
    parts: int,
    x_on_left: bool,
    out_dtype: Any,
    trainable: bool,
    quantized: bool,
    by_kernel: bool = False,
) -> list[jax.Array]:
    """By the matrix written out. As in cells of 2, a stored 0 counts as none."""
    matrix, x = operands[:_X], operands[_X]
    x = x.T if x_on_left else x
    form = {"columns": columns, "cell": cell, "parts": parts}
    if by_kernel:
        by_name = {"implementation": None, "variant": None}
        dtype = jnp.dtype(jnp.bfloat16) if quantized else matrix[_VALUES].dtype
        options = {"quantized": quantized, "dtype": dtype}
        (a,) = bind_local(packed_unpack_p, *matrix, **form, **options, **by_name)
    else:
        values, masks, starts, _, rows = matrix
        a = unpacked(values.astype(jnp.float32), masks, starts, rows, **form)[0]
    if quantized:
        a = dequantized(a, operands[-1])
        # Tensor cores multiply 16 bits, in which numbers times scales fit better than x does.
        a = a.astype(x.dtype) if by_kernel and x.dtype.itemsize == 2 else a
    a = (a.astype(common_dtype(a.dtype, x.dtype)) if by_kernel else a).T
    y = _product(a, a != 0, x).astype(out_dtype)
    return [y.T if x_on_left else y]


_WITHOUT_KERNEL = Fallback(
    "there is no kernel by the transposed matrix",
    functools.partial(_transposed, by_kernel=True),
    called="the matrix written out, and XLA's dot",
)

packed_transposed_p = make_primitive(
    Operation(
        name="packed_transposed",
        target="packed_unpack",
        params=(*_LINEAR, "columns"),
        signature=_transposed_signature,
        result_dtypes=lambda avals, params: [params["out_dtype"]],
        shardable=("n",),
        xla=_transposed,
        ffi=lambda *_: _WITHOUT_KERNEL,
        on_cpu=ONLY_ON_GPUS,
        plain=_PLAIN,
        stored=lambda params, operands: (
            f"packed matrix, {params['parts']} parts",
            (operands["rows"].shape[0], params["columns"]),
        ),
    )
)


# ---- Batches of x are more columns ----


def _batch(primitive: Any, operands: Any, dims: Any, **params: Any) -> Any:
    has_bias = params.get("has_bias", False)
    if any(dim is not None for dim in (*dims[:_X], *dims[_BIAS + has_bias :])):
        raise ValueError(
            "packed_product: takes one packed matrix, got a batch of them: map over x alone"
        )
    if has_bias and dims[_BIAS] is not None:
        return _batch_of_biases(operands, dims, **params)
    x, left = operands[_X], params["x_on_left"]
    axis = 0 if left else 1  # of the columns of the product, in x and in the result
    x = jnp.moveaxis(x, dims[_X], axis)
    sizes = x.shape[axis : axis + 2]
    x = x.reshape(*x.shape[:axis], sizes[0] * sizes[1], *x.shape[axis + 2 :])
    (out,) = bind(primitive, *operands[:_X], x, *operands[_BIAS:], **params)
    return [out.reshape(*out.shape[:axis], *sizes, *out.shape[axis + 1 :])], [axis]


def _batch_of_biases(operands: Any, dims: Any, **params: Any) -> Any:
    def one(x: jax.Array, bias: jax.Array) -> jax.Array:
        return _by_parts(*operands[:_X], x, bias, *operands[_BIAS + 1 :], **params)

    return [jax.vmap(one, (dims[_X], dims[_BIAS]))(operands[_X], operands[_BIAS])], [0]


for _primitive in (packed_product_p, packed_epilogue_p, packed_transposed_p):
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)


# ---- Derivatives ----


def _of_numbers(
    y: jax.Array, x: jax.Array, operands: Any, x_on_left: bool, **form: Any
) -> tuple[int, jax.Array]:
    """The cotangent of the numbers: what y x^T has in their places."""
    values, masks, starts, _, rows = operands[:_X]
    dtype, axis = common_dtype(y.dtype, x.dtype), 0 if x_on_left else 1
    # The columns of the product may be sharded; this sums over them.
    y, x = (gathered(z, axis).astype(dtype) for z in (y, x))
    if entries := operands[_X + 1 :]:
        sources, *pattern = entries
        y, x = (z.T if x_on_left else z for z in (y, x))
        options = {"implementation": None, "variant": None, "columns": None}
        (of_entries,) = bind(
            sddmm_p, y, x, *pattern, scaled=False, out_dtype=jnp.dtype(jnp.float32), **options
        )
        return _VALUES, taken(of_entries, sources)
    outer = jax.lax.dot_general(
        y,
        x,
        (((axis,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    at = slots(masks, starts, rows, columns=outer.shape[1], **form)
    return _VALUES, gathered_in(outer, at, rows, values.aval.shape)


def _transpose(
    ct: jax.Array,
    operands: Any,
    *,
    of: Any,
    cotangent_dtype: Any = None,
    columns: int | None = None,
    **params: Any,
) -> tuple[int, jax.Array]:
    """The rule of both products: the transpose of one in x is ``of``, the other one."""
    matrix, x, entries = operands[:_X], operands[_X], operands[_X + 1 :]
    ct = ct if cotangent_dtype is None else ct.astype(cotangent_dtype)
    form = {name: params[name] for name in ("cell", "parts")}
    left = params["x_on_left"]
    if undefined(matrix[_VALUES]):
        y, of_x = (ct, x) if columns is None else (x, ct)
        return _of_numbers(y, of_x, operands, left, **form)
    dtype = common_dtype(ct.dtype, x.aval.dtype)
    options: dict[str, Any] = {"implementation": params["implementation"], "variant": None}
    options |= {name: params[name] for name in ("trainable", "quantized")}
    if columns is None:
        options["columns"] = x.aval.shape[1 if left else 0]
    elif ct.dtype.itemsize != 2 or not (params["quantized"] or ct.dtype == matrix[_VALUES].dtype):
        # What has more than 16 bits is no operand of a kernel.
        scales = operands[-1] if params["quantized"] else None
        a = written_out(matrix, scales, columns=columns, **form).astype(dtype)
        y = _product(a, a != 0, ct.T if left else ct)
        return _X, y.T if left else y
    out = bind(of, *matrix, ct, *entries, x_on_left=left, out_dtype=dtype, **form, **options)[0]
    return _X, out


def _factors(params: dict[str, Any]) -> tuple[int, ...]:
    return (_X,) if params["quantized"] else (_VALUES, _X)


for _primitive, _other in (
    (packed_product_p, packed_transposed_p),
    (packed_transposed_p, packed_product_p),
):
    define_multilinear_jvp(_primitive, lambda **params: _factors(params))
    refuse_derivatives(_primitive)
    define_transpose(_primitive, functools.partial(_transpose, of=_other))


def _by_parts(
    *operands: jax.Array, has_bias: bool, activation: str | None, **params: Any
) -> jax.Array:
    """The same as `packed_epilogue_p`, with what follows the product in jnp."""
    rest = operands[_BIAS:]
    (z,) = bind(packed_product_p, *operands[:_BIAS], *rest[has_bias:], **unrounded(params))
    return _finished(
        z,
        rest,
        params["x_on_left"],
        out_dtype=params["out_dtype"],
        has_bias=has_bias,
        activation=activation,
    )


def _epilogue_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    varying = [*_factors(params), *([_BIAS] if params["has_bias"] else [])]
    varying = [i for i in varying if type(tangents[i]) is not ad.Zero]

    def of_varying(*varied: jax.Array) -> jax.Array:
        operands = list(primals)
        for i, operand in zip(varying, varied, strict=True):
            operands[i] = operand
        return _by_parts(*operands, **{**params, "variant": None})

    along = [tangents[i] for i in varying]
    y, dy = jax.jvp(of_varying, tuple(primals[i] for i in varying), tuple(along))
    return [y], [dy]


ad.primitive_jvps[packed_epilogue_p] = _epilogue_jvp
refuse_derivatives(packed_epilogue_p)
