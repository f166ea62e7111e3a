"""Scaled dot-product attention over the stored positions of a pattern."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.csr import CSR
from jaxsparse.ops import arguments
from jaxsparse.ops.matmul import sddmm, spmm
from jaxsparse.ops.sparse_softmax import sparse_softmax
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
        topology: of shape (T, S), one for all heads, or a batch ``(N,)``, one for each head.
        scale: multiplies the scores; 1 / sqrt(H) by default.
        dropout_rate: share of the probabilities that are set to 0, the others being scaled up.
        dropout_key: the random key that chooses them; None for no dropout.
        broadcast_dropout: choose the same for the whole batch and all heads.
        implementation: None (the platform's own), "cpu", "cuda" or "xla".

    Returns:
        The shape of ``query``, in the operands' common dtype.

    Raises:
        TypeError: for operands that are no arrays or not floating.
        ValueError: for shapes that don't fit, and a dropout rate outside [0, 1).

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
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    shape = query.shape
    if query.ndim == 3 and key.ndim == 3 and value.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"{name}: query, key and value must all have shape (B, T, N, H) or (T, N, H), "
            f"got {query.shape}, {key.shape} and {value.shape}"
        )
    b, t, n, h = query.shape
    _, s, groups, _ = key.shape
    if key.shape != (b, s, groups, h) or value.shape != key.shape:
        raise ValueError(
            f"{name}: key and value must have shape ({b}, S, K, {h}) for a query of shape "
            f"{query.shape}, got {key.shape} and {value.shape}"
        )
    if groups == 0 or n % groups:
        raise ValueError(f"{name}: {groups} key heads must divide {n} query heads")
    if topology.shape != (t, s):
        raise ValueError(f"{name}: topology must have shape {(t, s)}, got {topology.shape}")
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"{name}: dropout_rate must be in [0, 1), got {dropout_rate}")
    if topology.batch_shape not in ((), (n,)):
        raise ValueError(
            f"{name}: topology must be one pattern or a batch of {n}, one for each head, "
            f"got batch {topology.batch_shape}"
        )

    # Heads become batch dimensions (B, K, N / K); key heads broadcast over their group.
    q = jnp.swapaxes(query, 1, 2).reshape(b, groups, n // groups, t, h)
    k, v = (jnp.swapaxes(x, 1, 2)[:, :, None] for x in (key, value))
    if topology.batch_shape:
        topology = jax.tree.map(lambda x: x.reshape(groups, n // groups, *x.shape[1:]), topology)

    accumulator = arguments.accumulator_dtype(dtype)
    scores = sddmm(
        q, k, topology, preferred_element_type=accumulator, implementation=implementation
    )
    scale = 1 / math.sqrt(h) if scale is None and h else scale
    probabilities = sparse_softmax(
        scores, scale=1.0 if scale is None else scale, implementation=implementation
    )
    weights = probabilities.values
    if dropout_rate and dropout_key is not None:
        kept_shape = weights.shape[-1:] if broadcast_dropout else weights.shape
        kept = jax.random.bernoulli(dropout_key, 1 - dropout_rate, kept_shape)
        weights = jnp.where(kept, weights / (1 - dropout_rate), 0)
    out = spmm(CSR(weights.astype(dtype), topology), v, implementation=implementation)
    out = jnp.swapaxes(out.reshape(b, n, t, h), 1, 2)
    return out.reshape(shape)
