"""Attention to keys and values that lie in pages of a pool: a primitive of its own.

A kernel for few queries reads the pages where they lie. Everything else, derivatives too, is that
of `jaxsparse.ops.attention` on keys and values that are gathered from their pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad

from jaxsparse.batching import over_batch
from jaxsparse.device import AnyDevice
from jaxsparse.ops import attention
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import (
    Fallback,
    FfiCall,
    Operation,
    Signature,
    bind,
    bind_local,
    make_primitive,
)

_PARAMS = ("scale", "mask_of_group", "mask_of_head")
_OPERANDS = (("query", "t g r h"), ("key", "p z g h"), ("value", "p z g e"), ("pages", "w"))
# Of the primitive that takes keys in their order.
_OF_KEYS_IN_ORDER = {"has_mask": True, "has_pattern": False, "columns": None, "scores": None}


def gathered(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """The positions ``(pages * size, ...)`` of pages of a pool ``(count, size, ...)``.

    Numbers of pages that the pool has not are taken for its last one.
    """
    last = pool.shape[0] - 1
    within = jnp.where((pages < 0) | (pages > last), last, pages)
    positions = jnp.take(pool, within, axis=0, mode="clip")
    return positions.reshape(-1, *pool.shape[2:])


def _in_order(rank: int, *operands: jax.Array) -> list[jax.Array]:
    """The operands with keys and values in their order, with so many batch dimensions."""
    query, key, value, pages, *mask = operands
    keys, values = (over_batch(gathered, rank, pool, pages) for pool in (key, value))
    return [query, keys, values, *mask]


def _rank(query: jax.Array) -> int:
    return query.ndim - len(_OPERANDS[0][1].split())


def _signature(params: dict[str, Any]) -> Signature:
    lists = attention.mask_operands({**params, **_OF_KEYS_IN_ORDER})
    return Signature((*_OPERANDS, *lists), attention.RESULTS)


def _plain(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    results: list[jax.Array] = attention.plain_form(
        *_in_order(0, *operands), **params, **_OF_KEYS_IN_ORDER
    )
    return results


def _on_gathered(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """What stands for the kernel: that of keys in their order."""
    return bind_local(
        attention.attention_p,
        *_in_order(_rank(operands[0]), *operands),
        **params,
        **_OF_KEYS_IN_ORDER,
        implementation=None,
        variant=None,
    )


def _gathered(reason: str) -> Fallback:
    return Fallback(reason, _on_gathered, called="attention, of gathered pages")


def _ffi(
    params: dict[str, Any], avals: Sequence[ShapedArray], device: AnyDevice
) -> FfiCall | Fallback:
    query, key = avals[:2]
    return FfiCall(
        ("query", "key", "value", "pages", *attention.LISTS),
        {name: params[name] for name in _PARAMS},
        workspace=None,
        workspace_is_fixed=True,
        fallback=_gathered(
            f"no kernel reads pages of {key.shape[-3]} positions for {query.shape[-4]} queries of "
            f"{query.dtype} heads of {query.shape[-1]} numbers"
        ),
    )


def _stored(params: dict[str, Any], operands: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    size, pages = operands["key"].shape[-3], operands["pages"].shape[-1]
    what, shape = attention.stored_in(
        (operands["query"].shape[-4], size * pages), operands["entries"], operands["bits"]
    )
    return f"{what}, keys in {pages} pages of {size}", shape


paged_attention_p = make_primitive(
    Operation(
        name="paged_attention",
        target="paged_attention",
        params=_PARAMS,
        signature=_signature,
        result_dtypes=lambda avals, params: [avals[0].dtype, accumulator_dtype(avals[0].dtype)],
        shardable=("g",),
        stored=_stored,
        xla=_plain,
        ffi=_ffi,
        on_cpu=_gathered("only GPUs have a kernel that reads pages"),
    )
)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    results = bind(paged_attention_p, *primals, **params)
    varying = tangents[:3]
    if all(type(t) is ad.Zero for t in varying):
        return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    rank = _rank(primals[0])

    def in_order(*varied: jax.Array) -> list[jax.Array]:
        operands = _in_order(rank, *varied, *primals[3:])
        return bind(
            attention.attention_p, *operands, **{**params, "variant": None}, **_OF_KEYS_IN_ORDER
        )

    _, along = jax.jvp(in_order, tuple(primals[:3]), tuple(map(ad.instantiate_zeros, varying)))
    return results, along


ad.primitive_jvps[paged_attention_p] = _jvp
