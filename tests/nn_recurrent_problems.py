"""What the tests of the recurrent layers share: sizes, operands, comparisons, programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from jaxsparse.nn import SparseLinear  # noqa: E402

IN, H, T, B = 5, 7, 6, 4
LENGTHS = jnp.array([3, 0, 6, 1])
# A bias of zeros would hide a bias that is not added.
BIAS = {"bias_init": nnx.initializers.normal(0.5)}

leaves = jax.tree.leaves


def inputs(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(got, expected, rtol=2e-6, atol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def compiled(function):
    """`jax.jit` of a layer and an array, for programs that run once: most time is LLVM's."""

    def run(layer, x):
        graphdef, state = nnx.split(layer)
        program = jax.jit(
            lambda state, x: function(nnx.merge(graphdef, state), x),
            compiler_options={"xla_backend_optimization_level": 0},
        )
        return program(state, x)

    return run


def dense_twin(cell):
    """The same cell with dense kernels, and which of their entries are stored."""
    twin = type(cell)(IN, H, rngs=nnx.Rngs(1))
    stored = {}
    for name in ("dense_i", "dense_h"):
        layer, dense = getattr(cell, name), getattr(twin, name)
        if isinstance(layer, SparseLinear):
            dense.kernel[...] = layer.weight.todense().T
            topology = layer.topology[...]
            mask = np.zeros(topology.shape, bool)
            mask[topology.row_indices, topology.column_indices] = True
            stored[name] = mask.T
        else:
            dense.kernel[...] = layer.kernel[...]
        if layer.bias is not None:
            dense.bias[...] = layer.bias[...]
    return twin, stored
