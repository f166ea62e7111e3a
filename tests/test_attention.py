"""Fused attention: every kernel and the plain form, against dense attention in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problems import KINDS, operands, random_mask, stored_as, without_block_masks
from checks import PLATFORM
from covering import combinations
from jax.test_util import check_grads
from reference import attention

from jaxsparse import (
    BlockMask,
    Topology,
    backend,
    masks,
    merge_attention,
    sparse_attention,
)
from jaxsparse.ops.attention import attention_cotangent_p, attention_p
from jaxsparse.ops.attention_masks import mask_operands, over_heads
from jaxsparse.primitive import bind

# Rounding of what is multiplied, relative to sums of magnitudes.
TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def dense(q, k, v, mask, scale, cotangent):
    """out, lse, and the gradients of out's product with a cotangent plus the sum of lse."""
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in (q, k, v, cotangent))
    b, groups, per = len(q), k.shape[2], q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, per, 2) for x in (k, v))
    scores = np.where(mask, np.einsum("btnh,bsnh->bnts", q, wide_k) * scale, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.sum(np.exp(scores), -1))
    p = np.where(mask, np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None]), 0)
    out = np.einsum("bnts,bsnh->btnh", p, wide_v)
    dp = np.einsum("btnh,bsnh->bnts", cotangent, wide_v)
    ds = p * (dp - np.einsum("btnh,btnh->bnt", cotangent, out)[..., None] + 1) * scale
    dq = np.einsum("bnts,bsnh->btnh", ds, wide_k)
    dk, dv = np.einsum("bnts,btnh->bsnh", ds, q), np.einsum("bnts,btnh->bsnh", p, cotangent)
    return out, lse, dq, *(x.reshape(b, -1, groups, per, x.shape[-1]).sum(3) for x in (dk, dv))


def dense_tangents(q, k, v, mask, scale, along):
    """Those of out and lse, and how large what is summed up for each number of out is."""
    out, lse = dense(q, k, v, mask, scale, np.zeros((*q.shape[:-1], v.shape[-1])))[:2]
    q, k, v, dq, dk, dv = (np.asarray(x, np.float64) for x in (q, k, v, *along))
    k, v, dk, dv = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v, dk, dv))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    ds = (np.einsum("btnh,bsnh->bnts", dq, k) + np.einsum("btnh,bsnh->bnts", q, dk)) * scale
    p = np.where(mask, np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None]), 0)
    d_lse = np.einsum("bnts,bnts->bnt", p, ds)
    weighted = np.einsum("bnts,bsnh->btnh", p * ds, v) + np.einsum("bnts,bsnh->btnh", p, dv)
    parts = np.moveaxis(d_lse, 1, 2)[..., None] * out
    magnitudes = np.einsum("bnts,bsnh->btnh", p * np.abs(ds), np.abs(v)) + np.abs(parts)
    magnitudes += np.einsum("bnts,bsnh->btnh", p, np.abs(dv))
    return weighted - parts, d_lse, magnitudes


def tangents(q, k, v, mask, along, **options):
    """The same of `sparse_attention`."""
    attend = functools.partial(sparse_attention, mask=mask, return_lse=True, **options)
    return jax.jvp(attend, (q, k, v), tuple(along))[1]


def differentiated(q, k, v, mask, cotangent, **options):
    """The same of `sparse_attention`."""

    def loss(q, k, v):
        out, lse = sparse_attention(q, k, v, mask, return_lse=True, **options)
        total = jnp.sum(out.astype(lse.dtype) * cotangent.astype(lse.dtype))
        return total + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), (out, lse)

    gradients, results = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return *results, *gradients


def assert_as_dense(actual, expected, dtype, magnitudes_of_tangent=0.0):
    """Within what rounding explains: of what is summed up where sums may cancel."""
    names = ("out", "lse", "dq", "dk", "dv", "d_out", "d_lse")
    for name, x, y in zip(names[: len(expected)], actual, expected, strict=True):
        x = np.asarray(x, np.float64)
        finite = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), finite, err_msg=name)
        np.testing.assert_array_equal(x[~finite], y[~finite], err_msg=name)
        size = np.abs(y[finite]).max(initial=1)
        if name == "d_out":
            size = np.broadcast_to(1 + magnitudes_of_tangent, y.shape)[finite]
        off = np.abs(x[finite] - y[finite])
        assert np.all(off <= TOLERANCE[dtype] * (np.abs(y[finite]) + size)), (name, off.max())


# Queries, keys, heads, key heads, and the sizes of heads.
PROBLEMS = [
    (1, 1, 1, 1, 8, 8),
    (63, 200, 4, 2, 64, 64),
    (129, 64, 2, 2, 128, 128),
    (200, 127, 3, 1, 5, 7),
    (300, 130, 2, 1, 64, 64),
    (127, 257, 2, 1, 128, 128),
    (130, 70, 2, 1, 192, 96),
]
BATCHES = {"one": (), "each": (1,), "of sequences": (2, 1), "of heads": (1, 0), "all": (2, 0)}


@combinations(
    "t, s, n, groups, h, e, batch, dtype, kind, implementation",
    PROBLEMS,
    BATCHES,
    TOLERANCE,
    KINDS,
    ["xla", PLATFORM],
)
def test_against_dense(t, s, n, groups, h, e, batch, dtype, kind, implementation, monkeypatch):
    sizes = tuple(size or n for size in BATCHES[batch])  # 0 stands for the heads
    mask = np.stack([random_mask((t, s), seed) for seed in range(int(np.prod(sizes)))])
    mask = mask.reshape(*sizes, t, s)
    with jax.enable_x64(dtype == "float64"):
        q, k, v = operands(2, t, s, n, groups, h, e, dtype)
        cotangent = operands(2, t, s, n, groups, e, e, dtype, seed=2)[0]
        stored = stored_as(kind, mask, monkeypatch)
        along = operands(2, t, s, n, groups, h, e, dtype, seed=3)
        options = {"scale": 0.2, "implementation": implementation}

        @jax.jit
        def run(q, k, v, stored, cotangent, along):
            both_ways = differentiated(q, k, v, stored, cotangent, **options)
            return *both_ways, *tangents(q, k, v, stored, along, **options)

        actual = run(q, k, v, stored, cotangent, along)
    every = np.broadcast_to(mask, (2, n, t, s))
    expected = dense(q, k, v, every, 0.2, cotangent)
    *along, magnitudes = dense_tangents(q, k, v, every, 0.2, along)
    assert_as_dense(actual, (*expected, *along), dtype, magnitudes)


def takes(variant, dtype, h, e):
    """Whether a variant takes heads of these sizes as they are."""
    if PLATFORM != "cuda" or variant == "csr":
        return True
    if variant == "tiles":
        return dtype in ("bfloat16", "float16") and h == e and h in (64, 128)
    # Of float32 a block's rows of keys and values, and those that they meet, fill shared memory.
    fits = dtype != "float32" or h + e <= 400
    return dtype != "float64" and h % 8 == e % 8 == 0 and fits


@combinations(
    "t, s, n, groups, h, e, dtype, variant",
    [
        (129, 64, 2, 2, 64, 64),
        (127, 257, 4, 2, 128, 128),
        (200, 130, 2, 1, 40, 72),
        (130, 70, 2, 1, 192, 96),
        (70, 130, 1, 1, 256, 256),
    ],
    TOLERANCE,
    backend.TARGETS["attention_cotangent"]["variants"].get(PLATFORM, []),
)
def test_every_variant_against_dense(t, s, n, groups, h, e, dtype, variant):
    """Forward and backward, of which a gradient takes the cheapest one; twice, bit by bit."""
    if not takes(variant, dtype, h, e):
        pytest.skip("the variant does not take it")
    mask = random_mask((t, s))
    with jax.enable_x64(dtype == "float64"):
        q, k, v = operands(2, t, s, n, groups, h, e, dtype)
        ct_out = operands(2, t, s, n, groups, e, e, dtype, seed=2)[0]
        of_heads = (2, t, groups, n // groups)
        stored = (BlockMask.from_dense(mask), Topology.from_mask(mask))
        lists, params = mask_operands(*(over_heads(x, 2, groups, n // groups) for x in stored))
        params |= {"scores": None, "scale": 0.2, "implementation": PLATFORM, "variant": variant}

        @jax.jit
        def run(q, k, v, ct_out):
            fixed = (q.reshape(*of_heads, h), k, v, *lists)
            out, lse = bind(attention_p, *fixed, **params)
            ct = ct_out.reshape(*of_heads, e)
            shares = jnp.sum(ct.astype(lse.dtype) * out, -1)
            ct_sums = 1 - jnp.moveaxis(shares, 1, -1)
            cotangents = bind(attention_cotangent_p, *fixed, lse, ct, ct_sums, **params)
            ct_query = cotangents[0].reshape(q.shape)
            return out.reshape(ct_out.shape), lse.reshape(2, n, t), ct_query, *cotangents[1:]

        actual, again = (run(q, k, v, ct_out) for _ in range(2))
    for x, y in zip(actual, again, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))
    every = np.broadcast_to(mask, (2, n, t, s))
    assert_as_dense(actual, dense(q, k, v, every, 0.2, ct_out), dtype)


@combinations(
    "t, s, n, groups, h, e, dtype, kind",
    [(63, 200, 4, 2, 64, 64), (200, 130, 2, 1, 5, 72), (70, 130, 2, 2, 128, 256)],
    ["float32", "bfloat16", "float16"],
    ["block_mask", "topology"],
)
def test_tangents_against_the_plain_form(t, s, n, groups, h, e, dtype, kind):
    """Whatever a device takes, a kernel or the composition; the plain form in float64."""
    mask = random_mask((t, s))
    stored = BlockMask.from_dense(mask) if kind == "block_mask" else Topology.from_mask(mask)
    x, dx = (operands(2, t, s, n, groups, h, e, dtype, seed) for seed in (1, 2))

    def along(x, dx, **options):
        def attend(*x):
            return sparse_attention(*x, stored, scale=0.2, return_lse=True, **options)

        return jax.jvp(attend, x, dx)[1]

    actual = jax.jit(along)(tuple(x), tuple(dx))
    with jax.enable_x64(True):
        wide = [tuple(jnp.asarray(np.asarray(a, np.float64)) for a in part) for part in (x, dx)]
        expected = jax.jit(functools.partial(along, implementation="xla"))(*wide)
    for name, a, b in zip(("d_out", "d_lse"), actual, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        atol = 4 * TOLERANCE[dtype] * max(1, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=4 * TOLERANCE[dtype], atol=atol, err_msg=name)


def test_derivatives_of_higher_order():
    with jax.enable_x64(True):
        q, k, v = operands(1, 3, 9, 2, 1, 2, 2, "float64")
        mask = BlockMask.from_dense(random_mask((3, 9), density=0.6))

        def attend(q, k, v):
            out, lse = sparse_attention(q, k, v, mask, return_lse=True)
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        check_grads(attend, (q, k, v), order=2, modes=["fwd", "rev"])


def test_linearize_and_transpose():
    with jax.enable_x64(True):
        q, k, v = operands(2, 66, 30, 2, 2, 4, 4, "float64")
        mask = BlockMask.from_dense(random_mask((66, 30)))
        attend = functools.partial(sparse_attention, mask=mask)
        xs = operands(2, 66, 30, 2, 2, 4, 4, "float64", seed=5)
        _, along = jax.jvp(attend, (q, k, v), tuple(xs))
        _, linear = jax.linearize(attend, q, k, v)
        np.testing.assert_allclose(linear(*xs), along, rtol=1e-12, atol=1e-12)
        _, pull = jax.vjp(attend, q, k, v)
        ct = operands(2, 66, 30, 2, 2, 4, 4, "float64", seed=6)[0]
        pulled = sum(jnp.vdot(a, b) for a, b in zip(pull(ct), xs, strict=True))
        np.testing.assert_allclose(pulled, jnp.vdot(ct, along), rtol=1e-12)


def test_vmap_over_operands_and_masks():
    q, k, v = operands(3, 70, 80, 2, 1, 4, 4, "float32")
    masks_of = [random_mask((70, 80), seed) for seed in range(3)]
    stacked = BlockMask.from_dense(np.stack(masks_of))
    one = [sparse_attention(q[i], k[i], v[i], BlockMask.from_dense(masks_of[i])) for i in range(3)]
    out = jax.vmap(sparse_attention)(q, k, v, stacked)
    np.testing.assert_allclose(out, jnp.stack(one), rtol=1e-5, atol=1e-6)
    shared = jax.vmap(sparse_attention, (0, None, None, 0))(q, k[0], v[0], stacked)
    expected = attention(q[1:2], k[:1], v[:1], masks_of[1])
    np.testing.assert_allclose(shared[1:2], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("by", ["query", "key", "value"])
def test_derivatives_by_one_operand(by, implementation, monkeypatch):
    """Results have the batch of all operands, also where one of them alone is batched."""
    xs = dict(zip(("query", "key", "value"), operands(1, 9, 7, 2, 1, 4, 3, "float32"), strict=True))
    dense_mask = random_mask((9, 7), density=0.5)
    topology, mask = Topology.from_mask(dense_mask), BlockMask.from_dense(dense_mask)

    def attend(x, mask):
        options = {"return_lse": True, "implementation": implementation}
        return sparse_attention(**{**xs, by: x}, mask=mask, **options)

    def everything(mask):
        of = functools.partial(attend, mask=mask)

        @jax.jit
        def run(x):
            finite = jnp.isfinite(of(x)[1])
            of_lse = jax.jacrev(lambda x: jnp.where(finite, of(x)[1], 0))(x)
            return jax.jacfwd(of)(x)[0], jax.vmap(of)(jnp.stack([x, 2 * x])), of_lse

        return run(xs[by])

    expected = everything(mask)
    without_block_masks(monkeypatch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        everything(topology),
        expected,
    )
    if by == "query":
        with pytest.raises(ValueError, match="transposed pattern"):
            jax.grad(lambda x: jnp.sum(attend(x, topology.without_transpose())[0]))(xs[by])


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("sizes", [(0, 5, 4, 4), (5, 0, 4, 4), (5, 6, 0, 3), (5, 6, 3, 0)])
def test_empty_sizes(sizes, implementation):
    t, s, h, e = sizes
    xs = operands(1, t, s, 2, 1, h, e, "float32")
    for mask in masks.causal(), Topology.from_mask(masks.causal(), (t, s)):

        def attend(*xs, mask=mask):
            return sparse_attention(*xs, mask, return_lse=True, implementation=implementation)

        gradient = jax.grad(lambda *xs: jnp.sum(attend(*xs)[0] ** 2), (0, 1, 2))

        @jax.jit
        def everything(*xs, attend=attend, gradient=gradient):
            return attend(*xs), *jax.jvp(gradient, xs, xs)

        (out, lse), gradients, tangents_of_gradients = everything(*xs)
        assert out.shape == (1, t, 2, e) and lse.shape == (1, 2, t)
        assert s or np.all(lse == -np.inf)
        for x, g, along in zip(xs, gradients, tangents_of_gradients, strict=True):
            assert x.shape == g.shape == along.shape and np.all(np.isfinite(g))


def test_rows_that_see_nothing_have_derivatives_of_zero():
    q, k, v = operands(1, 4, 5, 2, 1, 4, 4, "float32")
    nothing = BlockMask.from_dense(np.zeros((4, 5), bool))
    out, lse = sparse_attention(q, k, v, nothing, return_lse=True)

    def merged(lse):
        return merge_attention([out, out], [lse, lse])

    assert not np.any(jax.jvp(merged, (lse,), (jnp.ones_like(lse),))[1][1])
    sinks = jnp.array([-jnp.inf, 1.0])
    gradient = jax.grad(lambda sinks: jnp.sum(sparse_attention(q, k, v, nothing, sinks=sinks)))
    np.testing.assert_array_equal(gradient(sinks), [0, 0])


@pytest.mark.parametrize("implementation", ["xla", PLATFORM])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_where_it_is_seen(kind, implementation, monkeypatch):
    mask = random_mask((130, 140), density=0.1)
    q, k, v = operands(1, 130, 140, 2, 2, 8, 8, "float32")
    stored = stored_as(kind, mask, monkeypatch)
    k = k.at[:, 3, 0].set(jnp.nan)
    v = v.at[:, 70, 1].set(jnp.nan)
    q = q.at[:, 9, 0].set(jnp.nan)
    sees = [mask[:, 3], mask[:, 70]]
    sees[0] = sees[0] | ((np.arange(130) == 9) & mask.any(1))
    ct = jnp.ones((1, 130, 2, 8))
    out, lse, dq, dk, dv = differentiated(q, k, v, stored, ct, implementation=implementation)
    ones = (jnp.ones_like(q), jnp.ones_like(k), jnp.ones_like(v))
    d_out, _ = tangents(q, k, v, stored, ones, implementation=implementation)
    for head, rows in enumerate(sees):
        np.testing.assert_array_equal(np.isnan(d_out[0, :, head]).any(-1), rows)
        np.testing.assert_array_equal(np.isnan(out[0, :, head]).any(-1), rows)
        np.testing.assert_array_equal(np.isnan(dq[0, :, head]).any(-1), rows)
    # A key has NaN if a query that sees it has.
    of_keys = [(mask & rows[:, None]).any(0) for rows in sees]
    np.testing.assert_array_equal(np.isnan(dk[0, :, 0]).any(-1), of_keys[0])
    np.testing.assert_array_equal(np.isnan(dv[0, :, 0]).any(-1), of_keys[0])
    assert np.isnan(lse[0, 0, sees[0]]).all() and np.isfinite(lse[0, 1, mask.any(1)]).all()


def test_sinks():
    q, k, v = operands(2, 20, 30, 4, 2, 8, 8, "float32")
    mask = np.random.default_rng(0).random((20, 30)) < 0.5
    mask[4] = False
    sinks = jnp.asarray([0.3, -1.0, -jnp.inf, 2.0])

    def with_sinks(q, k, v, sinks):
        return sparse_attention(q, k, v, BlockMask.from_dense(mask), sinks=sinks, return_lse=True)

    def expected(q, k, v, sinks):
        wide_k, wide_v = (jnp.repeat(x, 2, 2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, wide_k, precision="highest") / np.sqrt(8)
        scores = jnp.where(mask, scores, -jnp.inf)
        column = jnp.broadcast_to(sinks[:, None, None], (2, 4, 20, 1))
        lse = jax.nn.logsumexp(jnp.concatenate([scores, column], -1), -1)
        p = jnp.where(mask, jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None]), 0)
        return jnp.einsum("bnts,bsnh->btnh", p, wide_v, precision="highest"), lse

    for a, b in zip(with_sinks(q, k, v, sinks), expected(q, k, v, sinks), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    def loss(function, q, sinks):
        out, lse = function(q, k, v, sinks)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse))

    finite = jnp.asarray([0.3, -1.0, 0.5, 2.0])
    for a, b in zip(
        *(jax.grad(functools.partial(loss, f), (0, 1))(q, finite) for f in (with_sinks, expected)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_parts_of_a_mask_merge():
    q, k, v = operands(2, 40, 50, 2, 1, 8, 8, "float32")
    whole = np.random.default_rng(0).random((40, 50)) < 0.5
    whole[3] = False
    part = np.random.default_rng(1).random((40, 50)) < 0.5

    def merged(q, k, v):
        parts = [
            sparse_attention(q, k, v, BlockMask.from_dense(m), return_lse=True)
            for m in (whole & part, whole & ~part)
        ]
        return merge_attention(*zip(*parts, strict=True))

    def at_once(q, k, v):
        return sparse_attention(q, k, v, BlockMask.from_dense(whole), return_lse=True)

    for a, b in zip(merged(q, k, v), at_once(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    a, b = (jax.grad(lambda q, f=f: jnp.sum(jnp.sin(f(q, k, v)[0])))(q) for f in (merged, at_once))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert np.all(np.isfinite(a))


def test_a_ring_of_devices_is_one_device():
    """Keys are passed around: each part of the mask is made for its queries and keys."""
    q, k, v = operands(1, 256, 256, 2, 2, 8, 8, "float32")
    mask, parts = masks.causal() & masks.band(100), 4
    size = 256 // parts
    results = []
    for i in range(parts):
        rows = slice(i * size, (i + 1) * size)
        of_parts = []
        for j in range(parts):
            columns = slice(j * size, (j + 1) * size)
            shifted = masks.offset(mask, rows=i * size, columns=j * size)
            of_parts.append(
                sparse_attention(q[:, rows], k[:, columns], v[:, columns], shifted, return_lse=True)
            )
        results.append(merge_attention(*zip(*of_parts, strict=True))[0])
    whole = sparse_attention(q, k, v, mask)
    np.testing.assert_allclose(jnp.concatenate(results, 1), whole, rtol=1e-5, atol=1e-6)


def test_nothing_is_as_large_as_the_scores():
    t = 4096
    q = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32)
    mask = BlockMask.from_mask(masks.sliding_window(64), (t, t))

    def loss(q, k, v, mask):
        return jnp.sum(sparse_attention(q, k, v, mask, implementation="xla"))

    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    compiled = step.lower(q, q, q, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < t * t * 4
