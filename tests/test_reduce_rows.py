"""reduce_rows: against NumPy, at its limits, its derivatives and its errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxsparse import Topology, reduce_rows

REDUCTIONS = {
    "sum": np.sum,
    "mean": lambda v: v.mean() if v.size else 0.0,
    "max": functools.partial(np.max, initial=-np.inf),
    "logsumexp": lambda v: np.log(np.sum(np.exp(v))) if v.size else -np.inf,
}
LENGTHS = [3, 0, 300, 1, 0, 40]
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
COLUMNS = np.concatenate([np.arange(n) for n in LENGTHS])
TOPOLOGY = Topology(OFFSETS, COLUMNS, (len(LENGTHS), 500)).padded(COLUMNS.size + 7)
reduced = jax.jit(reduce_rows, static_argnames=("reduction", "implementation"))


def random_values(*batch):
    values = np.random.default_rng(0).standard_normal((*batch, TOPOLOGY.nse)).astype(np.float32)
    values[..., OFFSETS[-1] :] = np.nan  # padding counts nothing
    return values


def expected(values, reduction):
    rows = np.split(values[: OFFSETS[-1]].astype(np.float64), OFFSETS[1:-1])
    return np.array([REDUCTIONS[reduction](row) for row in rows])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows(reduction):
    with np.errstate(divide="ignore"):
        values = random_values(2, 3)
        out = reduced(values, TOPOLOGY, reduction)
        wanted = [[expected(v, reduction) for v in vs] for vs in values]
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
        batch = jax.tree.map(lambda *x: jnp.stack(x), TOPOLOGY, TOPOLOGY, TOPOLOGY)
        np.testing.assert_array_equal(reduced(values, batch, reduction), out)
        mapped = jax.vmap(lambda v: reduce_rows(v, TOPOLOGY, reduction))(values[0])
        np.testing.assert_allclose(mapped, out[0], rtol=1e-6)
        narrow = jnp.asarray(values[0, 0], jnp.bfloat16)
        out = reduced(narrow, TOPOLOGY, reduction)
        assert out.dtype == jnp.bfloat16
        exact = expected(np.asarray(narrow, np.float32), reduction)
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


def test_maxima_share_their_derivative():
    values = jnp.array([2.0, 5.0, 5.0, 5.0, -jnp.inf, jnp.inf, 1.0, jnp.nan])
    topology = Topology([0, 4, 5, 6, 8], [0, 1, 2, 3, 0, 0, 0, 1], (4, 5))
    out = reduce_rows(values, topology, "max")
    np.testing.assert_array_equal(out, [5, -np.inf, np.inf, np.nan])
    gradient = jax.grad(lambda v: reduce_rows(v, topology, "max")[0])(values)
    np.testing.assert_allclose(gradient, [0, *[1 / 3] * 3, 0, 0, 0, 0], rtol=1e-6)
    out = reduce_rows(values, topology, "logsumexp")
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
