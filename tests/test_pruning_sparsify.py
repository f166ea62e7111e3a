"""Models with sparse layers: numbers, gradients, the table, and back."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

from sparsify_problems import SPARSE, X, pruned, pruned_model, sparsified  # noqa: E402

from jaxsparse.nn import GRUCell, SparseLinear  # noqa: E402
from jaxsparse.pruning import (  # noqa: E402
    KINDS,
    SparseLinearGeneral,
    SparsityTable,
    apply_masks,
    densify,
    make_masks,
    one_shot,
    prune,
    sparsify,
    table,
)


@pytest.fixture(scope="module")
def model():
    return pruned_model()


def data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.fixture(scope="module")
def converted(model):
    return sparsify(model, X, faster_only=False, seconds=1e-3)


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
    assert rows["conv"]["kept_dense"] == "such a Conv has no sparse form"
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
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    nnx.update(model, apply_masks(params, make_masks(params, 0.25, structure="row_balanced")))
    sparse, table = sparsified(model, X)
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
    sparse, _ = sparsified(model, X)
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
    sparse, _ = sparsified(model, x)
    back = densify(sparse)
    assert sparse(x).dtype == model(x).dtype and sparse(x).shape == (7, 3, 5)
    np.testing.assert_array_equal(back(x), model(x))
    first = sparse.layers[0]
    assert (first.param_dtype, first.use_bias, first.dtype) == (jnp.bfloat16, False, dtype)
    assert back.layers[0].preferred_element_type == jnp.float32


@pytest.mark.parametrize(
    "axis, use_bias", [((-1,), True), ((1,), True), ((0, 2), True), ((2, 1), True), ((0, 2), False)]
)
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


def test_a_kind_of_ones_own(model):
    class Special(nnx.Linear):
        pass

    layer = pruned(Special(16, 4, rngs=nnx.Rngs(0)))
    kinds = {**KINDS, Special: KINDS[nnx.Linear]}
    sparse, table = sparsified(layer, X, kinds=kinds)
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
    sparse, table = sparsified(model, X)
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
            "type Linear, LinearGeneral, Conv, RNN, .* 'conv', which matches Conv",
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
    with pytest.raises(
        TypeError, match=r"densify: layer must be a SparseLinear or PackedLinear, got Doubled, "
    ):
        densify(cell)
    with pytest.raises(ValueError, match=r"from_dense: its kernel is a stack"):
        SparseLinearGeneral.from_dense(nnx.LinearGeneral(4, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0)))
