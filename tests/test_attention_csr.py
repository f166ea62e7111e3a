"""Attention by the rows of a pattern: graphs of every shape, and when it runs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problems import operands, without_block_masks
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from test_attention import assert_as_dense, dense, differentiated

from jaxsparse import H200, Topology, explain, sparse_attention


@pytest.fixture
def by_rows(monkeypatch):
    without_block_masks(monkeypatch)


def pattern(lengths, columns, seed=0):
    """Of rows of so many entries, as bool."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((len(lengths), columns), bool)
    for row, length in enumerate(lengths):
        mask[row, rng.choice(columns, min(length, columns), replace=False)] = True
    return mask


def check(mask, n=2, groups=1, h=4, e=4, dtype="float32", seed=0):
    t, s = mask.shape[-2:]
    with jax.enable_x64(dtype == "float64"):
        q, k, v = operands(1, t, s, n, groups, h, e, dtype, seed=seed)
        ct = operands(1, t, s, n, groups, e, e, dtype, seed=seed + 1)[0]
        run = functools.partial(differentiated, scale=0.4)
        actual = jax.jit(run)(q, k, v, Topology.from_mask(mask), ct)
    every = np.broadcast_to(mask, (1, n, t, s))
    assert_as_dense(actual, dense(q, k, v, every, 0.4, ct), dtype)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 5, 31, 33, 64]), min_size=1, max_size=40),
    columns=st.integers(1, 90),
    h=st.integers(1, 20),
    e=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 99),
)
def test_any_pattern(lengths, columns, h, e, heads, dtype, seed):
    with pytest.MonkeyPatch.context() as patched:
        without_block_masks(patched)
        mask = pattern(lengths, columns, seed)
        check(mask, *heads, h=h, e=e, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_columns_of_thousands(dtype, by_rows):
    """Those that several warps share, between others and beside rows that see nothing."""
    mask = pattern([3, 5000, 0, 1100, 1, 2049, 7], 5200)
    check(mask, h=16, e=8, dtype=dtype)
    check(mask.T, h=8, e=16, dtype=dtype)
    check(mask, n=4, groups=2, h=2, e=8, dtype=dtype)
    check(mask, n=1, h=64, e=64, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nan_in_rows_of_thousands(dtype, by_rows):
    """It reaches the rows that see it, and none that warps compute beside them."""
    mask = pattern([3, 2500, 0, 1100, 1, 40, 7], 2600)
    q, k, v = operands(1, *mask.shape, 1, 1, 64, 64, dtype)
    ct = jnp.ones_like(q)
    column = np.flatnonzero(mask[1] & ~mask[3])[0]
    run = jax.jit(functools.partial(differentiated, mask=Topology.from_mask(mask), cotangent=ct))
    clean = run(q, k, v)
    spoiled = run(q, k.at[0, column].set(jnp.nan), v)
    sees = mask[:, column]
    seen = mask[sees].any(axis=0)  # keys of rows that see it
    reached = [sees, sees, sees, seen, seen]
    for x, y, rows in zip(clean, spoiled, reached, strict=True):
        axis = 2 if x.ndim == 3 else 1  # lse has heads first
        x, y = (np.moveaxis(np.asarray(z, np.float64), axis, 0) for z in (x, y))
        assert np.isnan(y[rows]).all() and not np.isnan(y[~rows]).any()
        np.testing.assert_allclose(y[~rows], x[~rows], rtol=2e-2, atol=2e-2)


def test_small_cotangents_of_long_rows_in_float16(by_rows):
    """Their products with probabilities are smaller than float16 has numbers."""
    mask = pattern([2500, 40], 2600)
    q, k, v = operands(1, *mask.shape, 1, 1, 64, 64, "float16")
    topology = Topology.from_mask(mask)

    def gradient(q, k, v, ct):
        return jax.vjp(lambda q: sparse_attention(q, k, v, topology, scale=1), q)[1](ct)[0]

    q = q * 0.05  # so that no few keys have most of a row
    ct = operands(1, 2, 2, 1, 1, 64, 64, "float16", seed=2)[0] * 2.0**-13
    actual, expected = (
        np.asarray(jax.jit(gradient)(*(x.astype(dtype) for x in (q, k, v, ct))), np.float64)
        for dtype in ("float16", "float32")
    )
    off = np.abs(actual - expected).max(axis=-1)
    assert np.all(off <= 0.004 * np.abs(expected).max(axis=-1))


def test_derivatives(by_rows):
    with jax.enable_x64(True):
        q, k, v = operands(2, 6, 9, 2, 1, 3, 2, "float64")
        topology = Topology.from_mask(pattern([0, 1, 9, 4, 2, 3], 9))

        def attend(q, k, v):
            out, lse = sparse_attention(q, k, v, topology, return_lse=True)
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        check_grads(attend, (q, k, v), order=2, modes=["fwd", "rev"])


def test_vmap_over_operands_and_patterns(by_rows):
    q, k, v = operands(3, 30, 40, 2, 1, 4, 4, "float32")
    mask = np.stack([pattern([i % 7 + seed for i in range(30)], 40, seed) for seed in range(3)])
    one = [
        sparse_attention(q[i], k[i], v[i], Topology.from_mask(mask[i]), variant="csr")
        for i in range(3)
    ]
    out = jax.vmap(sparse_attention)(q, k, v, Topology.from_mask(mask))
    np.testing.assert_allclose(out, jnp.stack(one), rtol=1e-5, atol=1e-6)

    def loss(q, topology):
        return jnp.sum(jnp.sin(sparse_attention(q, k[0], v[0], topology)))

    topology = Topology.from_mask(mask[0])
    together = jax.vmap(jax.grad(loss), (0, None))(q, topology)
    each = jnp.stack([jax.grad(loss)(x, topology) for x in q])
    np.testing.assert_allclose(together, each, rtol=1e-5, atol=1e-6)


def test_results_repeat_bitwise(by_rows):
    q, k, v = operands(2, 200, 3000, 2, 2, 64, 64, "bfloat16")
    topology = Topology.from_mask(pattern([2500, 1500, *[20] * 198], 3000))
    run = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(sparse_attention(*x, topology)), (0, 1, 2)))
    first = run(q, k, v)
    for _ in range(10):
        jax.tree.map(np.testing.assert_array_equal, run(q, k, v), first)


def test_damaged_columns_are_not_followed(by_rows):
    """There is no right result, but nothing is read out of bounds."""
    q, k, v = operands(1, 50, 60, 1, 1, 8, 8, "float32")
    topology = Topology.from_mask(pattern([6] * 50, 60))
    leaves, tree = jax.tree.flatten(topology)
    rng = np.random.default_rng(0)

    def damaged(x):
        wrong = rng.choice([-1, 2**31 - 1, -(2**31), 10**6], x.shape)
        return jnp.where(jnp.asarray(rng.random(x.shape) < 0.3), wrong.astype(x.dtype), x)

    for _ in range(5):
        bad = jax.tree.unflatten(tree, [damaged(x) for x in leaves])
        attend = jax.jit(jax.grad(lambda q, bad: jnp.sum(sparse_attention(q, k, v, bad))))
        assert attend(q, bad).shape == q.shape


def test_a_pattern_beside_a_block_mask():
    """By what both would take, unless a name says which; a dense pattern is not looked at."""
    t = 4096
    x = jax.ShapeDtypeStruct((1, t, 2, 64), jnp.bfloat16)
    few = Topology.from_mask(pattern([3] * t, t)).with_layout("block_mask")
    attend = functools.partial(sparse_attention, mask=few)
    (call,) = explain(attend, x, x, x, device=H200)
    assert call.variant == "csr" and "others: tiles" in str(call)
    (call,) = explain(functools.partial(attend, variant="tiles"), x, x, x, device=H200)
    assert call.variant == "tiles"
    q, k, v = operands(1, 300, 300, 2, 1, 8, 8, "float32")
    many = Topology.from_mask(pattern([250] * 300, 300))
    tiles = "tiles_mma" if jax.default_backend() == "gpu" else "tiles"  # of float32
    by_tiles, by_rows = (sparse_attention(q, k, v, many, variant=x) for x in (tiles, "csr"))
    np.testing.assert_allclose(by_tiles, by_rows, rtol=1e-5, atol=1e-6)
    assert "csr" not in str(explain(sparse_attention, q, k, v, many, device=H200)[0])


def test_errors(monkeypatch):
    q, k, v = operands(1, 6, 8, 2, 1, 4, 4, "float32")
    with pytest.raises(ValueError, match="no variant 'rows'"):
        sparse_attention(q, k, v, Topology.from_mask(np.ones((6, 8))), variant="rows")
    topology = Topology.from_mask(np.ones((6, 8), bool)).without_transpose()
    without_block_masks(monkeypatch)
    with pytest.raises(ValueError, match="transposed pattern"):
        jax.grad(lambda q: jnp.sum(sparse_attention(q, k, v, topology)))(q)
