"""A packed matrix written out, as a primitive: linear in its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxsparse.device import AnyDevice
from jaxsparse.ops.packed_places import gathered_in, numbers_of_row, slots, unpacked
from jaxsparse.primitive import (
    Fallback,
    FfiCall,
    Operation,
    Signature,
    bind,
    define_multilinear_jvp,
    define_transpose,
    make_primitive,
)
from jaxsparse.quantization import NO_DERIVATIVES, dequantized

_PLACES = (("starts", "p+1"), ("panels", "p t 2"), ("rows", "m"))


MATRIX = ("values", "masks", *(name for name, _ in _PLACES))


def matrix_of(params: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Operands of a packed matrix, as `jaxsparse.Packed` has them, but for scales."""
    values = f"w {numbers_of_row(params['cell'], quantized=params['quantized'])}"
    return (("values", values), ("masks", "w 32" if params["cell"] == 0 else "p s 32"), *_PLACES)


ONLY_ON_GPUS = Fallback("only GPUs have a kernel that writes packed matrices out")

_FORM = ("columns", "cell", "parts")


def _signature(params: dict[str, Any]) -> Signature:
    return Signature(matrix_of(params), (("matrix", f"m {params['columns']}"),))


def _plain(
    values: jax.Array,
    masks: jax.Array,
    starts: jax.Array,
    panels: jax.Array,
    rows: jax.Array,
    *,
    quantized: bool,
    dtype: Any,
    **form: Any,
) -> list[jax.Array]:
    numbers = values.astype(dtype) if quantized else values
    matrix: jax.Array = unpacked(numbers, masks, starts, rows, **form)[0]
    return [matrix]


def _ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> FfiCall | Fallback:
    attributes = {name: params[name] for name in ("cell", "parts")}
    return FfiCall(MATRIX, attributes)


def _stored(params: dict[str, Any], operands: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    shape = operands["rows"].shape[0], params["columns"]
    return f"packed matrix {shape}, {params['parts']} parts", shape


packed_unpack_p = make_primitive(
    Operation(
        name="packed_unpack",
        target="packed_unpack",
        params=(*_FORM, "quantized", "dtype"),
        signature=_signature,
        result_dtypes=lambda avals, params: [params["dtype"]],
        shardable=(),
        xla=_plain,
        ffi=_ffi,
        on_cpu=ONLY_ON_GPUS,
        stored=_stored,
    )
)


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    """Several are written out in jnp: a vmap over numbers is one of derivatives."""
    form = {name: params[name] for name in (*_FORM, "quantized", "dtype")}

    def one(*matrix: jax.Array) -> jax.Array:
        return _plain(*matrix, **form)[0]

    return [jax.vmap(one, dims)(*operands)], [0]


def _transpose(
    ct: jax.Array, operands: Any, *, columns: int, cell: int, parts: int, **params: Any
) -> tuple[int, jax.Array]:
    values, masks, starts, _, rows = operands
    at = slots(masks, starts, rows, columns=columns, cell=cell, parts=parts)
    return 0, gathered_in(ct, at, rows, values.aval.shape)


def refuse_derivatives(primitive: Primitive) -> None:
    """Has the JVP raise a TypeError for tangents of numbers of 8 bits, or of their scales."""
    jvp = ad.primitive_jvps[primitive]

    def checked(primals: Any, tangents: Any, **params: Any) -> Any:
        varying = (
            type(tangent) is not ad.Zero and jax.typeof(tangent).dtype != jax.dtypes.float0
            for tangent in (tangents[0], tangents[-1])
        )
        if params["quantized"] and any(varying):
            raise TypeError(NO_DERIVATIVES)
        return jvp(primals, tangents, **params)

    ad.primitive_jvps[primitive] = checked


batching.primitive_batchers[packed_unpack_p] = _batch
define_multilinear_jvp(packed_unpack_p, lambda *, quantized, **_: () if quantized else (0,))
refuse_derivatives(packed_unpack_p)
define_transpose(packed_unpack_p, _transpose)


def written_out(matrix: Sequence[jax.Array], scales: jax.Array | None, **form: Any) -> jax.Array:
    """The dense matrix (m, columns) of a packed one's arrays, with ``columns, cell, parts``.

    With scales of rows, of numbers of 8 bits, it is in float32.
    """
    options = {"implementation": None, "variant": None, "quantized": scales is not None}
    # Numbers of 8 bits are exact in bfloat16.
    dtype = matrix[0].dtype if scales is None else jnp.dtype(jnp.bfloat16)
    dense: jax.Array = bind(packed_unpack_p, *matrix, **form, **options, dtype=dtype)[0]
    return dense if scales is None else dequantized(dense, scales)
