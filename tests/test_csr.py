"""CSR matrices: from and to dense ones, products, as pytrees; errors of all that they do.

Values are small integers wherever possible, so that results are exact and compared as such.
"""

from __future__ import annotations

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from csr_problems import DENSE, SHAPE, A, assert_same, integers, sparse

import jaxsparse
from jaxsparse import CSR

# ---- From and to dense matrices ----


@pytest.mark.parametrize(
    ("shape", "padding"),
    [
        (SHAPE, None),
        (SHAPE, 5),
        ((0, 4), None),
        ((0, 4), 5),
        ((4, 0), 5),
        ((2, 3, *SHAPE), None),
        ((0, *SHAPE), None),
    ],
)
def test_fromdense_and_todense(shape, padding):
    dense = sparse(1, *shape)
    dense[..., -1:, :1] = 5  # where an index that is clipped would fetch what padding must not hold
    counts = np.count_nonzero(dense, (-2, -1))
    nse = int(counts.max(initial=0)) + (padding or 0)
    a = CSR.fromdense(dense, nse=None if padding is None else nse)
    assert (a.shape, a.dtype, a.nse) == (shape[-2:], dense.dtype, nse)
    assert a.topology.batch_shape == shape[:-2]
    np.testing.assert_array_equal(a.topology.nnz, counts)
    np.testing.assert_array_equal(a.todense(), dense)
    padding = np.arange(nse) >= counts[..., None]
    np.testing.assert_array_equal(np.asarray(a.values)[padding], 0)
    traced, again = jax.jit(lambda x: ((a := CSR.fromdense(x, nse=nse)), a.todense()))(dense)
    assert_same(traced, a)
    np.testing.assert_array_equal(again, dense)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "complex64"])
def test_fromdense_keeps_the_dtype(dtype):
    dense = jnp.asarray(DENSE, dtype)
    a = CSR.fromdense(dense)
    assert a.dtype == a.todense().dtype == dtype
    np.testing.assert_array_equal(a.todense(), dense)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("mask_batch", [(), (3,)])
def test_fromdense_at_a_mask(batch, mask_batch):
    dense = sparse(2, *batch, *SHAPE)
    mask = np.random.default_rng(0).random((*mask_batch, *SHAPE)) < 0.5
    counts = mask.sum((-2, -1))
    a = jax.jit(functools.partial(CSR.fromdense, nse=int(counts.max())))(dense, mask)
    assert a.topology.batch_shape == mask_batch
    np.testing.assert_array_equal(a.topology.nnz, counts)
    np.testing.assert_array_equal(jax.jit(CSR.todense)(a), np.where(mask, dense, 0))
    assert_same(CSR.fromdense(dense, mask), a)


def test_fromdense_at_a_concrete_mask_needs_no_nse_under_jit():
    mask = np.random.default_rng(0).random(SHAPE) < 0.5
    a = jax.jit(lambda x: CSR.fromdense(x, mask))(DENSE)
    assert_same(a, CSR.fromdense(DENSE, jnp.asarray(mask)))
    assert_same(a, CSR.fromdense(DENSE, mask.tolist()))


def test_fromdense_under_jit_leaves_out_what_does_not_fit():
    rows, columns = (x[:5] for x in np.nonzero(DENSE))
    expected = np.zeros_like(DENSE)
    expected[rows, columns] = DENSE[rows, columns]
    a = jax.jit(functools.partial(CSR.fromdense, nse=5))(DENSE)
    np.testing.assert_array_equal(a.todense(), expected)


def test_nan_is_stored():
    dense = np.array([[np.nan, 0, -np.inf], [0, 0, 1]], np.float32)
    a = CSR.fromdense(dense)
    assert a.topology.nnz == 3
    np.testing.assert_array_equal(a.todense(), dense)


def test_padding_is_ignored():
    a = CSR.fromdense(DENSE, nse=np.count_nonzero(DENSE) + 4)
    a = CSR(a.values.at[-4:].set(jnp.nan), a.topology)
    x, y = integers(1, 9, 2), integers(2, 7, 2)
    np.testing.assert_array_equal(a.todense(), DENSE)
    np.testing.assert_array_equal(a.T.todense(), DENSE.T)
    np.testing.assert_array_equal(a @ x, DENSE @ x)
    np.testing.assert_array_equal(y.T @ a, y.T @ DENSE)
    np.testing.assert_array_equal(a.to_scipy().toarray(), DENSE)
    np.testing.assert_array_equal(a.to_bcoo().todense(), DENSE)


def test_conversions_from_and_to_dense_are_differentiable():
    mask = np.random.default_rng(0).random(SHAPE) < 0.4
    weights, nse = integers(1, *SHAPE), int(mask.sum()) + 4

    def weighted(x, mask):
        return jnp.sum(CSR.fromdense(x, mask, nse=nse).todense() * weights * x)

    for function in weighted, jax.jit(weighted):
        np.testing.assert_array_equal(jax.grad(function)(DENSE, mask), 2 * mask * DENSE * weights)
    tangent = jax.jvp(lambda x: jax.jit(weighted)(x, mask), (DENSE,), (weights,))[1]
    assert tangent == np.sum(2 * mask * DENSE * weights**2)


@pytest.mark.parametrize("shape", [SHAPE, (3, *SHAPE), (0, 4)])
def test_transpose(shape):
    dense = sparse(1, *shape)
    a = CSR.fromdense(dense, nse=40)
    expected = np.swapaxes(dense, -1, -2)
    assert a.T.shape == (shape[-1], shape[-2])
    again, transposed = jax.jit(lambda a: (a.T.T, a.T.todense()))(a)
    np.testing.assert_array_equal(transposed, expected)
    assert_same(again, a)
    assert_same(a.T.T, a)
    gradient = jax.jit(jaxsparse.grad(lambda a: jnp.sum(a.T.todense() * expected)))(a)
    np.testing.assert_array_equal(a.with_values(gradient.values).todense(), dense)


@pytest.mark.parametrize(("batch", "pattern_batch"), [((3,), ()), ((), (3,))])
def test_transpose_broadcasts(batch, pattern_batch):
    topology = CSR.fromdense(sparse(1, *pattern_batch, *SHAPE)).topology
    a = CSR(integers(0, *batch, topology.nse), topology)
    np.testing.assert_array_equal(a.T.todense(), np.swapaxes(a.todense(), -1, -2))


# ---- Products ----


@pytest.mark.smoke
@pytest.mark.parametrize(("batch", "n"), [((), ()), ((), (4,)), ((3,), (4,))])
@pytest.mark.parametrize("pattern_batch", [(), (3,)])
@pytest.mark.parametrize("module", [np, jnp])
def test_matmul(batch, n, pattern_batch, module):
    dense = sparse(1, *pattern_batch, *SHAPE)
    a = CSR.fromdense(dense)
    x, y = integers(2, *batch, 9, *n), integers(3, *batch, *n, 7)
    for actual, expected in (
        (a @ module.asarray(x), dense @ x),
        (module.asarray(y) @ a, y @ dense),
        (jax.jit(lambda a, x: a @ x)(a, x), dense @ x),
        (jax.jit(lambda y, a: y @ a)(y, a), y @ dense),
    ):
        assert isinstance(actual, jax.Array)
        np.testing.assert_array_equal(actual, expected)


def test_matmul_of_transposed():
    a, x, y = CSR.fromdense(DENSE), integers(2, 7, 4), integers(3, 4, 9)
    np.testing.assert_array_equal(a.T @ x, DENSE.T @ x)
    np.testing.assert_array_equal(y @ a.T, y @ DENSE.T)


# ---- Pytrees ----


def test_tree_round_trip():
    flat, treedef = jax.tree.flatten(A)
    assert all(isinstance(leaf, jax.Array) for leaf in flat)
    for again in jax.tree.unflatten(treedef, flat), pickle.loads(pickle.dumps(A)):
        assert_same(again, A)
    assert jax.tree_util.keystr(jax.tree.leaves_with_path(A)[0][0]) == ".values"
    assert_same(jax.jit(lambda a: a)(A), A)
    host = jax.device_get(A)
    np.testing.assert_array_equal(host @ integers(0, 9, 2), DENSE @ integers(0, 9, 2))
    np.testing.assert_array_equal(host.T.todense(), DENSE.T)


@pytest.mark.parametrize("leaf", [None, object()])
def test_unflattening_accepts_any_leaf(leaf):
    matrix = jax.tree.map(lambda _: leaf, A)
    assert matrix.values is leaf and matrix.shape == SHAPE
    assert "shape=(7, 9)" in repr(matrix)


def test_scan_and_vmap_over_matrices():
    dense, x = sparse(1, 4, *SHAPE), integers(2, 9, 2)
    a = CSR.fromdense(dense)
    expected = dense @ x
    np.testing.assert_array_equal(jax.vmap(lambda a: a @ x)(a), expected)
    np.testing.assert_array_equal(jax.lax.map(lambda a: a @ x, a), expected)


# ---- Text and errors ----


def test_str_and_repr():
    a = CSR.fromdense(np.eye(2, dtype=np.float32))
    head, *picture = str(a).splitlines()
    assert head == "CSR float32 on Topology of shape (2, 2), 2 stored, 50.0 % sparse"
    assert picture == ["┌──┐", "│█ │", "│ █│", "└──┘"]
    assert repr(a) == "CSR(values=float32[2], topology=Topology(shape=(2, 2), column_indices=(2,)))"
    traced = []
    jax.jit(lambda a: traced.append((str(a), repr(a))))(a)
    jax.jit(lambda a: traced.append((str(a), repr(a))))(
        a.with_values(a.values, a.topology.as_dynamic())
    )
    assert traced == [
        (str(a), repr(a)),  # the pattern is static
        ("CSR float32 on Topology(shape=(2, 2), column_indices=(2,))", repr(a)),
    ]


def test_batch_dimensions_must_broadcast():
    topology = jaxsparse.Topology.from_mask(np.ones((3, 2, 2), bool))
    assert CSR(jnp.ones((5, 1, 4)), topology).values.shape == (5, 1, 4)
    with pytest.raises(ValueError, match=r"values \(2,\) and topology \(3,\) must broadcast"):
        CSR(jnp.ones((2, 4)), topology)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: A @ 2.0, TypeError, "unsupported operand type(s) for @"),
        (lambda: 2.0 @ A, TypeError, "unsupported operand type(s) for @"),
        (lambda: A @ np.float32(2), TypeError, "unsupported operand type(s) for @"),
        (lambda: A @ np.array(2.0), ValueError, "matmul: a scalar is no operand of @, use *"),
        (lambda: np.array(2.0) @ A, ValueError, "matmul: a scalar is no operand of @, use *"),
        (lambda: jnp.array(2.0) @ A, ValueError, "matmul: a scalar is no operand of @, use *"),
        (lambda: A @ A.T, TypeError, "matmul: takes a sparse and a dense matrix, got two sparse"),
        (lambda: A @ A.to_scipy().T, TypeError, "matmul: takes a sparse and a dense matrix"),
        (lambda: A @ A.T.to_bcoo(), TypeError, "matmul: takes a sparse and a dense matrix"),
        (lambda: A @ [1.0] * 9, TypeError, "unsupported operand type(s) for @"),
        (lambda: A @ np.ones(7), ValueError, "must have 9 rows for a matrix of shape (7, 9)"),
        (lambda: np.ones(9) @ A, ValueError, "must have 7 columns for a matrix of shape (7, 9)"),
        (lambda: A * A.T, ValueError, "must be on one pattern"),
        (lambda: A * jnp.ones(2), ValueError, "must broadcast to (..., 7, 9), got shape (2,)"),
        (lambda: np.ones((7, 2)) * A, ValueError, "to (..., 7, 9), got shape (7, 2)"),
        (lambda: A * {}, TypeError, "unsupported operand type(s) for *"),
        (lambda: 1 / A, TypeError, "unsupported operand type(s) for /"),
        (lambda: A + 1, TypeError, "write a.todense() + x; got int"),
        (lambda: A - DENSE, TypeError, "write a.todense() + x; got ndarray"),
        (lambda: DENSE - A, TypeError, "write a.todense() + x; got ndarray"),
        (lambda: A + A.T, ValueError, "must have one shape, got (7, 9), (9, 7)"),
        (lambda: A + CSR.fromdense(DENSE[None]), ValueError, "needs one concrete pattern"),
        (lambda: A == A, TypeError, "CSR: == holds, or may hold, where nothing is stored"),
        (lambda: A == 0, TypeError, "CSR: == holds"),
        (lambda: A != 2, TypeError, "CSR: != holds"),
        (lambda: A <= A, TypeError, "CSR: <= holds"),
        (lambda: A != DENSE, TypeError, "CSR: != holds"),
        (lambda: jax.jit(lambda x: x < A)(1), TypeError, "CSR: > holds, or may hold"),
        (lambda: bool(A), ValueError, "CSR: the truth value of a matrix is ambiguous"),
        (lambda: len(A), TypeError, "CSR: the length of a sparse matrix is ambiguous"),
        (lambda: list(A), TypeError, "'CSR' object is not iterable"),
        (lambda: hash(A), TypeError, "unhashable type: 'CSR'"),
        (lambda: np.asarray(A), TypeError, "use a.todense() or a.to_scipy()"),
        (lambda: np.sum(A), TypeError, "CSR: numpy.sum takes no sparse matrix"),
        (lambda: A[2], TypeError, "rows are taken by a slice or by an array of row numbers"),
        (lambda: A[:, 1:], TypeError, "columns by a.T[...].T"),
        (lambda: A[[7]], IndexError, "out of bounds"),
        (lambda: A[[0.5]], TypeError, "CSR: row numbers must be integers, got float64"),
        (lambda: jax.jit(lambda r: A[r])(np.arange(2)), TypeError, "must be known, got a traced"),
        (lambda: jax.jit(lambda r: CSR.from_coo(r, r, jnp.ones(2), SHAPE, nse=-1))(np.arange(2)),
         ValueError, "CSR.from_coo: nse must be >= 0, got -1"),
        (lambda: CSR.fromdense(DENSE, nse=2.5), TypeError, "nse must be an integer, got 2.5"),
        (lambda: A.sum(2), ValueError, "CSR.sum: axis must be None, 0, 1, -1 or -2, got 2"),
        (lambda: CSR.fromdense(A), TypeError, "needs a dense array, got a sparse matrix"),
        (lambda: CSR.fromdense(A.to_scipy()), TypeError, "use CSR.from_scipy"),
        (lambda: CSR.from_coo([0], [9], [1.0], SHAPE), ValueError, "column 9, out of range for 9"),
        (lambda: CSR.from_coo([-1], [0], [1.0], SHAPE), ValueError, "row -1, out of range for 7"),
        (lambda: CSR.from_coo([0.5], [0], [1.0], SHAPE), ValueError, "rows must be integers"),
        (lambda: CSR.from_coo([0], [0, 1], [1.0], SHAPE), ValueError, "have shapes (entries,)"),
        (lambda: CSR.from_coo([0, 1], [0, 1], [1, 2], SHAPE, nse=1), ValueError, "nse=1 is less"),
        (lambda: CSR([1.0], [0]), TypeError, "CSR: topology must be a Topology, got list"),
        (lambda: CSR(1.0, A.topology), ValueError, "one for each stored entry, got ()"),
        (lambda: CSR([1.0], A.topology), ValueError, "one for each stored entry, got (1,)"),
        (lambda: CSR.fromdense([1.0]), ValueError, "needs an array (..., m, k), got shape (1,)"),
        (lambda: CSR.fromdense(DENSE, DENSE.T > 0), ValueError, "mask of shape (9, 7) must have"),
        (lambda: CSR.fromdense(DENSE, nse=2), ValueError, "nse=2 is less than the"),
        (lambda: jax.jit(CSR.fromdense)(DENSE), ValueError, "must be given as nse=..."),
        (lambda: CSR(A.values[None], A.topology).to_scipy(), ValueError, "one concrete matrix"),
        (lambda: CSR.fromdense(DENSE[None]).to_scipy(), ValueError, "needs one concrete pattern"),
        (lambda: jax.jit(lambda a: a.to_scipy())(A), ValueError, "needs one concrete matrix"),
        (lambda: CSR.from_scipy(scipy.sparse.coo_array(np.ones(3))), ValueError, "two integers"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
