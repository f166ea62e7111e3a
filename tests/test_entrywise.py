"""Arithmetic on the entries of CSR matrices: scaling, sums, comparisons, rows.

Values are small integers wherever possible, so that results are exact and compared as such.
"""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from csr_problems import DENSE, SHAPE, A, assert_same, integers, sparse

from jaxsparse import CSR, Topology, entrywise


@pytest.mark.parametrize(
    "scalar", [3, 3.0, True, np.float32(3), np.array(3.0, np.float32), jnp.float32(3)], ids=repr
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_scaling(scalar, dtype):
    a = A.astype(dtype)
    for scaled, values in (
        (a * scalar, a.values * scalar),
        (scalar * a, scalar * a.values),
        (a / scalar, a.values / scalar),
        (jax.jit(lambda a, s: s * a)(a, jnp.asarray(scalar)), a.values * jnp.asarray(scalar)),
    ):
        np.testing.assert_array_equal(scaled.values, values)
        assert scaled.dtype == values.dtype
        assert_same(scaled.topology, a.topology)


def test_negation_and_astype():
    np.testing.assert_array_equal((-A).todense(), -DENSE)
    assert (-A).topology is A.topology
    half = A.astype(jnp.bfloat16)
    assert half.dtype == jnp.bfloat16 and half.topology is A.topology
    np.testing.assert_array_equal(half.todense(), DENSE)  # bfloat16 holds small integers


def test_sums():
    b = CSR(integers(5, A.nse), A.topology)
    equal = copy.deepcopy(b), CSR.fromdense(b.todense()), jax.tree.map(lambda x: x, b)
    for other in b, *equal:
        np.testing.assert_array_equal((A + other).todense(), A.todense() + b.todense())
        np.testing.assert_array_equal((A - other).todense(), A.todense() - b.todense())
        assert (A + other).topology is A.topology
    batched = CSR(integers(6, 3, A.nse), A.topology)
    np.testing.assert_array_equal((A + batched).todense(), A.todense() + batched.todense())


@pytest.mark.parametrize(
    "other",
    [
        CSR.fromdense(sparse(7, *SHAPE)),
        CSR.fromdense(DENSE[:, ::-1]),  # as many entries
        CSR.fromdense(DENSE, nse=A.nse + 1),
        CSR.fromdense(np.zeros(SHAPE, np.float16)),
        CSR.fromdense(np.ones(SHAPE, np.int32)),
    ],
    ids=["random", "mirrored", "padded", "empty", "full"],
)
def test_sums_of_different_patterns(other):
    b = other.todense()
    batched = other.with_values(jnp.stack([other.values, 2 * other.values]))
    for actual, expected in (
        (A + other, DENSE + b),
        (A - other, DENSE - b),
        (other - A, b - DENSE),
        (sum([A, other, A]), 2 * DENSE + b),
        (A + batched, np.stack([DENSE + b, DENSE + 2 * b])),
    ):
        np.testing.assert_array_equal(actual.todense(), expected)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual.topology.nnz, np.sum((DENSE != 0) | (b != 0)))
        assert actual.topology.static is other.topology.static


def test_sums_of_different_patterns_are_differentiable():
    other, weights = CSR.fromdense(sparse(7, *SHAPE)), integers(8, *SHAPE)
    loss = jax.jit(lambda a, b: jnp.sum((a - 2 * b).todense() * weights))
    da, db = jax.grad(loss, (0, 1))(A, other)
    np.testing.assert_array_equal(da.todense(), np.where(DENSE != 0, weights, 0))
    np.testing.assert_array_equal(db.todense(), np.where(other.todense() != 0, -2 * weights, 0))


def test_sums_under_jit():
    expected = 3 * DENSE

    def one_topology(a):
        return a + 2 * jax.tree.map(lambda x: x, a)

    again = copy.deepcopy(A)
    constants = jax.jit(lambda v: CSR(v, A.topology) + 2 * again)
    np.testing.assert_array_equal(constants(A.values).todense(), expected)
    dynamic = CSR(A.values, A.topology.as_dynamic())
    for a in A, dynamic:
        np.testing.assert_array_equal(jax.jit(one_topology)(a).todense(), expected)
    np.testing.assert_array_equal(jax.jit(lambda a, b: a + 2 * b)(A, again).todense(), expected)
    with pytest.raises(ValueError, match="separate arguments of a traced function"):
        jax.jit(lambda a, b: a + b)(dynamic, dynamic)
    with pytest.raises(ValueError, match="separate arguments of a traced function"):
        jax.jit(lambda b: A + b)(dynamic)
    with pytest.raises(ValueError, match="needs one concrete pattern"):  # known to be different
        jax.jit(lambda b: A + b)(CSR.fromdense(DENSE, nse=A.nse + 1))


@pytest.mark.parametrize(
    "shape, pattern_batch",
    [
        *((shape, ()) for shape in [(9,), (1, 9), (7, 1), SHAPE, (1, 1), (2, *SHAPE), (2, 7, 1)]),
        *((shape, (2,)) for shape in [(9,), SHAPE, (2, 7, 1)]),
    ],
)
def test_products_with_dense_arrays_entry_by_entry(shape, pattern_batch):
    dense = sparse(1, *pattern_batch, *SHAPE)
    a, x = CSR.fromdense(dense, nse=40), integers(4, *shape)
    for function in (lambda f: f, jax.jit):
        for actual, expected in (
            (function(lambda a, x: a * x)(a, x), dense * x),
            (function(lambda a, x: x * a)(a, x), dense * x),
            (function(lambda a, x: a / x)(a, jnp.asarray(2.0**x)), dense / 2.0**x),
        ):
            np.testing.assert_array_equal(actual.todense(), expected)
            assert np.isfinite(actual.values).all()  # padding, too


def test_padding_meets_no_number_of_a_dense_row():
    topology = Topology([0, 1, 2], [1, 1, 0, 0], (2, 2))
    values, row = jnp.array([1.0, 2.0, 0.0, 0.0]), jnp.array([[0.0, 2.0]])

    def total(values):
        return jnp.sum((CSR(values, topology) / row).todense())

    np.testing.assert_array_equal((CSR(values, topology) / row).values, values / 2)
    np.testing.assert_array_equal(jax.grad(total)(values), [0.5, 0.5, 0, 0])


def test_products_of_two_matrices_entry_by_entry():
    b = A.with_values(integers(9, A.nse))
    np.testing.assert_array_equal((A * b).todense(), DENSE * b.todense())
    np.testing.assert_array_equal((A / b).values, A.values / b.values)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, bool])
@pytest.mark.parametrize("shape", [SHAPE, (3, *SHAPE), (0, 4), (4, 0)])
def test_sums_and_diagonal(shape, dtype):
    dense = sparse(1, *shape).astype(dtype)
    a = CSR.fromdense(dense, nse=40)
    for axis in None, 0, 1, -1, -2:
        over = {None: (-2, -1), 0: -2, 1: -1}.get(axis, axis)
        np.testing.assert_array_equal(a.sum(axis), dense.astype(np.float64).sum(over))
    expected = np.diagonal(dense, axis1=-2, axis2=-1)
    assert a.diagonal().dtype == dtype
    np.testing.assert_array_equal(a.diagonal(), expected)


@pytest.mark.parametrize(
    "key",
    [slice(2, 5), slice(None, None, -2), slice(5, 5), [3, 3, -1], np.arange(7) % 2 == 0, []],
    ids=str,
)
def test_rows(key):
    places = np.asarray(key, int) if isinstance(key, list) else key
    rows = CSR.fromdense(DENSE, nse=40)[key]
    np.testing.assert_array_equal(A[key].todense(), DENSE[places])
    np.testing.assert_array_equal(rows.todense(), DENSE[places])
    assert (A[key].topology.static, rows.topology.static) == (True, False)
    batched = A.with_values(jnp.stack([A.values, 2 * A.values]))
    np.testing.assert_array_equal(
        batched[key].todense(), np.stack([DENSE[places], 2 * DENSE[places]])
    )
    gradient = jax.grad(lambda a: jnp.sum(a[key].todense() ** 2) / 2)(A)
    times = np.bincount(np.arange(7)[places], minlength=7)[:, None]
    np.testing.assert_array_equal(gradient.todense(), DENSE * times)


@pytest.mark.parametrize("symbol", ["!=", "<", ">"])
def test_comparisons(symbol):
    b, compare = A.with_values(integers(9, A.nse)), entrywise._COMPARISONS[symbol]
    compared = compare(A, b)
    assert compared.dtype == compared.todense().dtype == bool
    np.testing.assert_array_equal(compared.todense(), compare(DENSE, b.todense()))
    for scalar in (0, np.float32(0), jnp.zeros(())):
        np.testing.assert_array_equal(compare(A, scalar).todense(), compare(DENSE, 0))
    np.testing.assert_array_equal((A >= 3).todense(), DENSE >= 3)
    np.testing.assert_array_equal((A == 3).todense(), DENSE == 3)
    assert A != "a"


def test_what_python_and_numpy_ask():
    dense = CSR.fromdense(DENSE[None])
    for a in A, dense:
        assert (a.ndim, a.size, a.shape) == (2, 63, SHAPE)
    assert A.nbytes == sum(x.nbytes for x in jax.tree.leaves((A.values, A.topology)))
    assert A.block_until_ready() is A
    np.testing.assert_array_equal(abs(-A).todense(), DENSE)
    np.testing.assert_array_equal(np.dot(np.ones(7), A), DENSE.sum(0))
    np.testing.assert_array_equal(np.dot(A, np.ones(9)), DENSE.sum(1))
