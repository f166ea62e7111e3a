"""reduce_rows: every variant against NumPy, at its limits, its derivatives and its errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import DTYPES, PLATFORM, assert_close, cases
from covering import combinations
from edge_cases import EDGE_CASES
from jax.test_util import check_grads
from reference import reduce_rows as reference

from jaxsparse import Topology, reduce_rows

REDUCTIONS = ["sum", "mean", "max", "logsumexp"]
BY_KERNELS = ["max", "logsumexp"]  # of their own; sums are products
LENGTHS = [3, 0, 300, 1, 0, 40]
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
COLUMNS = np.concatenate([np.arange(n) for n in LENGTHS])
TOPOLOGY = Topology(OFFSETS, COLUMNS, (len(LENGTHS), 500)).padded(COLUMNS.size + 7)
reduced = jax.jit(reduce_rows, static_argnames=("reduction", "implementation", "variant"))


def random_values(*batch):
    values = np.random.default_rng(0).standard_normal((*batch, TOPOLOGY.nse)).astype(np.float32)
    values[..., OFFSETS[-1] :] = np.nan  # padding counts nothing
    return values


@combinations(
    "name, dtype, reduction, implementation, variant",
    EDGE_CASES,
    DTYPES,
    BY_KERNELS,
    cases("reduce_rows"),
)
def test_every_variant(name, dtype, reduction, implementation, variant):
    topology, _ = EDGE_CASES[name]()
    values = np.random.default_rng(1).standard_normal(topology.nse)
    values[topology.nnz :] = np.nan  # padding is never read
    with jax.enable_x64(True):
        values = jnp.asarray(values, DTYPES[dtype])
        out = reduced(values, topology, reduction, implementation=implementation, variant=variant)
    assert out.dtype == DTYPES[dtype]
    exact = reference(values, topology, reduction)
    np.testing.assert_array_equal(np.isinf(out), np.isinf(exact))  # of empty rows
    if reduction == "max":
        np.testing.assert_array_equal(np.asarray(out, np.float64), exact)
    else:
        assert_close(out, exact, dtype, np.full(exact.shape, 5))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows(reduction):
    values = random_values(2, 3)
    out = reduced(values, TOPOLOGY, reduction)
    wanted = [[reference(v, TOPOLOGY, reduction) for v in vs] for vs in values]
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
    batch = jax.tree.map(lambda *x: jnp.stack(x), TOPOLOGY, TOPOLOGY, TOPOLOGY)
    np.testing.assert_array_equal(reduced(values, batch, reduction), out)
    masks = np.random.default_rng(3).random((3, 40, 60)) < np.array([0.1, 0.3, 0.6])[:, None, None]
    several = Topology.from_mask(masks)
    drawn = np.random.default_rng(4).standard_normal((3, several.nse)).astype(np.float32)
    each = [
        reference(v, jax.tree.map(lambda x, i=i: x[i], several), reduction)
        for i, v in enumerate(drawn)
    ]
    np.testing.assert_allclose(reduced(drawn, several, reduction), each, rtol=1e-5, atol=1e-5)
    shared = reduced(values[0, 0], batch, reduction)
    np.testing.assert_allclose(shared, jnp.stack([out[0, 0]] * 3), rtol=1e-6)
    mapped = jax.vmap(lambda v: reduce_rows(v, TOPOLOGY, reduction))(values[0])
    np.testing.assert_allclose(mapped, out[0], rtol=1e-6)
    narrow = jnp.asarray(values[0, 0], jnp.bfloat16)
    out = reduced(narrow, TOPOLOGY, reduction)
    assert out.dtype == jnp.bfloat16
    exact = reference(narrow, TOPOLOGY, reduction)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives(reduction):
    filled = np.flatnonzero(LENGTHS)

    def function(values):
        return reduce_rows(values, TOPOLOGY, reduction)[filled]

    values = np.where(np.isnan(random_values()), 0, random_values())
    check_grads(function, (values,), 1 if reduction == "max" else 2, atol=1e-2, rtol=1e-2)
    gradient = jax.grad(lambda v: function(v).sum())(random_values())
    np.testing.assert_array_equal(gradient[OFFSETS[-1] :], 0)


@combinations("dtype, reduction, implementation, variant", DTYPES, BY_KERNELS, cases("reduce_rows"))
def test_limits(dtype, reduction, implementation, variant):
    """Infinities and NaN stay in their rows, which are short and long."""
    lengths = np.tile([3, 9, 40, 600], 10)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = np.concatenate([np.arange(length) for length in lengths])
    topology = Topology(offsets, columns, (lengths.size, 700))
    rng = np.random.default_rng(2)
    values = rng.standard_normal(topology.nse)
    for row, special in enumerate(np.tile([np.nan, np.inf, -np.inf, 60.0, -60.0], 8)):
        values[rng.integers(*offsets[row : row + 2])] = special
    values[offsets[-5] : offsets[-4]] = -np.inf
    values[offsets[-2] : offsets[-1] - 3] = -np.inf
    values[offsets[3] : offsets[4]] -= 100  # of which an exponential is 0
    with jax.enable_x64(True):
        values = jnp.asarray(values, DTYPES[dtype])
        out = reduced(values, topology, reduction, implementation=implementation, variant=variant)
    exact = reference(values, topology, reduction)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(exact))
    assert_close(out, exact, dtype, 5 + np.abs(np.where(np.isfinite(exact), exact, 0)))


@pytest.mark.parametrize("implementation", ["xla", PLATFORM])
def test_maxima_share_their_derivative(implementation):
    values = jnp.array([2.0, 5.0, 5.0, 5.0, -jnp.inf, jnp.inf, 1.0, jnp.nan])
    topology = Topology([0, 4, 5, 6, 8], [0, 1, 2, 3, 0, 0, 0, 1], (4, 5))
    out = reduce_rows(values, topology, "max", implementation=implementation)
    np.testing.assert_array_equal(out, [5, -np.inf, np.inf, np.nan])
    weights = jnp.array([1.0, 2.0, 3.0, 4.0])

    def weighted(v):
        return jnp.dot(reduce_rows(v, topology, "max", implementation=implementation), weights)

    gradient = jax.grad(weighted)(values)
    np.testing.assert_allclose(gradient, [0, *[1 / 3] * 3, 2, 3, 0, 0], rtol=1e-6)
    out = reduce_rows(values, topology, "logsumexp", implementation=implementation)
    np.testing.assert_allclose(out[1:], [-np.inf, np.inf, np.nan])


def test_errors():
    values = np.zeros(TOPOLOGY.nse, np.float32)
    with pytest.raises(ValueError, match=r"reduction must be one of \['sum', .*got 'median'"):
        reduce_rows(values, TOPOLOGY, "median")
    with pytest.raises(ValueError, match=r"must have shape \(..., 351\).*got \(3,\)"):
        reduce_rows(values[:3], TOPOLOGY)
    with pytest.raises(TypeError, match="needs float32"):
        reduce_rows(values.astype(int), TOPOLOGY)
    with pytest.raises(TypeError, match="must be a Topology, got ndarray"):
        reduce_rows(values, OFFSETS)
    pair, triple = jnp.stack([values] * 2), jax.tree.map(lambda x: jnp.stack([x] * 3), TOPOLOGY)
    message = r"reduce_rows: batch dimensions of values \(2,\) and topology \(3,\) must broadcast"
    for reduction in REDUCTIONS:
        with pytest.raises(ValueError, match=message):
            reduce_rows(pair, triple, reduction)
    with pytest.raises(ValueError, match="no variant 'nope'"):
        reduce_rows(values, TOPOLOGY, "max", variant="nope")
