"""Kernels for graphs, on a GPU by their names, against the oracle; patterns of skewed rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from checks import DTYPES, PLATFORM, assert_close
from patterns import skewed

from jaxsparse import CSR, Topology, reduce_rows, sparse_softmax
from jaxsparse.ops.multiply import multiply

BY_NAME = PLATFORM == "cuda"
SHAPE = (1100, 1700)


def star(m, k):
    """A row of all columns, one entry in each other row; the last row is empty."""
    lengths = np.ones(m, np.int64)
    lengths[[0, -1]] = k, 0
    columns = np.concatenate([np.arange(k), np.arange(m - 2) % k])
    return Topology(np.concatenate([[0], np.cumsum(lengths)]), columns, (m, k))


TOPOLOGIES = {
    "power law": skewed(np.random.default_rng(0), *SHAPE),
    "star": star(*SHAPE),
    "padding": skewed(np.random.default_rng(1), *SHAPE).padded(9_000),
}


@functools.partial(jax.jit, static_argnames=("transpose", "activation"))
def product(a, x, bias, transpose, activation):
    variant = "split_rows" if BY_NAME else None
    options = {"activation": activation, "variant": variant}
    return multiply("spmm", a, x, transpose=transpose, dense_on_left=False, bias=bias, **options)


@functools.partial(jax.jit, static_argnames="scale")
def softmax_and_derivative(a, tangent, scale):
    variant = "runs_of_rows" if BY_NAME else None

    def function(values):
        return sparse_softmax(CSR(values, a.topology), scale=scale, variant=variant).values

    return jax.jvp(function, (a.values,), (tangent,))


@functools.partial(jax.jit, static_argnames="reduction")
def reduced(values, topology, reduction):
    variant = "runs_of_rows" if BY_NAME else None
    return reduce_rows(values, topology, reduction, variant=variant)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(
    ("dtype", "n", "transpose"),
    [("float32", 36, False), ("float32", 132, True), ("bfloat16", 24, True), ("float16", 3, False)],
)
def test_products(name, dtype, n, transpose):
    topology, rng = TOPOLOGIES[name], np.random.default_rng(2)
    values = jnp.asarray(rng.standard_normal(topology.nse), DTYPES[dtype])
    rows, inner = SHAPE[::-1] if transpose else SHAPE
    x = jnp.asarray(rng.standard_normal((inner, n)), DTYPES[dtype]).at[3, 0].set(jnp.nan)
    bias = jnp.asarray(rng.standard_normal(rows), DTYPES[dtype])
    a = CSR(values, topology)
    out = product(a, x, bias, transpose, "relu")
    again = product(a, x, bias, transpose, "relu")
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (out, again)))
    dense = reference.to_dense(np.asarray(values, np.float64), topology)
    dense = dense.T if transpose else dense
    wide, b = np.asarray(x, np.float64), np.asarray(bias, np.float64)[:, None]
    stored = reference.stored_mask(topology.row_offsets, topology.column_indices, SHAPE)
    reached = (stored.T if transpose else stored)[:, 3]
    finite = np.where(np.isnan(wide), 0, wide)
    expected = np.maximum(dense @ finite + b, 0)
    expected[reached, 0] = np.nan  # and no other
    assert_close(out, expected, DTYPES[dtype], np.abs(dense) @ np.abs(finite) + np.abs(b))


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax(name, dtype):
    topology, rng = TOPOLOGIES[name], np.random.default_rng(3)
    drawn = rng.standard_normal((2, 2, topology.nse))
    values, tangent = (jnp.asarray(x, DTYPES[dtype]) for x in drawn)  # a batch of two
    y, dy = softmax_and_derivative(CSR(values, topology), tangent, 0.5)
    for batch in range(2):
        v, t = (np.asarray(x[batch], np.float64) for x in (values, tangent))
        expected = reference.sparse_softmax(v, topology, 0.5)
        assert_close(y[batch], expected, DTYPES[dtype], np.abs(expected) * 4)
        rows = np.minimum(np.asarray(topology.row_indices), SHAPE[0] - 1)
        sums = np.bincount(rows, expected * t, SHAPE[0])[rows]
        spread = np.bincount(rows, expected * np.abs(t), SHAPE[0])[rows]
        slope = 0.5 * expected * (t - sums)
        assert_close(dy[batch], slope, DTYPES[dtype], expected * (np.abs(t) + 4 * spread))


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(("dtype", "reduction"), [("float32", "max"), ("float16", "logsumexp")])
def test_reductions(name, dtype, reduction):
    topology, rng = TOPOLOGIES[name], np.random.default_rng(4)
    drawn = rng.standard_normal((3, topology.nse))
    drawn[..., topology.nnz :] = np.nan  # padding counts nothing
    drawn[1, ::700] *= 30  # most are not as large
    drawn[2, 5] = np.nan
    values = jnp.asarray(drawn, DTYPES[dtype])
    out = reduced(values, topology, reduction)
    again = reduced(values, topology, reduction)
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (out, again)))
    for v, got in zip(values, out, strict=True):
        exact = reference.reduce_rows(v, topology, reduction)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(exact))  # of empty rows
        if reduction == "max":
            np.testing.assert_array_equal(got, exact)
        else:
            finite = np.where(np.isfinite(exact), exact, 0)
            assert_close(got, exact, DTYPES[dtype], 5 + np.abs(finite))
