"""The primitives behind attention over a block mask or a pattern.

With s = scale q.k, p = exp(s - lse) at stored positions and 0 elsewhere,

    out = p v,  lse = log of the row sums of exp(s),
    d out = u - r out,  d lse = r,  where u = (p ds) v + p dv,  r = row sums of p ds,
    ds = scale (dq.k + q.dk)

A function of scores (`Scores`) takes s to f(s) before the exponential, and what it reads varies,
too: then ds is f'(s) scale (dq.k + q.dk) and the sum of what its operands add. Dropout multiplies
each p that meets a value.

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

from jaxsparse.block_mask.words import CELL, TILE
from jaxsparse.device import AnyDevice, Device
from jaxsparse.ops import composed_attention as composed
from jaxsparse.ops import plain_attention as plain
from jaxsparse.ops import score_kernels
from jaxsparse.ops.arguments import ROWS, TRANSPOSED_ROWS, operands_of_pattern
from jaxsparse.ops.padded_heads import (
    MOST_OF_TILES,
    best_sizes,
    with_padded_heads,
)
from jaxsparse.ops.scores import Scores
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import (
    OPERATIONS,
    Fallback,
    FfiCall,
    Operation,
    Signature,
    bind_local,
    make_primitive,
)

PARAMS = ("scale", "mask_of_group", "mask_of_head", "has_mask", "has_pattern", "columns", "scores")
_ATTRIBUTES = PARAMS[:3]  # those that targets take as they are

MULTIPLIED = (("query", "t g r h"), ("key", "u g h"), ("value", "u g e"))
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
# What the dimensions of a pattern are called here. Beside rows and columns they are its own: w is
# that of distances (scores.py).
_OF_PATTERN = {
    **{"m": "t", "m+1": "t+1", "k": "u", "k+1": "u+1", "e": "z", "tiles": "y"},
    **{"cuts": "v", "transposed_cuts": "x"},
}


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


def _score_operands(params: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    scores: Scores | None = params["scores"]
    return () if scores is None else scores.operands()


def variations(params: dict[str, Any], prefix: str) -> tuple[tuple[str, str], ...]:
    """Tangents or cotangents of operands of scores, of those of which they are wanted."""
    scores: Scores | None = params["scores"]
    return () if scores is None else scores.variations(prefix)


def _signature_with(
    behind: tuple[tuple[str, str], ...],
    results: tuple[tuple[str, str], ...],
    *,
    varied_operands: bool = False,
    varied_results: bool = False,
) -> Any:
    """The signature of an operation with these operands behind those that all three have."""

    def signature(params: dict[str, Any]) -> Signature:
        along = variations(params, "d") if varied_operands else ()
        cotangents = variations(params, "ct") if varied_results else ()
        shared = (*MULTIPLIED, *mask_operands(params), *_score_operands(params))
        return Signature((*shared, *behind, *along), (*results, *cotangents))

    return signature


_COMPOSED = "sddmm, sparse_softmax and spmm"


def _instead(reason: str, name: str, params: dict[str, Any]) -> Fallback:
    """The composition where the pattern is there with all that it needs, or the plain form."""
    lacks_transpose = name == "attention_cotangent" and params["columns"] is not None
    # Sums of operands' cotangents by entries are in no order on GPUs, those of the plain form are.
    sums_entries = bool(variations(params, "ct")) and name == "attention_cotangent"
    if not params["has_pattern"] or (params["has_mask"] and (lacks_transpose or sums_entries)):
        return Fallback(reason, called=_PLAIN)
    return Fallback(reason, getattr(composed, name), called=_COMPOSED)


# The variant that takes the pattern alone.
_BY_PATTERN = "csr"

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
        scores = params["scores"] or Scores()
        behind_mask = len(MULTIPLIED) + len(mask_operands(params))
        dtypes = tuple(str(a.dtype) for a in avals[behind_mask:][: len(scores.axes)])
        if params["scores"] is not None and name == "attention_tangent":
            return _instead("a tangent's kernel takes no functions of scores", name, params)
        if params["scores"] is not None:
            per_group = avals[0].shape[-2] if name == "attention_cotangent" else None
            lacks = _lacks_kernels_of_scores(params, avals, device)
            lacks = lacks or score_kernels.lacking(scores, dtypes, per_group)
            if lacks:
                return _instead(lacks, name, params)
        query, _, value = avals[:3]
        sizes = (query.shape[-1], value.shape[-1])
        reason = "no kernel takes {} heads of {} and {} numbers".format(query.dtype, *sizes)
        sums_over_tiles = score_kernels.sums_over_tiles(scores)
        if sums_over_tiles:
            reason += f", or sums by columns or distances: {score_kernels.SUMS_OVER_TILES_NEED}"
        gives_pattern = _gives_pattern(name, params, avals)
        if not (params["has_mask"] or gives_pattern):
            return _instead("no kernel takes a pattern without a block mask", name, params)

        def call(has_mask: bool) -> FfiCall:
            given = (
                operand
                for lists, pattern in masks
                for operand in (*(lists if has_mask else ()), *(pattern if gives_pattern else ()))
            )
            of_scores = (operand for operand, _ in _score_operands(params))
            return FfiCall(
                ("query", "key", "value", *given, *behind, *of_scores),
                {
                    **{attribute: params[attribute] for attribute in _ATTRIBUTES},
                    "has_mask": has_mask,
                    "has_pattern": gives_pattern,
                    **score_kernels.attributes(scores, dtypes),
                },
                workspace=None,
                workspace_is_fixed=not sums_over_tiles,
                fallback=_instead(reason, name, params),
            )

        made = call(params["has_mask"])
        if params["has_mask"] and gives_pattern:
            made = made._replace(narrower=(_BY_PATTERN, call(False)))
        instead = _sparse_composition(name, params, avals, device)
        if instead is not None:
            return instead
        best = best_sizes(OPERATIONS[PRIMITIVES[name]], params, avals, made, device)
        if best == sizes:
            return made
        heads = " and ".join(map(str, dict.fromkeys(best)))
        return Fallback(
            f"{reason} as fast",
            functools.partial(with_padded_heads, PRIMITIVES[name], best, params["variant"]),
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


def _lacks_kernels_of_scores(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> str:
    """Why kernels with functions of scores, by tiles of 16 bits, don't fit; empty if they do."""
    size = max(avals[0].shape[-1], avals[2].shape[-1])
    fits = avals[0].dtype.itemsize == 2 and 0 < size <= MOST_OF_TILES
    if not isinstance(device, Device) or not fits:
        return (
            "functions of scores and dropout have kernels for GPUs alone, for heads of 1 to "
            f"{MOST_OF_TILES} numbers of 16 bits"
        )
    if not params["has_mask"]:
        return "kernels by rows of a pattern take no functions of scores or dropout"
    return ""


def _gives_pattern(name: str, params: dict[str, Any], avals: Sequence[ShapedArray]) -> bool:
    """Whether a target gets the pattern, with all that it needs of it."""
    if not params["has_pattern"] or params["scores"] is not None or name == "attention_tangent":
        return False
    if name == "attention_cotangent" and params["columns"] is not None:
        return False
    if not params["has_mask"] or params["variant"] is not None:
        return True
    return _entries_of_tile(params, avals) < _MOST_ENTRIES_OF_TILE


def _entries_of_tile(params: dict[str, Any], avals: Sequence[ShapedArray]) -> float:
    """Entries of the pattern for each tile of the block mask."""
    names = [name for name, _ in (*MULTIPLIED, *mask_operands(params))]
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


def form_of(name: str, bind_products: Any = bind_local) -> Any:
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
    """A block mask in words, by tiles and cells that there is room for; and what scores become."""
    shape = (operands["query"].shape[-4], operands["key"].shape[-3])
    scores = "" if params["scores"] is None else f"; scores: {params['scores']}"
    if not params["has_mask"]:
        entries = operands["column_indices"].shape[-1]
        return f"pattern {shape} with {entries} stored entries{scores}", shape
    what, shape = stored_in(shape, operands["entries"], operands["bits"])
    return f"{what}{scores}", shape


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

plain_form = form_of("attention")

attention_p = make_primitive(
    Operation(
        name="attention",
        target="attention",
        params=PARAMS,
        signature=_signature_with((), RESULTS),
        result_dtypes=lambda avals, params: [avals[0].dtype, accumulator_dtype(avals[0].dtype)],
        shardable=("g",),
        stored=_stored,
        xla=plain_form,
        ffi=_ffi_of("attention", (_BY_ROWS,)),
    )
)

# ---- (u, r), linear in the tangents ----

TANGENTS = tuple((f"d_{name}", spec) for name, spec in MULTIPLIED)


def _wide(avals: Sequence[ShapedArray], params: dict[str, Any]) -> list[Any]:
    return [accumulator_dtype(avals[0].dtype)] * 2


def _narrow_tangents(
    params: dict[str, Any], avals: Sequence[ShapedArray]
) -> tuple[dict[str, Any], list[Any]]:
    """Tangents are multiplied in the dtype of what they meet."""
    dtypes = [a.dtype for a in avals]
    dtypes[-len(TANGENTS) :] = [dtypes[0]] * len(TANGENTS)
    return params, dtypes


attention_tangent_p = make_primitive(
    Operation(
        name="attention_tangent",
        target="attention_tangent",
        params=PARAMS,
        signature=_signature_with(
            (("lse", _SUMS), *TANGENTS),
            (("weighted", _OUT), ("sums", _SUMS)),
            varied_operands=True,
        ),
        result_dtypes=_wide,
        shardable=("g",),
        stored=_stored,
        xla=form_of("attention_tangent"),
        ffi=_ffi_of("attention_tangent", ((_ROWS, ()),), ("lse", *(name for name, _ in TANGENTS))),
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
        params=PARAMS,
        signature=_signature_with(
            (("lse", _SUMS), ("ct_out", _OUT), ("ct_sums", _SUMS)),
            tuple((f"ct_{name}", spec) for name, spec in MULTIPLIED),
            varied_results=True,
        ),
        result_dtypes=lambda avals, params: [
            *[avals[0].dtype] * 3,
            *[accumulator_dtype(avals[0].dtype)] * len(variations(params, "ct")),
        ],
        shardable=("g",),
        stored=_stored,
        xla=form_of("attention_cotangent"),
        ffi=_ffi_of("attention_cotangent", (_BY_ROWS, _BY_COLUMNS), ("lse", "ct_out", "ct_sums")),
        cast=_narrow_cotangent,
    )
)

PRIMITIVES = {
    "attention": attention_p,
    "attention_tangent": attention_tangent_p,
    "attention_cotangent": attention_cotangent_p,
}
