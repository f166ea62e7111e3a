"""Layers that `sparsify` leaves dense, and those that are shared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from sparsify_problems import (  # noqa: E402
    Applied,
    X,
    decides_by_value,
    pruned,
    pruned_model,
    sparsified,
)

from jaxsparse.nn import RNN, Bidirectional, GRUCell, SparseLinear  # noqa: E402
from jaxsparse.pruning import SparseLinearGeneral, densify  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return pruned_model()


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
    sparse, table = sparsified(model, x)
    assert [row["kept_dense"] for row in table.rows] == [None, None]
    assert type(sparse.a.cell.dense_h) is SparseLinear
    assert sparse.a.cell is sparse.b.forward_rnn.cell is sparse.b.backward_rnn.cell
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)
    dense = densify(sparse)
    assert dense.a.cell is dense.b.forward_rnn.cell and count(dense) == count(model)
    with pytest.raises(ValueError, match=r"densify: .* but 'a' shares some with 'b/"):
        densify(sparse, where="a")

    kept, table = sparsified(model, x, keep_dense="a")
    assert [row["kept_dense"] for row in table.rows] == [
        "asked for",
        "its weights are shared with a, which stays dense",
    ]
    assert kept.a.cell is kept.b.forward_rnn.cell and type(kept.a.cell.dense_h) is nnx.Linear


@pytest.mark.parametrize("name", ["a_cell", "z_cell"])  # before the layer, and after it
def test_a_cell_with_a_name_of_its_own_becomes_what_it_is_in_its_layer(name):
    model = Applied(RNN(pruned(GRUCell(4, 4, rngs=nnx.Rngs(0)))), lambda layer, x: layer(x))
    setattr(model, name, model.layer.cell)
    sparse, table = sparsified(model, jnp.ones((2, 3, 4)))
    assert [(row["path"], row["kept_dense"]) for row in table.rows] == [("layer", None)]
    assert getattr(sparse, name) is sparse.layer.cell
    assert type(sparse.layer.cell.dense_h) is SparseLinear
    _, table = sparsified(model, jnp.ones((2, 3, 4)), where="layer")
    assert table.rows[0]["kept_dense"] == f"its weights are shared with {name}"


def test_layers_that_share_a_parameter_stay_dense():
    rngs = nnx.Rngs(0)
    model = Two(nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs))
    model.b.kernel = model.a.kernel
    pruned(model)
    kept, table = sparsified(model, jnp.ones((2, 8)))
    assert [row["kept_dense"] for row in table.rows] == [
        "its weights are shared with b",
        "its weights are shared with a",
    ]
    assert kept.a.kernel is kept.b.kernel and count(kept) == count(model) == 3


def test_recurrent_layers_that_share_a_parameter_stay_dense():
    model = Two(*(RNN(pruned(GRUCell(4, 4, rngs=nnx.Rngs(0)))) for _ in range(2)))
    model.b.cell.dense_h.kernel = model.a.cell.dense_h.kernel
    kept, table = sparsified(model, jnp.ones((2, 3, 4)))
    assert table.rows[0]["kept_dense"] == "its weights are shared with b/cell/dense_h"
    assert count(kept) == count(densify(kept)) == count(model)


def test_layers_of_one_random_stream():
    stream = nnx.RngStream(0, tag="carry")
    cells = [pruned(GRUCell(4, 4, rngs=nnx.Rngs(0))) for _ in range(2)]
    model = Two(*(RNN(cell, rngs=stream) for cell in cells))
    assert model.a.rngs is model.b.rngs
    _, table = sparsified(model, jnp.ones((2, 3, 4)))
    assert [row["kept_dense"] for row in table.rows] == [None, None]


def test_a_parameter_that_the_model_holds_too():
    model = Applied(pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), lambda layer, x: layer(x))
    model.weight = model.layer.kernel
    kept, table = sparsified(model, jnp.ones((2, 8)))
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
        sparsified(model, x)
    _, table = sparsified(model, x, keep_dense="layer")
    assert table.rows[0]["kept_dense"] == "asked for"


def test_a_model_that_fails_with_sparse_layers():
    def function(layer, x):
        assert isinstance(layer, nnx.Linear)
        return layer(x)

    model = Applied(pruned(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), function)
    with pytest.raises(ValueError, match=r"must run .* are sparse: 'layer', got AssertionError"):
        sparsified(model, jnp.ones((2, 8)))


# ---- What stays dense ----


def test_kept_dense_by_name(model):
    sparse, table = sparsified(model, X, keep_dense=["blocks/*", "attention/out"])
    asked = {row["path"] for row in table.rows if row["kept_dense"] == "asked for"}
    assert asked == {"again", "blocks/1", "attention/out"}
    assert type(sparse.blocks[1]) is nnx.Linear
    assert type(sparse.attention.query) is SparseLinearGeneral


def test_where(model):
    sparse, table = sparsified(model, X, where=["blocks/1", "attention/?e*"])
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
        sparse, table = sparsified(Unused(layer), x)
        assert reason in table.rows[0]["kept_dense"], reason
        assert table.rows[0]["density"] is None and type(sparse.layer) is type(layer)
    special = Special(4, 4, rngs=rngs)
    special.bias[...] = jnp.zeros(4)  # no matrix
    _, table = sparsified(nnx.Sequential(special, nnx.Linear(4, 4, rngs=rngs)), x)
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
    _, table = sparsified(model, jnp.ones((1, 5, 4)))
    assert [row["path"] for row in table.rows] == ["out"]
    for kernel in model.stacked[1].kernel, model.special.kernel, model.weights[0], model.kernel:
        kernel[...] = kernel[...].at[..., 0].set(0)
    sparse, table = sparsified(model, jnp.ones((1, 5, 4)))
    assert {row["path"]: (row["layer"], row["kept_dense"]) for row in table.rows} == {
        "out": ("Linear", "its weights are shared with (model)"),
        "stacked/1": ("Conv", "such a Conv has no sparse form"),
        "special": (
            "Special",
            "Special has no sparse form, and that of Linear would not run its code: see kinds",
        ),
        "weights": ("List", "List has no sparse form"),
    }
    assert all(row["density"] == 0.75 for row in table.rows if row["layer"] != "Linear")
    assert type(sparse.special) is Special
    _, table = sparsified(model, jnp.ones((1, 5, 4)), where="out")
    assert [row["path"] for row in table.rows] == ["out"]


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_what_gives_a_layer_another_kernel_keeps_it_dense(wrapper):
    """Else it would find no kernel, and normalise nothing."""
    dense = pruned(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    model = nnx.Sequential(
        wrapper(dense, rngs=nnx.Rngs(1)), pruned(nnx.Linear(4, 4, rngs=nnx.Rngs(2)))
    )
    x = jax.random.normal(jax.random.key(0), (2, 4))
    sparse, table = sparsified(model, x)
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
    sparse, _ = sparsified(model, x)
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
    sparse, table = sparsified(model, jnp.ones((2, 4)))
    assert [row["kept_dense"] for row in table.rows] == ["it is not pruned"] * 2
    assert table.rows[0]["density"] is None
    np.testing.assert_array_equal(sparse(jnp.ones((2, 4))), model(jnp.ones((2, 4))))


def test_a_layer_of_zeros():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.zeros((4, 3))
    sparse, table = sparsified(model, jnp.ones((2, 4)))
    assert table.rows[0]["density"] == 0 and table.rows[0]["imbalance"] == 1
    assert sparse.weight.nse == 0
    np.testing.assert_array_equal(sparse(jnp.ones((2, 4))), model(jnp.ones((2, 4))))
