"""PackedLinear: its results, its state, its gradients; and how sparsify chooses it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxsparse import pruning, timing
from jaxsparse.nn import PackedArray, PackedLinear, SparseLinear


def layers(**options):
    sparse = SparseLinear(300, 70, sparsity=0.6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
    if sparse.bias is not None:
        sparse.bias[...] = jnp.linspace(-1, 1, 70)
    return sparse, PackedLinear.from_sparse(sparse)


@pytest.mark.parametrize("options", [{}, {"use_bias": False, "activation": "gelu"}])
def test_results_are_those_of_sparse_linear(options):
    sparse, packed = layers(**options)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 300)), jnp.bfloat16)
    y, expected = nnx.jit(lambda layer, x: layer(x))(packed, x), sparse(x)
    assert y.shape == (2, 3, 70) and y.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (y, expected)), atol=0.03)
    wide = packed(x.astype(jnp.float32))
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, np.asarray(expected, np.float32), atol=0.03)


def test_state():
    """Arrays are no parameters, and come back from a pure dict."""
    _, packed = layers()
    assert set(nnx.state(packed, nnx.Param)) == {"bias"}
    assert set(nnx.state(packed, PackedArray)) == {"values", "masks", "starts", "panels", "rows"}
    graphdef, state = nnx.split(packed)
    pure = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    blank = jax.tree.map(jnp.zeros_like, state)
    nnx.replace_by_pure_dict(blank, pure)
    again = nnx.merge(graphdef, blank)
    x = jnp.ones((1, 300), jnp.bfloat16)
    np.testing.assert_array_equal(again(x), packed(x))
    again.weight.verify()


def test_gradients():
    """Of the inputs and the bias; weights are frozen."""
    sparse, packed = layers()
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 300)), jnp.bfloat16)

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x).astype(jnp.float32)))

    (got, of_x), (expected, of_x_expected) = (
        nnx.grad(loss, argnums=(0, 1))(layer, x) for layer in (packed, sparse)
    )
    assert set(got) == {"bias"}
    np.testing.assert_allclose(got["bias"][...], expected["bias"][...], atol=0.02)
    np.testing.assert_allclose(
        *(np.asarray(z, np.float32) for z in (of_x, of_x_expected)), atol=0.05
    )


def test_errors():
    with pytest.raises(TypeError, match="weight must be Packed, got ndarray"):
        PackedLinear(np.ones((2, 2)))
    with pytest.raises(TypeError, match="must be a SparseLinear, got Linear"):
        PackedLinear.from_sparse(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    wide = SparseLinear(8, 4, sparsity=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float16, got float32"):
        PackedLinear.from_sparse(wide)


def pruned(dtype):
    layer = nnx.Linear(300, 70, dtype=dtype, rngs=nnx.Rngs(0))
    kernel = layer.kernel[...]
    layer.kernel[...] = jnp.where(jnp.abs(kernel) > 0.05, kernel, 0)
    return layer


def measured(monkeypatch, *microseconds):
    """What layers take: dense, sparse and packed."""

    def measure(programs, **_):
        return [
            timing.Timing(us, (us, us), (us, us), us, None, "wall", 1, 1)
            for us in microseconds[: len(programs)]
        ]

    monkeypatch.setattr(timing, "measure_in_turns", measure)


@pytest.mark.parametrize(
    "microseconds, now", [((3, 2, 1), "packed"), ((3, 1, 2), "sparse"), ((1, 3, 2), "dense")]
)
def test_sparsify_keeps_the_fastest(microseconds, now, monkeypatch):
    measured(monkeypatch, *microseconds)
    model, x = pruned(jnp.bfloat16), jnp.ones((2, 300), jnp.bfloat16)
    result, table = pruning.sparsify(model, x, packed=True)
    expected = {"packed": PackedLinear, "sparse": SparseLinear, "dense": nnx.Linear}[now]
    assert type(result) is expected
    (row,) = table.rows
    assert row["packed"] == (now == "packed")
    assert row["packed_seconds"] == pytest.approx(1e-6 * microseconds[2])
    assert row["packed_bytes"] < row["sparse_bytes"] and "us packed" in str(table)
    np.testing.assert_allclose(*(np.asarray(m(x), np.float32) for m in (result, model)), atol=0.03)


def test_densify():
    _, packed = layers()
    dense = pruning.densify(packed)
    assert type(dense) is nnx.Linear and dense.dtype == jnp.bfloat16
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 300)), jnp.bfloat16)
    np.testing.assert_allclose(*(np.asarray(m(x), np.float32) for m in (dense, packed)), atol=0.03)
    with pytest.raises(ValueError, match="a PackedLinear was made with activation='relu'"):
        pruning.densify(layers(activation="relu")[1])


def test_sparsify_rounds_nothing_by_itself(monkeypatch):
    """What computes in float32 is not packed; nor is anything unless it is asked for."""
    measured(monkeypatch, 3, 2, 1)
    for dtype, packed in (None, True), (jnp.bfloat16, False):
        result, table = pruning.sparsify(pruned(dtype), jnp.ones((2, 300)), packed=packed)
        assert type(result) is SparseLinear and table.rows[0]["packed_bytes"] is None
        assert "packed" not in str(table)
