"""What `sparsify` measures, and on what: calls of a model that are traced or computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from sparsify_problems import (  # noqa: E402
    SPARSE,
    Applied,
    X,
    decides_by_value,
    pruned,
    pruned_model,
    sparsified,
)

from jaxsparse import timing  # noqa: E402
from jaxsparse.nn import RNN, GRUCell, SparseLinear  # noqa: E402
from jaxsparse.pruning import measure, sparsify  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return pruned_model()


def test_layers_are_timed_on_what_reaches_them(monkeypatch, model):
    """A stopwatch of ours: it sees every program's operands, and says what is slower."""
    seen = []

    def measure(programs, **_):
        return [measure_one(program) for program in programs]

    def measure_one(program):
        out = program.function(*program.operands())
        arrays = jax.tree.leaves(program.operands()[1])
        seen.append(([np.asarray(x) for x in arrays], np.asarray(out)))
        slow = program.bytes_read > 4000  # a density of 0.25 takes more bytes than dense here
        us = 3.0 if slow else 1.0
        return timing.Timing(us, (us, us), (us, us), us, None, "wall", 1, 1)

    monkeypatch.setattr(timing, "measure_in_turns", measure)
    sparse, table = sparsify(model, X)
    order = [row["path"] for row in table.rows if row["dense_seconds"]]
    (inputs,), out = seen[2 * order.index("attention/key")]  # each is seen dense, then sparse
    assert inputs.shape == (2, 5, 32) and inputs.std() > 0.5  # random numbers
    np.testing.assert_allclose(out, model.attention.key(inputs), rtol=1e-5, atol=1e-6)
    (inputs,), _ = seen[2 * order.index("again")]
    np.testing.assert_array_equal(inputs, X)  # what is known is taken as it is
    rows = {row["path"]: row for row in table.rows}
    # Called twice, on arrays of one shape: measured once, counted twice.
    assert rows["again"]["dense_seconds"] == pytest.approx(2e-6)
    assert rows["blocks/1"]["dense_seconds"] == pytest.approx(1e-6)
    slower = [p for p, row in rows.items() if row["kept_dense"] == "it would be slower"]
    faster = [p for p in SPARSE if p not in slower]
    for path in SPARSE:
        row = rows[path]
        assert (row["sparse_seconds"] < row["dense_seconds"]) == (path in faster)
    assert "again" in slower and type(sparse.blocks[0]) is nnx.Linear


def test_what_is_hardly_faster_stays_dense(monkeypatch):
    """Else the choice would depend on what else the machine does."""
    figures = {}

    def measure(programs, **_):
        assert len(programs) == 2  # in turns
        return [
            timing.Timing(us, quartiles, quartiles, us, None, "wall", 1, 1)
            for us, quartiles in figures.values()
        ]

    monkeypatch.setattr(timing, "measure_in_turns", measure)
    model = pruned(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    for sparse, reason in {
        (50.0, (40.0, 60.0)): None,
        (94.0, (93.0, 94.5)): None,
        (96.0, (96.0, 96.0)): "it would not be clearly faster",
        (50.0, (40.0, 99.0)): "it would not be clearly faster",
        (100.0, (99.0, 101.0)): "it would be slower",
    }.items():
        figures.update(dense=(100.0, (95.0, 110.0)), sparse=sparse)
        _, table = sparsify(model, X)
        assert table.rows[0]["kept_dense"] == reason
        assert table.rows[0]["sparse_seconds"] == pytest.approx(sparse[0] * 1e-6)


class Jitted(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, flag=True):
        if not flag:
            return x
        x = nnx.jit(lambda layer, x: jnp.tanh(layer(x)))(self.layer, x)
        graphdef, state = nnx.split(self.layer)

        def step(x, _):
            return jnp.tanh(nnx.merge(graphdef, state)(x)), None

        return jax.lax.scan(step, x, None, length=3)[0]


def test_layers_within_jit_and_scan_are_seen():
    model = pruned(Jitted(nnx.Rngs(0)))
    x = jnp.ones((2, 8))
    sparse, table = sparsified(model, (x, True))
    assert table.rows[0]["kept_dense"] is None and type(sparse.layer) is SparseLinear
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)
    _, table = sparsified(model, (x, False))
    assert table.rows[0]["kept_dense"] == "it is never called with example_inputs"


TRANSFORMED = {
    "nnx.remat": nnx.remat(lambda layer, x: layer(x)),
    "jax.checkpoint": lambda layer, x: jax.checkpoint(lambda x: layer(x))(x),
    "jax.grad": lambda layer, x: jax.grad(lambda x: jnp.sum(jnp.sin(layer(x))))(x),
    "jax.jvp": lambda layer, x: jax.jvp(layer, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("computed", [False, True])
def test_layers_within_transformations(name, computed):
    function = TRANSFORMED[name]
    layer = pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    model = Applied(layer, decides_by_value(function) if computed else function)
    x = jax.random.normal(jax.random.key(0), (2, 8))
    sparse, table = sparsified(model, x)
    assert table.rows[0]["kept_dense"] is None and table.rows[0]["dense_seconds"] > 0
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)


def test_layers_under_vmap_are_not_timed():
    def function(layer, x):
        return jax.vmap(jax.checkpoint(lambda x: layer(x)))(x)

    model = Applied(pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), function)
    x = jnp.ones((2, 8))
    dense, table = sparsify(model, x, seconds=1e-3)
    assert "runs under jax.vmap, where it can't be timed" in table.rows[0]["kept_dense"]
    assert table.rows[0]["dense_seconds"] is None and type(dense.layer) is nnx.Linear
    sparse, table = sparsified(model, x)
    assert table.rows[0]["note"] == "not timed: it runs under jax.vmap"
    assert str(table).endswith("sparse (not timed: it runs under jax.vmap)")
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_stack_that_is_run_stays_dense():
    @nnx.vmap(in_axes=0)
    def stack(rngs):
        return nnx.Linear(8, 8, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return jnp.tanh(layer(x))

    layer = stack(nnx.Rngs(0).split(3))
    layer.kernel[...] = layer.kernel[...].at[:, 0].set(0)
    model = Applied(layer, run)
    same, table = sparsified(model, X[0, :, :8])
    assert "a stack of shape (3, 8, 8)" in table.rows[0]["kept_dense"]
    assert table.rows[0]["dense_seconds"] is None
    np.testing.assert_array_equal(same(X[0, :, :8]), model(X[0, :, :8]))


def steps(layer, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(layer(x)), None), x, None, length=50)[0]


@pytest.mark.parametrize("computed", [False, True])
def test_calls_that_are_alike_are_kept_once(computed):
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = Applied(layer, decides_by_value(steps) if computed else steps)
    calls = measure.record_calls(model, {"layer": layer}, lambda model: model(jnp.ones((2, 8))))
    assert [call.count for call in calls["layer"]] == [50]


def test_a_model_that_can_be_traced_is_not_computed():
    seen = []

    def function(layer, x):
        jax.debug.callback(lambda: seen.append(1))
        return layer(x)

    model = Applied(pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), function)
    sparsified(model, jnp.ones((2, 8)))
    assert not seen


def test_integers_that_reach_a_layer_are_known():
    def function(layer, x):
        return layer(x, seq_lengths=jnp.sum(x[..., 0] > 0, axis=-1))

    layer = RNN(GRUCell(4, 8, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 3, 4))
    calls = measure.record_calls(Applied(layer, function), {"layer": layer}, lambda model: model(x))
    args, options = calls["layer"][0].arguments()
    np.testing.assert_array_equal(args[0], x)
    np.testing.assert_array_equal(options["seq_lengths"], [3, 3])


def test_what_stands_for_traced_arguments():
    kept = {
        "float8": jax.ShapeDtypeStruct((3, 4), jnp.float8_e4m3fn),
        "complex": jax.ShapeDtypeStruct((3,), jnp.complex64),
        "index": jax.ShapeDtypeStruct((2,), jnp.int32),
        "key": jax.ShapeDtypeStruct((2,), jax.random.key(0).dtype),
    }
    leaves, treedef = jax.tree.flatten(((), kept))
    _, options = measure.Call(leaves, treedef).arguments()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), options) == jax.tree.map(
        lambda x: (x.shape, x.dtype), kept
    )
    assert not options["index"].any() and options["complex"].any()


def test_call():
    class Options(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(8, 8, rngs=rngs)

        def encode(self, x, *, deterministic):
            return self.layer(x) if deterministic else x

    model = pruned(Options(nnx.Rngs(0)))
    x = jnp.ones((2, 8))
    sparse, table = sparsified(model, x, call=lambda model, x: model.encode(x, deterministic=True))
    assert table.rows[0]["kept_dense"] is None and type(sparse.layer) is SparseLinear


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.layer(x)


def test_the_state_of_the_model_does_not_move():
    model = pruned(Counting(nnx.Rngs(0)))
    sparse, _ = sparsified(model, jnp.ones((2, 4)))
    assert model.calls[...] == 0 and sparse.calls[...] == 0
