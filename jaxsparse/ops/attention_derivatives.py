"""Derivative rules of the primitives behind attention.

Each of the tangent and the cotangent is linear in what it is about, and the other one's transpose.
Derivatives of second order are those of the plain form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxsparse.batching import over_batch
from jaxsparse.ops.attention import (
    MULTIPLIED,
    PARAMS,
    TANGENTS,
    attention_cotangent_p,
    attention_p,
    attention_tangent_p,
    form_of,
    mask_operands,
    variations,
)
from jaxsparse.ops.scores import Scores
from jaxsparse.pattern import transpose_is_missing
from jaxsparse.primitive import bind, summed_to, undefined


def _attention_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out, lse = bind(attention_p, *primals, **params)
    first = len(MULTIPLIED) + len(mask_operands(params))
    scores, of_operands = _varied_scores(params["scores"], primals[0].shape, tangents[first:])
    tangents = tangents[: len(TANGENTS)]
    if not of_operands and all(type(t) is ad.Zero for t in tangents):
        return [out, lse], [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse)]
    varying = [*map(ad.instantiate_zeros, tangents), *of_operands]
    params = {**params, "variant": None, "scores": scores}
    weighted, sums = bind(attention_tangent_p, *primals, lse, *varying, **params)
    by_query = jnp.moveaxis(sums, -1, -3)  # as out: queries, groups, heads
    d_out = weighted - _scaled(by_query, out.astype(weighted.dtype))
    return [out, lse], [d_out.astype(out.dtype), sums]


def _scaled(factors: jax.Array, rows: jax.Array) -> jax.Array:
    """Each row times its factor.

    Dimensions of 1 are left out: in the transpose, sums of products of rows, XLA packs both factors
    on CPUs where there is one, and takes ten times as long.
    """
    ones = [axis for axis, n in enumerate(factors.shape) if n == 1]
    products = jnp.squeeze(factors, ones)[..., None] * jnp.squeeze(rows, ones)
    return jnp.expand_dims(products, ones)


def _varied_scores(
    scores: Scores | None, query: tuple[int, ...], tangents: Sequence[Any]
) -> tuple[Scores | None, list[Any]]:
    """Scores with the operands that have tangents as varied ones, and the tangents, widened."""
    if scores is None:
        return None, []
    named = enumerate(tangents[: len(scores.axes)])
    varied = {i: t for i, t in named if type(t) is not ad.Zero and _differs(t)}
    *batch, queries, groups, heads, _ = query
    wide = [scores.widened(i, t, (groups, heads), queries, len(batch)) for i, t in varied.items()]
    return dataclasses.replace(scores, varied=tuple(varied)), wide


def _second_order(primitive: Any, name: str, linear_of: Callable[[dict[str, Any]], int]) -> None:
    """The JVP of a map that is linear in its last operands; ``linear_of`` says in how many.

    Along tangents of these operands the derivative is the map itself; along tangents of the others
    it is the derivative of the map's plain form.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        linear = linear_of(params)
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
            declared = {param: params[param] for param in PARAMS}

            def by_varying(*xs: jax.Array) -> list[jax.Array]:
                operands = list(primals)
                for i, x in zip(varying, xs, strict=True):
                    operands[i] = x
                compute = functools.partial(form_of(name, bind), **declared)
                rank = operands[0].ndim - len(MULTIPLIED[0][1].split())
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


def _transpose(primitive: Any, transposed: Any, linear_of: Callable[[dict[str, Any]], int]) -> None:
    """The transpose of a map that is linear in its last operands, as in `_second_order`."""

    def transpose(cts: Any, *operands: Any, **params: Any) -> Any:
        linear = linear_of(params)
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


def _tangents(params: dict[str, Any]) -> int:
    return len(TANGENTS) + len(variations(params, "d"))


def _cotangents(params: dict[str, Any]) -> int:
    return 2  # those of u and r


ad.primitive_jvps[attention_p] = _attention_jvp
_second_order(attention_tangent_p, "attention_tangent", _tangents)
_second_order(attention_cotangent_p, "attention_cotangent", _cotangents)
_transpose(attention_tangent_p, attention_cotangent_p, _tangents)
_transpose(attention_cotangent_p, attention_tangent_p, _cotangents)
