"""What the tests of `sparsify` share: models, pruned."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

nnx = pytest.importorskip("flax.nnx")

from jaxsparse.pruning import apply_masks, make_masks, sparsify  # noqa: E402


class Model(nnx.Module):
    """Layers in a list, in a dict, shared, within attention, and some that can't be sparse."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)])
        self.by_name = nnx.Dict({"wide": nnx.Linear(16, 32, use_bias=False, rngs=rngs)})
        self.again = self.blocks[0]
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.conv = nnx.Conv(32, 16, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.unused = nnx.Linear(4, 4, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        x = self.again(x) + x
        x = self.attention(self.by_name["wide"](x))
        return self.out(self.dropout(jax.nn.relu(self.conv(x)), deterministic=True))


X = jax.random.normal(jax.random.key(0), (2, 5, 16))
SPARSE = {
    "again": "Linear",  # of its two names, the first
    "blocks/1": "Linear",
    "by_name/wide": "Linear",
    "attention/query": "LinearGeneral",
    "attention/key": "LinearGeneral",
    "attention/value": "LinearGeneral",
    "attention/out": "LinearGeneral",
}


def pruned(model, density=0.25, where="*kernel", **options):
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    nnx.update(model, apply_masks(params, make_masks(params, density, where, **options)))
    return model


@functools.cache
def pruned_model():
    """Pruned but for its last layer; tests leave it as it is."""
    model = Model(nnx.Rngs(0))
    out = model.out.kernel[...]
    pruned(model)
    model.out.kernel[...] = out
    return model


def sparse_of(model, **options):
    return sparsify(model, X, **{"faster_only": False, "seconds": 1e-3, **options})


class Applied(nnx.Module):
    """A layer that is run by a function of the layer and the inputs."""

    def __init__(self, layer, function):
        self.layer = layer
        self.function = function

    def __call__(self, x):
        return self.function(self.layer, x)


def decides_by_value(function):
    """A model that no trace can follow, so that it is computed."""
    return lambda layer, x: function(layer, x if float(x[0, 0]) < 9 else -x)
