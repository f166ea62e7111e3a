"""Functions of scores and dropout over block masks whose rows and columns are regrouped."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_masks import stored
from checks import PLATFORM

from jaxsparse import H200, BlockMask, Indexed, explain, masks, sparse_attention

STRIDED = masks.strided(7) & masks.causal()


def operands(T, S, h=8, e=5, dtype="float32"):
    """Of two sequences, four heads and two key heads."""
    rng = np.random.default_rng(0)
    sizes = (T, 4, h), (S, 2, h), (S, 2, e)
    return [jnp.asarray(rng.standard_normal((2, *x)), dtype) for x in sizes]


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
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).astype(jnp.bfloat16)
        total = jnp.sum(out.astype(jnp.float32) * weights.reshape(out.shape))
        return total + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)

    (_, results), gradients = jax.value_and_grad(loss, range(4), has_aux=True)(q, k, v, read)
    return jax.tree.leaves((results, gradients))


def masks_and_operands_read(T, S):
    """In orders by remainders, in one for all, and in those of each head and sequence."""
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
    return made, read


KERNELS = pytest.mark.skipif(PLATFORM != "cuda", reason="numbers of 16 bits have kernels on GPUs")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2e-5), pytest.param("bfloat16", 2.0**-6, marks=KERNELS)]
)
def test_functions_of_scores_get_positions_of_arrays(dtype, tolerance):
    """Kernels of 16 bits as well, against the same numbers in float32, which has none."""
    T, S = 150, 130
    made, read = masks_and_operands_read(T, S)
    arrays = operands(T, S, *((64, 64) if dtype == "bfloat16" else ()), dtype=dtype)
    wide = [x.astype(jnp.float32) for x in arrays]
    for offsets in None, 5:
        expected = scored(BlockMask.from_dense(stored(STRIDED, T, S)), *wide, read, offsets)
        for mask in made:
            actual = scored(mask, *arrays, read, offsets)
            for x, y in zip(actual, expected, strict=True):
                atol = tolerance * max(1, np.nan_to_num(np.abs(y), posinf=0).max())
                np.testing.assert_allclose(np.asarray(x, np.float32), y, rtol=tolerance, atol=atol)


def test_kernels_take_positions_of_arrays():
    """Of axes in an order of their own, so that seven other operands leave room for them."""
    made, read = masks_and_operands_read(150, 130)
    arrays = operands(150, 130, 64, 64, "bfloat16")
    for offsets, mask in itertools.product((None, 5), made):
        of_offsets = functools.partial(scored, offsets=offsets)
        calls = explain(of_offsets, mask, *arrays, read, device=H200)
        assert [call.variant for call in calls] == ["tiles", "tiles"], calls

    def attend(q, k, v, slopes, mask):
        named = {f"slope{i}": Indexed(x, "n") for i, x in enumerate(slopes)}

        def score(s, row, column, **slopes):
            return s - sum(slopes.values()) * abs(row - column)

        return sparse_attention(q, k, v, mask, score=score, operands=named)

    slopes = [jnp.ones(4)] * 7
    by_rows = BlockMask.from_dense(
        stored(STRIDED, 150, 130), row_order=np.arange(150, dtype=np.int32)[::-1].copy()
    )
    (call,) = explain(attend, *arrays, slopes, by_rows, device=H200)
    assert call.variant == "tiles", call
    (call,) = explain(attend, *arrays, slopes, made[1], device=H200)
    assert call.variant is None and "9 operands" in str(call)


@jax.custom_jvp
def _with_rule(s, row, column):
    return s + 0.01 * column


@_with_rule.defjvp
def _rule(primals, tangents):
    s, row, column = primals
    return _with_rule(s, row, column), tangents[0] * (1 + 0.1 * row)


def test_rules_of_derivatives_get_positions_of_arrays():
    """Also of what a function's value does not depend on."""
    arrays = operands(70, 70)

    @jax.jit
    def gradients(mask, *arrays):
        return jax.grad(
            lambda *xs: jnp.sum(sparse_attention(*xs, mask, score=_with_rule) ** 2), range(3)
        )(*arrays)

    expected = gradients(BlockMask.from_mask(STRIDED, (70, 70)), *arrays)
    actual = gradients(BlockMask.from_mask(STRIDED, (70, 70), regroup=7), *arrays)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * np.abs(y).max())


def test_dropout_of_places_in_the_orders():
    """Each probability is dropped or not, as often as the rate says, in gradients too."""
    arrays = operands(300, 300)
    ones = jnp.ones_like(arrays[2])
    mask = BlockMask.from_mask(masks.strided(3), (300, 300), regroup=3)

    def attend(q, k, v):
        return sparse_attention(q * 0, k, v, mask, dropout_key=jax.random.key(0), dropout_rate=0.25)

    out = attend(*arrays[:2], ones)
    kept = np.asarray(out) * 0.75 * 100  # of the 100 keys that each query sees
    np.testing.assert_allclose(kept, np.rint(kept), atol=1e-3)
    assert 0.74 < kept.mean() / 100 < 0.76 and kept.std() > 1
    # Results are linear in the values, with what is dropped: so is the transpose.
    rng = np.random.default_rng(1)
    out, pull = jax.vjp(attend, *arrays)
    cotangent = jnp.asarray(rng.standard_normal(out.shape), out.dtype)
    by_value = jnp.sum(pull(cotangent)[2] * arrays[2])
    np.testing.assert_allclose(by_value, jnp.sum(cotangent * out), rtol=1e-4, atol=1e-3)
