"""Layers with heads, beside layers of the same matrices with their zeros."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import BIAS, IN, LENGTHS, MGU, B, T, close, inputs  # noqa: E402

from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    HeadwiseLinear,
    LSTMCell,
    RecurrentCell,
    SimpleCell,
    to_flax,
)

HEADS, D = 3, 4
H = HEADS * D
CELLS = {
    "simple": (SimpleCell, (), {}),
    "gru": (GRUCell, (), {"use_recurrent_bias": True}),
    "lstm": (LSTMCell, (), {}),
    "own": (RecurrentCell, (MGU,), {"gates": 2}),
}


def cell_of(name, heads=HEADS, seed=0, **options):
    cls, function, own = CELLS[name]
    return cls(IN, H, *function, heads=heads, rngs=nnx.Rngs(seed), **BIAS, **own, **options)


def with_zeros(cell, name):
    """The cell with the matrix of the heads as a dense kernel."""
    twin = cell_of(name, heads=1)
    for own, theirs in ((cell.dense_i, twin.dense_i), (cell.dense_h, twin.dense_h)):
        theirs.kernel[...] = own.matrix if isinstance(own, HeadwiseLinear) else own.kernel[...]
        if own.bias is not None:
            theirs.bias[...] = own.bias[...]
    return twin


@pytest.mark.parametrize("name", CELLS)
def test_cells_compute_what_a_matrix_with_zeros_does(name):
    cell = cell_of(name)
    assert cell.dense_h.kernel.shape == (HEADS, D, cell.gates * D)
    x = inputs(B, T, IN)

    @nnx.jit
    def gradient(layer):
        loss = lambda layer: jnp.sum(jnp.sin(layer(x, seq_lengths=LENGTHS)))  # noqa: E731
        return layer(x, seq_lengths=LENGTHS), nnx.grad(loss)(layer)

    got, own = gradient(RNN(cell))
    expected, theirs = gradient(RNN(with_zeros(cell, name)))
    close(got, expected)
    blocks = theirs.cell.dense_h.kernel[...].reshape(HEADS, D, cell.gates, HEADS, D)
    k = np.arange(HEADS)
    close(own.cell.dense_h.kernel[...], blocks[k, :, :, k].reshape(HEADS, D, -1))
    close(own.cell.dense_i.kernel[...], theirs.cell.dense_i.kernel[...])


def test_a_step_and_both_directions():
    cells = [cell_of("lstm", seed=s) for s in range(2)]
    twins = [with_zeros(cell, "lstm") for cell in cells]
    x = inputs(B, T, IN)
    both, dense = (Bidirectional(*map(RNN, own)) for own in (cells, twins))
    close(both(x), dense(x))
    carry = cells[0].initialize_carry((B, IN))
    close(cells[0](carry, x[:, 0]), twins[0](carry, x[:, 0]))


def test_conversion_to_flax_writes_the_zeros():
    ours = RNN(cell_of("gru"))
    theirs = to_flax(ours)
    assert theirs.cell.dense_h.kernel.shape == (H, 3 * H)
    x = inputs(B, T, IN)
    close(ours(x), theirs(x))


def test_each_head_is_initialized_by_itself():
    kernel = cell_of("lstm").dense_h.kernel[...]
    for block in kernel:
        np.testing.assert_allclose(block @ block.T, np.eye(D), atol=1e-5)
    assert not np.allclose(kernel[0], kernel[1])


def test_one_head_is_a_dense_layer():
    assert type(cell_of("lstm", heads=1).dense_h) is nnx.Linear


def test_heads_of_the_input():
    cell = SimpleCell(6, H, heads=HEADS, rngs=nnx.Rngs(0))
    dense = SimpleCell(6, H, rngs=nnx.Rngs(0))
    cell.dense_i = HeadwiseLinear(6, H, heads=HEADS, rngs=nnx.Rngs(1))
    dense.dense_i.kernel[...], dense.dense_h.kernel[...] = cell.dense_i.matrix, cell.dense_h.matrix
    x = inputs(B, T, 6)
    close(RNN(cell)(x), RNN(dense)(x))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_headwise_layer_multiplies_by_its_matrix(dtype):
    layer = HeadwiseLinear(6, 24, heads=2, gates=3, dtype=dtype, rngs=nnx.Rngs(0), **BIAS)
    assert layer.kernel.shape == (2, 3, 12)
    x = inputs(5, 4, 6)
    expected = x @ layer.matrix + layer.bias[...]
    got = layer(x)
    assert got.dtype == (dtype or jnp.float32)
    tolerance = 3e-2 if dtype else 2e-6
    close(got.astype(jnp.float32), expected, rtol=tolerance, atol=tolerance)
    # A head's input reaches its units of every gate, and no others.
    moved = np.flatnonzero(np.asarray(layer(x.at[..., 3:].add(1.0)) != got).any((0, 1)))
    np.testing.assert_array_equal(moved.reshape(3, 4), np.arange(4) + 4 + 8 * np.arange(3)[:, None])


def test_a_nan_stays_in_its_block():
    layer = HeadwiseLinear(4, 4, heads=2, rngs=nnx.Rngs(0))
    layer.kernel[...] = layer.kernel[...].at[0, 0, 0].set(jnp.nan)
    assert np.isnan(layer.matrix).sum() == 1


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: cell_of("gru", heads=5), ValueError, "^GRUCell: heads must divide the 12 hidden_"),
        (lambda: cell_of("gru", heads=0), ValueError, "^GRUCell: heads must divide .*, got 0"),
        (lambda: cell_of("gru", heads=1.5), TypeError, "^GRUCell: heads must be an integer"),
        (
            lambda: cell_of("lstm", recurrent_sparsity=0.5),
            ValueError,
            "^LSTMCell: 3 heads have blocks of dense weights, got recurrent_sparsity",
        ),
        (
            lambda: HeadwiseLinear(6, 9, heads=3, gates=2, rngs=nnx.Rngs(0)),
            ValueError,
            "^HeadwiseLinear: heads must divide .*got 3 heads, 2 gates, 6 and 9 features",
        ),
        (
            lambda: HeadwiseLinear(6, 6, heads=2, rngs=nnx.Rngs(0))(jnp.ones((2, 4))),
            ValueError,
            "^HeadwiseLinear: inputs must have 6 features, got 4",
        ),
        (
            lambda: HeadwiseLinear(
                6,
                6,
                heads=2,
                kernel_init=nnx.with_metadata(nnx.initializers.ones, tag=1),
                rngs=nnx.Rngs(0),
            ),
            ValueError,
            "^HeadwiseLinear: kernel_init must make the array of a head",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_gates_of_another_cell_are_refused():
    cell = cell_of("simple")
    cell.dense_h = HeadwiseLinear(H, H, heads=HEADS, gates=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dense_h must have the 1 gates of the cell, got 2"):
        RNN(cell)(inputs(B, T, IN))


def test_metadata_of_the_kernel():
    options = {"recurrent_kernel_metadata": {"tag": "heads"}}
    cell = cell_of("lstm", **options)
    assert cell.dense_h.kernel.tag == "heads"
    assert jax.tree.structure(nnx.state(cell, nnx.Param)).num_leaves == 3
