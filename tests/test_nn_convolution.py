"""DepthwiseConv and SparseConv1x1: results, gradients, errors; sparsify of such convolutions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from sparsify_problems import pruned, sparsified  # noqa: E402

from jaxsparse.nn import DepthwiseConv, SparseConv1x1  # noqa: E402
from jaxsparse.pruning import densify, load, save  # noqa: E402

IN, OUT = 12, 7


def images(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.smoke
@pytest.mark.parametrize("channel_axis", [0, -1])
def test_sparse_conv_is_the_dense_one(channel_axis):
    dense = pruned(nnx.Conv(IN, OUT, (1, 1), rngs=nnx.Rngs(0)))
    dense.bias[...] = jnp.linspace(-1, 1, OUT)
    layer = SparseConv1x1.from_dense(dense, activation="relu", channel_axis=channel_axis)
    assert layer.values.shape == (IN * OUT // 4,)
    x = images(2, 3, 5, IN)
    move = (lambda y: jnp.moveaxis(y, -1, 0)) if channel_axis == 0 else lambda y: y

    def loss(layer, x):
        y = layer(x)
        return jnp.sum(jnp.sin(y)), y

    gradient = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, y), (of_layer, of_x) = gradient(layer, move(x))
    expected = nnx.value_and_grad(
        lambda dense, x: loss(lambda x: jax.nn.relu(dense(x)), x), argnums=(0, 1), has_aux=True
    )
    (_, dense_y), (of_dense, of_dense_x) = expected(dense, x)
    np.testing.assert_allclose(y, move(dense_y), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_x, move(of_dense_x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_layer["bias"][...], of_dense["bias"][...], rtol=1e-5, atol=1e-6)
    matrix = np.asarray(of_dense["kernel"][...]).reshape(IN, OUT).T
    stored = matrix[np.asarray(dense.kernel[...]).reshape(IN, OUT).T != 0]
    np.testing.assert_allclose(of_layer["values"][...], stored, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(IN,), (IN, 4), (IN, 0, 3, 3), (IN, 2, 3, 1)])
def test_channels_come_first(shape):
    layer = SparseConv1x1(
        IN, OUT, sparsity=0.5, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    x = images(*shape)
    y = layer(x)
    assert y.shape == (OUT, *shape[1:]) and y.dtype == jnp.bfloat16
    expected = jnp.tensordot(layer.weight.todense(), x, 1)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.05, rtol=0.05)


def test_depthwise_conv_is_one_of_flax_in_groups():
    rngs = nnx.Rngs(0)
    layer = DepthwiseConv(IN, 2, kernel_size=(3, 5), activation="relu", rngs=rngs)
    layer.bias[...] = jnp.linspace(-1, 1, IN)
    grouped = nnx.Conv(IN, IN, (3, 5), 2, feature_group_count=IN, rngs=rngs)
    grouped.kernel[...] = jnp.moveaxis(layer.kernel[...], 0, -1)[:, :, None]
    grouped.bias[...] = layer.bias[...]
    x = images(2, 7, 6, IN)
    expected = jnp.moveaxis(jax.nn.relu(grouped(x)), -1, 0)
    np.testing.assert_allclose(layer(jnp.moveaxis(x, -1, 0)), expected, rtol=1e-5, atol=1e-5)
    by_images = nnx.clone(layer)
    by_images.channel_axis = 1
    y = by_images(jnp.moveaxis(x, -1, 1))
    np.testing.assert_allclose(y, expected.swapaxes(0, 1), rtol=1e-5, atol=1e-5)


def test_variances_are_kept():
    layer = DepthwiseConv(400, use_bias=False, rngs=nnx.Rngs(0))
    assert jnp.std(layer.kernel[...]) == pytest.approx(1 / 3, rel=0.05)


class Separable(nnx.Module):
    """A separable block as it is written with Flax, channels last."""

    def __init__(self, rngs):
        self.wide = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.mix = nnx.Conv(4, 8, (1, 1), rngs=rngs)
        self.row = nnx.Conv(8, 8, 1, padding="VALID", use_bias=False, rngs=rngs)
        self.strided = nnx.Conv(8, 4, (1, 1), 2, rngs=rngs)
        self.grouped = nnx.Conv(4, 4, (1, 1), feature_group_count=2, rngs=rngs)
        self.padded = nnx.Conv(4, 4, (1, 1), padding=1, rngs=rngs)

    def __call__(self, x):
        x = self.row(jax.nn.relu(self.mix(self.wide(x))))
        return self.padded(self.grouped(self.strided(x)))


def test_sparsify_and_back(tmp_path):
    model = pruned(Separable(nnx.Rngs(0)))
    x = images(2, 5, 6, 4)
    sparse, table = sparsified(model, x)
    rows = {row["path"]: row["kept_dense"] for row in table.rows}
    assert {path for path, reason in rows.items() if reason is None} == {"mix", "row"}
    assert rows["wide"] == "such a Conv has no sparse form"
    assert "strides must be 1" in rows["strided"] and "2 groups" in rows["grouped"]
    assert "pads its inputs" in rows["padded"]
    assert type(sparse.mix) is type(sparse.row) is SparseConv1x1
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-5)
    save(tmp_path / "model", sparse)
    loaded = load(tmp_path / "model", lambda: Separable(nnx.Rngs(1)))
    assert (type(loaded.mix), loaded.row.kernel_size) == (SparseConv1x1, (1,))
    np.testing.assert_array_equal(loaded(x), sparse(x))
    again = densify(sparse)
    assert jax.tree.structure(nnx.state(again)) == jax.tree.structure(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    np.testing.assert_array_equal(again(x), model(x))
    assert again.row.kernel_size == (1,)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: conv()(images(4, 2)), ValueError, "must have 12 channels along axis 0, got shape"),
        (lambda: conv(channel_axis=1), ValueError, "channel_axis must be 0 or -1, got 1"),
        (lambda: conv(sparsity=None), ValueError, "SparseConv1x1: needs either sparsity or"),
        (lambda: densify(conv()), ValueError, "densify: nnx.Conv has its channels last"),
        (lambda: densify(conv(activation="relu")), ValueError, "nnx.Conv has no activation"),
        (
            lambda: SparseConv1x1.from_dense(nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(0))),
            ValueError,
            "SparseConv1x1.from_dense: its window is 3 x 3",
        ),
        (
            lambda: SparseConv1x1.from_dense(nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
            TypeError,
            "layer must be an nnx.Conv, got Linear",
        ),
        (
            lambda: SparseConv1x1.from_dense(
                nnx.Conv(4, 4, (1, 1), rngs=nnx.Rngs(0)), sparsity=0.5, channel_axis=1
            ),
            ValueError,
            "SparseConv1x1.from_dense: channel_axis must be 0 or -1, got 1",
        ),
        (lambda: depthwise(features=0), ValueError, "DepthwiseConv: features must be >= 1, got 0"),
        (lambda: depthwise(kernel_size=3), ValueError, r"kernel_size must be \(kh, kw\), got 3"),
        (lambda: depthwise(kernel_size=(3, 0)), ValueError, "kernel_size must be >= 1, got 0"),
        (lambda: DepthwiseConv(4.5, rngs=nnx.Rngs(0)), TypeError, "features must be an integer"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def depthwise(**options):
    return DepthwiseConv(**{"features": 4, "rngs": nnx.Rngs(0)} | options)


def conv(**options):
    return SparseConv1x1(IN, OUT, **{"sparsity": 0.5, "rngs": nnx.Rngs(0)} | options)
