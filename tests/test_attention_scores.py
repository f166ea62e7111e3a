"""Functions of scores, biases, offsets and dropout in attention: every path, against float64."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problems import operands, random_mask
from checks import PLATFORM
from covering import combinations
from jax.test_util import check_grads
from score_problems import SCORES, arrays_of, dense

from jaxsparse import (
    EXPORT_DISABLED_CHECKS,
    H200,
    BlockMask,
    Indexed,
    Topology,
    explain,
    masks,
    sparse_attention,
)
from jaxsparse.ops import dropout
from jaxsparse.ops.attention_masks import _compiled_at

# Rounding of what is multiplied, relative to sums of magnitudes.
TOLERANCE = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 2.0**-6, "float16": 2.0**-9}


def loss_of(attend, cotangent):
    def loss(*xs):
        out, lse = attend(*xs)
        total = jnp.sum(out.astype(lse.dtype) * cotangent.astype(lse.dtype))
        return total + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), (out, lse)

    return loss


def assert_close(actual, expected, dtype, where):
    for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite], err_msg=f"{where} {i}")
        atol = TOLERANCE[dtype] * max(1, np.abs(y[finite]).max(initial=0))
        np.testing.assert_allclose(
            x[finite], y[finite], rtol=TOLERANCE[dtype], atol=atol, err_msg=f"{where} {i}"
        )


def compare(kind, implementation, dtype, stored_as, problem, dropped=False):
    """Results and all first gradients of a kind of scores against dense attention in float64."""
    t, s, n, groups, h = problem
    scale = 0.8 / math.sqrt(h)
    score, axes = SCORES[kind]
    sizes = {"b": 2, "n": n, "t": t, "s": s, "d": t + s - 1}
    mask = random_mask((t, s))
    stored = BlockMask.from_dense(mask) if stored_as == "block_mask" else Topology.from_mask(mask)
    wide = "float64" if dtype == "float64" else "float32"
    ids = [name for name in axes if name.startswith("ids")]
    with jax.enable_x64(dtype == "float64"):
        q, k, v = operands(2, t, s, n, groups, h, h, dtype)
        cotangent = operands(2, t, s, n, groups, h, h, dtype, seed=2)[0]
        named = arrays_of(axes, sizes, wide)
        key = jax.random.key(3) if dropped else None

        def attend(q, k, v, named):
            return sparse_attention(
                q,
                k,
                v,
                stored,
                score=score,
                operands=named,
                scale=scale,
                return_lse=True,
                dropout_key=key,
                dropout_rate=0.3,
                implementation=implementation,
            )

        run = jax.grad(loss_of(attend, cotangent), (0, 1, 2, 3), has_aux=True, allow_int=True)
        gradients, results = jax.jit(run)(q, k, v, named)
        seeds = dropout.seeds_of(key, (2, n), same_for_all=False) if dropped else None
    kept = None
    with jax.enable_x64(True):
        if dropped:
            at = np.arange(t, dtype=np.int32)[:, None], np.arange(s, dtype=np.int32)
            rows, columns = map(jnp.asarray, at)
            kept = dropout.kept(seeds[..., None, None], rows, columns, jnp.float32(0.3)) / 0.7
        xs = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, cotangent)]
        wide_named = {
            name: Indexed(jnp.asarray(np.asarray(x.array, None if name in ids else float)), x.axes)
            for name, x in named.items()
        }

        def reference(q, k, v, named):
            return dense(q, k, v, mask, score, named, scale, kept=kept)

        run = jax.grad(loss_of(reference, xs[3]), (0, 1, 2, 3), has_aux=True, allow_int=True)
        expected, of_reference = jax.jit(run)(*xs[:3], wide_named)
    assert_close(results, of_reference, dtype, "result")
    assert_close(gradients[:3], expected[:3], dtype, "gradient")
    of_operands, expected_ones = (
        [g[3][name].array for name in named if name not in ids] for g in (gradients, expected)
    )
    assert_close(of_operands, expected_ones, dtype, "operand")


# The heads of the last one are too large for kernels by warpgroups.
PROBLEMS = [(1, 1, 1, 1, 8), (150, 200, 4, 2, 16), (200, 70, 2, 1, 136)]


@combinations(
    "kind, t, s, n, groups, h, dtype, stored_as, implementation, dropped",
    SCORES,
    PROBLEMS,
    TOLERANCE,
    ["block_mask", "topology"],
    ["xla", PLATFORM],
    [False, True],
)
def test_against_dense(kind, t, s, n, groups, h, dtype, stored_as, implementation, dropped):
    compare(kind, implementation, dtype, stored_as, (t, s, n, groups, h), dropped)


@pytest.mark.skipif(PLATFORM != "cuda", reason="it is about a loop of a kernel for GPUs")
def test_sums_over_more_rows_of_tiles_than_threads():
    """258 of them add to a column; with few columns that is quick."""
    T, S = 33000, 128
    mask = BlockMask.from_mask(masks.causal(), (T, S))
    arrays = operands(1, T, S, 1, 1, 64, 64, "bfloat16")
    named = arrays_of({"far": "nd", "tilt": "s"}, {"n": 1, "s": S, "d": T + S - 1})
    cotangent = operands(1, T, S, 1, 1, 64, 64, "bfloat16", seed=2)[0]

    def gradients(q, k, v, named, mask, cotangent, implementation=None):
        def attend(q, k, v, named):
            return sparse_attention(
                *(q, k, v, mask),
                score=lambda s, row, column, far, tilt: s + far + tilt,
                operands=named,
                return_lse=True,
                implementation=implementation,
            )

        run = jax.grad(loss_of(attend, cotangent), (0, 1, 2, 3), has_aux=True)
        return jax.tree.leaves(run(q, k, v, named)[0])

    calls = explain(gradients, *arrays, named, mask, cotangent, device=H200)
    assert [call.variant for call in calls] == ["tiles", "tiles"], calls
    wide = [x.astype(jnp.float32) for x in arrays]
    in_plain_jax = functools.partial(gradients, implementation="xla")
    expected = jax.jit(in_plain_jax)(*wide, named, mask, cotangent)
    assert_close(
        jax.jit(gradients)(*arrays, named, mask, cotangent), expected, "bfloat16", "gradient"
    )


@pytest.mark.parametrize("kind", ["by row", "distances"])
def test_derivatives_of_higher_order(kind):
    score, axes = SCORES[kind]
    with jax.enable_x64(True):
        q, k, v = operands(1, 3, 5, 2, 1, 2, 2, "float64")
        sizes = {"b": 1, "n": 2, "t": 3, "s": 5, "d": 7}
        named = arrays_of(axes, sizes, "float64")
        mask = BlockMask.from_dense(np.random.default_rng(0).random((3, 5)) < 0.8)

        def attend(q, k, v, *arrays):
            read = {
                name: Indexed(x, named[name].axes) for name, x in zip(named, arrays, strict=True)
            }
            out, lse = sparse_attention(
                q, k, v, mask, score=score, operands=read, soft_cap=3.0, return_lse=True
            )
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        arrays = [x.array for x in named.values()]
        attend, modes = jax.jit(attend), ["fwd", "rev"]
        check_grads(attend, (q, k, v, *arrays), order=2, modes=modes, atol=1e-4, rtol=1e-4)


def test_forms_of_soft_caps_and_biases():
    q, k, v = operands(2, 20, 30, 4, 2, 8, 8, "float32")
    rng = np.random.default_rng(0)
    pair = jnp.asarray(rng.standard_normal((2, 4, 20, 30)), jnp.float32)

    def by_hand(s, row, column, pair):
        return 2.0 * jnp.tanh(s / 2.0) + pair

    expected = sparse_attention(q, k, v, score=by_hand, operands={"pair": Indexed(pair, "bnts")})
    for cap in 2.0, jnp.float32(2.0):
        actual = jax.jit(functools.partial(sparse_attention, q, k, v))(bias=pair, soft_cap=cap)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    for shape in (1, 20, 30), (4, 20, 30), (1, 4, 20, 30), (2, 1, 20, 30), (1, 1, 20, 30):
        small = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        whole = jnp.broadcast_to(small, (2, 4, 20, 30))
        actual, expected = (
            jax.value_and_grad(lambda bias: jnp.sum(sparse_attention(q, k, v, bias=bias) ** 2))(x)
            for x in (small, whole)
        )
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
        summed = tuple(d for d in range(4) if np.shape(whole)[d] != (1, *shape)[-4:][d])
        np.testing.assert_allclose(
            actual[1].reshape((1, *shape)[-4:]),
            jnp.sum(expected[1], summed, keepdims=True),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("offsets", [(3, 5), (np.int32(40), 0), (np.array([7, -2]), None)])
@pytest.mark.parametrize("jitted", [False, True])
def test_offsets(offsets, jitted):
    """Of masks, functions and dropout alike."""
    q, k, v = operands(2, 20, 30, 4, 2, 8, 8, "float32")
    slope = Indexed(jnp.asarray([0.1, 0.2, 0.3, 0.4]), "n")
    key = jax.random.key(0)

    def score(s, row, column, slope):
        return s - slope * (row - column) + 0.01 * row

    def attend(query_offset, key_offset, mask):
        return sparse_attention(
            q,
            k,
            v,
            mask,
            score=score,
            operands={"slope": slope},
            query_offset=query_offset,
            key_offset=key_offset,
            dropout_key=key,
            dropout_rate=0.5,
            return_lse=True,
        )

    window = masks.band(9)
    begin = [np.broadcast_to(0 if x is None else x, 2) for x in offsets]
    of = functools.partial(attend, mask=window)
    out, lse = jax.jit(of)(*offsets) if jitted else of(*offsets)
    rows, columns = (
        (begin[i][:, None] + np.arange(size)).astype(np.int32) for i, size in ((0, 20), (1, 30))
    )
    mask = abs(rows[:, None, :, None] - columns[:, None, None]) < 9
    seeds = dropout.seeds_of(key, (2, 2, 2), same_for_all=False).reshape(2, 4, 1, 1)
    kept = dropout.kept(
        seeds, *map(jnp.asarray, (rows[:, None, :, None], columns[:, None, None])), jnp.float32(0.5)
    )
    expected = dense(
        q, k, v, mask, score, {"slope": slope}, 1 / math.sqrt(8), begin, kept=kept / 0.5
    )
    assert_close((out, lse), expected, "float32", "offset")
    # A block mask stays where it is.
    stored = BlockMask.from_mask(window, (20, 30))
    mask = np.asarray(masks.band(9)(np.arange(20)[:, None], np.arange(30)))
    expected = dense(
        q, k, v, mask, score, {"slope": slope}, 1 / math.sqrt(8), begin, kept=kept / 0.5
    )
    assert_close(attend(*offsets, stored), expected, "float32", "block mask")


def test_masks_at_offsets_are_compiled_once():
    q, k, v = operands(1, 20, 30, 2, 2, 8, 8, "float32")
    _compiled_at.cache_clear()
    for begin in 3, 5:
        sparse_attention(q, k, v, masks.band(9), query_offset=jnp.int32(begin))
    assert _compiled_at.cache_info().hits == 1
    assert _compiled_at(masks.band(9), (20, 30))._cache_size() == 1


def test_vmap_over_operands_of_scores():
    q, k, v = operands(1, 20, 30, 4, 2, 8, 8, "float32")
    slopes = jnp.asarray(np.random.default_rng(0).random((3, 4)), jnp.float32)

    def attend(slopes, q):
        return sparse_attention(
            q,
            k,
            v,
            score=lambda s, row, column, slope: s - slope * abs(row - column),
            operands={"slope": Indexed(slopes, "n")},
        )

    def gradient(slopes, q):
        return jax.grad(lambda s: jnp.sum(attend(s, q) ** 2))(slopes)

    for of in attend, gradient:
        mapped = jax.vmap(of, (0, None))(slopes, q)
        one = jnp.stack([of(x, q) for x in slopes])
        np.testing.assert_allclose(mapped, one, rtol=1e-5, atol=1e-6)


def _attend_with_all(q, k, v, slope, pair, tilt, far, sinks, seeds):
    return sparse_attention(
        q,
        k,
        v,
        masks.causal(),
        score=lambda s, row, column, slope, pair, tilt, far: (
            jnp.tanh(s * pair) - slope * abs(row - column) + tilt * far
        ),
        operands={
            "slope": Indexed(slope, "n"),
            "pair": Indexed(pair, "ts"),
            "tilt": Indexed(tilt, "s"),
            "far": Indexed(far, "nd"),
        },
        sinks=sinks,
        dropout_key=seeds,
        dropout_rate=0.5,
    )


def _gradient_with_all(*operands):
    *floating, seeds = operands
    return jax.grad(lambda *xs: jnp.sum(_attend_with_all(*xs, seeds) ** 2), range(8))(*floating)


@pytest.mark.several_devices(4)
@pytest.mark.parametrize("of", [_attend_with_all, _gradient_with_all])
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_as_on_one_device(kind, of):
    """Over sequences and groups of heads, by automatic and explicit axes."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    spec = jax.sharding.PartitionSpec
    qkv = operands(2, 20, 30, 4, 2, 8, 8, "float32")
    axes = {"slope": "n", "pair": "ts", "tilt": "s", "far": "nd"}
    named = arrays_of(axes, {"n": 4, "t": 20, "s": 30, "d": 49})
    others = *(x.array for x in named.values()), jnp.arange(4.0), jax.random.key(0)
    expected = jax.jit(of)(*qkv, *others)
    with jax.set_mesh(mesh):
        by_heads = jax.sharding.NamedSharding(mesh, spec("x", None, "y"))
        cut = [jax.device_put(x, by_heads) for x in qkv]
        actual = jax.jit(of)(
            *cut, *jax.device_put(others, jax.sharding.NamedSharding(mesh, spec()))
        )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected
    )


@pytest.mark.several_devices(4)
def test_inside_of_shard_map_as_on_one_device():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=auto)
    q, k, v = operands(2, 20, 30, 4, 2, 8, 8, "float32")
    sizes = {"n": 4, "t": 20, "s": 30}
    slope, pair = (x.array for x in arrays_of({"slope": "n", "pair": "ts"}, sizes).values())
    spec = jax.sharding.PartitionSpec
    by_heads = spec("x", None, "y")

    def without_dropout(q, k, v, slope, pair):
        return sparse_attention(
            q,
            k,
            v,
            score=lambda s, row, column, slope, pair: s * pair - slope * abs(row - column),
            operands={"slope": Indexed(slope, "n"), "pair": Indexed(pair, "ts")},
        )

    mapped = jax.shard_map(
        without_dropout,
        mesh=mesh,
        in_specs=(by_heads, by_heads, by_heads, spec("y"), spec()),
        out_specs=by_heads,
    )
    of_loss = [
        jax.jit(jax.grad(lambda *xs, f=f: jnp.sum(f(*xs) ** 2), (0, 1, 3, 4)))(q, k, v, slope, pair)
        for f in (mapped, without_dropout)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *of_loss)


def test_export():
    """With operands as arguments; the program for GPUs holds the printed function."""
    q, k, v = operands(2, 64, 128, 4, 2, 64, 64, "bfloat16")
    slope = Indexed(jnp.asarray([0.1, 0.2, 0.3, 0.4]), "n")

    @jax.jit
    def attend(q, k, v, slope):
        return sparse_attention(
            q,
            k,
            v,
            score=lambda s, row, column, slope: s - slope * abs(row - column),
            operands={"slope": slope},
        )

    exported = jax.export.export(
        attend, platforms=("cpu", "cuda"), disabled_checks=EXPORT_DISABLED_CHECKS
    )(q, k, v, slope)
    assert "struct Score" in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    if PLATFORM == "cpu":
        np.testing.assert_array_equal(again.call(q, k, v, slope), attend(q, k, v, slope))


def test_patterns_without_block_masks(monkeypatch):
    """All derivatives by entries, with functions that take whole rows to -infinity."""
    monkeypatch.setattr("jaxsparse.ops.sparse_attention.block_mask", lambda mask: None)
    for kind in SCORES:
        compare(kind, None, "float32", "topology", (63, 70, 4, 2, 8), dropped=True)
