"""Sparse attention layers against the dense layer with the same mask."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from jaxsparse import BlockMask, Topology, masks, sparse_attention  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    SparseAttention,
    SparseMultiHeadAttention,
    TopologyVariable,
    verify,
)

HEADS, FEATURES, LENGTH = 4, 16, 24
MASK = (masks.band(4) | masks.random(0.8, LENGTH, band_width=4, seed=1)) & masks.causal()
TOPOLOGY = Topology.from_mask(MASK, (LENGTH, LENGTH))
DENSE_MASK = np.asarray(MASK(np.arange(LENGTH)[:, None], np.arange(LENGTH)))


def inputs(*leading, length=LENGTH, features=FEATURES, seed=0):
    return jax.random.normal(jax.random.key(seed), (*leading, length, features))


def dense_layer(**options):
    return nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, **options, rngs=nnx.Rngs(0))


def loss(layer, x, mask=None):
    return jnp.sum(jnp.sin(layer(x, mask=mask)))


def results_and_gradients(layer, x, mask=None):
    def loss(layer, x):
        y = layer(x, mask=mask)
        return jnp.sum(jnp.sin(y)), y

    run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, y), (gradients, of_x) = run(layer, x)
    return y, of_x, nnx.to_pure_dict(gradients)


@functools.cache
def dense_results(leading):
    return results_and_gradients(dense_layer(), inputs(*leading), DENSE_MASK)


@pytest.mark.smoke
@pytest.mark.parametrize("pattern", [TOPOLOGY, MASK], ids=["topology", "mask"])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=str)
def test_values_and_gradients_are_those_of_the_dense_layer(leading, pattern):
    sparse = SparseMultiHeadAttention.from_dense(dense_layer(), pattern)
    y, of_x, gradients = results_and_gradients(sparse, inputs(*leading))
    y_expected, of_x_expected, expected = dense_results(leading)
    np.testing.assert_allclose(y, y_expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_x, of_x_expected, rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), gradients, expected
    )


def test_every_spelling_is_the_same_layer():
    dense = dense_layer()
    sparse = SparseMultiHeadAttention.from_dense(dense, TOPOLOGY)
    same_seed = SparseMultiHeadAttention(HEADS, FEATURES, pattern=TOPOLOGY, rngs=nnx.Rngs(0))
    injected = dense_layer(attention_fn=SparseAttention(TOPOLOGY))
    x = inputs(2)
    for layer in (same_seed, injected):
        np.testing.assert_array_equal(layer(x), sparse(x))
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(sparse, x).shape, x.shape)


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_features": 32, "out_features": 8},
        {"num_kv_heads": 2},
        {"normalize_qk": True},
        {"use_bias": False, "dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"dropout_rate": 0.5, "deterministic": True},
        {"precision": "default"},
        {"qkv_promote_dtype": lambda x, dtype: jax.tree.map(lambda a: a.astype("float32"), x)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_dense_layer(options):
    dense = dense_layer(**options)
    sparse = SparseMultiHeadAttention.from_dense(dense, TOPOLOGY)
    x = inputs(2)
    actual, expected = sparse(x), dense(x, mask=DENSE_MASK)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    tolerance = 2e-2 if jnp.bfloat16 in options.values() else 1e-5
    np.testing.assert_allclose(
        np.float32(actual), np.float32(expected), rtol=tolerance, atol=tolerance
    )


def test_cross_attention():
    mask = np.random.default_rng(0).random((LENGTH, 10)) < 0.4
    mask[:, 0] = True  # what a query that sees nothing gets differs between the two layers
    dense = dense_layer()
    sparse = SparseMultiHeadAttention.from_dense(dense, Topology.from_mask(mask))
    q, k = inputs(2), inputs(2, length=10, seed=1)
    np.testing.assert_allclose(sparse(q, k), dense(q, k, mask=mask), rtol=1e-4, atol=1e-5)


def test_a_pattern_for_each_head():
    rng = np.random.default_rng(0)
    per_head = (rng.random((HEADS, LENGTH, LENGTH)) < 0.3) | np.eye(LENGTH, dtype=bool)
    dense = dense_layer()
    sparse = SparseMultiHeadAttention.from_dense(dense, Topology.from_mask(per_head))
    expected = dense(inputs(2), mask=per_head)
    np.testing.assert_allclose(sparse(inputs(2)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("axes", ["heads", "sequences", "both"])
def test_axes_of_a_batch_of_patterns(axes, leading):
    ones = (1,) * len(leading)
    batch = {"heads": (*ones, HEADS), "sequences": (*leading, 1), "both": (*leading, HEADS)}[axes]
    mask = np.random.default_rng(0).random((*batch, LENGTH, LENGTH)) < 0.3
    mask |= np.eye(LENGTH, dtype=bool)
    dense = dense_layer()
    sparse = SparseMultiHeadAttention.from_dense(dense, Topology.from_mask(mask))
    x = inputs(*leading)
    expected = dense(x, mask=np.broadcast_to(mask, (*leading, HEADS, LENGTH, LENGTH)))
    np.testing.assert_allclose(sparse(x), expected, rtol=1e-4, atol=1e-5)


def test_patterns_of_heads_or_of_sequences():
    patterns = Topology.from_mask(np.ones((HEADS, LENGTH, LENGTH), bool))
    layer = SparseMultiHeadAttention(HEADS, FEATURES, pattern=patterns, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="ambiguous for 4 sequences of 4 heads"):
        layer(inputs(HEADS))


class TestDropout:
    def layer(self, **options):
        return SparseMultiHeadAttention(
            HEADS, FEATURES, pattern=TOPOLOGY, dropout_rate=0.4, **options, rngs=nnx.Rngs(0)
        )

    def test_is_random_in_training_only(self):
        layer, x = self.layer(), inputs(2)
        first, second = (layer(x, deterministic=False) for _ in range(2))
        assert not np.allclose(first, second)
        plain = SparseMultiHeadAttention(HEADS, FEATURES, pattern=TOPOLOGY, rngs=nnx.Rngs(0))
        np.testing.assert_array_equal(layer(x, deterministic=True), plain(x))

    @pytest.mark.parametrize("broadcast", [True, False])
    def test_drops_the_share_and_scales_the_rest(self, broadcast):
        attend = SparseAttention(Topology.from_mask(np.ones((200, 200), bool)))
        zeros = jnp.zeros((2, 200, 3, 4))
        value = jnp.ones((2, 200, 3, 200)) * jnp.eye(200)[None, :, None, :]
        q, key = jnp.zeros((2, 200, 3, 200)), jax.random.key(0)
        options = {"dropout_rng": key, "dropout_rate": 0.4, "broadcast_dropout": broadcast}
        weights = attend(q, q, value, **options)  # the probabilities themselves
        kept = weights[weights > 0]
        np.testing.assert_allclose(kept, 1 / 200 / 0.6, rtol=1e-5)
        assert abs(kept.size / weights.size - 0.6) < 0.01
        assert bool((weights == weights[:1, :, :1]).all()) == broadcast
        plain = attend(q, q, value, dropout_rate=0.4, dropout_rng=key, deterministic=True)
        np.testing.assert_allclose(plain, 1 / 200, rtol=1e-5)
        assert attend(zeros, zeros, zeros).shape == zeros.shape


@pytest.mark.parametrize(
    "shape",
    [(LENGTH,), (2, 3, 1, 1, LENGTH), (4, LENGTH, LENGTH), (2, 3, 4, 1, 1)],
)
def test_bias_and_mask_as_flax_passes_them(shape):
    """Beside a pattern, of any shape that broadcasts."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3, LENGTH, 4, 8)), "float32") for _ in range(3))
    bias = jnp.asarray(rng.standard_normal(shape), "float32")
    seen = jnp.asarray(rng.random(shape) < 0.7)
    attend = SparseAttention(TOPOLOGY)

    def expected(bias):
        return nnx.dot_product_attention(
            q, k, v, bias=bias, mask=seen & DENSE_MASK, deterministic=True
        )

    def actual(bias):
        return attend(q, k, v, bias=bias, mask=seen, deterministic=True)

    some = jnp.broadcast_to(seen & DENSE_MASK, (2, 3, 4, LENGTH, LENGTH)).any(-1)
    some = jnp.moveaxis(some, -1, -2)[..., None]  # flax spreads rows that see nothing

    def loss(of):
        return lambda bias: jnp.sum(jnp.where(some, of(bias), 0) ** 2)

    for of in (lambda f: jnp.where(some, f(bias), 0)), (lambda f: jax.grad(loss(f))(bias)):
        np.testing.assert_allclose(of(actual), of(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="bias must broadcast to the scores' shape"):
        attend(q, k, v, bias=jnp.ones((5, LENGTH)), deterministic=True)


def test_pattern_is_a_variable_and_an_argument():
    layer = SparseMultiHeadAttention(HEADS, FEATURES, pattern=TOPOLOGY, rngs=nnx.Rngs(0))
    graphdef, parameters, rest = nnx.split(layer, nnx.Param, ...)
    assert [type(leaf) for _, leaf in nnx.to_flat_state(rest)] == [TopologyVariable]
    x = inputs(2)
    traced = jax.make_jaxpr(lambda p, r, x: nnx.merge(graphdef, p, r)(x))(parameters, rest, x)
    assert not traced.consts
    assert jax.make_jaxpr(layer)(x).consts  # what it looks like where the pattern is a constant
    verify(layer)


def test_patterns_of_masks_are_made_once(monkeypatch):
    """Of kinds of masks: a function may read what changes."""
    made = []
    of_mask = BlockMask.from_mask
    monkeypatch.setattr(BlockMask, "from_mask", lambda *xs: made.append(xs) or of_mask(*xs))
    q = inputs(2, 3).swapaxes(1, 2)
    for _ in range(2):
        SparseAttention(masks.sliding_window(5) & ~masks.padding(3))(q, q, q)
    assert len(made) == 1
    attend = SparseAttention(lambda rows, columns: columns <= rows)
    for calls in (2, 3):
        attend(q, q, q)
        assert len(made) == calls


def test_mask_functions_under_jit():
    """Functions of jax.numpy are evaluated while the program is traced."""
    ids, window = jnp.arange(LENGTH) // 8, masks.band(4)
    patterns = {
        "function": lambda rows, columns: jnp.logical_and(ids[rows] == ids[columns], rows > -1),
        "combined": window & (lambda rows, columns: jnp.equal(ids[rows], ids[columns])),
        "broadcast": lambda rows, columns: columns < 3,
        "everything": lambda rows, columns: True,
        "documents": window | masks.documents(ids),
    }
    dense, positions = dense_layer(), np.ogrid[:LENGTH, :LENGTH]
    for pattern in patterns.values():
        layer = SparseMultiHeadAttention.from_dense(dense, pattern)
        expected = dense(inputs(2), mask=jnp.broadcast_to(pattern(*positions), (LENGTH, LENGTH)))
        actual = nnx.jit(lambda layer, x: layer(x))(layer, inputs(2))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_masks_of_traced_arrays():
    q = jnp.ones((2, LENGTH, 3, 4))

    def attend(pattern):
        return jax.jit(lambda n: SparseAttention(pattern(n))(q, q, q))(LENGTH // 2)

    with pytest.raises(TypeError, match=r"padding\(<int32\[\]>\) depends on traced arrays.*nse="):
        attend(masks.padding)
    out = attend(lambda n: lambda rows, columns: columns < n)
    assert np.isfinite(out).all()
    out = attend(lambda n: Topology.from_mask(masks.padding(n), (LENGTH, LENGTH), nse=LENGTH**2))
    assert np.isfinite(out).all()


def test_new_queries_by_rows_of_the_mask():
    q, k, v = (inputs(2, HEADS, features=4, seed=seed).swapaxes(1, 2) for seed in range(3))
    full = sparse_attention(q, k, v, TOPOLOGY)
    for t, s in (1, LENGTH), (5, LENGTH), (3, 9):
        rows = Topology.from_mask(masks.offset(MASK, rows=s - t), (t, s))
        part = sparse_attention(q[:, s - t : s], k[:, :s], v[:, :s], rows)
        np.testing.assert_allclose(part, full[:, s - t : s], rtol=1e-5, atol=1e-6)


def test_linen_bridge_and_remat():
    linen = nnx.bridge.to_linen(SparseMultiHeadAttention, HEADS, FEATURES, pattern=TOPOLOGY)
    variables = linen.init(jax.random.key(0), inputs(2))
    assert set(variables) == {"params", "topology"}
    assert linen.apply(variables, inputs(2)).shape == (2, LENGTH, FEATURES)

    layer = SparseMultiHeadAttention(HEADS, FEATURES, pattern=TOPOLOGY, rngs=nnx.Rngs(0))
    plain = nnx.grad(loss)(layer, inputs(2))
    remat = nnx.grad(lambda layer, x: jnp.sum(jnp.sin(nnx.remat(lambda m, x: m(x))(layer, x))))(
        layer, inputs(2)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        nnx.to_pure_dict(plain),
        nnx.to_pure_dict(remat),
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mask": TOPOLOGY}, "or the call a mask, got both"),
        ({"is_causal": True}, "SparseAttention: is_causal can't be had"),
        ({"sow_weights": True}, "sow_weights"),
    ],
    ids=lambda options: next(iter(options)) if isinstance(options, dict) else "",
)
def test_options_that_the_pattern_replaces(options, message):
    layer = SparseMultiHeadAttention(HEADS, FEATURES, pattern=TOPOLOGY, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        layer(inputs(2), **options)


def test_documents_that_change_with_each_call():
    layer = SparseMultiHeadAttention(HEADS, FEATURES, pattern=None, rngs=nnx.Rngs(0))
    x = inputs(2)

    @nnx.jit
    def attend(layer, x, ids):
        def mask_of(ids):
            mask = masks.documents(ids) & masks.causal()
            return BlockMask.from_mask(mask, (LENGTH, LENGTH))

        return layer(x, mask=jax.vmap(mask_of)(ids).reshape_batch(2, 1))

    ids = np.array([np.arange(LENGTH) // 7, np.arange(LENGTH) // 5])
    out = attend(layer, x, ids)
    for i in range(2):
        topology = Topology.from_mask(masks.documents(ids[i]) & masks.causal(), (LENGTH, LENGTH))
        same = SparseMultiHeadAttention(HEADS, FEATURES, pattern=topology, rngs=nnx.Rngs(0))
        np.testing.assert_allclose(out[i], same(x[i]), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="or the call a mask, got neither"):
        layer(x)


def test_layers_on_one_pattern_can_be_donated():
    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List(
                SparseMultiHeadAttention(HEADS, FEATURES, pattern=TOPOLOGY, rngs=nnx.Rngs(i))
                for i in range(2)
            )

    model, x = Model(), inputs(2)
    run = nnx.jit(lambda model, x: model.layers[1](model.layers[0](x)), donate_argnums=0)
    np.testing.assert_array_equal(run(model, x), run(model, x))
    assert TOPOLOGY.nnz  # it is still there


def test_from_dense_copies():
    dense = dense_layer(dropout_rate=0.1)
    sparse = SparseMultiHeadAttention.from_dense(dense, TOPOLOGY)
    for leaf in jax.tree.leaves(nnx.state(sparse)):
        leaf.delete()
    assert np.isfinite(dense(inputs(2), deterministic=False)).all()


def test_an_attention_fn_can_not_be_chosen():
    options = {"attention_fn": lambda q, k, v, **_: v}
    with pytest.raises(ValueError, match="attention_fn can't be chosen"):
        SparseMultiHeadAttention(HEADS, FEATURES, pattern=TOPOLOGY, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must have Flax's own attention_fn"):
        SparseMultiHeadAttention.from_dense(dense_layer(**options), TOPOLOGY)


class Doubled(nnx.MultiHeadAttention):
    def __call__(self, *args, **options):
        return 2 * super().__call__(*args, **options)


def test_subclasses_are_refused_by_name():
    dense = Doubled(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"must be an nnx.MultiHeadAttention, got Doubled, a subcl"):
        SparseMultiHeadAttention.from_dense(dense, TOPOLOGY)


def test_projections_of_ones_own_are_kept():
    dense = dense_layer()
    lora = nnx.LoRA(HEADS * 4, 2, FEATURES, b_initializer=nnx.initializers.ones, rngs=nnx.Rngs(1))

    class Adapted(nnx.LinearGeneral):
        def __call__(self, x, out_sharding=None):
            return super().__call__(x) + lora(x.reshape(*x.shape[:-2], -1))

    dense.out = Adapted((HEADS, 4), FEATURES, axis=(-2, -1), rngs=nnx.Rngs(2))
    sparse = SparseMultiHeadAttention.from_dense(dense, TOPOLOGY)
    x = inputs(2)
    np.testing.assert_allclose(sparse(x), dense(x, mask=DENSE_MASK), rtol=1e-4, atol=1e-5)


def test_the_call_of_an_attention_fn():
    """By position, and with a promotion of its own, as nnx.dot_product_attention."""
    q, k, v = (jax.random.normal(jax.random.key(i), (2, LENGTH, HEADS, 4)) for i in range(3))
    attend, key = SparseAttention(TOPOLOGY), jax.random.key(3)
    by_name = attend(q, k, v, dropout_rng=key, dropout_rate=0.4, broadcast_dropout=False)
    np.testing.assert_array_equal(attend(q, k, v, None, None, False, key, 0.4), by_name)
    seen = []

    def promote(arrays, dtype):
        seen.append(dtype)
        return [x.astype(jnp.float16) for x in arrays]

    assert attend(q, k, v, dtype=jnp.float32, promote_dtype=promote).dtype == jnp.float16
    assert seen == [jnp.float32]


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, LENGTH, 2, 4), (3, 2, LENGTH, 2, 4)),
        ((2, LENGTH, 2, 4), (LENGTH, 2, 4)),
        ((LENGTH, 4), (LENGTH, 4)),
    ],
    ids=str,
)
def test_leading_dimensions_that_differ(shapes):
    q, k = map(jnp.ones, shapes)
    with pytest.raises(ValueError, match="SparseAttention: query, key and value must have shapes"):
        SparseAttention(TOPOLOGY)(q, k, k)


def test_no_batch_and_no_features():
    q = jnp.ones((0, LENGTH, 2, 4))
    assert SparseAttention(TOPOLOGY)(q, q, q).shape == q.shape
    q = jnp.ones((2, 3, LENGTH, 2, 0))
    assert SparseAttention(TOPOLOGY)(q, q, q).shape == q.shape


def test_errors():
    with pytest.raises(TypeError, match=r"pattern must be a Topology or a \(hashable\) mask"):
        SparseMultiHeadAttention(HEADS, FEATURES, pattern=3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"layer must be an nnx.MultiHeadAttention, got Linear"):
        SparseMultiHeadAttention.from_dense(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), TOPOLOGY)
    layer = SparseMultiHeadAttention(HEADS, FEATURES, pattern=TOPOLOGY, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"mask must have shape \(5, 5\), got \(24, 24\)"):
        layer(inputs(2, length=5))
    attend, q = SparseAttention(TOPOLOGY), jnp.ones((2, LENGTH, 3, 4))
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\)"):
            attend(q, q, q, dropout_rate=rate, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match="SparseAttention: dropout_rng must be given"):
        attend(q, q, q, dropout_rate=0.5)
    with pytest.raises(ValueError, match="SparseAttention: dropout_rng must be given"):
        jax.jit(lambda rate: attend(q, q, q, dropout_rate=rate))(0.5)
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    with pytest.raises(ValueError, match=r"SparseAttention: precision must be .*BF16_BF16_F32"):
        attend(q, q, q, precision=algorithm)
    with pytest.raises(ValueError, match="SparseMultiHeadAttention: precision must be"):
        SparseMultiHeadAttention(
            HEADS, FEATURES, pattern=TOPOLOGY, precision=algorithm, rngs=nnx.Rngs(0)
        )
