"""CSR matrices from and to those of SciPy, BCSR and BCOO.

Values are small integers wherever possible, so that results are exact and compared as such.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from csr_problems import DENSE, SHAPE, A, assert_same, integers, sparse
from jax.experimental import sparse as jsparse

from jaxsparse import CSR


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
