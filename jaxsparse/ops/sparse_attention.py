"""Scaled dot-product attention over the positions that a mask stores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse import backend
from jaxsparse.block_mask import BlockMask
from jaxsparse.layouts.block_mask import block_mask_of
from jaxsparse.ops import arguments, attention_derivatives, dropout  # noqa: F401, registers rules
from jaxsparse.ops.attention import attention_p
from jaxsparse.ops.attention_masks import (
    OPERATION,
    as_mask,
    as_offsets,
    at_offsets,
    block_mask,
    mask_operands,
    of_checked,
    over_heads,
)
from jaxsparse.ops.merge_attention import log_of_sums
from jaxsparse.ops.paged_attention import gathered, paged_attention_p
from jaxsparse.ops.regrouping import regrouped, regrouped_scores, restored_results
from jaxsparse.ops.score_functions import Indexed, ScoreFunction, score_function
from jaxsparse.ops.scores import Scores
from jaxsparse.pattern import checks_enabled
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind
from jaxsparse.primitive.sharding import parts_along
from jaxsparse.topology import Topology


def sparse_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    score: Callable[..., Any] | None = None,
    operands: Mapping[str, Indexed] | None = None,
    bias: Indexed | jax.Array | None = None,
    pages: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    soft_cap: float | jax.Array | None = None,
    sinks: jax.Array | None = None,
    query_offset: int | jax.Array | None = None,
    key_offset: int | jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    return_lse: bool = False,
    implementation: str | None = None,
    variant: str | None = None,
) -> Any:
    r"""Attention in which query position t sees the key positions that row t of a mask stores.

    .. math::

        y_t = \sum_{s \in P_t} e^{f(c\, q_t \cdot k_s) - \ell_t}\, v_s, \qquad
        \ell_t = \log \sum_{s \in P_t} e^{f(c\, q_t \cdot k_s)}

    with :math:`f` the soft cap, then the bias, then the function ``score``: by default nothing.

    Shapes are those of ``jax.nn.dot_product_attention``. It is one fused operation: nothing as
    large as the scores is in memory, forward or backward. Where no kernel takes the call and the
    mask is a `Topology`, it is composed of `sddmm`, `sparse_softmax` and `spmm`, whose memory grows
    with the number of stored positions; otherwise it is a loop over blocks of keys in plain JAX.
    `jaxsparse.explain` says which. Scores and their softmax are float32 for 16-bit operands; the
    probabilities are then rounded to the operands' dtype. A query that sees no key gets zeros.

    Args:
        query: ``(B, T, N, H)`` or ``(T, N, H)``.
        key: ``(B, S, K, H)`` or ``(S, K, H)``; K divides N, groups of N / K query heads share a key
            head.
        value: ``(B, S, K, E)`` or ``(S, K, E)``; E may differ from H.
        mask: what of (T, S) is seen: a `BlockMask`, a `Topology`, a mask function
            (`jaxsparse.masks`), an array of bool, or None for all. One mask for all, or a batch of
            them, ``(N,)`` or ``(1, N)``, one for each head, ``(B, 1)``, one for each sequence, or
            ``(B, N)``. ``(N,)`` is refused where B is N, since it could as well be meant for
            sequences. A mask function is made into a block mask where a program is traced, and
            becomes a constant of it: prefer a `BlockMask` for long sequences. Of a block mask that
            is regrouped, queries, keys and values are brought into its orders, and results back;
            dropout is by places in these then.
        score: a jnp function ``score(s, row, column, **operands) -> s`` of scalars: a score,
            float32 (float64 for float64) and already multiplied by ``scale``, and the int32
            positions of its query and its key. It is traced once, and runs in the kernel where one
            takes it. A position that it takes to -inf is as one that is not seen.
        operands: what the function reads, by name, each an `Indexed` array: it gets the element of
            its sequence, head, row, column or distance. All are differentiable.
        bias: added to scores: ``(N or 1, T, S)`` or ``(B or 1, N or 1, T, S)``, or an `Indexed`.
        pages: ``(B, W)``, or ``(W,)`` for a query of one sequence, integers: the keys and values of
            a sequence lie in W pages of a pool, as in a paged cache. Then ``key`` is
            ``(P, Z, K, H)``, P pages of Z positions, ``value`` likewise, and S = W Z. On a GPU a
            kernel for at most 64 queries reads them there if Z is a multiple of 64; else they are
            gathered first. Numbers that are not in [0, P) are taken for P - 1: for pages that no
            query sees. The mask must not be regrouped. With functions of scores or dropout they
            are gathered first, too.
        scale: multiplies the scores; 1 / sqrt(H) by default. An array, of no dimensions, is
            multiplied with the query, which is rounded again.
        soft_cap: c, scores become :math:`c \tanh(s / c)`, before bias and function.
        sinks: ``(N,)``, a score of each head that takes part in the sums of every row and has no
            value: :math:`e^{\ell_t}` grows by :math:`e^{\mathrm{sink}}`.
        query_offset, key_offset: the positions of the first query and the first key, integers or
            ``(B,)``, 0 by default; they may be traced. Mask functions, ``score`` and dropout get
            positions that begin there. A `BlockMask`, a `Topology` or an array is of places in
            ``query`` and ``key`` and stays as it was made.
        dropout_rate: share of the probabilities that are set to 0, the others being scaled up. It
            may be traced; its range is not checked then. Derivatives take it for a constant.
        dropout_key: the random key that chooses them; None for no dropout. The choice is a hash of
            a seed of each head and of positions: the same in every kernel, in plain JAX, and
            however the call is cut over devices. ``lse`` is of all probabilities.
        broadcast_dropout: choose the same for the whole batch and all heads.
        return_lse: whether to return :math:`\ell`, too.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".
        variant: the name of a kernel variant to force, see ``python -m jaxsparse info``.

    Returns:
        ``(B, T, N, E)`` or ``(T, N, E)``, in the operands' common dtype. With ``return_lse`` also
        the logarithm of each row's sum, float32 (float64 for float64) ``(B, N, T)`` or ``(N, T)``,
        -inf for a query that sees no key; it is differentiable, see `merge_attention`.

    Raises:
        TypeError: for operands that are no arrays or not floating, masks of another type, pages and
            offsets that are no integers, operands of functions that are not `Indexed`, and
            functions that return no score.
        ValueError: for shapes that don't fit, those of pages too; key heads that don't divide the
            query heads, or can't be cut as explicit axes cut these; batches of masks that are
            ambiguous; a regrouped mask with pages, or with operands of distances;
            a dropout rate outside [0, 1); functions that read arrays in any other way than by
            ``operands``; a gradient of a pattern that has neither a block mask nor its transpose;
            options that don't exist.
        IndexError: for a mask with a table, as of documents' ids, that ends before T or S.

    Sources: Gale et al. 2020, "Sparse GPU Kernels for Deep Learning", section VII-C; Dao et al.
    2022, "FlashAttention"; Shah et al. 2024, "FlashAttention-3".

    >>> import jax.numpy as jnp
    >>> from jaxsparse import masks
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> sparse_attention(q, q, q, masks.causal()).shape
    (1, 4, 2, 8)

    A bias that grows with the distance, by a slope of each head:

    >>> from jaxsparse import Indexed
    >>> def alibi(s, row, column, slope):
    ...     return s - slope * (row - column)
    >>> slopes = {"slope": Indexed(jnp.array([0.5, 0.25]), "n")}
    >>> sparse_attention(q, q, q, masks.causal(), score=alibi, operands=slopes).shape
    (1, 4, 2, 8)

    Keys and values of 8 positions, in two of the 5 pages of a pool:

    >>> pool = jnp.ones((5, 4, 2, 8))
    >>> sparse_attention(q, pool, pool, masks.padding(7), pages=jnp.array([[3, 1]])).shape
    (1, 4, 2, 8)
    """
    query, key, value = (
        arguments.as_array(OPERATION, n, x, 3)
        for n, x in (("query", query), ("key", key), ("value", value))
    )
    dtype = arguments.check_floating(OPERATION, query=query, key=key, value=value)
    backend.check_implementation(OPERATION, implementation)
    if pages is None:
        _check_shapes(query, key, value)
        length = key.shape[-3]
    else:
        pages = _check_pages(query, key, value, pages)
        length = pages.shape[-1] * key.shape[-3]
    h = query.shape[-1]
    drops = _check_rate(dropout_rate) and dropout_key is not None
    if scale is None:
        scale = 1 / math.sqrt(h) if h else 1.0
    scales = arguments.as_scale(OPERATION, scale)
    if not isinstance(scales, float) and scales.ndim:
        raise ValueError(f"{OPERATION}: scale must have no dimensions, got shape {scales.shape}")
    if sinks is not None:
        sinks = arguments.as_array(OPERATION, "sinks", sinks, 1)
        if not jnp.issubdtype(sinks.dtype, jnp.floating):
            raise TypeError(f"{OPERATION}: sinks must be floating, got {sinks.dtype}")
        if sinks.shape != query.shape[-2:-1]:
            raise ValueError(
                f"{OPERATION}: sinks must have shape {query.shape[-2:-1]}, one for each head, got "
                f"{sinks.shape}"
            )
    lengths = query.shape[-3], length
    b = 1 if query.ndim == 3 else query.shape[0]
    offsets = as_offsets(b, query_offset, key_offset)
    mask = as_mask(at_offsets(mask, query_offset, key_offset, lengths), lengths)
    if pages is not None and isinstance(mask, Topology):
        mask = block_mask_of(mask)
    if pages is not None and mask.is_regrouped:
        raise ValueError(f"{OPERATION}: with pages the mask must not be regrouped")
    topology = mask if isinstance(mask, Topology) else None
    per_group = query.shape[-2] // key.shape[-2]
    sizes = {"b": b, "n": query.shape[-2], "t": lengths[0], "s": lengths[1], "d": sum(lengths) - 1}
    function, values = score_function(
        soft_cap, bias, score, operands, sizes, per_group, accumulator_dtype(dtype)
    )
    out, lse = _attention(
        query,
        key,
        value,
        pages,
        topology,
        block_mask(mask),
        None if isinstance(scales, float) else scales,
        sinks,
        [array for _, array in values],
        offsets if function is not None or drops else None,
        dropout_key if drops else None,
        dropout_rate if drops else None,
        function=function,
        axes=tuple(axes for axes, _ in values),
        scale=scales if isinstance(scales, float) else 1.0,
        dtype=dtype,
        broadcast_dropout=bool(broadcast_dropout),
        implementation=implementation,
        variant=variant,
        checks=checks_enabled(),
    )
    return (out, lse) if return_lse else out


def _check_rate(rate: Any) -> bool:
    """Whether anything may be dropped."""
    array = arguments.as_array(OPERATION, "dropout_rate", rate, 0)
    if array.shape or not (
        jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    ):
        raise TypeError(
            f"{OPERATION}: dropout_rate must be a real number, got {array.dtype} of shape "
            f"{array.shape}"
        )
    if isinstance(rate, jax.core.Tracer):
        return True
    if not 0 <= rate < 1:
        raise ValueError(f"{OPERATION}: dropout_rate must be in [0, 1), got {rate}")
    return bool(rate)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if not query.ndim == key.ndim == value.ndim or query.ndim > 4:
        raise ValueError(
            f"{OPERATION}: query, key and value must all have shape (B, T, N, H) or (T, N, H), "
            f"got {query.shape}, {key.shape} and {value.shape}"
        )
    *batch, _, _, h = query.shape
    s, groups = key.shape[-3:-1]
    if key.shape != (*batch, s, groups, h) or value.shape[:-1] != key.shape[:-1]:
        named = [", ".join(map(str, (*batch, "S", "K", size))) for size in (h, "E")]
        raise ValueError(
            f"{OPERATION}: key and value must have shapes ({named[0]}) and ({named[1]}) for a "
            f"query of shape {query.shape}, got {key.shape} and {value.shape}"
        )
    _check_heads(query, groups)


def _check_pages(query: jax.Array, key: jax.Array, value: jax.Array, pages: Any) -> jax.Array:
    *batch, _, _, h = query.shape
    pages = arguments.as_array(OPERATION, "pages", pages, 1)
    if not jnp.issubdtype(pages.dtype, jnp.integer):
        raise TypeError(f"{OPERATION}: pages must be integers, got {pages.dtype}")
    if len(batch) > 1 or pages.shape[:-1] != tuple(batch):
        raise ValueError(
            f"{OPERATION}: pages must have shape (B, W) for a query (B, T, N, H), or (W,) for "
            f"(T, N, H), got {pages.shape} and {query.shape}"
        )
    if (
        key.ndim != 4
        or 0 in key.shape[:2]
        or key.shape[-1] != h
        or value.shape[:-1] != key.shape[:-1]
    ):
        raise ValueError(
            f"{OPERATION}: key and value must have shapes (P, Z, K, {h}) and (P, Z, K, E), P pages "
            f"of Z positions, got {key.shape} and {value.shape}"
        )
    _check_heads(query, key.shape[2])
    checked: jax.Array = pages.astype(jnp.int32)
    return checked


def _check_heads(query: jax.Array, groups: int) -> None:
    n = query.shape[-2]
    if groups == 0 or n % groups:
        raise ValueError(f"{OPERATION}: {groups} key heads must divide {n} query heads")
    parts, axes = parts_along(query, -2)
    if groups % parts:
        raise ValueError(
            f"{OPERATION}: {n} query heads are cut over {axes!r} into {parts} parts, which "
            f"{groups} key heads can't be: reshard the query, repeat the key heads, or use "
            "automatic axes"
        )


# So that an eager call compiles one program. Programs that call it hold what is inside.
@functools.partial(
    jax.jit,
    static_argnames=(
        "function",
        "axes",
        "scale",
        "dtype",
        "broadcast_dropout",
        "implementation",
        "variant",
        "checks",
    ),
    inline=True,
)
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pages: jax.Array | None,
    topology: Topology | None,
    mask: BlockMask | None,
    scales: jax.Array | None,
    sinks: jax.Array | None,
    values: list[jax.Array],
    offsets: jax.Array | None,
    dropout_key: jax.Array | None,
    dropout_rate: Any,
    *,
    function: ScoreFunction | None,
    axes: tuple[str, ...],
    scale: float,
    dtype: Any,
    broadcast_dropout: bool,
    implementation: str | None,
    variant: str | None,
    checks: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Of checked operands.

    ``checks`` is what tracing reads of JAXSPARSE_CHECK: what was traced otherwise is not found.
    """
    *batch, t, n, h = query.shape
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    if query.ndim == 3:
        query = query[None]
        pages = pages if pages is None else pages[None]
    if pages is not None and (function is not None or dropout_key is not None):
        # The kernel that reads pages takes neither.
        key, value = (jax.vmap(functools.partial(gathered, x))(pages) for x in (key, value))
        pages = None
    elif pages is not None or key.ndim == 3:  # of all sequences, or of the only one
        key, value = key[None], value[None]
    b, groups = query.shape[0], key.shape[-2]
    per_group = n // groups
    wide = accumulator_dtype(dtype)
    if scales is not None:
        query = (query.astype(wide) * scales.astype(wide)).astype(dtype)
    query = query.reshape(b, t, groups, per_group, h)
    if topology is not None:
        if checks and mask is not None:
            mask = of_checked(topology)
        topology = over_heads(topology, b, groups, per_group)
    if mask is not None:
        mask = over_heads(mask, b, groups, per_group)
    if mask is not None and mask.is_regrouped:
        query, key, value = regrouped(mask, query, key, value)
        if function is not None:
            function, axes, values = regrouped_scores(
                mask, function, axes, values, offsets, (groups, per_group)
            )
        topology = None  # whose rows and columns are where they were
    operands, params = mask_operands(mask, topology)
    scores = Scores(function, axes, offsets is not None, dropout_key is not None)
    of_scores = [*values]
    if offsets is not None:
        of_scores.append(offsets)
    if dropout_key is not None:
        heads = (b, groups, per_group)
        seeds = dropout.seeds_of(dropout_key, heads, same_for_all=broadcast_dropout)
        rate = jax.lax.stop_gradient(jnp.asarray(dropout_rate, wide))
        of_scores += [seeds, rate.reshape(1)]
    primitive = attention_p
    params["scores"] = scores if scores != Scores() else None
    if pages is not None:
        primitive, operands = paged_attention_p, [pages, *operands]
        params = {name: params[name] for name in ("mask_of_group", "mask_of_head")}
    out, lse = bind(
        primitive,
        query,
        key,
        value,
        *operands,
        *of_scores,
        **params,
        scale=scale,
        implementation=implementation,
        variant=variant,
    )
    if mask is not None and mask.is_regrouped:
        out, lse = restored_results(mask, out, lse)
    out, lse = out.reshape(b, t, n, value.shape[-1]), lse.reshape(b, n, t)
    if sinks is not None:
        of_heads = sinks.astype(wide)[:, None] + jnp.zeros_like(lse)  # cut over devices as lse
        lse, (share, _) = log_of_sums(jnp.stack([lse, of_heads]))
        out = (out * jnp.swapaxes(share, 1, 2)[..., None]).astype(dtype)
    return out.reshape(*batch, t, n, out.shape[-1]), lse.reshape(*batch, n, t)
