"""The primitives behind attention over a block mask or a pattern.

With s = scale q.k, p = exp(s - lse) at stored positions and 0 elsewhere,

    out = p v,  lse = log of the row sums of exp(s),
    d out = u - r out,  d lse = r,  where u = (p ds) v + p dv,  r = row sums of p ds,
    ds = scale (dq.k + q.dk)

`attention_tangent` is the map (dq, dk, dv) -> (u, r), `attention_cotangent` its transpose
(ct u, ct r) -> (ct q, ct k, ct v). Each is linear in these, and the other one's transpose: so
derivatives of first order close. Those of higher order are derivatives of the plain form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad

from jaxsparse.batching import over_batch
from jaxsparse.block_mask.words import CELL, TILE
from jaxsparse.device import AnyDevice, Device
from jaxsparse.ops import composed_attention as composed
from jaxsparse.ops import plain_attention as plain
from jaxsparse.ops.arguments import ROWS, TRANSPOSED_ROWS, operands_of_pattern
from jaxsparse.pattern import transpose_is_missing
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import (
    OPERATIONS,
    Fallback,
    FfiCall,
    Operation,
    Signature,
    bind,
    bind_local,
    make_primitive,
    summed_to,
    typed_call,
    undefined,
    variants_of,
)

_PARAMS = ("scale", "mask_of_group", "mask_of_head", "has_mask", "has_pattern", "columns")
_ATTRIBUTES = _PARAMS[:4]  # those that targets take as they are

_MULTIPLIED = (("query", "t g r h"), ("key", "u g h"), ("value", "u g e"))
_PLAIN = "attention by blocks of keys in plain XLA"
_OUT, _SUMS = "t g r e", "g r t"
RESULTS = (("out", _OUT), ("lse", _SUMS))

# The arrays of a mask's TileLists, in their order; and what these dimensions are called of its rows
# of tiles, and of its columns.
LISTS = {
    "offsets": "tiles+1",
    "entries": "entries",
    "bits_at": "entries",
    "bits": "cells words",
    "order": "tiles",
}
_OF_ROWS = {"tiles": "i", "tiles+1": "i+1", "entries": "n", "cells": "c", "words": "128"}
_OF_COLUMNS = {"tiles": "j", "tiles+1": "j+1", "entries": "m", "cells": "d", "words": "128"}
_ROWS = tuple(LISTS)
_COLUMNS = tuple(f"transposed_{name}" for name in LISTS)
OF_MASKS = frozenset((*_ROWS, *_COLUMNS))
"""The operands that are lists of a block mask."""
# What the dimensions of a pattern are called here.
_OF_PATTERN = {"m": "t", "m+1": "t+1", "k": "u", "k+1": "u+1", "e": "z", "tiles": "y"}


def mask_operands(params: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The lists of a block mask in both orientations, and the pattern: both, or one of the two."""
    heads = f"{'g' if params['mask_of_group'] else '1'} {'r' if params['mask_of_head'] else '1'}"
    lists = (
        (name, " ".join((heads, *(dimensions[d] for d in dims.split()))))
        for names, dimensions in ((_ROWS, _OF_ROWS), (_COLUMNS, _OF_COLUMNS))
        for name, dims in zip(names, LISTS.values(), strict=True)
    )
    pattern = operands_of_pattern(params["columns"]) if params["has_pattern"] else ()
    return (
        *(lists if params["has_mask"] else ()),
        *((name, f"{heads} {_OF_PATTERN[dim]}") for name, dim in pattern),
    )


def _signature_with(
    behind: tuple[tuple[str, str], ...], results: tuple[tuple[str, str], ...]
) -> Any:
    """The signature of an operation with these operands behind those that all three have."""
    return lambda params: Signature((*_MULTIPLIED, *mask_operands(params), *behind), results)


_COMPOSED = "sddmm, sparse_softmax and spmm"


def _instead(reason: str, name: str, params: dict[str, Any]) -> Fallback:
    """The composition where the pattern is there with all that it needs, or the plain form."""
    lacks_transpose = name == "attention_cotangent" and params["columns"] is not None
    if not params["has_pattern"] or (params["has_mask"] and lacks_transpose):
        return Fallback(reason, called=_PLAIN)
    return Fallback(reason, getattr(composed, name), called=_COMPOSED)


# What targets take of masks: lists by rows and patterns by rows, and the same transposed.
_BY_ROWS = (_ROWS, ROWS)
_BY_COLUMNS = (_COLUMNS, TRANSPOSED_ROWS)


def _ffi_of(
    name: str, masks: tuple[tuple[tuple[str, ...], ...], ...], behind: tuple[str, ...] = ()
) -> Any:
    """The call of a target that takes these of a mask, and what else is behind."""

    def ffi(
        params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
    ) -> FfiCall | Fallback:
        query, _, value = avals[:3]
        sizes = (query.shape[-1], value.shape[-1])
        reason = "no kernel takes {} heads of {} and {} numbers".format(query.dtype, *sizes)
        gives_pattern = _gives_pattern(name, params, avals)
        if not (params["has_mask"] or gives_pattern):
            return _instead("no kernel takes a pattern without a block mask", name, params)
        given = (
            operand
            for lists, pattern in masks
            for operand in (
                *(lists if params["has_mask"] else ()),
                *(pattern if gives_pattern else ()),
            )
        )
        made = FfiCall(
            ("query", "key", "value", *given, *behind),
            {
                **{attribute: params[attribute] for attribute in _ATTRIBUTES},
                "has_pattern": gives_pattern,
            },
            workspace=None,
            workspace_is_fixed=True,
            fallback=_instead(reason, name, params),
        )
        instead = _sparse_composition(name, params, avals, device)
        if instead is not None:
            return instead
        best = _best_sizes(name, params, avals, made, device)
        if best == sizes:
            return made
        heads = " and ".join(map(str, dict.fromkeys(best)))
        return Fallback(
            f"{reason} as fast",
            functools.partial(_with_padded_heads, name, best, params["variant"]),
            called=f"the kernel of heads of {heads}, padded",
        )

    return ffi


# Where a tile of the mask has more entries than this, kernels that walk the rows of a pattern are
# slower than those that multiply tiles, or than the composition, in any case.
_MOST_ENTRIES_OF_TILE = 300
# Entries of a tile from which on its products cost a GPU less than the composition, in float32.
_FEWEST_ENTRIES_OF_TILE = {
    "attention": 1800,
    "attention_tangent": 1800,
    "attention_cotangent": 3400,
}


def _gives_pattern(name: str, params: dict[str, Any], avals: Sequence[ShapedArray]) -> bool:
    """Whether a target gets the pattern, with all that it needs of it."""
    if not params["has_pattern"] or name == "attention_tangent":
        return False
    if name == "attention_cotangent" and params["columns"] is not None:
        return False
    if not params["has_mask"] or params["variant"] is not None:
        return True
    return _entries_of_tile(params, avals) < _MOST_ENTRIES_OF_TILE


def _entries_of_tile(params: dict[str, Any], avals: Sequence[ShapedArray]) -> float:
    """Entries of the pattern for each tile of the block mask."""
    names = [name for name, _ in (*_MULTIPLIED, *mask_operands(params))]
    sizes = dict(zip(names, (a.shape[-1] for a in avals), strict=False))
    return float(sizes["column_indices"] / sizes["entries"])


def _sparse_composition(
    name: str, params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> Fallback | None:
    """The composition, where a GPU's kernel of float32 would multiply tiles with few entries."""
    if params["variant"] is not None or not isinstance(device, Device):
        return None
    if not (params["has_mask"] and params["has_pattern"]) or avals[0].dtype != jnp.float32:
        return None
    entries = _entries_of_tile(params, avals)
    if not _MOST_ENTRIES_OF_TILE <= entries < _FEWEST_ENTRIES_OF_TILE[name]:
        return None
    instead = _instead("the mask's tiles have few entries each", name, params)
    return None if instead.compute is None else instead


# Sizes of heads, both of keys and of values, that kernels by warpgroups take.
_SIZES_OF_WARPGROUPS = (64, 128)
_ALIGNED = 8  # all other kernels of GPUs take multiples of this


def _best_sizes(
    name: str,
    params: dict[str, Any],
    avals: Sequence[ShapedArray],
    made: FfiCall,
    device: AnyDevice,
) -> tuple[int, int]:
    """What to pad heads of keys and of values to: as they are, or for a kernel that costs less."""
    sizes = (avals[0].shape[-1], avals[2].shape[-1])
    if not isinstance(device, Device):
        return sizes
    squares = [(s, s) for s in _SIZES_OF_WARPGROUPS if max(sizes) <= s]
    aligned = tuple(-(-size // _ALIGNED) * _ALIGNED for size in sizes)
    best, least = sizes, math.inf
    for padded in (sizes, *squares, aligned):
        of_sizes = typed_call(
            OPERATIONS[PRIMITIVES[name]], params, _padded_avals(name, params, avals, padded)
        )
        for _, cost in variants_of(of_sizes, made, device)[:1]:
            if cost < least:
                best, least = padded, cost
    return best


def _sizes_by_operand(name: str, padded: tuple[int, int]) -> dict[str, int]:
    """The last dimension of each operand that has heads' numbers."""
    h, e = padded
    by_name = {"query": h, "key": h, "value": e}
    more = {
        "attention": {},
        "attention_tangent": {f"d_{operand}": size for operand, size in by_name.items()},
        "attention_cotangent": {"ct_out": e},
    }
    return by_name | more[name]


def _padded_avals(
    name: str, params: dict[str, Any], avals: Sequence[ShapedArray], padded: tuple[int, int]
) -> list[ShapedArray]:
    operands = OPERATIONS[PRIMITIVES[name]].signature(params).operands
    sizes = _sizes_by_operand(name, padded)
    return [
        ShapedArray((*aval.shape[:-1], sizes[operand]), aval.dtype) if operand in sizes else aval
        for (operand, _), aval in zip(operands, avals, strict=True)
    ]


def _padded_to(size: int, x: jax.Array) -> jax.Array:
    if x.shape[-1] == size:
        return x
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),))


def _with_padded_heads(
    name: str, sizes: tuple[int, int], variant: str | None, *operands: jax.Array, **params: Any
) -> Any:
    """A call whose heads get zeros behind them: these add nothing to products."""
    padded = _padded_avals(name, params, [jax.typeof(x) for x in operands], sizes)
    results = bind_local(
        PRIMITIVES[name],
        *(_padded_to(aval.shape[-1], x) for x, aval in zip(operands, padded, strict=True)),
        **params,
        implementation="cuda",
        variant=variant,
    )
    h, e = operands[0].shape[-1], operands[2].shape[-1]
    of_results = (h, h, e) if name == "attention_cotangent" else (e, None)
    return [
        x if size is None else x[..., :size] for x, size in zip(results, of_results, strict=True)
    ]


def _form_of(name: str, bind_products: Any = bind_local) -> Any:
    """The plain form: by the block mask, or by the pattern where there is none."""

    def compute(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        results: list[jax.Array]
        if params["has_mask"]:
            results = getattr(plain, name)(*operands, **params)
        else:
            by_pattern = functools.partial(bind_products, implementation="xla", variant=None)
            results = getattr(composed, name)(*operands, bind_products=by_pattern, **params)
        return results

    return compute


def _stored(params: dict[str, Any], operands: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    """A block mask in words: tiles and cells that there is room for."""
    shape = (operands["query"].shape[-4], operands["key"].shape[-3])
    if not params["has_mask"]:
        return f"pattern {shape} with {operands['column_indices'].shape[-1]} stored entries", shape
    return stored_in(shape, operands["entries"], operands["bits"])


def stored_in(shape: tuple[int, int], entries: Any, bits: Any) -> tuple[str, tuple[int, int]]:
    """A block mask of this shape in words, by its lists."""
    tiles = math.prod(-(-size // TILE) for size in shape)
    cells = math.prod(-(-size // CELL) for size in shape)
    listed, partial = entries.shape[-1], bits.shape[-2]
    return (
        f"mask {shape} with {min(listed, tiles)} of {tiles} tiles, "
        f"{min(partial, cells)} of {cells} cells partial",
        shape,
    )


# ---- out, lse = attention(q, k, v) ----

plain_form = _form_of("attention")

attention_p = make_primitive(
    Operation(
        name="attention",
        target="attention",
        params=_PARAMS,
        signature=_signature_with((), RESULTS),
        result_dtypes=lambda avals, params: [avals[0].dtype, accumulator_dtype(avals[0].dtype)],
        shardable=("g",),
        stored=_stored,
        xla=plain_form,
        ffi=_ffi_of("attention", (_BY_ROWS,)),
    )
)

# ---- (u, r), linear in the tangents ----

_TANGENTS = tuple((f"d_{name}", spec) for name, spec in _MULTIPLIED)


def _wide(avals: Sequence[ShapedArray], params: dict[str, Any]) -> list[Any]:
    return [accumulator_dtype(avals[0].dtype)] * 2


def _narrow_tangents(
    params: dict[str, Any], avals: Sequence[ShapedArray]
) -> tuple[dict[str, Any], list[Any]]:
    """Tangents are multiplied in the dtype of what they meet."""
    dtypes = [a.dtype for a in avals]
    dtypes[-len(_TANGENTS) :] = [dtypes[0]] * len(_TANGENTS)
    return params, dtypes


attention_tangent_p = make_primitive(
    Operation(
        name="attention_tangent",
        target="attention_tangent",
        params=_PARAMS,
        signature=_signature_with(
            (("lse", _SUMS), *_TANGENTS), (("weighted", _OUT), ("sums", _SUMS))
        ),
        result_dtypes=_wide,
        shardable=("g",),
        stored=_stored,
        xla=_form_of("attention_tangent"),
        ffi=_ffi_of("attention_tangent", ((_ROWS, ()),), ("lse", *(name for name, _ in _TANGENTS))),
        lacks_on_cpu="a CPU has no kernel of a tangent",
        without_kernels=lambda reason, params: _instead(reason, "attention_tangent", params),
        cast=_narrow_tangents,
    )
)

# ---- (ct q, ct k, ct v), linear in the cotangents ----


def _narrow_cotangent(
    params: dict[str, Any], avals: Sequence[ShapedArray]
) -> tuple[dict[str, Any], list[Any]]:
    """The cotangent of out comes in float32, and is multiplied in the dtype of what it meets."""
    dtypes = [a.dtype for a in avals]
    dtypes[-2] = dtypes[0]
    return params, dtypes


attention_cotangent_p = make_primitive(
    Operation(
        name="attention_cotangent",
        target="attention_cotangent",
        params=_PARAMS,
        signature=_signature_with(
            (("lse", _SUMS), ("ct_out", _OUT), ("ct_sums", _SUMS)),
            tuple((f"ct_{name}", spec) for name, spec in _MULTIPLIED),
        ),
        result_dtypes=lambda avals, params: [avals[0].dtype] * 3,
        shardable=("g",),
        stored=_stored,
        xla=_form_of("attention_cotangent"),
        ffi=_ffi_of("attention_cotangent", (_BY_ROWS, _BY_COLUMNS), ("lse", "ct_out", "ct_sums")),
        cast=_narrow_cotangent,
    )
)

PRIMITIVES = {
    "attention": attention_p,
    "attention_tangent": attention_tangent_p,
    "attention_cotangent": attention_cotangent_p,
}

# ---- Derivative rules ----


def _attention_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out, lse = bind(attention_p, *primals, **params)
    tangents = tangents[: len(_TANGENTS)]
    if all(type(t) is ad.Zero for t in tangents):
        return [out, lse], [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse)]
    varying = map(ad.instantiate_zeros, tangents)
    weighted, sums = bind(
        attention_tangent_p, *primals, lse, *varying, **{**params, "variant": None}
    )
    by_query = jnp.expand_dims(jnp.moveaxis(sums, -1, -3), -1)  # as out: queries, groups, heads
    d_out = weighted - by_query * out.astype(weighted.dtype)
    return [out, lse], [d_out.astype(out.dtype), sums]


def _second_order(primitive: Any, name: str, linear: int) -> None:
    """The JVP of a map that is linear in its last operands, so many of them.

    By these it is itself; by the others, the derivative of its plain form.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        results = bind(primitive, *primals, **params)
        params = {**params, "variant": None}
        total = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
        if any(type(t) is not ad.Zero for t in tangents[-linear:]):
            along = map(ad.instantiate_zeros, tangents[-linear:])
            terms = bind(primitive, *primals[:-linear], *along, **params)
            total = [ad.add_tangents(a, b) for a, b in zip(total, terms, strict=True)]
        varying = [
            i for i, t in enumerate(tangents[:-linear]) if type(t) is not ad.Zero and _differs(t)
        ]
        if varying:
            declared = {param: params[param] for param in _PARAMS}

            def by_varying(*xs: jax.Array) -> list[jax.Array]:
                operands = list(primals)
                for i, x in zip(varying, xs, strict=True):
                    operands[i] = x
                compute = functools.partial(_form_of(name, bind), **declared)
                rank = operands[0].ndim - len(_MULTIPLIED[0][1].split())
                return over_batch(compute, rank, *operands)

            at = tuple(primals[i] for i in varying)
            _, terms = jax.jvp(by_varying, at, tuple(tangents[i] for i in varying))
            total = [
                ad.add_tangents(a, b.astype(x.dtype))
                for a, b, x in zip(total, terms, results, strict=True)
            ]
        return results, total

    ad.primitive_jvps[primitive] = jvp


def _differs(tangent: Any) -> bool:
    """Whether it is one of a floating operand: those of masks are of type float0."""
    return bool(tangent.dtype != jax.dtypes.float0)


def _transpose(primitive: Any, transposed: Any, linear: int) -> None:
    """The transpose of a map that is linear in its last operands, so many of them."""

    def transpose(cts: Any, *operands: Any, **params: Any) -> Any:
        fixed, varying = operands[:-linear], operands[-linear:]
        answers: list[Any] = [None] * len(operands)
        if all(type(ct) is ad.Zero for ct in cts):
            return answers
        needs_transpose = transposed is attention_cotangent_p and not params["has_mask"]
        if needs_transpose and params["columns"] is not None:
            raise transpose_is_missing("sparse_attention: a gradient")
        cotangents = map(ad.instantiate_zeros, cts)
        results = bind(transposed, *fixed, *cotangents, **{**params, "variant": None})
        for i, (x, result) in enumerate(zip(varying, results, strict=True), len(fixed)):
            if undefined(x):
                answers[i] = summed_to(x.aval, result)
        return answers

    ad.primitive_transposes[primitive] = transpose


_COTANGENTS = 2  # those of u and r

ad.primitive_jvps[attention_p] = _attention_jvp
_second_order(attention_tangent_p, "attention_tangent", len(_TANGENTS))
_second_order(attention_cotangent_p, "attention_cotangent", _COTANGENTS)
_transpose(attention_tangent_p, attention_cotangent_p, len(_TANGENTS))
_transpose(attention_cotangent_p, attention_tangent_p, _COTANGENTS)
