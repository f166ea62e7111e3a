"""Attention over parts of a mask or of the keys, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.ops import arguments


def merge_attention(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    r"""Attention over the union of masks that share no position, of attention over each.

    .. math::

        \ell = \log \sum_i e^{\ell_i}, \qquad y = \sum_i e^{\ell_i - \ell}\, y_i

    So keys may be cut into parts, on one device or on several in a ring, and a mask into parts that
    have better kernels. Differentiable.

    Args:
        outs: results ``(B, T, N, E)`` or ``(T, N, E)`` of `sparse_attention`.
        lses: those of ``return_lse=True``, ``(B, N, T)`` or ``(N, T)``.

    Returns:
        The result of the union in the dtype of the first one, and its lse.

    Raises:
        ValueError: if there are none, not as many of one as of the other, or shapes don't fit.

    >>> import jax.numpy as jnp
    >>> from jaxsparse import masks, sparse_attention
    >>> q = jnp.ones((4, 2, 8))
    >>> parts = [
    ...     sparse_attention(q, q[:2], q[:2], masks.causal(), return_lse=True),
    ...     sparse_attention(q, q[2:], q[2:], masks.offset(masks.causal(), columns=2),
    ...                      return_lse=True),
    ... ]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> bool(jnp.allclose(out, sparse_attention(q, q, q, masks.causal())))
    True
    """
    outs = [arguments.as_array("merge_attention", "out", x, 3) for x in outs]
    lses = [arguments.as_array("merge_attention", "lse", x, 2) for x in lses]
    shapes = {x.shape for x in outs}
    if len(outs) != len(lses) or len(shapes) != 1:
        raise ValueError(
            "merge_attention: needs one lse for each out, and outs of one shape, got "
            f"{len(lses)} lses and outs of shapes {[x.shape for x in outs]}"
        )
    *batch, t, n, _ = outs[0].shape
    if any(x.shape != (*batch, n, t) for x in lses):
        raise ValueError(
            f"merge_attention: every lse must have shape {(*batch, n, t)}, got "
            f"{[x.shape for x in lses]}"
        )
    lse, shares = log_of_sums(jnp.stack(lses))
    weights = jnp.swapaxes(shares, -1, -2)[..., None]
    out = sum(w * x.astype(w.dtype) for w, x in zip(weights, outs, strict=True))
    return out.astype(outs[0].dtype), lse


def log_of_sums(logs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logarithm of sums along the first axis, of their logarithms, and each one's share of it.

    Where all are -inf, so is the result; shares and derivatives are 0 there.
    """
    most = jax.lax.stop_gradient(jnp.max(logs, axis=0))
    stored = logs != -jnp.inf
    parts = jnp.where(
        stored, jnp.exp(jnp.where(stored, logs - jnp.where(most == -jnp.inf, 0, most), 0)), 0
    )
    total = jnp.sum(parts, axis=0)
    some = jnp.where(total == 0, 1, total)
    return jnp.where(total == 0, -jnp.inf, most + jnp.log(some)), parts / some
