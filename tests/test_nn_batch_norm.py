"""fold_batch_norm: the same results with fewer layers, and what has to stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from jaxsparse.nn import DepthwiseConv, SparseConv1x1, SparseLinear, fold_batch_norm  # noqa: E402
from jaxsparse.nn.batch_norm import Identity  # noqa: E402

CHANNELS = 6


def norm(seed=0, features=CHANNELS, **options):
    """One with statistics and parameters that change everything."""
    layer = nnx.BatchNorm(features, rngs=nnx.Rngs(0), **options)
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    layer.mean[...] = jax.random.normal(next(keys), (features,))
    layer.var[...] = jax.random.uniform(next(keys), (features,), minval=0.1, maxval=3)
    for parameter in (layer.scale, layer.bias):
        if parameter is not None:
            parameter[...] = jax.random.normal(next(keys), (features,))
    return layer


class Chain(nnx.Module):
    """Layers one behind the other, each followed by a function."""

    def __init__(self, *layers, between=lambda x: x):
        self.layers = nnx.List(layers)
        self.between = between

    def __call__(self, x):
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def remaining(model):
    return [type(layer).__name__ for layer in model.layers]


def folded(model, x):
    """The folded model, whose results are those of the model, which is left as it was."""
    model.eval()
    expected = model(x)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    result = fold_batch_norm(model, x)
    actual = result(x)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
    after = nnx.to_pure_dict(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    return result


# With a shape of inputs that it takes.
LAYERS = {
    "Conv": (lambda r: nnx.Conv(4, CHANNELS, (3, 2), strides=2, rngs=r), (2, 5, 5, 4), -1),
    "grouped": (
        lambda r: nnx.Conv(6, CHANNELS, (3,), feature_group_count=3, use_bias=False, rngs=r),
        (2, 5, 6),
        -1,
    ),
    "Linear": (lambda r: nnx.Linear(4, CHANNELS, use_bias=False, rngs=r), (3, 4), -1),
    "SparseLinear": (lambda r: SparseLinear(9, CHANNELS, sparsity=0.6, rngs=r), (3, 9), -1),
    "DepthwiseConv": (lambda r: DepthwiseConv(CHANNELS, 2, rngs=r), (CHANNELS, 2, 5, 4), 0),
    "by_images": (
        lambda r: DepthwiseConv(CHANNELS, channel_axis=1, use_bias=False, rngs=r),
        (2, CHANNELS, 3, 4),
        1,
    ),
    "SparseConv1x1": (
        lambda r: SparseConv1x1(9, CHANNELS, sparsity=0.5, use_bias=False, rngs=r),
        (9, 2, 3, 1),
        0,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("options", [{}, {"use_scale": False, "use_bias": False}], ids=str)
def test_each_layer(name, options):
    make, shape, axis = LAYERS[name]
    layer = make(nnx.Rngs(1))
    if layer.bias is not None:
        layer.bias[...] = jnp.linspace(-1, 1, CHANNELS)
    model = Chain(layer, norm(axis=axis, epsilon=0.01, **options))
    result = folded(model, jax.random.normal(jax.random.key(2), shape))
    assert remaining(result) == [type(layer).__name__, "Identity"]
    assert not nnx.state(result, nnx.BatchStat)
    if layer.bias is None:  # what a layer gets is a parameter like any other
        assert isinstance(result.layers[0].bias, nnx.Param)


class Residual(nnx.Module):
    """The first layer's result is used twice, the second one's by the norm alone."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 6, rngs=rngs), norm(), nnx.Linear(6, 6, rngs=rngs)])
        self.other = norm(1)

    def __call__(self, x):
        first = self.layers[0](x)
        second = self.other(self.layers[2](self.layers[1](first)))
        return first + second


def linear(inputs=4, seed=1, **options):
    return nnx.Linear(inputs, CHANNELS, rngs=nnx.Rngs(seed), **options)


def tied():
    """Two layers with one kernel."""
    one, other = linear(6), linear(6)
    other.kernel = one.kernel
    return Chain(one, norm(), other)


def shared_norm():
    same = norm()
    return Chain(linear(6), same, linear(6, 2), same)


@pytest.mark.parametrize(
    "model, features",
    [
        (Chain(linear(), norm(), between=jnp.tanh), 4),
        (Chain(SparseLinear(4, 6, sparsity=0, activation="relu", rngs=nnx.Rngs(0)), norm()), 4),
        (Chain(norm(), linear(6)), 6),
        (Chain(linear(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16), norm()), 4),
        (tied(), 6),
        (shared_norm(), 6),
        (Chain(nnx.WeightNorm(linear(), rngs=nnx.Rngs(0)), norm()), 4),
    ],
    ids=["tanh", "fused", "first", "wider", "tied", "shared", "weight_norm"],
)
def test_what_stays(model, features):
    x = jax.random.normal(jax.random.key(0), (3, features))
    result = folded(model, x)
    assert remaining(result) == remaining(model)


def test_another_dimension_stays():
    model = Chain(DepthwiseConv(CHANNELS, rngs=nnx.Rngs(0)), norm(axis=-1))
    result = folded(model, jax.random.normal(jax.random.key(0), (CHANNELS, 1, 4, CHANNELS)))
    assert remaining(result) == ["DepthwiseConv", "BatchNorm"]


def test_results_that_are_used_twice():
    result = folded(Residual(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (3, 4)))
    assert remaining(result) == ["Linear", "BatchNorm", "Linear"]
    assert isinstance(result.other, Identity)


def test_within_compiled_functions_and_other_methods():
    """A layer that is called twice with its norm, in a jitted part; shapes are enough."""
    model = Chain(linear(6), norm())
    x = jax.random.normal(jax.random.key(0), (3, 6))

    @nnx.jit
    def twice(model, x):
        return model(model(x))

    model.eval()
    result = fold_batch_norm(model, jax.ShapeDtypeStruct(x.shape, x.dtype), call=twice)
    assert remaining(result) == ["Linear", "Identity"]
    np.testing.assert_allclose(twice(result, x), twice(model, x), rtol=1e-4, atol=1e-5)


def test_statistics_of_the_batch_stay():
    model = Chain(linear(), norm())

    def call(model, x):
        return model.layers[1](model.layers[0](x), use_running_average=False)

    result = fold_batch_norm(model, jnp.ones((3, 4)), call=call)
    assert remaining(result) == ["Linear", "BatchNorm"]


def test_refusal():
    with pytest.raises(TypeError, match="fold_batch_norm: model must be a Flax NNX module, got"):
        fold_batch_norm(lambda x: x, jnp.ones(3))
