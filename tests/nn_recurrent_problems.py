"""What the tests of the recurrent layers share: sizes, operands, cells, comparisons, programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_problems

nnx = pytest.importorskip("flax.nnx")

from jaxsparse.nn import GRUCell, LSTMCell, SimpleCell, SparseLinear  # noqa: E402

IN, H, T, B = 5, 7, 6, 4
LENGTHS = jnp.array([3, 0, 6, 1])
# A bias of zeros would hide a bias that is not added.
BIAS = {"bias_init": nnx.initializers.normal(0.5)}

# Of a (3 h, h) pattern whose rows differ in length.
UNEVEN = np.random.default_rng(0).random((3 * H, H)) < np.linspace(0, 1, 3 * H)[:, None]

# By name: our class, Flax's, and options of both.
CELLS = {
    "simple": (SimpleCell, nnx.SimpleCell, {"kernel_init": nnx.initializers.lecun_normal()}),
    "relu": (SimpleCell, nnx.SimpleCell, {"activation_fn": nnx.relu}),
    "residual": (SimpleCell, nnx.SimpleCell, {"residual": True}),
    "gru": (GRUCell, nnx.GRUCell, {}),
    "gru, other functions": (
        GRUCell,
        nnx.GRUCell,
        {"gate_fn": nnx.hard_sigmoid, "activation_fn": jax.nn.soft_sign},
    ),
    "lstm": (LSTMCell, nnx.OptimizedLSTMCell, {}),
    "lstm, other functions": (
        LSTMCell,
        nnx.OptimizedLSTMCell,
        {"gate_fn": nnx.hard_sigmoid, "activation_fn": nnx.gelu},
    ),
}

leaves = jax.tree.leaves


def MGU(x, r, h):
    (x_f, x_n), (r_f, r_n) = x, r
    f = jax.nn.sigmoid(x_f + r_f)
    h = h + f * (jnp.tanh(x_n + f * r_n) - h)
    return h, h


def inputs(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(got, expected, rtol=2e-6, atol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def compiled(function):
    """`recurrent_problems.compiled` for a function of a layer and an array."""
    program = recurrent_problems.compiled(
        lambda graphdef, state, x: function(nnx.merge(graphdef, state), x), static_argnums=0
    )
    return lambda layer, x: program(*nnx.split(layer), x)


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


def random_carry(cell, *batch, seed=5):
    stream = nnx.RngStream(seed, tag="carry")
    return cell.initialize_carry((*batch, IN), stream, nnx.initializers.normal(1.0))


def pair(name, *, features=IN, seed=0, **options):
    """Our cell and Flax's, made from one seed."""
    ours, theirs, functions = CELLS[name]
    options = BIAS | functions | options
    return (cls(features, H, **options, rngs=nnx.Rngs(seed)) for cls in (ours, theirs))


def jitted_gradient(loss):
    return compiled(nnx.grad(loss, argnums=(0, 1)))


def check_against_flax(ours, theirs, x, valid, **call):
    """Outputs, carries and gradients, of steps and rows that count (B, T)."""
    rows, valid = valid.any(1)[:, None], valid[..., None]

    def loss(layer, x):
        carry, y = layer(x, **call, return_carry=True)
        # Flax makes outputs past the end, too, and no carry of a row without steps.
        carry = jax.tree.map(lambda c: jnp.where(rows, c, 0), carry)
        results = carry, jnp.where(valid, y, 0)
        parts = [jnp.sum(jnp.sin((i + 1) * a)) for i, a in enumerate(leaves(results))]
        return sum(parts), results

    run = compiled(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, got), (ours_, x_) = run(ours, x)
    (_, expected), (theirs_, of_x) = run(theirs, x)
    close(got, expected)
    close(x_, of_x, atol=5e-6)
    close(nnx.to_pure_dict(ours_), nnx.to_pure_dict(theirs_), rtol=1e-5, atol=2e-5)


def primitives(function, x):
    """The names of all that a function does, but of what is inside of our own operations."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            if not equation.primitive.name.startswith("jaxsparse"):
                for p in equation.params.values():
                    if isinstance(p, jax.extend.core.ClosedJaxpr):
                        yield from walk(p.jaxpr)

    return list(walk(jax.make_jaxpr(function)(x).jaxpr))


def scans(names):
    return sum(name.startswith("jaxsparse_recurrent_scan") for name in names)
