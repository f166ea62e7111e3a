"""CSR matrices: how they are made, converted, combined and differentiated.

Values are small integers wherever possible, so that results are exact and compared as such.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse as jsparse

import jaxsparse
from jaxsparse import CSR, entrywise, spmm

SHAPE = (7, 9)


def integers(seed, *shape, dtype=np.float32):
    """Random integers from 1 to 7, so none is 0."""
    return np.random.default_rng(seed).integers(1, 8, shape).astype(dtype)


def sparse(seed, *shape, density=0.3, dtype=np.float32):
    """A dense array with zeros."""
    stored = np.random.default_rng(seed + 99).random(shape) < density
    return np.where(stored, integers(seed, *shape), 0).astype(dtype)


DENSE = sparse(0, *SHAPE)


def assert_same(a, b):
    """Equal in structure, values and dtypes, of whatever kind their patterns are."""

    def dynamic(x):
        return CSR(x.values, x.topology.as_dynamic()) if isinstance(x, CSR) else x

    a, b = (jax.tree.map(dynamic, x, is_leaf=lambda x: isinstance(x, CSR)) for x in (a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype


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


A = CSR.fromdense(DENSE)


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


# ---- Arithmetic ----


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


@pytest.mark.parametrize("pattern_batch", [(), (2,)])
@pytest.mark.parametrize("shape", [(9,), (1, 9), (7, 1), SHAPE, (1, 1), (2, *SHAPE), (2, 7, 1)])
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
    key = np.asarray(key, int) if isinstance(key, list) else key
    rows = CSR.fromdense(DENSE, nse=40)[key]
    np.testing.assert_array_equal(A[key].todense(), DENSE[key])
    np.testing.assert_array_equal(rows.todense(), DENSE[key])
    assert (A[key].topology.static, rows.topology.static) == (True, False)
    batched = A.with_values(jnp.stack([A.values, 2 * A.values]))
    np.testing.assert_array_equal(batched[key].todense(), np.stack([DENSE[key], 2 * DENSE[key]]))
    gradient = jax.grad(lambda a: jnp.sum(a[key].todense() ** 2) / 2)(A)
    times = np.bincount(np.arange(7)[key], minlength=7)[:, None]
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


# ---- SciPy, BCSR, BCOO ----


def coordinates(seed, nnz=60):
    """Unsorted, with duplicates."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, SHAPE[0], nnz), rng.integers(0, SHAPE[1], nnz)
    dense = np.zeros(SHAPE, np.float32)
    values = integers(seed, nnz)
    np.add.at(dense, (rows, columns), values)
    return values, rows, columns, dense


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "dok", "lil", "bsr"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_scipy(layout, kind):
    values, rows, columns, dense = coordinates(0)
    coo = getattr(scipy.sparse, f"coo_{kind}")((values, (rows, columns)), shape=SHAPE)
    a = CSR.from_scipy(coo.asformat(layout))
    assert a.dtype == jnp.float32 and a.nse == np.count_nonzero(dense)
    np.testing.assert_array_equal(a.todense(), dense)
    back = a.to_scipy()
    assert isinstance(back, scipy.sparse.csr_array) and back.dtype == np.float32
    np.testing.assert_array_equal(back.toarray(), dense)
    assert_same(CSR.from_scipy(back), a)


def test_scipy_csr_unsorted_with_duplicates_and_stored_zeros():
    parts = np.array([3.0, 2, 4, 0], np.float32), np.array([2, 0, 2, 1]), np.array([0, 3, 4])
    matrix = scipy.sparse.csr_array(parts, shape=(2, 3), copy=True)
    a = CSR.from_scipy(matrix)
    np.testing.assert_array_equal(a.todense(), [[2, 0, 7], [0, 0, 0]])
    assert a.topology.nnz == 3  # the zero is stored
    for ours, theirs in zip((matrix.data, matrix.indices, matrix.indptr), parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)  # and the operand is as it was


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int16", "int32", "complex64"])
def test_to_scipy_dtypes(dtype):
    a = CSR(A.values.astype(dtype), A.topology)
    expected = "float32" if dtype in ("bfloat16", "float16") else dtype
    assert a.to_scipy().dtype == expected
    np.testing.assert_array_equal(a.to_scipy().toarray(), DENSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("padding", [0, 5])
def test_bcoo(dtype, padding):
    values, rows, columns, dense = coordinates(1)
    indices = np.concatenate([np.stack([rows, columns], 1), np.tile(SHAPE, (padding, 1))])
    data = jnp.asarray(np.concatenate([values, np.full(padding, 9)]), dtype)
    a = CSR.from_bcoo(jsparse.BCOO((data, jnp.asarray(indices)), shape=SHAPE))
    assert a.dtype == dtype and a.nse == np.count_nonzero(dense)
    np.testing.assert_array_equal(a.todense(), dense)
    back = a.to_bcoo()
    assert back.dtype == dtype and back.nse == a.nse
    np.testing.assert_array_equal(back.todense(), dense)
    assert_same(CSR.from_bcoo(back), a)


@pytest.mark.parametrize(("batch", "nse"), [((), None), ((), 40), ((3,), 40)])
def test_bcsr(batch, nse):
    dense = sparse(3, *batch, *SHAPE)
    n_batch = len(batch)
    a = CSR.from_bcsr(jsparse.BCSR.fromdense(jnp.asarray(dense), n_batch=n_batch, nse=nse))
    np.testing.assert_array_equal(a.todense(), dense)
    np.testing.assert_array_equal(a.topology.nnz, np.count_nonzero(dense, (-2, -1)))
    a = CSR.fromdense(dense, nse=nse)
    back = a.to_bcsr()
    assert back.shape == dense.shape and back.n_batch == n_batch
    assert back.nse == (a.nse if batch else a.topology.nnz)  # padding of one matrix is cut off
    assert_same(CSR.from_bcsr(back).todense(), a.todense())
    np.testing.assert_array_equal(back.todense(), dense)
    # Neither a constant nor an argument of a traced function needs its values.
    for bcoo in jax.jit(lambda b: (a.to_bcoo(), b.to_bcoo()))(a):
        np.testing.assert_array_equal(bcoo.todense(), dense)


def test_bcsr_of_batched_values():
    a = CSR(integers(0, 3, A.nse), A.topology)
    np.testing.assert_array_equal(a.to_bcsr().todense(), a.todense())


def test_dense_and_batch_dimensions_are_refused():
    one, two = jnp.ones((2, 3)), jnp.zeros((2, 2), jnp.int32)
    with pytest.raises(ValueError, match="from_bcsr: needs n_dense = 0, got 1"):
        CSR.from_bcsr(jsparse.BCSR((one, two[0], jnp.array([0, 2])), shape=(1, 4, 3)))
    for bcoo, got in (
        (jsparse.BCOO((one[:, :2], two[None].repeat(2, 0)), shape=(2, 4, 4)), "1 batch, 2 sparse"),
        (jsparse.BCOO((one, two), shape=(4, 4, 3)), "0 batch, 2 sparse and 1 dense"),
        (jsparse.BCOO((one[0, :2], two[:, :1]), shape=(4,)), "0 batch, 1 sparse and 0 dense"),
    ):
        with pytest.raises(ValueError, match=f"needs two sparse dimensions alone, got {got}"):
            CSR.from_bcoo(bcoo)


def test_unsorted_bcsr_is_refused():
    parts = jnp.ones(2), jnp.array([1, 0]), jnp.array([0, 2])
    with pytest.raises(ValueError, match=re.escape("row 0 has unsorted columns [1, 0]")):
        CSR.from_bcsr(jsparse.BCSR(parts, shape=(1, 2)))


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


# ---- Gradients ----


def loss(a, x, scale):
    """Of a CSR or a dense matrix."""
    y = a @ x if isinstance(a, CSR) else jnp.dot(a, x, precision="highest")
    return jnp.sum(scale * y**2)


MASK = (DENSE != 0).astype(np.float32)
OPERANDS = (A, jnp.asarray(integers(8, 9, 3)), jnp.float32(2))


def dense_gradients():
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(jnp.asarray(DENSE), *OPERANDS[1:])
    return value, (gradients[0] * MASK, *gradients[1:])


@pytest.mark.smoke
@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 2), (2, 0), (0, 1, 2)])
@pytest.mark.parametrize("jit", [False, True])
def test_grad(argnums, jit):
    value, gradients = dense_gradients()
    wrap = jax.jit if jit else lambda f: f
    actual_value, actual = wrap(jaxsparse.value_and_grad(loss, argnums))(*OPERANDS)
    assert actual_value == value
    alone = wrap(jaxsparse.grad(loss, argnums))(*OPERANDS)
    assert_same(alone, actual)
    if isinstance(argnums, int):
        argnums, actual = (argnums,), (actual,)
    assert isinstance(actual, tuple)
    for position, gradient in zip(argnums, actual, strict=True):
        if position == 0:
            assert isinstance(gradient, CSR)
            assert jit or gradient.topology is A.topology
            assert_same(gradient.topology, A.topology)
            gradient = gradient.todense()
        np.testing.assert_array_equal(gradient, gradients[position])


@pytest.mark.parametrize("jit", [False, True])
def test_grad_of_nested_matrices_with_aux(jit):
    _, x, scale = OPERANDS
    params = {"layers": [(A, x), (2 * A, x)], "scale": scale, "bias": None}

    def fun(params, *, shift):
        losses = [loss(a, x, params["scale"]) for a, x in params["layers"]]
        return sum(losses) + shift, {"losses": losses, "shape": params["layers"][0][0].values}

    wrap = jax.jit if jit else lambda f: f
    both = wrap(jaxsparse.value_and_grad(fun, has_aux=True))
    (value, aux), gradient = both(params, shift=1.0)
    base, (dense, dx, dscale) = dense_gradients()
    assert value == 5 * base + 1 and aux["losses"] == [base, 4 * base]
    np.testing.assert_array_equal(aux["shape"], A.values)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    for (da, dxi), factor in zip(gradient["layers"], (1, 2), strict=True):
        np.testing.assert_array_equal(da.todense(), factor * dense)
        np.testing.assert_array_equal(dxi, factor**2 * dx)
    np.testing.assert_array_equal(gradient["scale"], 5 * dscale)
    again, aux_again = wrap(jaxsparse.grad(fun, has_aux=True))(params, shift=1.0)
    assert_same((again, aux_again), (gradient, aux))


def test_gradient_descent_on_a_matrix():
    """A gradient can be scaled and subtracted, eagerly and in one program."""

    def step(a):
        return a - 0.5 * jaxsparse.grad(loss)(a, *OPERANDS[1:])

    expected = DENSE - 0.5 * dense_gradients()[1][0]
    for function in step, jax.jit(step):
        np.testing.assert_array_equal(function(A).todense(), expected)


def test_grad_of_padding_and_batches():
    dense = sparse(1, 3, *SHAPE)
    a, x = CSR.fromdense(dense, nse=40), OPERANDS[1]
    gradient = jaxsparse.grad(loss)(a, x, 1.0)
    expected = jax.grad(loss)(jnp.asarray(dense), x, 1.0) * (dense != 0)
    np.testing.assert_array_equal(gradient.todense(), expected)
    padding = np.arange(40) >= a.topology.nnz[:, None]
    np.testing.assert_array_equal(np.asarray(gradient.values)[padding], 0)


def test_second_derivatives():
    direction = CSR(integers(9, A.nse), A.topology)

    def slope(a):
        gradient = jaxsparse.grad(loss)(a, *OPERANDS[1:])
        return jnp.sum(gradient.values * direction.values)

    # The loss is quadratic: its Hessian times the direction is the direction's own gradient.
    expected = jaxsparse.grad(loss)(direction, *OPERANDS[1:])
    assert_same(jaxsparse.grad(slope)(A), expected)


def test_grad_passes_arguments_on():
    def fun(a, n):
        return jnp.sum((a @ OPERANDS[1]) * n)

    _, counts = jaxsparse.grad(fun, (0, 1), allow_int=True)(A, 3)
    assert counts.dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jaxsparse.grad(fun, (0, 1))(A, 3)
    with pytest.raises(TypeError, match="scalar-output"):
        jaxsparse.grad(lambda a: a.values)(A)
    assert jaxsparse.grad(loss).__name__ == jaxsparse.value_and_grad(loss).__name__ == "loss"


def test_grad_of_a_matrix_made_by_spmm_and_fromdense():
    """Values that depend on each other stay differentiable through a change of topology."""

    def function(x):
        a = CSR.fromdense(x, MASK)
        return jnp.sum(spmm(a.T, spmm(a, OPERANDS[1])))

    def dense_function(x):
        a = jnp.where(MASK, x, 0)
        y = jnp.dot(a, OPERANDS[1], precision="highest")
        return jnp.sum(jnp.dot(a.T, y, precision="highest"))

    np.testing.assert_array_equal(jax.grad(function)(DENSE), jax.grad(dense_function)(DENSE))


def test_batch_dimensions_must_broadcast():
    topology = jaxsparse.Topology.from_mask(np.ones((3, 2, 2), bool))
    assert CSR(jnp.ones((5, 1, 4)), topology).values.shape == (5, 1, 4)
    with pytest.raises(ValueError, match=r"values \(2,\) and topology \(3,\) must broadcast"):
        CSR(jnp.ones((2, 4)), topology)


def test_argnums_may_be_any_integer():
    a = CSR.fromdense(np.eye(2, dtype=np.float32))
    gradient = jaxsparse.grad(lambda x, a: jnp.sum(a @ x), np.int64(1))(jnp.ones(2), a)
    np.testing.assert_array_equal(gradient.values, 1)
