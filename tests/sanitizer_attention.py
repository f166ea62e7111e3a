"""The part of cuda_sanitizer.py that runs the kernels of attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from score_problems import arrays_of

from jaxsparse import BlockMask, Topology, masks, sparse_attention

# Sizes of heads that no kernel by warpgroups takes, and of those that they do.
OF_WARPS, OF_WARPGROUPS = [(192, 136)], [(64, 64), (128, 128)]


def attentions(rng, dtype):
    """Grouped heads, several tiles, cells of every state."""
    seen = rng.random((200, 300)) < 0.3
    seen[:64, 64:128], seen[64:128, :128] = True, False
    mask = BlockMask.from_dense(seen)
    sizes = {"tiles_mma": OF_WARPS, "tiles": OF_WARPGROUPS}
    if dtype == jnp.float32:
        sizes = {"tiles_mma": OF_WARPGROUPS}
    return gradients_of_attention(rng, mask, dtype, sizes)


def attentions_by_rows(rng, dtype):
    """A graph, with rows and columns that are cut into parts, and heads of odd size."""
    seen = rng.random((1500, 1300)) < 0.002
    seen[7], seen[:, 9] = True, True
    return gradients_of_attention(
        rng, Topology.from_mask(seen), dtype, {"csr": [(64, 64), (2, 64), (5, 7)]}
    )


def gradients_of_attention(rng, mask, dtype, sizes):
    """By variants, each with some sizes of heads."""

    @functools.partial(jax.jit, static_argnames="variant")
    def gradients(*operands, variant):
        def loss(q, k, v):
            out = sparse_attention(q, k, v, mask, variant=variant)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1, 2))(*operands)

    results = []
    t, s = mask.shape
    for variant, of_variant in sizes.items():
        for h, e in of_variant:
            shapes = (2, t, 4, h), (2, s, 2, h), (2, s, 2, e)
            operands = (jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)
            results += gradients(*operands, variant=variant)
    return results


def scored_attention(rng, dtype):
    """By functions of scores with gradients of what they read, and dropout; tangents.

    Kernels by warpgroups sum such gradients by distances and columns as well, others do not.
    """
    mask = BlockMask.from_mask(masks.causal() & masks.band(200), (500, 500))
    bias = jnp.asarray(rng.standard_normal((4, 500, 500)), jnp.float32)
    sizes = {"n": 4, "s": 500, "d": 999}

    def loss(q, k, v, named, bias):
        out = sparse_attention(
            *(q, k, v, mask),
            score=lambda s, row, column, slope, **more: (
                s - slope * (row - column) + sum(more.values())
            ),
            operands=named,
            bias=bias,
            dropout_rate=0.2,
            dropout_key=jax.random.key(0),
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def along(q, k, v):
        return jax.jvp(lambda q: sparse_attention(q, k, v, mask), (q,), (q,))[1]

    results = []
    of_warpgroups = {"slope": "n", "far": "nd", "tilt": "s"}
    for h, axes in ((64, of_warpgroups), (136, {"slope": "n"})):
        q, k, v = (jnp.asarray(rng.standard_normal((2, 500, n, h)), dtype) for n in (4, 2, 2))
        named = arrays_of(axes, sizes)
        results += jax.tree.leaves(jax.jit(jax.grad(loss, range(5)))(q, k, v, named, bias))
        results.append(jax.jit(along)(q, k, v))
    return results


def few_queries(rng, dtype):
    """Heads that share keys, sequences of different lengths; keys in order and in pages."""
    mask = BlockMask.from_lengths([300, 0, 77], (3, 320), causal=True).reshape_batch(3, 1)
    q, k, pool = (
        jnp.asarray(rng.standard_normal(s), dtype)
        for s in ((3, 3, 4, 64), (3, 320, 2, 64), (9, 64, 2, 64))
    )
    pages = rng.integers(0, 9, (3, 5))
    return [
        sparse_attention(q, k, k, mask, variant="decode"),
        sparse_attention(q, pool, pool, mask, pages=pages, variant="decode"),
    ]


def of_attention(rng, dtype, suffix):
    """The kernels of attention."""
    results = attentions(rng, dtype) + attentions_by_rows(rng, dtype)
    if dtype != jnp.float32:
        results += few_queries(rng, dtype) + scored_attention(rng, dtype)
    return results
