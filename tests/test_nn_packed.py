"""PackedLinear: its results, its state, its gradients; and how sparsify chooses it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxsparse import CSR, pruning, timing
from jaxsparse.nn import PackedArray, PackedLinear, SparseLinear
from jaxsparse.ops.packed_places import taken


def layers(cell=None, **options):
    sparse = SparseLinear(300, 70, sparsity=0.6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
    if sparse.bias is not None:
        sparse.bias[...] = jnp.linspace(-1, 1, 70)
    return sparse, PackedLinear.from_sparse(sparse, cell=cell)


@pytest.mark.parametrize(
    "options", [{}, {"use_bias": False, "activation": "gelu"}, {"cell": 0, "activation": "relu"}]
)
def test_results_are_those_of_sparse_linear(options):
    sparse, packed = layers(**options)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 300)), jnp.bfloat16)
    y, expected = nnx.jit(lambda layer, x: layer(x))(packed, x), sparse(x)
    assert y.shape == (2, 3, 70) and y.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (y, expected)), atol=0.03)
    wide = x.astype(jnp.float32)
    assert packed(wide).dtype == sparse(wide).dtype == jnp.bfloat16
    np.testing.assert_array_equal(packed(wide), packed(x))
    packed.preferred_element_type = None
    assert packed(wide).dtype == jnp.float32
    np.testing.assert_allclose(packed(wide), np.asarray(expected, np.float32), atol=0.03)


def test_state():
    """Arrays are no parameters, and come back from a pure dict."""
    _, packed = layers()
    assert set(nnx.state(packed, nnx.Param)) == {"bias"}
    assert set(nnx.state(packed, PackedArray)) == {"values", "masks", "starts", "panels", "rows"}
    graphdef, state = nnx.split(packed)
    pure = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    blank = jax.tree.map(jnp.zeros_like, state)
    nnx.replace_by_pure_dict(blank, pure)
    again = nnx.merge(graphdef, blank)
    x = jnp.ones((1, 300), jnp.bfloat16)
    np.testing.assert_array_equal(again(x), packed(x))
    again.weight.verify()


@pytest.mark.parametrize("cell", [0, 1])
def test_restored_to_an_abstract_layer(cell, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    _, packed = layers(cell)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(packed))
    graphdef, target = nnx.split(nnx.eval_shape(lambda: nnx.clone(packed)))
    with ocp.StandardCheckpointer() as checkpointer:
        again = nnx.merge(graphdef, checkpointer.restore(tmp_path / "state", target))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 300)), jnp.bfloat16)
    np.testing.assert_array_equal(again(x), packed(x))
    again.weight.verify()


def test_state_of_another_layer():
    """Of as many weights is right; of other sizes says which array does not fit."""
    _, packed = layers()
    same, wider = (
        PackedLinear.from_sparse(
            SparseLinear(300, n, sparsity=0.6, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
        )
        for n in (70, 100)
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 300)), jnp.bfloat16)
    nnx.update(packed, nnx.state(same))
    np.testing.assert_array_equal(packed(x), same(x))
    nnx.update(packed, nnx.state(wider, PackedArray))
    with pytest.raises(ValueError, match=r"PackedLinear: rows of .* \(70,\), got \(100,\)"):
        packed(x)


@pytest.mark.parametrize("cell", [0, 1])
def test_saved_and_loaded(cell, tmp_path):
    def make_model(width=70):
        rngs = nnx.Rngs(0)
        return nnx.List(
            [
                nnx.Linear(300, width, dtype=jnp.bfloat16, rngs=rngs),
                nnx.Linear(width, 5, rngs=rngs),
                nnx.Linear(5, 3, rngs=rngs),
            ]
        )

    model = make_model()
    model[0] = layers(cell)[1]
    model[1] = SparseLinear.from_dense(model[1], sparsity=0.5)
    pruning.save(tmp_path / "model", model)
    sparse = make_model()
    sparse[0] = layers()[0]
    for make in (make_model, lambda: nnx.clone(model), lambda: nnx.clone(sparse)):
        loaded = pruning.load(tmp_path / "model", make)
        assert [type(layer) for layer in loaded] == [PackedLinear, SparseLinear, nnx.Linear]
        jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))
        x = jnp.ones((2, 300), jnp.bfloat16)
        np.testing.assert_array_equal(loaded[0](x), model[0](x))
        assert loaded[0](x.astype(jnp.float32)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"load: at 0: .* rows of .* shape \(64,\), got \(70,\)"):
        pruning.load(tmp_path / "model", lambda: make_model(64))
    with pytest.raises(ValueError, match="load: make_model must make a Linear or SparseLinear or "):
        pruning.load(tmp_path / "model", lambda: nnx.List([nnx.LayerNorm(3, rngs=nnx.Rngs(0))]))
    model[0].masks[...] = model[0].masks[...] ^ 1
    with pytest.raises(ValueError, match=r"save: at 0: Packed\.verify: "):
        pruning.save(tmp_path / "damaged", model)


def test_export():
    """With an open number of rows, weights within the program or as its arguments."""
    _, packed = layers()
    (b,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((b, 300), jnp.bfloat16)
    graphdef, state = nnx.split(packed)
    pure = nnx.to_pure_dict(state)

    def apply(pure, x):
        blank = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(blank, pure)
        return nnx.merge(graphdef, blank)(x)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 300)), jnp.bfloat16)
    for run, operands in ((lambda x: packed(x), ()), (apply, (pure,))):
        exported = jax.export.export(jax.jit(run))(*operands, shape)
        program = jax.export.deserialize(exported.serialize())
        # On a GPU packed(x) has a kernel and this has none, whose bias XLA may not round.
        rounding = 0.01 if jax.default_backend() == "gpu" else 0
        got, expected = (np.asarray(y, np.float32) for y in (program.call(*operands, x), packed(x)))
        np.testing.assert_allclose(got, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("cell", [0, 1])
def test_gradients(cell):
    """Of the inputs and the bias; weights are frozen."""
    sparse, packed = layers(cell)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 300)), jnp.bfloat16)

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x).astype(jnp.float32)))

    (got, of_x), (expected, of_x_expected) = (
        nnx.grad(loss, argnums=(0, 1))(layer, x) for layer in (packed, sparse)
    )
    assert set(got) == {"bias"}
    np.testing.assert_allclose(got["bias"][...], expected["bias"][...], atol=0.02)
    np.testing.assert_allclose(
        *(np.asarray(z, np.float32) for z in (of_x, of_x_expected)), atol=0.05
    )


@pytest.mark.parametrize("cell", [0, 1, 2])
def test_trained(cell, tmp_path):
    """As the sparse layer would be; what was pruned stays 0, also with momentum and decay."""
    sparse, _ = layers()
    weight = sparse.weight.pack(jnp.bfloat16, cell=cell, trainable=True)
    packed = PackedLinear(weight, bias=sparse.bias[...])
    assert set(nnx.state(packed, nnx.Param)) == {"bias", "values"}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 300)), jnp.bfloat16)

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x).astype(jnp.float32)))

    got, expected = (nnx.grad(loss)(layer, x) for layer in (packed, sparse))
    of_entries = taken(jnp.asarray(expected["values"][...]), weight.sources)
    np.testing.assert_allclose(
        *(np.asarray(z, np.float32) for z in (got["values"][...], of_entries)), atol=0.1
    )
    optimizer = nnx.Optimizer(packed, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.Param)
    step = nnx.jit(lambda m, o: o.update(m, nnx.grad(loss)(m, x)))
    before = float(loss(packed, x))
    for _ in range(10):
        step(packed, optimizer)
    assert float(loss(packed, x)) < before - 1
    back = CSR.from_packed(packed.weight)
    assert back.nse == sparse.weight.nse and (back.values != sparse.weight.values).any()
    padding = np.asarray(weight.sources) == weight.topology.nse
    assert padding.any() and not np.asarray(packed.values[...])[padding].any()
    pruning.save(tmp_path / "model", packed)
    loaded = pruning.load(tmp_path / "model", lambda: nnx.Linear(300, 70, rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(loaded(x), packed(x))
    assert set(nnx.state(loaded, nnx.Param)) == {"bias", "values"}
    assert type(pruning.densify(packed)) is nnx.Linear


def test_trainable_by_name():
    sparse, packed = layers()
    trainable = PackedLinear.from_sparse(sparse, trainable=True)
    np.testing.assert_array_equal(trainable.weight.todense(), packed.weight.todense())
    with pytest.raises(ValueError, match="trainable=True"):
        packed.weight.repack(sparse.values[...])


def test_errors():
    with pytest.raises(TypeError, match="weight must be Packed, got ndarray"):
        PackedLinear(np.ones((2, 2)))
    with pytest.raises(TypeError, match="must be a SparseLinear, got Linear"):
        PackedLinear.from_sparse(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    wide = SparseLinear(8, 4, sparsity=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"dtype must be bfloat16, .*, got float32"):
        PackedLinear.from_sparse(wide)


@pytest.mark.parametrize("dtype, cell", [(jnp.int8, 1), (jnp.float8_e4m3fn, 0)])
def test_weights_of_8_bits(dtype, cell, tmp_path):
    """No parameters, and scales beside them; inputs are rounded to the layer's own 16 bits."""
    for own, computed in (jnp.float16, jnp.float16), (None, jnp.bfloat16):
        dense = nnx.Linear(300, 70, dtype=own, rngs=nnx.Rngs(0))
        sparse = SparseLinear.from_dense(dense, sparsity=0.6)
        layer = PackedLinear.from_sparse(sparse, dtype=dtype, columns=None if cell else 1)
        assert layer.weight.cell == cell
        assert set(nnx.state(layer, nnx.Param)) == {"bias"} and layer.dtype == computed
        assert "scales" in nnx.state(layer, PackedArray)
        x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 300)), jnp.float32)
        y, expected = layer(x), sparse(x)
        assert y.dtype == expected.dtype
        step = 1 / 127 if dtype == jnp.int8 else 1 / 8
        error = np.linalg.norm(np.asarray(y, np.float32) - np.asarray(expected, np.float32))
        assert 0 < error < step * np.linalg.norm(np.asarray(expected, np.float32))
        exact = nnx.clone(pruning.densify(layer))(x)
        np.testing.assert_allclose(
            *(np.asarray(z, np.float32) for z in (y, exact)), rtol=0.01, atol=0.02
        )
        gradient = nnx.grad(lambda layer, x: layer(x).astype(jnp.float32).sum())(layer, x)
        assert set(gradient) == {"bias"}
        path = tmp_path / jnp.dtype(computed).name
        pruning.save(path, layer)
        again = pruning.load(path, lambda: nnx.Linear(300, 70, dtype=own, rngs=nnx.Rngs(1)))  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(layer))
        assert (again.dtype, again.weight.dtype, again.cell) == (computed, dtype, cell)
        np.testing.assert_array_equal(again(x), y)
    with pytest.raises(ValueError, match="is not trainable, as numbers of 8 bits have no grad"):
        PackedLinear.from_sparse(sparse, dtype=dtype, trainable=True)
    with pytest.raises(
        ValueError, match=r"PackedLinear: dtype must be bfloat16 or float16 .*float32"
    ):
        PackedLinear(layer.weight, dtype=jnp.float32)


def test_sparsify_to_8_bits(monkeypatch):
    measured(monkeypatch, 3, 2, 1)
    x = jnp.ones((2, 300), jnp.bfloat16)
    result, table = pruning.sparsify(pruned(jnp.bfloat16), x, packed=True, dtype=jnp.int8)
    assert type(result) is PackedLinear and result.weight.dtype == jnp.int8
    sixteen, _ = pruning.sparsify(pruned(jnp.bfloat16), x, packed=True, dtype=jnp.bfloat16)
    assert sixteen.weight.dtype == jnp.bfloat16
    assert table.rows[0]["packed_bytes"] < 0.75 * sixteen.weight.nbytes
    measured(monkeypatch, 3, 2, 1.5, 1)
    result, _ = pruning.sparsify(pruned(jnp.bfloat16), x, packed=True, dtype=jnp.int8)
    assert (result.weight.dtype, result.weight.cell) == (jnp.int8, 0)
    measured(monkeypatch, 3, 2)
    for dtype, wanted, why in (
        (jnp.float32, jnp.int8, "it computes in float32, and packed weights have 16 bits"),
        (jnp.bfloat16, jnp.float16, "it computes in bfloat16, not in float16"),
    ):
        _, table = pruning.sparsify(pruned(dtype), x.astype(dtype), packed=True, dtype=wanted)
        assert table.rows[0]["not_packed"] == why
    for options in {"dtype": jnp.int8}, {"dtype": jnp.float32, "packed": True}:
        with pytest.raises(ValueError, match="sparsify: dtype is that of packed weights, bfloat16"):
            pruning.sparsify(pruned(jnp.bfloat16), x, **options)


def pruned(dtype):
    layer = nnx.Linear(300, 70, dtype=dtype, rngs=nnx.Rngs(0))
    kernel = layer.kernel[...]
    layer.kernel[...] = jnp.where(jnp.abs(kernel) > 0.05, kernel, 0)
    return layer


def measured(monkeypatch, *microseconds):
    """What layers take: dense, sparse, packed in cells and by gaps; those by gaps 9 by default."""

    def measure(programs, **_):
        return [
            timing.Timing(us, (us, us), (us, us), us, None, "wall", 1, 1)
            for us in (*microseconds, 9)[: len(programs)]
        ]

    monkeypatch.setattr(timing, "measure_in_turns", measure)


SLOWER, NOT_CLEARLY = "it would be slower", "it would not be clearly faster"


@pytest.mark.parametrize(
    "microseconds, now, kept_dense, not_packed",
    [
        ((3, 2, 1), "packed", None, None),
        ((3, 1, 2), "sparse", None, SLOWER),
        ((3, 1.01, 1), "sparse", None, NOT_CLEARLY),
        ((1, 3, 2), "dense", SLOWER, None),
        ((1, 0.98, 0.99), "dense", NOT_CLEARLY, None),
        ((1, 3, 0.98), "dense", NOT_CLEARLY, None),
        # Neither is clearly faster than the other, but packed ones are than dense ones.
        ((3, 2.9, 2.8), "packed", None, None),
        ((3, 2, 1.5, 1), "packed by gaps", None, None),
        ((3, 1, 2.5, 2), "sparse", None, SLOWER),
    ],
)
def test_sparsify_keeps_the_fastest(microseconds, now, kept_dense, not_packed, monkeypatch):
    measured(monkeypatch, *microseconds)
    model, x = pruned(jnp.bfloat16), jnp.ones((2, 300), jnp.bfloat16)
    result, table = pruning.sparsify(model, x, packed=True)
    expected = {"packed": PackedLinear, "sparse": SparseLinear, "dense": nnx.Linear}
    assert type(result) is expected[now.partition(" ")[0]]
    (row,) = table.rows
    assert row["packed"] == now.startswith("packed")
    assert row["packed_form"] == ("gaps" if len(microseconds) == 4 else "cells")
    if row["packed"]:
        assert (result.weight.cell == 0) == (row["packed_form"] == "gaps")
    assert (row["kept_dense"], row["not_packed"]) == (kept_dense, not_packed)
    said = f"dense: {kept_dense}" if kept_dense else now
    assert str(table).endswith(f"{said}; not packed: {not_packed}" if not_packed else said)
    assert row["packed_seconds"] == pytest.approx(1e-6 * min(microseconds[2:]))
    assert row["packed_bytes"] < row["sparse_bytes"] and "us packed" in str(table)
    np.testing.assert_allclose(*(np.asarray(m(x), np.float32) for m in (result, model)), atol=0.03)


def test_plot_has_packed_layers(monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    measured(monkeypatch, 3, 2, 1)
    x = jnp.ones((2, 300), jnp.bfloat16)
    _, table = pruning.sparsify(pruned(jnp.bfloat16), x, packed=True)
    _, ax = table.plot()
    np.testing.assert_allclose([patch.get_width() for patch in ax.patches], [3, 2, 1])
    plt.close("all")


def test_sparsify_takes_the_rows_that_it_is_shown(monkeypatch):
    """For a few rows packed weights may be faster where for many dense ones are."""

    def measure(programs, **_):
        rows = [jax.tree.leaves(program.operands()[1])[0].shape[0] for program in programs]
        figures = (3, 2, 1, 4) if rows[0] < 100 else (1, 2, 3)
        return [timing.Timing(us, (us, us), (us, us), us, None, "wall", 1, 1) for us in figures]

    monkeypatch.setattr(timing, "measure_in_turns", measure)
    model = pruned(jnp.bfloat16)
    for rows, expected in (2, PackedLinear), (200, nnx.Linear):
        x = jnp.ones((rows, 300), jnp.bfloat16)
        assert type(pruning.sparsify(model, x, packed=True)[0]) is expected


def test_packed_projections(monkeypatch, tmp_path):
    """Layers of several dimensions, as attention has them: packed, saved, loaded, dense again."""
    measured(monkeypatch, 3, 2, 1)

    def make_model():
        options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        return nnx.LinearGeneral((4, 8), (2, 24), axis=(-2, -1), **options)

    model, x = make_model(), jax.random.normal(jax.random.key(0), (3, 4, 8), jnp.bfloat16)
    kernel = model.kernel[...]
    model.kernel[...] = jnp.where(jnp.abs(kernel) > 0.1, kernel, 0)
    result, table = pruning.sparsify(model, x, packed=True)
    assert table.rows[0]["packed"] and type(result.linear) is PackedLinear
    pruning.save(tmp_path / "model", result)
    sparse = pruning.SparseLinearGeneral.from_dense(model)
    for make in make_model, lambda: nnx.clone(sparse), lambda: nnx.clone(result):
        loaded = pruning.load(tmp_path / "model", make)
        assert type(loaded.linear) is PackedLinear
        np.testing.assert_array_equal(loaded(x), result(x))
    pruning.save(tmp_path / "sparse", sparse)
    with pytest.raises(ValueError, match="a Linear or SparseLinear at linear, got PackedLinear"):
        pruning.load(tmp_path / "sparse", lambda: nnx.clone(result))
    dense = pruning.densify(loaded)
    assert type(dense) is nnx.LinearGeneral
    np.testing.assert_array_equal(dense.kernel[...], model.kernel[...])
    for each in result, dense:
        got, expected = (np.asarray(m(x), np.float32) for m in (each, model))
        np.testing.assert_allclose(got, expected, atol=0.05)


def test_densify():
    _, packed = layers()
    dense = pruning.densify(packed)
    assert type(dense) is nnx.Linear and dense.dtype == jnp.bfloat16
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 300)), jnp.bfloat16)
    np.testing.assert_allclose(*(np.asarray(m(x), np.float32) for m in (dense, packed)), atol=0.03)
    packed.preferred_element_type = jnp.float32
    assert pruning.densify(packed)(x).dtype == packed(x).dtype == jnp.float32
    with pytest.raises(ValueError, match="a PackedLinear was made with activation='relu'"):
        pruning.densify(layers(activation="relu")[1])


def test_sparsify_rounds_nothing_by_itself(monkeypatch):
    """What computes in float32 is not packed; nor is anything unless it is asked for."""
    measured(monkeypatch, 3, 2, 1)
    for dtype, packed in (None, True), (jnp.bfloat16, False):
        result, table = pruning.sparsify(pruned(dtype), jnp.ones((2, 300)), packed=packed)
        assert type(result) is SparseLinear and table.rows[0]["packed_bytes"] is None
        assert "KiB packed" not in str(table)
        why = "it computes in float32, and packed weights have 16 bits" if packed else None
        assert table.rows[0]["not_packed"] == why


def test_sparsify_rounds_no_inputs(monkeypatch):
    """A layer without a dtype of its own computes in that of its inputs."""
    measured(monkeypatch, 3, 2, 1)
    layer = nnx.Linear(300, 70, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.where(jnp.abs(layer.kernel[...]) > 0.05, layer.kernel[...], 0)
    for dtype, expected in (jnp.float32, SparseLinear), (jnp.bfloat16, PackedLinear):
        result, _ = pruning.sparsify(layer, jnp.ones((2, 300), dtype), packed=True)
        assert type(result) is expected and result(jnp.ones((2, 300), dtype)).dtype == dtype
