"""Attention with few queries: kernels that cut the keys into parts, keys in pages, lengths."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problems import operands, random_mask
from checks import PLATFORM
from covering import combinations
from jax.test_util import check_grads
from test_attention import TOLERANCE

from jaxsparse import H200, BlockMask, Topology, backend, explain, masks, sparse_attention
from jaxsparse.ops.padded_heads import fits_decode

# Those that take block masks: on a GPU the ones for few queries.
VARIANTS = [
    (PLATFORM, name)
    for name in backend.TARGETS["attention"]["variants"].get(PLATFORM, [])
    if name.startswith("decode" if PLATFORM == "cuda" else "tiles")
]


def dense(q, k, v, mask, scale):
    """Out and lse in float64; a value that is not finite makes rows NaN that see it."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    with np.errstate(invalid="ignore"):
        scores = np.where(mask, np.einsum("btnh,bsnh->bnts", q, k) * scale, -np.inf)
        most = np.max(scores, -1, keepdims=True, initial=-np.inf)
        p = np.where(mask, np.exp(scores - np.where(most == -np.inf, 0, most)), 0)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total == 0, -np.inf, most + np.log(total))[..., 0]
    finite = np.isfinite(v)
    out = np.einsum("bnts,bsnh->btnh", p / np.where(total == 0, 1, total), np.where(finite, v, 0))
    seen = np.broadcast_to(mask, scores.shape).astype(float)
    wrong = np.einsum("bnts,bsnh->btnh", seen, ~finite) > 0
    return np.where(wrong, np.nan, out), lse


def assert_as_dense(actual, expected, dtype):
    for name, x, y in zip(("out", "lse"), actual, expected, strict=True):
        limit = TOLERANCE[dtype]
        np.testing.assert_allclose(
            np.asarray(x, np.float64), y, rtol=limit, atol=limit, err_msg=name
        )


# Sequences, queries, keys, heads, key heads, and the sizes of heads.
PROBLEMS = [
    (1, 1, 1, 1, 1, 64, 64),
    (3, 1, 1025, 8, 1, 128, 128),
    (2, 3, 300, 6, 2, 96, 32),
    (2, 16, 517, 4, 4, 64, 64),
    (1, 5, 130, 16, 2, 128, 128),  # 40 rows of a key head
    (2, 40, 257, 2, 1, 48, 160),
]
MASKS = {"all": None, "one": (), "sequences": (0, 1), "heads": (1, -1), "each": (0, -1)}


@pytest.mark.parametrize("implementation, variant", [("xla", None), *VARIANTS])
@combinations("b, t, s, n, groups, h, e, kind, dtype", PROBLEMS, MASKS, ["bfloat16", "float16"])
def test_against_dense(b, t, s, n, groups, h, e, kind, dtype, implementation, variant):
    q, k, v = operands(b, t, s, n, groups, h, e, dtype)
    mask, seen = None, np.ones((t, s), bool)
    if MASKS[kind] is not None:
        sizes = tuple({0: b, -1: n}.get(size, size) for size in MASKS[kind])
        seen = np.stack([random_mask((t, s), seed) for seed in range(int(np.prod(sizes)))])
        seen = seen.reshape(*sizes, t, s)
        mask = BlockMask.from_dense(seen)
    attend = jax.jit(
        functools.partial(
            sparse_attention, return_lse=True, implementation=implementation, variant=variant
        )
    )
    actual = attend(q, k, v, mask)
    assert_as_dense(actual, dense(q, k, v, seen, h**-0.5), dtype)
    for x, y in zip(actual, attend(q, k, v, mask), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation, variant", [("xla", None), *VARIANTS])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("t", [1, 3])
def test_bad_numbers_stay_where_they_are_seen(t, bad, implementation, variant):
    q, k, v = operands(2, t, 700, 4, 2, 64, 64, "bfloat16")
    seen = np.random.default_rng(0).random((t, 700)) < 0.5
    seen[:, [3, 600]], seen[:, 400] = False, np.arange(t) == 1
    k = k.at[:, [3, 650], 0, 5].set(np.nan)
    v = v.at[:, 600].set(bad).at[:, 400, 1, 7].set(bad)
    seen[:, 650] = np.arange(t) == 2
    out = sparse_attention(
        q, k, v, BlockMask.from_dense(seen), implementation=implementation, variant=variant
    )
    finite = np.isfinite(np.asarray(out, np.float32)).all(-1)  # sequences, queries, heads
    expected = np.ones((2, t, 4), bool)
    expected[:, 2:, :2] = False
    expected[:, 1:2, 2:] = False
    np.testing.assert_array_equal(finite, expected)


# ---- Pages ----


def paged(b, pages, size, groups, h, e, dtype, seed=3):
    """Pools of keys and values, numbers of pages, and the keys and values in their order."""
    rng = np.random.default_rng(seed)
    pool = b * pages + 3
    key, value = (
        jnp.asarray(rng.standard_normal((pool, size, groups, width)), dtype) for width in (h, e)
    )
    numbers = rng.permutation(pool)[: b * pages].reshape(b, pages)
    in_order = (x[numbers].reshape(b, pages * size, groups, -1) for x in (key, value))
    return key, value, jnp.asarray(numbers, jnp.int32), *in_order


PAGED = [
    (implementation, variant)
    for implementation, variant in [("xla", None), (None, None), (PLATFORM, "decode")]
    if variant is None or PLATFORM == "cuda"
]


@pytest.mark.parametrize("implementation, variant", PAGED)
@pytest.mark.parametrize("size", [64, 128, 192])
@pytest.mark.parametrize("t", [1, 4])
def test_pages(t, size, implementation, variant):
    dtype = "bfloat16"
    key, value, pages, k, v = paged(3, 5, size, 2, 64, 64, dtype)
    (q,) = operands(3, t, 1, 6, 2, 64, 64, dtype)[:1]
    lengths = np.array([5 * size, 0, 2 * size + 7])
    mask = BlockMask.from_lengths(lengths, (t, 5 * size), causal=True).reshape_batch(3, 1)
    options = {"implementation": implementation, "variant": variant, "return_lse": True}
    # Pages that nothing sees may be any; NaN in them stays there.
    unseen = np.arange(5) * size >= lengths[:, None]
    wild = jnp.where(unseen, np.array([-1, 10**9, -(2**31), 20, 17]), pages)
    seen = np.unique(np.asarray(pages)[~unseen])
    nowhere = np.setdiff1d(np.arange(len(key)), seen)
    key, value = (x.at[nowhere].set(np.nan) for x in (key, value))
    attend = jax.jit(functools.partial(sparse_attention, **options))
    actual = attend(q, key, value, mask, pages=wild)
    ends = lengths[:, None, None] - (t - 1 - np.arange(t)[:, None])
    expected = dense(q, k, v, (np.arange(5 * size) < ends)[:, None], 64**-0.5)
    assert_as_dense(actual, expected, dtype)
    alone = sparse_attention(q[2], key, value, mask_of_one(lengths[2], t, 5 * size), pages=wild[2])
    np.testing.assert_allclose(
        np.float32(alone), np.float32(actual[0][2]), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def mask_of_one(length, t, s):
    return BlockMask.from_lengths(length, (t, s), causal=True)


def test_derivatives_of_pages():
    with jax.enable_x64(True):
        key, value, pages, *_ = paged(2, 2, 3, 1, 2, 3, "float64")
        (q,) = operands(2, 2, 1, 2, 1, 2, 2, "float64")[:1]
        mask = Topology.from_mask(masks.padding(5), (2, 6))

        def attend(q, key, value):
            return sparse_attention(q, key, value, mask, pages=pages, return_lse=True)

        check_grads(jax.jit(attend), (q, key, value), order=1, modes=["fwd", "rev"])
        each = [sparse_attention(q[i], key, value, mask, pages=pages[i]) for i in range(2)]
        mapped = jax.vmap(lambda q, pages: sparse_attention(q, key, value, mask, pages=pages))
        np.testing.assert_allclose(mapped(q, pages), jnp.stack(each), rtol=1e-12)


# ---- Lengths ----


@pytest.mark.parametrize("shape", [(1, 1), (3, 513), (64, 700)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 130, 500])
def test_masks_of_lengths(shape, causal, window):
    t, s = shape
    chosen = np.random.default_rng(0).integers(0, s + 1, 4)
    lengths = np.array([-1, 0, 1, 2, 127, 128, 129, 257, s - 1, s, s + 1, 2**31 - 1, *chosen])
    mask = jax.jit(
        lambda lengths: BlockMask.from_lengths(lengths, shape, causal=causal, window=window)
    )(lengths).verify()
    ends = np.clip(lengths, 0, s)[:, None, None]
    ends = ends - (t - 1 - np.arange(t)[:, None] if causal else 0)
    begins = ends - (s + t if window is None else window)
    columns = np.arange(s)
    expected = np.broadcast_to((begins <= columns) & (columns < ends), (len(lengths), t, s))
    np.testing.assert_array_equal(mask.to_dense(), expected)
    np.testing.assert_array_equal(mask.T.to_dense(), expected.swapaxes(1, 2))
    np.testing.assert_allclose(mask.density, expected.mean((1, 2)), rtol=1e-12)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["int", "uint"])
def test_lengths_of_any_integers(kind, bits):
    """A type may be too narrow for S, or hold more than int32."""
    dtype = np.dtype(f"{kind}{bits}")
    limits = np.iinfo(dtype)
    lengths = np.array([limits.min, 0, 100, 127, limits.max], dtype)
    expected = np.arange(300) < np.array([min(max(int(n), 0), 300) for n in lengths])[:, None]
    with jax.enable_x64(True):
        in_program = jax.jit(lambda n: BlockMask.from_lengths(n, (1, 300)))(lengths)
    for mask in BlockMask.from_lengths(lengths, (1, 300)), in_program:
        np.testing.assert_array_equal(mask.to_dense()[:, 0], expected)


def test_a_mask_of_a_length_costs_little():
    """Nothing in the program has a number for each position, or for each of a cell."""
    s = 2**20
    make = jax.make_jaxpr(lambda n: BlockMask.from_lengths(n, (1, s), causal=True).rows)
    most = max(v.aval.size for eqn in make(3).jaxpr.eqns for v in eqn.outvars)
    assert most <= 2 * s // 128 and make(3).jaxpr.outvars[3].aval.shape == (6, 128)


# ---- What runs ----


@pytest.mark.parametrize(
    ("t", "n", "h", "dtype", "expected"),
    [
        (1, 8, 128, "bfloat16", "decode"),
        (16, 8, 96, "float16", "decode"),
        (64, 64, 128, "bfloat16", "tiles"),
        (65, 8, 128, "bfloat16", "tiles"),
        (1, 8, 128, "float32", "tiles_mma"),
        (1, 8, 264, "bfloat16", None),
    ],
)
def test_explain(t, n, h, dtype, expected):
    q, k = (jax.ShapeDtypeStruct(s, dtype) for s in ((4, t, n, h), (4, 8192, 8, h)))
    (call,) = explain(lambda q, k: sparse_attention(q, k, k), q, k, device=H200)
    assert call.variant == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sizes_that_layers_decode_by_a_kernel(dtype):
    """What `fits_decode` says is what the kernel says."""
    found = set()
    for h, e in (16, 32), (8, 32), (16, 16), (24, 64), (48, 160), (256, 256), (272, 32), (16, 288):
        q, k, v = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape in ((2, 1, 4, h), (2, 256, 4, h), (2, 256, 4, e))
        )
        (call,) = explain(
            functools.partial(sparse_attention, variant="decode"), q, k, v, device=H200
        )
        assert fits_decode(dtype, (h, e)) == bool(call.variants), (h, e)
        found.add(bool(call.variants))
    assert found == ({False} if dtype == "float32" else {False, True})


@pytest.mark.parametrize(
    ("t", "size", "expected"), [(1, 64, "decode"), (1, 48, None), (65, 64, None)]
)
def test_explain_pages(t, size, expected):
    types = ((4, t, 8, 128), "bfloat16"), ((99, size, 2, 128), "bfloat16"), ((4, 7), "int32")
    arguments = [jax.ShapeDtypeStruct(*each) for each in types]
    (call,) = explain(
        lambda q, k, pages: sparse_attention(q, k, k, pages=pages), *arguments, device=H200
    )
    assert call.variant == expected
    assert expected or "attention, of gathered pages, because no kernel reads pages" in str(call)


def test_errors():
    key, value, pages, *_ = paged(2, 3, 4, 2, 8, 8, "float32")
    q = jnp.ones((2, 1, 4, 8))
    with pytest.raises(TypeError, match="sparse_attention: pages must be integers, got float32"):
        sparse_attention(q, key, value, pages=pages.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"pages must have shape \(B, W\) for a query .*, got \(3"):
        sparse_attention(q, key, value, pages=pages[0])
    with pytest.raises(ValueError, match=r"must have shapes \(P, Z, K, 8\) and \(P, Z, K, E\)"):
        sparse_attention(q, key[0], value[0], pages=pages)
    with pytest.raises(ValueError, match="2 key heads must divide 3"):
        sparse_attention(q[:, :, :3], key, value, pages=pages)
    with pytest.raises(ValueError, match=r"mask must have shape \(1, 12\), got \(1, 11\)"):
        sparse_attention(q, key, value, BlockMask.from_lengths(3, (1, 11)), pages=pages)
    grouped = BlockMask.from_dense(np.ones((1, 12), bool), column_order=np.arange(12)[::-1])
    with pytest.raises(ValueError, match="with pages the mask must not be regrouped"):
        sparse_attention(q, key, value, grouped, pages=pages)
    with pytest.raises(TypeError, match="from_lengths: lengths must be integers, got float64"):
        BlockMask.from_lengths(3.0, (1, 11))
    with pytest.raises(ValueError, match=r"shape must be \(T, S\), 1 <= T <= 64 .*, got \(65, 3\)"):
        BlockMask.from_lengths(3, (65, 3))
    with pytest.raises(ValueError, match="window"):
        BlockMask.from_lengths(3, (1, 3), window=0)
