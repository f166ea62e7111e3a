"""Functions of scores and dropout over block masks whose rows and columns are regrouped."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from block_masks import stored

from jaxsparse import BlockMask, Indexed, masks, sparse_attention

STRIDED = masks.strided(7) & masks.causal()


def operands(T, S):
    """Of two sequences, four heads and two key heads."""
    rng = np.random.default_rng(0)
    sizes = (T, 4, 8), (S, 2, 8), (S, 2, 5)
    return [jnp.asarray(rng.standard_normal((2, *x)), jnp.float32) for x in sizes]


READ = {"by_row": "t", "by_column": "bs", "by_both": "nts", "slope": "n"}


def _score(s, row, column, by_row, by_column, by_both, slope):
    return s * by_row + by_column * by_both - slope * jnp.log1p(abs(row - column) + row)


@functools.partial(jax.jit, static_argnames="offsets")
def scored(mask, q, k, v, read, offsets):
    """Results, and gradients of a sum in which each number has a weight of its own."""

    def loss(q, k, v, read):
        named = {name: Indexed(x, READ[name]) for name, x in read.items()}
        query_offset, key_offset = (jnp.array([7, 3]), offsets) if offsets else (None, None)
        out, lse = sparse_attention(
            q, k, v, mask, score=_score, operands=named, soft_cap=5.0, return_lse=True,
            query_offset=query_offset, key_offset=key_offset,
        )  # fmt: skip
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(out * weights) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)

    (_, results), gradients = jax.value_and_grad(loss, range(4), has_aux=True)(q, k, v, read)
    return jax.tree.leaves((results, gradients))


def test_functions_of_scores_get_positions_of_arrays():
    """In orders by remainders, in one for all, and in those of each head and sequence."""
    T, S = 150, 130
    rng = np.random.default_rng(0)
    sizes = {"b": 2, "n": 4, "t": T, "s": S}
    read = {
        name: jnp.asarray(rng.random([sizes[a] for a in axes]), jnp.float32)
        for name, axes in READ.items()
    }
    rows, columns = (rng.permutation(size).astype(np.int32) for size in (T, S))
    of_heads = np.stack([rng.permutation(T) for _ in range(8)]).astype(np.int32).reshape(2, 4, T)
    dense = stored(STRIDED, T, S)
    by_heads = jax.jit(jax.vmap(jax.vmap(lambda i: BlockMask.from_dense(dense, row_order=i))))
    made = (
        BlockMask.from_mask(STRIDED, (T, S), regroup=7),
        BlockMask.from_mask(STRIDED, (T, S), row_order=rows, column_order=columns),
        by_heads(of_heads),
    )
    arrays = operands(T, S)
    for offsets in None, 5:
        expected = scored(BlockMask.from_dense(dense), *arrays, read, offsets)
        for mask in made:
            actual = scored(mask, *arrays, read, offsets)
            for x, y in zip(actual, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_dropout_of_places_in_the_orders():
    """Each probability is dropped or not, as often as the rate says, in gradients too."""
    arrays = operands(300, 300)
    ones = jnp.ones_like(arrays[2])
    mask = BlockMask.from_mask(masks.strided(3), (300, 300), regroup=3)

    def attend(q, k, v):
        return sparse_attention(q * 0, k, v, mask, dropout_key=jax.random.key(0), dropout_rate=0.25)

    out, pull = jax.vjp(attend, *arrays[:2], ones)
    kept = np.asarray(out) * 0.75 * 100  # of the 100 keys that each query sees
    np.testing.assert_allclose(kept, np.rint(kept), atol=1e-3)
    assert 0.74 < kept.mean() / 100 < 0.76 and kept.std() > 1
    np.testing.assert_allclose(jnp.sum(pull(jnp.ones_like(out))[2]), jnp.sum(out), rtol=1e-5)
