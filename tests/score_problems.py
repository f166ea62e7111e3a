"""Functions of scores with operands of every kind, and dense attention with them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxsparse import Indexed


def arrays_of(axes, sizes, dtype="float32", seed=0):
    """Of each name an Indexed of these axes, with numbers between 0.1 and 1."""
    rng = np.random.default_rng(seed)
    return {
        name: Indexed(
            jnp.asarray(0.1 + 0.9 * rng.random([sizes[a] for a in of]), dtype)
            if not name.startswith("ids")
            else jnp.asarray(rng.integers(0, 3, [sizes[a] for a in of])),
            of,
        )
        for name, of in axes.items()
    }


# Functions, and the axes of what they read.
SCORES = {
    "alibi": (lambda s, row, column, slope: s - slope * abs(row - column), {"slope": "n"}),
    "t5": (lambda s, row, column, table: s + table, {"table": "nd"}),
    "pair": (lambda s, row, column, bias: s + bias, {"bias": "nts"}),
    "shared pair": (lambda s, row, column, bias: s * bias + bias, {"bias": "bts"}),
    "by row": (lambda s, row, column, heat, tilt: s * heat + tilt, {"heat": "bt", "tilt": "ns"}),
    "by column": (
        lambda s, row, column, tilt, far: s * tilt + far,
        {"tilt": "s", "far": "bd"},
    ),
    "by head": (lambda s, row, column, heat: jnp.tanh(s / heat) * heat, {"heat": "bn"}),
    "documents": (
        lambda s, row, column, ids, ids_of_keys: jnp.where(ids == ids_of_keys, s, -jnp.inf),
        {"ids": "bt", "ids_of_keys": "bs"},
    ),
    "distances": (
        lambda s, row, column, far, base: s - far * jnp.log1p(base * (row - column) ** 2),
        {"far": "d", "base": ""},
    ),
}


def spread(indexed, sizes):
    """An array of all sequences, heads, rows and columns."""
    b, n, t, s = (sizes[a] for a in "bnts")
    at = {
        "b": np.arange(b)[:, None, None, None],
        "n": np.arange(n)[:, None, None],
        "t": np.arange(t)[:, None],
        "s": np.arange(s),
        "d": np.arange(t)[:, None] - np.arange(s) + s - 1,
    }
    array = jnp.asarray(indexed.array)
    wide = array.astype(float) if jnp.issubdtype(array.dtype, jnp.floating) else array
    return wide[tuple(at[a] for a in indexed.axes)]


def dense(q, k, v, mask, score, named, scale, offsets=(0, 0), kept=None):
    """Out and lse of float64 operands, differentiable."""
    groups, (b, t, n, _), s = k.shape[2], q.shape, k.shape[1]
    sizes = {"b": b, "n": n, "t": t, "s": s}
    k, v = (jnp.repeat(x, n // groups, 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    values = {name: spread(x, sizes) for name, x in named.items()}
    rows, columns = (
        jnp.reshape(jnp.asarray(x), (-1, 1, 1, 1)) + jnp.arange(size).reshape(shape)
        for x, size, shape in zip(offsets, (t, s), ((-1, 1), (1, -1)), strict=True)
    )
    scores = score(scores, rows, columns, **values)
    seen = mask & (scores > -jnp.inf)
    shift = jnp.max(jnp.where(seen, scores, -1e30), -1, keepdims=True)
    e = jnp.where(seen, jnp.exp(jnp.where(seen, scores, shift) - shift), 0)
    total = jnp.sum(e, -1)
    p = e / jnp.where(total == 0, 1, total)[..., None]
    p = p if kept is None else p * kept
    lse = jnp.where(total == 0, -jnp.inf, shift[..., 0] + jnp.log(jnp.where(total == 0, 1, total)))
    return jnp.einsum("bnts,bsnh->btnh", p, v), lse
