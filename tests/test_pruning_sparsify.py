"""Models with sparse layers: numbers, gradients, the table, what stays dense, and back."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

from jaxsparse import (  # noqa: E402
    H200,
    nn,
    timing,
)
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    SimpleCell,
    SparseLinear,
)
from jaxsparse.pruning import (  # noqa: E402
    KINDS,
    SparseLinearGeneral,
    SparsityTable,
    apply_masks,
    densify,
    make_masks,
    measure,
    one_shot,
    prune,
    sparsify,
    table,
)


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


@pytest.fixture(scope="module")
def model():
    """Pruned but for its last layer."""
    model = Model(nnx.Rngs(0))
    out = model.out.kernel[...]
    pruned(model)
    model.out.kernel[...] = out
    return model


def sparse_of(model, **options):
    return sparsify(model, X, **{"faster_only": False, "seconds": 1e-3, **options})


def data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.fixture(scope="module")
def converted(model):
    return sparse_of(model)


@pytest.mark.smoke
def test_results_and_gradients_are_those_of_the_dense_model(model, converted):
    sparse, _ = converted

    def loss(model, x):
        y = model(x)
        return jnp.sum(jnp.sin(y)), y

    run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    ((_, y), (gradients, of_x)), ((_, y_expected), (expected, of_x_expected)) = (
        run(m, X) for m in (sparse, model)
    )
    np.testing.assert_allclose(y, y_expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_x, of_x_expected, rtol=1e-4, atol=1e-5)
    for name, columns in ("blocks", 16), ("attention", 32):
        if name == "blocks":
            kernel, slope = model.blocks[1].kernel[...], expected["blocks"][1]["kernel"]
            values = gradients["blocks"][1]["values"][...]
        else:
            kernel, slope = model.attention.query.kernel[...], expected[name]["query"]["kernel"]
            values = gradients[name]["query"]["linear"]["values"][...]
        kernel, slope = (np.asarray(x[...]).reshape(-1, columns).T for x in (kernel, slope))
        np.testing.assert_allclose(values, slope[kernel != 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        gradients["out"]["bias"][...], expected["out"]["bias"][...], rtol=1e-4, atol=1e-5
    )


def test_the_table(model, converted):
    sparse, table = converted
    rows = {row["path"]: row for row in table.rows}
    assert {path: row["layer"] for path, row in rows.items() if not row["kept_dense"]} == SPARSE
    assert rows["out"]["kept_dense"] == "it is not pruned" and rows["out"]["density"] == 1
    assert rows["unused"]["kept_dense"] == "it is never called with example_inputs"
    assert rows["unused"]["dense_seconds"] is None
    # Pruned like the others, but nothing can be gained by it.
    assert rows["conv"]["kept_dense"] == "Conv has no sparse form"
    assert rows["conv"]["shapes"] == ((16, 96),) and rows["conv"]["density"] == 0.25
    assert rows["conv"]["dense_bytes"] == 4 * 96 * 16 and rows["conv"]["sparse_bytes"] is None
    assert len(table) == len(rows) == 10

    query = rows["attention/query"]
    kernel = np.asarray(model.attention.query.kernel[...]).reshape(32, 32).T
    lengths = np.count_nonzero(kernel, axis=1)
    assert query["shapes"] == ((32, 32),) and query["density"] == 0.25
    assert query["imbalance"] == pytest.approx(lengths.max() / lengths.mean())
    assert query["dense_bytes"] == 4 * (32 * 32 + 32)
    leaves = jax.tree.leaves(nnx.state(sparse.attention.query))
    assert query["sparse_bytes"] == sum(x.nbytes for x in leaves) > 4 * 256
    assert all(rows[path][f"{form}_seconds"] > 0 for path in SPARSE for form in ("dense", "sparse"))
    assert rows["by_name/wide"]["shapes"] == ((32, 16),)

    text = str(table).splitlines()
    assert len(text) == 11 and text[0].split()[:4] == ["path", "layer", "shape", "density"]
    line = next(line for line in text if line.startswith("out "))
    assert line.endswith("dense: it is not pruned")
    assert next(line for line in text if line.startswith("blocks/1")).endswith("  sparse")


@pytest.mark.parametrize(
    "density, text",
    [
        (0.0, "0.000"),
        (1.0, "1.000"),
        (0.25, "0.250"),
        (0.9996, "0.9996"),
        (0.0004, "0.0004"),
        (1 - 1e-5, "0.99999"),
        (2**-31, "0.0000000005"),
        (None, "-"),
    ],
)
def test_a_density_that_is_neither_0_nor_1_does_not_look_like_it(density, text):
    report = table.LayerReport("a", "Linear", ((4, 8),), density, 1, 1, 1, 1, 1, None)
    assert str(SparsityTable([report])).splitlines()[1].split()[3] == text


def test_balanced_rows_show_in_the_table():
    model = pruned(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), structure="row_balanced")
    sparse, table = sparse_of(model)
    assert type(sparse) is SparseLinear
    assert table.rows[0]["imbalance"] == 1 and table.rows[0]["path"] == ""
    assert "(model)" in str(table)


def test_plot(converted):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    _, table = converted
    left, right = table.plot()
    assert [len(bars) for bars in left.containers] == [10, 7]  # unmeasured ones have no bar
    assert [len(bars) for bars in right.containers] == [8, 7]
    widths = [bar.get_width() for bar in left.containers[0]]
    assert widths == pytest.approx([row["dense_bytes"] / 1024 for row in table.rows])
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert labels == [row["path"] for row in table.rows]
    assert table.plot(axes=(left, right))[0] is left
    plt.close("all")


def test_the_model_is_left_as_it_is_and_shares_nothing(model):
    before = [np.array(data(x)) for x in jax.tree.leaves(nnx.state(model))]
    sparse, _ = sparse_of(model)
    assert type(model.blocks[0]) is nnx.Linear and type(sparse.blocks[0]) is SparseLinear
    assert sparse.again is sparse.blocks[0]
    for leaf in jax.tree.leaves(nnx.state(sparse)):
        leaf.delete()
    after = [data(x) for x in jax.tree.leaves(nnx.state(model))]
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert "sparsify_path" not in vars(model.blocks[0])


def test_densify_goes_back(model, converted):
    dense = densify(converted[0])
    expected = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    restored = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(dense)))
    assert [path for path, _ in restored] == [path for path, _ in expected]
    for (_, a), (_, b) in zip(restored, expected, strict=True):
        np.testing.assert_array_equal(data(a), data(b))
    np.testing.assert_array_equal(dense(X), model(X))
    assert dense.again is dense.blocks[0]


def test_densify_some(model, converted):
    sparse, _ = converted
    partly = densify(sparse, where="attention/*")
    assert type(partly.attention.query) is nnx.LinearGeneral
    assert type(partly.blocks[0]) is SparseLinear
    np.testing.assert_allclose(partly(X), model(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_options_of_layers_survive(dtype):
    rngs = nnx.Rngs(0)
    options = {"dtype": dtype, "param_dtype": jnp.bfloat16, "precision": jax.lax.Precision.HIGHEST}
    model = nnx.Sequential(
        nnx.Linear(16, 8, use_bias=False, preferred_element_type=jnp.float32, **options, rngs=rngs),
        nnx.LinearGeneral((2, 4), (3, 5), axis=(-2, -1), **options, rngs=rngs),
    )
    pruned(model.layers[0])
    pruned(model.layers[1])
    model = nnx.Sequential(model.layers[0], lambda x: x.reshape(-1, 2, 4), model.layers[1])
    x = jax.random.normal(jax.random.key(0), (7, 16))
    sparse, _ = sparsify(model, x, faster_only=False, seconds=1e-3)
    back = densify(sparse)
    assert sparse(x).dtype == model(x).dtype and sparse(x).shape == (7, 3, 5)
    np.testing.assert_array_equal(back(x), model(x))
    first = sparse.layers[0]
    assert (first.param_dtype, first.use_bias, first.dtype) == (jnp.bfloat16, False, dtype)
    assert back.layers[0].preferred_element_type == jnp.float32


@pytest.mark.parametrize("axis", [(-1,), (1,), (0, 2), (2, 1)])
@pytest.mark.parametrize("use_bias", [True, False])
def test_sparse_linear_general_is_the_dense_one(axis, use_bias):
    x = jax.random.normal(jax.random.key(0), (3, 4, 5))
    features = tuple(x.shape[a] for a in sorted(a % 3 for a in axis))
    dense = nnx.LinearGeneral(features, (2, 3), axis=axis, use_bias=use_bias, rngs=nnx.Rngs(0))
    dense.kernel[...] = jnp.where(jnp.abs(dense.kernel[...]) > 0.3, dense.kernel[...], 0)
    if use_bias:
        dense.bias[...] = jnp.arange(6.0).reshape(2, 3)
    layer = SparseLinearGeneral.from_dense(dense)
    assert layer(x).shape == dense(x).shape
    np.testing.assert_allclose(layer(x), dense(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(densify(layer)(x), dense(x))


# ---- What is measured, and on what ----


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
    sparse, table = sparsify(model, (x, True), faster_only=False, seconds=1e-3)
    assert table.rows[0]["kept_dense"] is None and type(sparse.layer) is SparseLinear
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)
    _, table = sparsify(model, (x, False), faster_only=False, seconds=1e-3)
    assert table.rows[0]["kept_dense"] == "it is never called with example_inputs"


class Applied(nnx.Module):
    """A layer that is run by a function of the layer and the inputs."""

    def __init__(self, layer, function):
        self.layer = layer
        self.function = function

    def __call__(self, x):
        return self.function(self.layer, x)


TRANSFORMED = {
    "nnx.remat": nnx.remat(lambda layer, x: layer(x)),
    "jax.checkpoint": lambda layer, x: jax.checkpoint(lambda x: layer(x))(x),
    "jax.grad": lambda layer, x: jax.grad(lambda x: jnp.sum(jnp.sin(layer(x))))(x),
    "jax.jvp": lambda layer, x: jax.jvp(layer, (x,), (x,))[1],
}


def decides_by_value(function):
    """A model that no trace can follow, so that it is computed."""
    return lambda layer, x: function(layer, x if float(x[0, 0]) < 9 else -x)


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("computed", [False, True])
def test_layers_within_transformations(name, computed):
    function = TRANSFORMED[name]
    layer = pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    model = Applied(layer, decides_by_value(function) if computed else function)
    x = jax.random.normal(jax.random.key(0), (2, 8))
    sparse, table = sparsify(model, x, faster_only=False, seconds=1e-3)
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
    sparse, table = sparsify(model, x, faster_only=False, seconds=1e-3)
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
    same, table = sparsify(model, X[0, :, :8], faster_only=False, seconds=1e-3)
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
    sparsify(model, jnp.ones((2, 8)), faster_only=False, seconds=1e-3)
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
    sparse, table = sparsify(
        model,
        x,
        call=lambda model, x: model.encode(x, deterministic=True),
        faster_only=False,
        seconds=1e-3,
    )
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
    sparse, _ = sparsify(model, jnp.ones((2, 4)), faster_only=False, seconds=1e-3)
    assert model.calls[...] == 0 and sparse.calls[...] == 0


# ---- Recurrent layers ----


def test_recurrent_layers(monkeypatch):
    packed = []
    monkeypatch.setattr(
        "jaxsparse.pruning.recurrent_layers.pack",
        lambda layer, batch: packed.append((type(layer).__name__, batch)),
    )
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        RNN(LSTMCell(16, 8, rngs=rngs)),
        Bidirectional(RNN(GRUCell(8, 6, rngs=rngs)), RNN(GRUCell(8, 6, rngs=rngs))),
        RNN(LSTMCell(12, 4, rngs=rngs)),
    )
    pruned(model, where=["layers/0/cell/dense_h/kernel", "layers/1/*kernel"])
    x = jax.random.normal(jax.random.key(0), (3, 5, 16))
    sparse, table = sparsify(model, x, faster_only=False, seconds=1e-3)
    kept = {row["path"]: row["kept_dense"] for row in table.rows}
    assert kept == {"layers/0": None, "layers/1": None, "layers/2": "it is not pruned"}
    assert packed == [("RNN", 3), ("Bidirectional", 3)]
    assert table.rows[0]["shapes"] == ((32, 16), (32, 8)) and len(table.rows[1]["shapes"]) == 4
    assert type(sparse.layers[0].cell.dense_h) is SparseLinear
    assert type(sparse.layers[0].cell.dense_i) is nnx.Linear  # it has no zeros
    assert type(sparse.layers[1].backward_rnn.cell.dense_i) is SparseLinear
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)
    dense = densify(sparse)
    assert type(dense.layers[1].backward_rnn.cell.dense_i) is nnx.Linear
    np.testing.assert_array_equal(dense(x), model(x))
    assert type(model.layers[0].cell.dense_h) is nnx.Linear

    _, table = sparsify(sparse, x, faster_only=False, seconds=1e-3)
    assert table.rows[1]["kept_dense"] == "it has no dense matrices"


@pytest.mark.parametrize("time_major", [True, False])
def test_recurrent_layers_are_laid_out_for_the_batch_of_the_call(monkeypatch, time_major):
    seen = []
    monkeypatch.setattr(
        "jaxsparse.pruning.recurrent_layers.pack", lambda _, batch: seen.append(batch)
    )
    layer = pruned(RNN(GRUCell(4, 8, rngs=nnx.Rngs(0)), time_major=time_major))
    shape = (7, 2, 3, 4) if time_major else (2, 3, 7, 4)
    sparsify(layer, jnp.ones(shape), faster_only=False, seconds=1e-3)
    assert seen == [6]


def test_weights_that_do_not_fit_the_chip_take_the_plain_path(monkeypatch):
    def pack(layer, batch):
        nn.pack(layer.forward_rnn, batch=batch, device=H200)
        raise ValueError("pack: at backward_rnn.cell: too large")

    monkeypatch.setattr("jaxsparse.pruning.recurrent_layers.pack", pack)
    rngs = nnx.Rngs(0)
    layer = pruned(Bidirectional(*(RNN(GRUCell(4, 8, rngs=rngs)) for _ in range(2))))
    sparse, table = sparsify(layer, jnp.ones((2, 3, 4)), faster_only=False, seconds=1e-3)
    assert table.rows[0]["kept_dense"] is None
    assert table.rows[0]["note"] == "pack: at backward_rnn.cell: too large"
    assert str(table).endswith("sparse (pack: at backward_rnn.cell: too large)")
    dense_h = sparse.forward_rnn.cell.dense_h
    assert type(dense_h) is SparseLinear and "scan_layout" not in dense_h.topology[...].layouts


@pytest.mark.parametrize("cls", [SimpleCell, GRUCell, LSTMCell])
def test_cells_that_the_model_steps(monkeypatch, cls):
    batches = []
    monkeypatch.setattr(
        "jaxsparse.pruning.recurrent_layers.pack", lambda _, batch: batches.append(batch)
    )

    def loop(cell, x):
        carry = cell.initialize_carry(x[0].shape)
        for step in x:
            carry, y = cell(carry, step)
        return y

    model = pruned(Applied(cls(4, 8, rngs=nnx.Rngs(0)), loop))
    x = jnp.ones((3, 2, 4))
    sparse, table = sparsify(model, x, faster_only=False, seconds=1e-3)
    assert table.rows[0]["kept_dense"] is None and batches == [2] and len(table) == 1
    assert type(sparse.layer.dense_h) is SparseLinear
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(densify(sparse)(x), model(x))


# ---- What is shared ----


class Two(nnx.Module):
    """Two layers, one on top of the other."""

    def __init__(self, a, b):
        self.a = a
        self.b = b

    def __call__(self, x):
        return self.b(self.a(x))


def count(model):
    return len(jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_layers_of_one_cell_still_share_it():
    cell = pruned(GRUCell(4, 4, rngs=nnx.Rngs(0)))
    model = Two(RNN(cell), Bidirectional(RNN(cell), RNN(cell), merge_fn=jnp.add))
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    sparse, table = sparsify(model, x, faster_only=False, seconds=1e-3)
    assert [row["kept_dense"] for row in table.rows] == [None, None]
    assert type(sparse.a.cell.dense_h) is SparseLinear
    assert sparse.a.cell is sparse.b.forward_rnn.cell is sparse.b.backward_rnn.cell
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)
    dense = densify(sparse)
    assert dense.a.cell is dense.b.forward_rnn.cell and count(dense) == count(model)
    with pytest.raises(ValueError, match=r"densify: .* but 'a' shares some with 'b/"):
        densify(sparse, where="a")

    kept, table = sparsify(model, x, faster_only=False, seconds=1e-3, keep_dense="a")
    assert [row["kept_dense"] for row in table.rows] == [
        "asked for",
        "its weights are shared with a, which stays dense",
    ]
    assert kept.a.cell is kept.b.forward_rnn.cell and type(kept.a.cell.dense_h) is nnx.Linear


@pytest.mark.parametrize("name", ["a_cell", "z_cell"])  # before the layer, and after it
def test_a_cell_with_a_name_of_its_own_becomes_what_it_is_in_its_layer(name):
    model = Applied(RNN(pruned(GRUCell(4, 4, rngs=nnx.Rngs(0)))), lambda layer, x: layer(x))
    setattr(model, name, model.layer.cell)
    sparse, table = sparsify(model, jnp.ones((2, 3, 4)), faster_only=False, seconds=1e-3)
    assert [(row["path"], row["kept_dense"]) for row in table.rows] == [("layer", None)]
    assert getattr(sparse, name) is sparse.layer.cell
    assert type(sparse.layer.cell.dense_h) is SparseLinear
    _, table = sparsify(model, jnp.ones((2, 3, 4)), faster_only=False, where="layer")
    assert table.rows[0]["kept_dense"] == f"its weights are shared with {name}"


def test_layers_that_share_a_parameter_stay_dense():
    rngs = nnx.Rngs(0)
    model = Two(nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs))
    model.b.kernel = model.a.kernel
    pruned(model)
    kept, table = sparsify(model, jnp.ones((2, 8)), faster_only=False, seconds=1e-3)
    assert [row["kept_dense"] for row in table.rows] == [
        "its weights are shared with b",
        "its weights are shared with a",
    ]
    assert kept.a.kernel is kept.b.kernel and count(kept) == count(model) == 3


def test_recurrent_layers_that_share_a_parameter_stay_dense():
    model = Two(*(RNN(pruned(GRUCell(4, 4, rngs=nnx.Rngs(0)))) for _ in range(2)))
    model.b.cell.dense_h.kernel = model.a.cell.dense_h.kernel
    kept, table = sparsify(model, jnp.ones((2, 3, 4)), faster_only=False, seconds=1e-3)
    assert table.rows[0]["kept_dense"] == "its weights are shared with b/cell/dense_h"
    assert count(kept) == count(densify(kept)) == count(model)


def test_layers_of_one_random_stream():
    stream = nnx.RngStream(0, tag="carry")
    cells = [pruned(GRUCell(4, 4, rngs=nnx.Rngs(0))) for _ in range(2)]
    model = Two(*(RNN(cell, rngs=stream) for cell in cells))
    assert model.a.rngs is model.b.rngs
    _, table = sparsify(model, jnp.ones((2, 3, 4)), faster_only=False, seconds=1e-3)
    assert [row["kept_dense"] for row in table.rows] == [None, None]


def test_a_parameter_that_the_model_holds_too():
    model = Applied(pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), lambda layer, x: layer(x))
    model.weight = model.layer.kernel
    kept, table = sparsify(model, jnp.ones((2, 8)), faster_only=False, seconds=1e-3)
    assert table.rows[0]["kept_dense"] == "its weights are shared with (model)"
    assert kept.weight is kept.layer.kernel


@pytest.mark.parametrize("computed", [False, True])
def test_a_kernel_that_the_model_uses_itself(computed):
    def function(layer, x):
        return layer(x) @ layer.kernel[...].T

    layer = pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    model = Applied(layer, decides_by_value(function) if computed else function)
    x = jnp.ones((2, 8))
    with pytest.raises(ValueError, match="uses 'kernel' of 'layer', which SparseLinear doesn't"):
        sparsify(model, x, faster_only=False, seconds=1e-3)
    _, table = sparsify(model, x, faster_only=False, seconds=1e-3, keep_dense="layer")
    assert table.rows[0]["kept_dense"] == "asked for"


def test_a_model_that_fails_with_sparse_layers():
    def function(layer, x):
        assert isinstance(layer, nnx.Linear)
        return layer(x)

    model = Applied(pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), function)
    with pytest.raises(ValueError, match=r"must run .* are sparse: 'layer', got AssertionError"):
        sparsify(model, jnp.ones((2, 8)), faster_only=False, seconds=1e-3)


# ---- What stays dense ----


def test_kept_dense_by_name(model):
    sparse, table = sparse_of(model, keep_dense=["blocks/*", "attention/out"])
    asked = {row["path"] for row in table.rows if row["kept_dense"] == "asked for"}
    assert asked == {"again", "blocks/1", "attention/out"}
    assert type(sparse.blocks[1]) is nnx.Linear
    assert type(sparse.attention.query) is SparseLinearGeneral


def test_where(model):
    sparse, table = sparse_of(model, where=["blocks/1", "attention/?e*"])
    assert [row["path"] for row in table.rows] == ["attention/key", "blocks/1"]
    assert type(sparse.blocks[0]) is nnx.Linear and type(sparse.blocks[1]) is SparseLinear


def test_obstacles():
    @nnx.vmap(in_axes=0)
    def stack(rngs):
        return nnx.Linear(4, 4, rngs=rngs)

    def dot(*args, **kwargs):
        return jax.lax.dot_general(*args, **kwargs)

    class Special(nnx.Linear):
        pass

    rngs = nnx.Rngs(0)
    cases = {
        "a stack of shape (3, 4, 4)": stack(nnx.Rngs(0).split(3)),
        "a dot_general of its own": nnx.Linear(4, 4, dot_general=dot, rngs=rngs),
        "dot_general of its own, which": nnx.LinearGeneral(4, 4, dot_general=dot, rngs=rngs),
        "its kernel is a stack": nnx.LinearGeneral(4, 4, batch_axis={0: 2}, rngs=rngs),
        "precision must be None": nnx.Linear(4, 4, precision="BF16_BF16_F32", rngs=rngs),
        "type must be float32": nnx.Linear(4, 4, preferred_element_type="float16", rngs=rngs),
        "wider one, got float16": nnx.LinearGeneral(
            4, 4, preferred_element_type="float16", rngs=rngs
        ),
        "needs float32": nnx.Linear(4, 4, param_dtype="complex64", rngs=rngs),
    }
    for reason, layer in cases.items():
        layer.kernel[...] = layer.kernel[...].at[0].set(0)
        x = jnp.ones((2, 4))
        sparse, table = sparsify(Unused(layer), x, faster_only=False, seconds=1e-3)
        assert reason in table.rows[0]["kept_dense"], reason
        assert table.rows[0]["density"] is None and type(sparse.layer) is type(layer)
    special = Special(4, 4, rngs=rngs)
    special.bias[...] = jnp.zeros(4)  # no matrix
    _, table = sparsify(nnx.Sequential(special, nnx.Linear(4, 4, rngs=rngs)), x, seconds=1e-3)
    assert [row["path"] for row in table.rows] == ["layers/1"]


def test_pruned_layers_without_a_sparse_form():
    class Special(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Parts(nnx.Module):
        def __init__(self, rngs):
            self.stacked = nnx.List([nnx.Conv(4, 8, 3, rngs=rngs), nnx.Conv(8, 4, 3, rngs=rngs)])
            self.special = Special(4, 4, rngs=rngs)
            self.weights = nnx.List([nnx.Param(jnp.ones((4, 4)))])
            self.tied = self.special.kernel
            self.lora = nnx.LoRA(4, 2, 4, rngs=rngs)  # one of its matrices is 0, and none pruned
            self.out = nnx.Linear(4, 4, rngs=rngs)
            self.kernel = self.out.kernel

        def __call__(self, x):
            for conv in self.stacked:
                x = conv(x)
            return self.out(self.lora(self.special(x) @ self.weights[0][...]))

    model = Parts(nnx.Rngs(0))
    _, table = sparsify(model, jnp.ones((1, 5, 4)), seconds=1e-3)
    assert [row["path"] for row in table.rows] == ["out"]
    for kernel in model.stacked[1].kernel, model.special.kernel, model.weights[0], model.kernel:
        kernel[...] = kernel[...].at[..., 0].set(0)
    sparse, table = sparsify(model, jnp.ones((1, 5, 4)), faster_only=False, seconds=1e-3)
    assert {row["path"]: (row["layer"], row["kept_dense"]) for row in table.rows} == {
        "out": ("Linear", "its weights are shared with (model)"),
        "stacked/1": ("Conv", "Conv has no sparse form"),
        "special": (
            "Special",
            "Special has no sparse form, and that of Linear would not run its code: see kinds",
        ),
        "weights": ("List", "List has no sparse form"),
    }
    assert all(row["density"] == 0.75 for row in table.rows if row["layer"] != "Linear")
    assert type(sparse.special) is Special
    _, table = sparsify(model, jnp.ones((1, 5, 4)), where="out", seconds=1e-3)
    assert [row["path"] for row in table.rows] == ["out"]


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_what_gives_a_layer_another_kernel_keeps_it_dense(wrapper):
    """Else it would find no kernel, and normalise nothing."""
    dense = pruned(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    model = nnx.Sequential(
        wrapper(dense, rngs=nnx.Rngs(1)), pruned(nnx.Linear(4, 4, rngs=nnx.Rngs(2)))
    )
    x = jax.random.normal(jax.random.key(0), (2, 4))
    sparse, table = sparsify(model, x, faster_only=False, seconds=1e-3)
    reason = f"its kernel is what {wrapper.__name__} makes of it"
    assert [row["kept_dense"] for row in table.rows] == [reason, None]
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)


def test_adapters_around_a_layer_stay():
    dense = pruned(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    ones = nnx.initializers.ones
    model = Applied(
        nnx.LoRA(4, 2, 4, base_module=dense, b_initializer=ones, rngs=nnx.Rngs(1)),
        lambda layer, x: layer(x),
    )
    x = jax.random.normal(jax.random.key(0), (2, 4))
    sparse, _ = sparsify(model, x, faster_only=False, seconds=1e-3)
    assert type(sparse.layer.base_module) is SparseLinear
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)


class Unused(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return x


ZEROS = {"kernel_init": nnx.initializers.zeros, "rngs": nnx.Rngs(0)}


def test_layers_without_weights():
    model = nnx.Sequential(*(nnx.Linear(*sizes, **ZEROS) for sizes in ((4, 0), (0, 3))))
    sparse, table = sparsify(model, jnp.ones((2, 4)), faster_only=False, seconds=1e-3)
    assert [row["kept_dense"] for row in table.rows] == ["it is not pruned"] * 2
    assert table.rows[0]["density"] is None
    np.testing.assert_array_equal(sparse(jnp.ones((2, 4))), model(jnp.ones((2, 4))))


def test_a_layer_of_zeros():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.zeros((4, 3))
    sparse, table = sparsify(model, jnp.ones((2, 4)), faster_only=False, seconds=1e-3)
    assert table.rows[0]["density"] == 0 and table.rows[0]["imbalance"] == 1
    assert sparse.weight.nse == 0
    np.testing.assert_array_equal(sparse(jnp.ones((2, 4))), model(jnp.ones((2, 4))))


def test_a_kind_of_ones_own(model):
    class Special(nnx.Linear):
        pass

    layer = pruned(Special(16, 4, rngs=nnx.Rngs(0)))
    kinds = {**KINDS, Special: KINDS[nnx.Linear]}
    sparse, table = sparsify(layer, X, faster_only=False, seconds=1e-3, kinds=kinds)
    assert type(sparse) is SparseLinear and table.rows[0]["layer"] == "Special"


# ---- From training to a sparse model ----


def test_prune_then_sparsify_then_train_on():
    model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.relu)
    tx = prune(optax.adam(1e-2), one_shot(0.1, step=2), structure="row_balanced")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss(model):
        return jnp.mean((model(X) - 1) ** 2)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    for _ in range(4):
        step(model, optimizer)
    sparse, table = sparse_of(model)
    assert table.rows[0]["imbalance"] == 1 and sparse.layers[0].weight.nse == 2 * 32
    np.testing.assert_allclose(loss(sparse), loss(model), rtol=1e-5)
    tuned = nnx.Optimizer(sparse, optax.adam(1e-2), wrt=nnx.Param)
    losses = [step(sparse, tuned) for _ in range(5)]
    assert losses[-1] < losses[0]


# ---- Errors ----


@pytest.mark.parametrize(
    "error, options, message",
    [
        (
            ValueError,
            {"where": "block/0"},
            "where must name layers .* got 'block/0', which matches",
        ),
        (ValueError, {"where": ["out", "x"]}, "got 'x', which matches none"),
        (ValueError, {"keep_dense": "x"}, "keep_dense must name layers of the model, got 'x'"),
        (
            TypeError,
            {"where": "conv"},
            "type Linear, LinearGeneral, RNN, .* 'conv', which matches Conv",
        ),
        (TypeError, {"keep_dense": "dropout"}, "got 'dropout', which matches Dropout"),
    ],
)
def test_errors(model, error, options, message):
    with pytest.raises(error, match=message):
        sparsify(model, X, **options)


def test_other_models_are_refused():
    linen = pytest.importorskip("flax.linen")
    with pytest.raises(TypeError, match=r"sparsify: model must be .* got flax.linen.*Dense: write"):
        sparsify(linen.Dense(4), X)
    with pytest.raises(TypeError, match=r"densify: model must be .* got builtins.dict"):
        densify({"kernel": X})


def test_signatures_are_short():
    for function in sparsify, densify, prune, make_masks:
        assert len(str(inspect.signature(function))) < 600


def test_errors_of_densify(model):
    with pytest.raises(TypeError, match=r"densify: where must name layers of type SparseLinear, "):
        densify(model, where="out")
    with pytest.raises(ValueError, match="densify: where must name layers of the model, got 'x'"):
        densify(model, where="x")
    fused = SparseLinear(4, 4, sparsity=0.5, activation="relu", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="made with activation='relu'"):
        densify(fused)


def test_errors_of_sparse_linear_general():
    linear = SparseLinear(4, 6, sparsity=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must map 4 features to 4, got 4 and 6"):
        SparseLinearGeneral(linear, (4,), (2, 2))
    with pytest.raises(ValueError, match=r"for each of in_features \(2, 2\), got \(-1,\)"):
        SparseLinearGeneral(linear, (2, 2), (6,))
    with pytest.raises(TypeError, match=r"out_sharding.* only supports"):
        SparseLinearGeneral(linear, (4,), (6,))(jnp.ones((1, 4)), out_sharding=1)
    with pytest.raises(TypeError, match=r"must be an nnx.LinearGeneral, got Linear"):
        SparseLinearGeneral.from_dense(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

    class Special(nnx.LinearGeneral):
        def __call__(self, x, out_sharding=None):
            return 2 * super().__call__(x)

    with pytest.raises(TypeError, match=r"must be an nnx.LinearGeneral, got Special, a subclass"):
        SparseLinearGeneral.from_dense(Special(2, 2, rngs=nnx.Rngs(0)))


def test_a_subclass_in_a_cell_is_not_made_dense():
    class Doubled(SparseLinear):
        def __call__(self, x, out_sharding=None):
            return 2 * super().__call__(x)

    cell = GRUCell(3, 5, rngs=nnx.Rngs(0))
    cell.dense_i = Doubled(3, 15, sparsity=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"densify: layer must be a SparseLinear, got Doubled, a "):
        densify(cell)
    with pytest.raises(ValueError, match=r"from_dense: its kernel is a stack"):
        SparseLinearGeneral.from_dense(nnx.LinearGeneral(4, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0)))
