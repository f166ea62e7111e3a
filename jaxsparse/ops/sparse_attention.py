"""Scaled dot-product attention over the stored positions of a pattern."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops import arguments
from jaxsparse.ops.bilinear import spmm_p
from jaxsparse.ops.dense_product import allowed_precision
from jaxsparse.ops.matmul import sddmm
from jaxsparse.ops.sparse_softmax import sparse_softmax
from jaxsparse.pattern import checks_enabled
from jaxsparse.precision import accumulator_dtype
from jaxsparse.primitive import bind
from jaxsparse.topology import Topology


def sparse_attention(
    query: Any,
    key: Any,
    value: Any,
    topology: Topology,
    *,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    r"""Attention in which query position t sees the key positions that row t of a pattern stores.

    .. math:: y_t = \sum_{s \in P_t} \mathrm{softmax}_s\bigl(c\, q_t \cdot k_s\bigr)\, v_s

    Shapes are those of ``jax.nn.dot_product_attention``. It is composed of ``sddmm``,
    ``sparse_softmax`` and ``spmm``: memory grows with the number of stored positions, never
    with T S. Scores and their softmax are float32 for 16-bit operands; the probabilities are then
    rounded to the operands' dtype. A query that sees no key gets zeros.

    On a GPU, fused dense attention in 16 bits is faster than this and takes less memory at the
    sparsities of the paper's mask (5 % stored off the diagonal). In float32 the two are about
    level there; sparser patterns pay.

    Args:
        query: ``(B, T, N, H)`` or ``(T, N, H)``.
        key: ``(B, S, K, H)`` or ``(S, K, H)``; K divides N, groups of N / K query heads share a key
            head.
        value: the shape of ``key``.
        topology: of shape (T, S): one for all, or a batch ``(N,)`` or ``(1, N)``, one for each
            head, ``(B, 1)``, one for each sequence, or ``(B, N)``. ``(N,)`` is refused where B is
            N, since it could as well be meant for sequences: see `Topology.reshape_batch`.
        scale: multiplies the scores; 1 / sqrt(H) by default.
        dropout_rate: share of the probabilities that are set to 0, the others being scaled up. It
            may be traced; its range is not checked then.
        dropout_key: the random key that chooses them; None for no dropout.
        broadcast_dropout: choose the same for the whole batch and all heads.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".

    Returns:
        The shape of ``query``, in the operands' common dtype.

    Raises:
        TypeError: for operands that are no arrays or not floating.
        ValueError: for shapes that don't fit, batches of patterns that are ambiguous, and a dropout
            rate outside [0, 1).

    Source: Gale et al. 2020, "Sparse GPU Kernels for Deep Learning", section VII-C.

    >>> import jax.numpy as jnp
    >>> from jaxsparse import masks
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> sparse_attention(q, q, q, Topology.from_mask(masks.causal(), (4, 4))).shape
    (1, 4, 2, 8)
    """
    name = "sparse_attention"
    if not isinstance(topology, Topology):
        raise TypeError(f"{name}: topology must be a Topology, got {type(topology).__name__}")
    query, key, value = (
        arguments.as_array(name, n, x, 3)
        for n, x in (("query", query), ("key", key), ("value", value))
    )
    dtype = arguments.check_floating(name, query=query, key=key, value=value)
    if not query.ndim == key.ndim == value.ndim or query.ndim > 4:
        raise ValueError(
            f"{name}: query, key and value must all have shape (B, T, N, H) or (T, N, H), "
            f"got {query.shape}, {key.shape} and {value.shape}"
        )
    *batch, t, n, h = query.shape
    s, groups = key.shape[-3:-1]
    if key.shape != (*batch, s, groups, h) or value.shape != key.shape:
        expected = ", ".join(map(str, (*batch, "S", "K", h)))
        raise ValueError(
            f"{name}: key and value must have shape ({expected}) for a query of shape "
            f"{query.shape}, got {key.shape} and {value.shape}"
        )
    if groups == 0 or n % groups:
        raise ValueError(f"{name}: {groups} key heads must divide {n} query heads")
    if topology.shape != (t, s):
        raise ValueError(f"{name}: topology must have shape {(t, s)}, got {topology.shape}")
    rate_is_traced = isinstance(dropout_rate, jax.core.Tracer)
    if not rate_is_traced and not 0 <= dropout_rate < 1:
        raise ValueError(f"{name}: dropout_rate must be in [0, 1), got {dropout_rate}")
    drops = dropout_key is not None and (rate_is_traced or dropout_rate)
    if scale is None:
        scale = 1 / math.sqrt(h) if h else 1.0
    scales = arguments.as_scale(name, scale)
    fused = isinstance(scales, float)  # else it is an array
    topology.check_positions()
    out: jax.Array = _attention(
        query,
        key,
        value,
        topology if topology.static else topology.as_dynamic(),
        None if fused else scales,
        dropout_key if drops else None,
        1 - dropout_rate if drops else None,
        scale=scales if fused else None,
        dtype=dtype,
        broadcast_dropout=bool(broadcast_dropout),
        implementation=implementation,
        checks=checks_enabled(),
    )
    return out


# So that an eager call compiles one program. Programs that call it hold what is inside.
@functools.partial(
    jax.jit,
    static_argnames=("scale", "dtype", "broadcast_dropout", "implementation", "checks"),
    inline=True,
)
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    topology: Topology,
    scales: jax.Array | None,
    dropout_key: jax.Array | None,
    kept_share: Any,
    *,
    scale: float | None,
    dtype: Any,
    broadcast_dropout: bool,
    implementation: str | None,
    checks: bool,
) -> jax.Array:
    """Of checked operands.

    ``checks`` is what tracing reads of JAXSPARSE_CHECK: what was traced otherwise is not found.
    """
    shape = query.shape
    query, key, value = ((x if x.ndim == 4 else x[None]).astype(dtype) for x in (query, key, value))
    b, t, n, h = query.shape
    groups = key.shape[2]
    topology = _over_heads("sparse_attention", topology, b, groups, n // groups)

    # Heads become batch dimensions (B, K, N / K); key heads broadcast over their group.
    q = jnp.swapaxes(query, 1, 2).reshape(b, groups, n // groups, t, h)
    k, v = (jnp.swapaxes(x, 1, 2)[:, :, None] for x in (key, value))

    accumulator = accumulator_dtype(dtype)
    scores = sddmm(
        q, k, topology, preferred_element_type=accumulator, implementation=implementation
    )
    probabilities = sparse_softmax(
        scores, scale=scales if scale is None else scale, implementation=implementation
    )
    weights = probabilities.values
    if dropout_key is not None:
        kept_shape = weights.shape[-1:] if broadcast_dropout else weights.shape
        kept = jax.random.bernoulli(dropout_key, kept_share, kept_shape)
        weights = jnp.where(kept, weights / jnp.asarray(kept_share, weights.dtype), 0)
    # As spmm, but what its gradient gives the softmax is not rounded.
    (weights, v), pattern = arguments.align([weights, v], [1, 2], accumulator, topology)
    (out,) = bind(
        spmm_p,
        weights,
        *pattern,
        v.astype(dtype),
        transpose=False,
        dense_on_left=False,
        out_dtype=dtype,
        precision=allowed_precision(None),
        rounds_values=True,
        columns=arguments.columns_alone(topology),
        implementation=implementation,
        variant=None,
    )
    return jnp.swapaxes(out.reshape(b, n, t, h), 1, 2).reshape(shape)


def _over_heads(name: str, topology: Topology, b: int, groups: int, per_group: int) -> Topology:
    """The topology with the batch dimensions of operands (B, K, N / K), or none of them."""
    batch, n = topology.batch_shape, groups * per_group
    if batch == (n,) == (b,) and n > 1:
        raise ValueError(
            f"{name}: a batch of {n} patterns is ambiguous for {b} sequences of {n} heads: write "
            f"topology.reshape_batch(1, {n}) for one for each head, topology.reshape_batch({b}, 1) "
            "for one for each sequence"
        )
    sequences, heads = batch if len(batch) == 2 else (1, *batch, 1)[:2]
    if len(batch) > 2 or sequences not in (1, b) or heads not in (1, n):
        hint = f": write topology.reshape_batch({b}, 1)" if batch == (b,) else ""
        raise ValueError(
            f"{name}: topology must be one pattern, a batch of {n} or (1, {n}), one for each head, "
            f"({b}, 1), one for each sequence, or ({b}, {n}), got batch {batch}{hint}"
        )
    over_heads = (groups, per_group) if heads == n else (1, 1)
    if sequences != 1:
        return topology.reshape_batch(sequences, *over_heads)
    return topology.reshape_batch(*(over_heads if heads != 1 else ()))
