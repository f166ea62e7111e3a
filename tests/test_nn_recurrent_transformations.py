"""The recurrent layers under everything that Flax does with a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
ocp = pytest.importorskip("orbax.checkpoint")

from nn_recurrent_problems import BIAS, IN, B, H, T, close, compiled, dense_twin, inputs, leaves  # noqa: E402

from jaxsparse.nn import RNN, Bidirectional, GRUCell, LSTMCell, TopologyVariable, verify  # noqa: E402

# ---- What Flax does with layers ----


@pytest.fixture
def layer():
    return sparse_layer()


def sparse_layer(seed=0):
    return RNN(LSTMCell(IN, H, recurrent_sparsity=0.6, **BIAS, rngs=nnx.Rngs(seed)))


def test_jit_takes_the_pattern_as_an_argument(layer):
    traces, x = [], inputs(B, T, IN)

    @nnx.jit
    def compiled(layer, x):
        traces.append(1)
        return layer(x)

    compiled(layer, x)
    other = sparse_layer(7)
    np.testing.assert_allclose(compiled(other, x), other(x), rtol=1e-5, atol=1e-6)
    assert len(traces) == 1
    graphdef, state = nnx.split(layer)
    inside = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)
    outside = jax.make_jaxpr(layer)(x)
    assert not any(a.ndim for a in inside.consts) and any(a.ndim for a in outside.consts)


def test_parameters_and_pattern_are_told_apart(layer):
    graphdef, params, patterns = nnx.split(layer, nnx.Param, TopologyVariable)
    assert set(params["cell"]["dense_h"]) == {"values", "bias"}
    assert set(params["cell"]["dense_i"]) == {"kernel"}
    assert set(patterns["cell"]) == {"dense_h"}
    x = inputs(B, T, IN)
    np.testing.assert_array_equal(nnx.merge(graphdef, params, patterns)(x), layer(x))


def test_training_steps_are_those_of_the_masked_dense_layer():
    cell = LSTMCell(IN, H, recurrent_sparsity=0.6, rngs=nnx.Rngs(0))
    twin, stored = dense_twin(cell)
    mask = jnp.asarray(stored["dense_h"])
    x, target = inputs(16, T, IN), inputs(16, T, H, seed=1)

    def loss(layer):
        return jnp.mean((layer(x) - target) ** 2)

    @nnx.jit
    def step(layer, optimizer, mask):
        value, gradients = nnx.value_and_grad(loss)(layer)
        if mask is not None:
            gradients["cell"]["dense_h"]["kernel"][...] *= mask
        optimizer.update(layer, gradients)
        return value

    layers = RNN(cell), RNN(twin)
    optimizers = [nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in layers]
    first = loss(layers[0])
    for _ in range(8):
        losses = [
            step(layers[0], optimizers[0], None),
            step(layers[1], optimizers[1], mask),
        ]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0] < 0.98 * first
    close(cell.dense_h.weight.todense().T, twin.dense_h.kernel[...], rtol=1e-3, atol=1e-4)


def test_donated_training_step(layer):
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
    x = inputs(B, T, IN)

    @nnx.jit(donate_argnames=("layer", "optimizer"))
    def step(layer, optimizer, x):
        optimizer.update(layer, nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer))

    before = layer(x)
    for _ in range(3):
        step(layer, optimizer, x)
    verify(layer)
    assert np.isfinite(layer(x)).all() and not np.allclose(layer(x), before)


def test_vmap_makes_and_runs_an_ensemble():
    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return RNN(GRUCell(IN, H, recurrent_sparsity=0.6, rngs=rngs))

    layers, x = make(nnx.Rngs(0)), inputs(3, B, T, IN)
    y = compiled(nnx.vmap(lambda layer, x: layer(x)))(layers, x)
    assert len({float(row) for row in y[:, 0, 0, 0]}) == 3
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(layers))
        alone = nnx.merge(nnx.graphdef(layers), verify(one))
        close(y[i], alone(x[i]))


def test_scan_over_layers_with_remat():
    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return RNN(LSTMCell(H, H, recurrent_sparsity=0.6, rngs=rngs))

    layers, x = make(nnx.Rngs(0)), inputs(B, T, H)

    def results(call):
        def loss(layers, x):
            run = nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return jnp.sum(run(layers, x) ** 2)

        return compiled(nnx.value_and_grad(loss))(layers, x)

    def call(layer, x):
        return layer(x)

    (value, plain), (_, remat) = (results(f) for f in (call, nnx.remat(call)))
    close(nnx.to_pure_dict(plain), nnx.to_pure_dict(remat), rtol=1e-5)
    expected = x
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(layers))
        expected = nnx.merge(nnx.graphdef(layers), one)(expected)
    np.testing.assert_allclose(value, jnp.sum(expected**2), rtol=1e-5)


def test_checkpoint_comes_back_bitwise(layer, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nnx.state(layer))
    graphdef, state = nnx.split(nnx.eval_shape(sparse_layer))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "checkpoint", state)
    x = inputs(B, T, IN)
    np.testing.assert_array_equal(nnx.merge(graphdef, verify(state))(x), layer(x))
    other = sparse_layer(9)
    nnx.update(other, state)
    np.testing.assert_array_equal(other(x), layer(x))


def test_checkpoint_of_a_random_stream(tmp_path):
    def make(seed=0):
        cell = GRUCell(IN, H, carry_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(seed))
        return RNN(cell, rngs=nnx.Rngs(seed))

    layer, x = make(), inputs(B, T, IN)
    layer(x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nnx.state(layer))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "checkpoint", nnx.state(make(3)))
    other = make(3)
    nnx.update(other, state)
    np.testing.assert_array_equal(other(x), layer(x))


def test_linen_bridge():
    linen = nnx.bridge.to_linen(sparse_rnn, IN, H)
    x = inputs(B, T, IN)
    variables = linen.init(jax.random.key(0), x)
    assert set(variables) == {"params", "topology"}
    direct = sparse_rnn(IN, H, rngs=nnx.Rngs(3))
    cell, params = direct.cell, variables["params"]["cell"]
    cell.dense_i.kernel[...] = params["dense_i"]["kernel"]
    cell.dense_i.bias[...] = params["dense_i"]["bias"]
    cell.dense_h.values[...] = params["dense_h"]["values"]
    cell.dense_h.topology.set_value(variables["topology"]["cell"]["dense_h"]["topology"])
    np.testing.assert_allclose(linen.apply(variables, x), direct(x), rtol=1e-6)
    gradient = jax.grad(
        lambda params: jnp.sum(linen.apply({**variables, "params": params}, x) ** 2)
    )(variables["params"])
    assert all(np.any(a) for a in leaves(gradient))


def sparse_rnn(features, units, *, rngs):
    return RNN(GRUCell(features, units, recurrent_sparsity=0.6, rngs=rngs))


@pytest.mark.several_devices(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "sparse", [{}, {"recurrent_sparsity": 0.5, "input_sparsity": 0.4}], ids=len
)
def test_a_sharded_batch_stays_sharded(kind, sparse):
    layer = Bidirectional(*(RNN(LSTMCell(IN, H, **sparse, rngs=nnx.Rngs(i))) for i in range(2)))
    x, lengths = inputs(8, T, IN), jnp.arange(8)
    expected = layer(x, seq_lengths=lengths)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        shards = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
        y = nnx.jit(lambda layer, x, lengths: layer(x, seq_lengths=lengths))(layer, shards, lengths)
    assert y.sharding.spec[0] == "batch"
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
