"""CSR matrices of coordinates, concrete and traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse as jsparse

from jaxsparse import CSR


def dense_of(rows, columns, values, shape):
    dense = np.zeros((*values.shape[:-1], *shape), values.dtype)
    np.add.at(dense, (..., rows, columns), values)
    return dense


@pytest.mark.parametrize(
    ("shape", "count", "batch", "room"),
    [
        ((4, 5), 17, (), 2),
        ((5, 3), 9, (2,), 0),
        ((1, 7), 1, (), 1),
        ((0, 3), 0, (), 0),
        ((3, 0), 0, (2,), 1),
    ],
)
def test_from_coo(shape, count, batch, room):
    rng = np.random.default_rng(1)
    rows, columns = (rng.integers(0, max(size, 1), count) for size in shape)
    values = rng.integers(1, 8, (*batch, count)).astype(np.float32)
    expected = dense_of(rows, columns, values, shape)
    positions = len(set(zip(rows.tolist(), columns.tolist(), strict=True)))
    a = CSR.from_coo(rows, columns, values, shape)
    assert a.topology.static and a.nse == positions
    padded = CSR.from_coo(rows, columns, values, shape, nse=positions + room)
    assert not padded.topology.static and padded.nse == positions + room
    traced = jax.jit(lambda *x: CSR.from_coo(*x, shape))(rows, columns, values)
    assert traced.nse == rows.size
    for x in a, padded, traced:
        x.topology.verify()
        np.testing.assert_array_equal(x.topology.nnz, positions)
        np.testing.assert_array_equal(x.todense(), expected)


def test_traced_coordinates_outside_are_left_out_and_room_is_as_asked():
    rows, columns = jnp.array([0, 5, -1, 1, 1, 0]), jnp.array([1, 0, 2, 3, 0, 1])
    values = jnp.arange(1.0, 7)

    def make(rows, columns, nse):
        return CSR.from_coo(rows, columns, values, (2, 3), nse=nse)

    for nse in 2, 9:
        a = jax.jit(make, static_argnums=2)(rows, columns, nse)
        assert a.nse == nse
        np.testing.assert_array_equal(a.todense(), [[0, 7, 0], [5, 0, 0]])
    a = jax.jit(make, static_argnums=2)(rows, columns, 1)  # the first positions are kept
    np.testing.assert_array_equal(a.todense(), [[0, 7, 0], [0, 0, 0]])


def test_a_graph_each_step_compiles_once():
    compilations = []

    @jax.jit
    def aggregate(rows, columns, x):
        compilations.append(1)
        return CSR.from_coo(rows, columns, jnp.ones(rows.size), (5, 5)) @ x

    rng = np.random.default_rng(0)
    for _ in range(3):
        rows, columns, x = rng.integers(0, 5, 8), rng.integers(0, 5, 8), rng.random((5, 2))
        expected = dense_of(rows, columns, np.ones(8), (5, 5)) @ x
        np.testing.assert_allclose(aggregate(rows, columns, x.astype("f4")), expected, rtol=1e-5)
    assert len(compilations) == 1


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_values(jit):
    rows, columns, weights = np.array([1, 0, 1]), np.array([0, 2, 0]), np.arange(6.0).reshape(2, 3)

    def loss(values, rows, columns):
        return jnp.sum(CSR.from_coo(rows, columns, values, (2, 3)).todense() * weights)

    loss = jax.jit(loss) if jit else loss
    gradient = jax.grad(loss)(jnp.ones(3), rows, columns)
    np.testing.assert_array_equal(gradient, weights[rows, columns])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_bcoo_under_jit(dtype):
    dense = jnp.asarray(np.eye(3, 4) * [2, 0, 3, 0], dtype)
    matrix = jsparse.BCOO.fromdense(dense, nse=5)
    for a in CSR.from_bcoo(matrix), jax.jit(CSR.from_bcoo)(matrix):
        assert a.dtype == a.todense().dtype == dtype
        np.testing.assert_array_equal(a.todense(), dense)
