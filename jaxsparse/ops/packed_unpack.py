"""A packed matrix written out, as a primitive: linear in its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.interpreters import batching

from jaxsparse.device import AnyDevice
from jaxsparse.ops.packed_places import gathered_in, slots, unpacked
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

MATRIX = (
    ("values", "w 64"),
    ("masks", "p s 32"),
    ("starts", "p+1"),
    ("panels", "p t 2"),
    ("rows", "m"),
)
"""Operands of a packed matrix, as `jaxsparse.Packed` has them."""

ONLY_ON_GPUS = Fallback("only GPUs have a kernel that writes packed matrices out")

_FORM = ("columns", "cell", "parts")


def _signature(params: dict[str, Any]) -> Signature:
    return Signature(MATRIX, (("matrix", f"m {params['columns']}"),))


def _plain(
    values: jax.Array,
    masks: jax.Array,
    starts: jax.Array,
    panels: jax.Array,
    rows: jax.Array,
    **form: Any,
) -> list[jax.Array]:
    matrix: jax.Array = unpacked(values, masks, starts, rows, **form)[0]
    return [matrix]


def _ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> FfiCall | Fallback:
    attributes = {name: params[name] for name in ("cell", "parts")}
    return FfiCall(tuple(name for name, _ in MATRIX), attributes)


def _stored(params: dict[str, Any], operands: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    shape = operands["rows"].shape[0], params["columns"]
    return f"packed matrix {shape}, {params['parts']} parts", shape


packed_unpack_p = make_primitive(
    Operation(
        name="packed_unpack",
        target="packed_unpack",
        params=_FORM,
        signature=_signature,
        result_dtypes=lambda avals, params: [avals[0].dtype],
        shardable=(),
        xla=_plain,
        ffi=_ffi,
        on_cpu=ONLY_ON_GPUS,
        stored=_stored,
    )
)


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    """Several are written out in jnp: a vmap over numbers is one of derivatives."""
    form = {name: params[name] for name in _FORM}

    def one(*matrix: jax.Array) -> jax.Array:
        return _plain(*matrix, **form)[0]

    return [jax.vmap(one, dims)(*operands)], [0]


def _transpose(
    ct: jax.Array, operands: Any, *, columns: int, cell: int, parts: int, **params: Any
) -> tuple[int, jax.Array]:
    values, masks, starts, _, rows = operands
    at = slots(masks, starts, cell=cell, parts=parts)
    return 0, gathered_in(ct, at, rows, values.aval.shape[0])


batching.primitive_batchers[packed_unpack_p] = _batch
define_multilinear_jvp(packed_unpack_p, lambda **params: (0,))
define_transpose(packed_unpack_p, _transpose)


def written_out(matrix: Sequence[jax.Array], **form: Any) -> jax.Array:
    """The dense matrix (m, columns) of a packed one's arrays, with ``columns, cell, parts``."""
    options = {"implementation": None, "variant": None}
    dense: jax.Array = bind(packed_unpack_p, *matrix, **form, **options)[0]
    return dense
