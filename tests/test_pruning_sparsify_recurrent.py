"""Recurrent layers that `sparsify` makes sparse, and lays out for a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from sparsify_problems import Applied, pruned, sparsified  # noqa: E402

from jaxsparse import H200, nn  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    SimpleCell,
    SparseLinear,
)
from jaxsparse.pruning import densify, sparsify  # noqa: E402


def test_recurrent_layers(monkeypatch):
    packed = []
    monkeypatch.setattr(
        "jaxsparse.pruning.recurrent_layers.pack",
        lambda layer, batch: packed.append((type(layer).__name__, batch)),
    )
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        RNN(LSTMCell(4, 8, rngs=rngs)),
        Bidirectional(RNN(GRUCell(8, 8, rngs=rngs)), RNN(GRUCell(8, 8, rngs=rngs))),
        RNN(LSTMCell(16, 8, rngs=rngs)),
    )
    pruned(model.layers[0].cell.dense_h)
    pruned(model.layers[1])
    x = jax.random.normal(jax.random.key(0), (3, 5, 4))
    sparse, table = sparsify(model, x, faster_only=False, seconds=1e-3)
    kept = {row["path"]: row["kept_dense"] for row in table.rows}
    assert kept == {"layers/0": None, "layers/1": None, "layers/2": "it is not pruned"}
    assert packed == [("RNN", 3), ("Bidirectional", 3)]
    assert table.rows[0]["shapes"] == ((32, 4), (32, 8)) and len(table.rows[1]["shapes"]) == 4
    assert type(sparse.layers[0].cell.dense_h) is SparseLinear
    assert type(sparse.layers[0].cell.dense_i) is nnx.Linear  # it has no zeros
    assert type(sparse.layers[1].backward_rnn.cell.dense_i) is SparseLinear
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)
    dense = densify(sparse)
    assert type(dense.layers[1].backward_rnn.cell.dense_i) is nnx.Linear
    np.testing.assert_array_equal(dense(x), model(x))
    assert type(model.layers[0].cell.dense_h) is nnx.Linear

    _, table = sparsified(sparse, x)
    assert table.rows[1]["kept_dense"] == "it has no dense matrices"


@pytest.mark.parametrize("time_major", [True, False])
def test_recurrent_layers_are_laid_out_for_the_batch_of_the_call(monkeypatch, time_major):
    seen = []
    monkeypatch.setattr(
        "jaxsparse.pruning.recurrent_layers.pack", lambda _, batch: seen.append(batch)
    )
    layer = pruned(RNN(GRUCell(4, 8, rngs=nnx.Rngs(0)), time_major=time_major))
    shape = (7, 2, 3, 4) if time_major else (2, 3, 7, 4)
    sparsified(layer, jnp.ones(shape))
    assert seen == [6]


def test_weights_that_do_not_fit_the_chip_take_the_plain_path(monkeypatch):
    def pack(layer, batch):
        nn.pack(layer.forward_rnn, batch=batch, device=H200)
        raise ValueError("pack: at backward_rnn.cell: too large")

    monkeypatch.setattr("jaxsparse.pruning.recurrent_layers.pack", pack)
    rngs = nnx.Rngs(0)
    layer = pruned(Bidirectional(*(RNN(GRUCell(4, 8, rngs=rngs)) for _ in range(2))))
    sparse, table = sparsified(layer, jnp.ones((2, 3, 4)))
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
    sparse, table = sparsified(model, x)
    assert table.rows[0]["kept_dense"] is None and batches == [2] and len(table) == 1
    assert type(sparse.layer.dense_h) is SparseLinear
    np.testing.assert_allclose(sparse(x), model(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(densify(sparse)(x), model(x))
