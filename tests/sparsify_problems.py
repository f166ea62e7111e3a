"""What the tests of `sparsify` share: models, pruned."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from covering import ALL  # noqa: E402

from jaxsparse import timing  # noqa: E402
from jaxsparse.pruning import sparsify  # noqa: E402


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


def pruned(model):
    """A quarter of each kernel stays, the largest. In NumPy: each shape is compiled for else."""
    params = nnx.state(model, nnx.Param)
    for path, param in nnx.to_flat_state(params):
        if path[-1] == "kernel":
            kernel = np.array(param.get_value())
            order = np.argsort(np.abs(kernel), axis=None, kind="stable")
            kernel.flat[order[: kernel.size - kernel.size // 4]] = 0
            param[...] = jnp.asarray(kernel)
    nnx.update(model, params)
    return model


@functools.cache
def pruned_model():
    """Pruned but for its last layer; tests leave it as it is."""
    model = Model(nnx.Rngs(0))
    out = model.out.kernel[...]
    pruned(model)
    model.out.kernel[...] = out
    return model


def sparsified(model, *inputs, **options):
    """All that can be sparse. Programs of layers are traced, not timed: most time is XLA's."""

    def trace(programs, **_):
        results = [jax.eval_shape(x.function, *x.operands()) for x in programs]
        assert results[0] == results[-1]  # of the dense layer, and of the sparse one
        return [timing.Timing(1.0, (1.0, 1.0), (1.0, 1.0), 1.0, None, "wall", 1, 1)] * len(results)

    with pytest.MonkeyPatch.context() as patch:
        if not ALL:
            patch.setattr(timing, "measure_in_turns", trace)
        return sparsify(model, *inputs, faster_only=False, seconds=1e-3, **options)


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
