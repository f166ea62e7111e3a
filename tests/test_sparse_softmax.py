"""sparse_softmax: every variant against the oracle, limits, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import DTYPES, EPSILON, assert_close, cases
from covering import combinations
from edge_cases import EDGE_CASES as PROBLEMS
from reference import from_dense, stored_mask, to_dense
from reference import sparse_softmax as reference

from jaxsparse import CSR, Topology, sparse_softmax
from jaxsparse.ops import arguments
from jaxsparse.ops.sparse_softmax import sparse_softmax_derivative_p
from jaxsparse.primitive import bind


@functools.partial(jax.jit, static_argnames=("scale", "implementation", "variant"))
def softmax(a, scale, implementation, variant):
    return sparse_softmax(a, scale=scale, implementation=implementation, variant=variant).values


@functools.partial(jax.jit, static_argnames=("scale", "implementation"))
def derivative(a, tangent, scale, implementation):
    def function(v):
        return softmax(CSR(v, a.topology), scale, implementation, None)

    return jax.jvp(function, (a.values,), (tangent,))[1]


@functools.partial(jax.jit, static_argnames=("scale", "implementation", "variant"))
def forced_derivative(y, tangent, topology, scale, implementation, variant):
    """Its kernels by name, which derivatives of `sparse_softmax` don't hand on."""
    options = {"scale": scale, "implementation": implementation, "variant": variant}
    options["columns"] = arguments.columns_alone(topology)
    operands = topology.operands()
    return bind(sparse_softmax_derivative_p, y, tangent, *operands, **options)[0]


@functools.partial(jax.jit, static_argnames=("scale", "implementation", "variant"))
def softmax_and_derivatives(a, tangent, scale, implementation, variant):
    """The result, and its derivative by both functions above, in one program."""
    y = softmax(a, scale, implementation, variant)
    by_kernel = forced_derivative(y, tangent, a.topology, scale, implementation, variant)
    return y, [derivative(a, tangent, scale, implementation), by_kernel]


def random_values(topology, dtype, seed, scale=3.0):
    values = np.random.default_rng(seed).standard_normal(topology.nse) * scale
    values[topology.nnz :] = np.nan  # padding is never read
    return jnp.asarray(values, dtype)


def rows_of_lengths(*lengths):
    """Random columns of a matrix with room for them, and padding."""
    rng, k = np.random.default_rng(0), max(lengths) + 1
    rows = [np.sort(rng.choice(k, length, replace=False)) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = np.concatenate([*rows, np.zeros(7)]).astype(np.int32)
    return Topology(offsets, columns, (len(lengths), k)), None


# Rows that are longer than a warp keeps, though those of mean length are not; rows of which a block
# keeps each, as the mean is beyond the 1,813 values that a warp would take of 16 bits, the type of
# which it keeps most; and with one that is too long for that.
LONG_ROWS = {
    "few_long_rows": lambda: rows_of_lengths(1100, 0, 2501, 800, 1, 700),
    "rows_of_blocks": lambda: rows_of_lengths(2100, 0, 3501, 2800, 1, 4047, 2600, 2750),
    "longer_than_a_block_keeps": lambda: rows_of_lengths(9001, 3000, 2600, 0, 2450, 2700),
}


@combinations(
    "name, implementation, variant, dtype",
    [*PROBLEMS, *LONG_ROWS],
    cases("sparse_softmax"),
    DTYPES,
)
def test_softmax(name, implementation, variant, dtype):
    topology, _ = (PROBLEMS | LONG_ROWS)[name]()
    with jax.enable_x64(True):
        values = random_values(topology, DTYPES[dtype], 0)
        tangent = random_values(topology, DTYPES[dtype], 1)
        out, slopes = softmax_and_derivatives(
            CSR(values, topology), tangent, 0.7, implementation, variant
        )
        assert out.dtype == DTYPES[dtype]
        expected = reference(values, topology, 0.7)
        assert_close(out, expected, dtype, 10 * np.abs(expected))
        t = np.nan_to_num(np.asarray(tangent, np.float64))
    rows = np.asarray(topology.row_indices)

    def row_sums(terms):
        sums = np.zeros(topology.shape[0] + 1)
        np.add.at(sums, rows, terms)
        return sums[rows]

    # The rule starts from the rounded result, whose error it carries on to both of its terms.
    y = expected
    error = np.abs(y) * EPSILON[dtype] + (2**-24 if dtype == "float16" else 0)
    terms = np.abs(t) + row_sums(np.abs(y * t))
    rounding = error * terms + np.abs(y) * row_sums(error * np.abs(t))
    magnitude = (
        np.abs(y) * terms + rounding / EPSILON["float64" if dtype == "float64" else "float32"]
    )
    for slope in slopes:
        assert_close(slope, 0.7 * y * (t - row_sums(y * t)), dtype, magnitude)


@pytest.mark.parametrize("implementation, variant", cases("sparse_softmax"))
@pytest.mark.parametrize("scale", [0.0, -1.3])
def test_scales_that_reverse_or_level(scale, implementation, variant):
    """Whatever a kernel keeps in place of missing entries must not reach the sums."""
    topology, _ = PROBLEMS["odd"]()
    values = random_values(topology, jnp.float32, 0)
    out = softmax(CSR(values, topology), scale, implementation, variant)
    expected = reference(values, topology, scale)
    assert_close(out, expected, "float32", 10 * np.abs(expected))


@pytest.mark.smoke
@pytest.mark.parametrize("implementation, variant", cases("sparse_softmax"))
def test_limits_as_in_jax(implementation, variant):
    """-inf, rows of -inf alone, infinity, NaN and large values: as in jax.nn.softmax(where=...)."""
    inf, nan = np.inf, np.nan
    rows = [
        [1, -inf, 2],
        [-inf, -inf],
        [inf, 1],
        [nan, 1, 2],
        [1e4, -1e4],
        [88.0, 89.0],
        [-inf, 3],
        [],
    ]
    offsets = np.cumsum([0, *map(len, rows)])
    columns = np.concatenate([np.arange(len(row)) for row in rows])
    topology = Topology(offsets, columns, (len(rows), 4))
    with jax.debug_nans(False):
        values = jnp.asarray(np.concatenate(rows), jnp.float32)
        out = softmax(CSR(values, topology), 1.0, implementation, variant)
    expected = reference(values, topology)
    with jax.enable_x64(True):
        dense = jnp.asarray(to_dense(values, topology))
        mask = stored_mask(topology.row_offsets, topology.column_indices, topology.shape)
        of_jax = from_dense(np.asarray(jax.nn.softmax(dense, where=mask)), topology)
    np.testing.assert_allclose(expected, of_jax, rtol=1e-14)
    assert np.isnan(expected).any() and (expected == 0).any()
    assert_close(out, expected, "float32", 10 * np.nan_to_num(expected))


@pytest.mark.parametrize("implementation, variant", cases("sparse_softmax"))
def test_more_batch_entries_than_fit_a_grid_dimension(implementation, variant):
    """Two of a grid's three have 65,535 blocks at most."""
    rows, batch = 2, (70_001,)
    topology = Topology(np.arange(rows + 1) * 2, np.tile([0, 2], rows), (rows, 3))
    values = np.random.default_rng(4).standard_normal((*batch, rows, 2))
    flat = jnp.asarray(values.reshape(*batch, -1), jnp.float32)
    out = softmax(CSR(flat, topology), 1.0, implementation, variant)
    expected = np.exp(values) / np.exp(values).sum(-1, keepdims=True)
    np.testing.assert_allclose(out, expected.reshape(flat.shape), rtol=1e-5)


@pytest.mark.smoke
def test_rows_sum_to_one():
    topology, _ = PROBLEMS["uneven"]()
    y = sparse_softmax(CSR(random_values(topology, jnp.float32, 2), topology))
    lengths = np.diff(topology.row_offsets)
    np.testing.assert_allclose((y @ jnp.ones(topology.shape[1])), (lengths > 0) * 1.0, rtol=1e-5)


def test_scale_may_be_traced():
    topology, _ = PROBLEMS["odd"]()
    a = CSR(random_values(topology, jnp.float32, 3), topology)
    a = CSR(jnp.nan_to_num(a.values), topology)
    traced = jax.jit(lambda s: sparse_softmax(a, scale=s).values)(0.3)
    np.testing.assert_allclose(traced, sparse_softmax(a, scale=0.3).values, rtol=1e-5)
    with jax.enable_x64(True):
        exact = CSR(a.values.astype(jnp.float64), topology)
        scaled = sparse_softmax(exact, scale=jnp.asarray(0.3, jnp.float64)).values
        np.testing.assert_allclose(scaled, sparse_softmax(exact, scale=0.3).values, rtol=1e-13)
    slope = jax.grad(lambda s: jnp.sum(sparse_softmax(a, scale=s).values ** 2))(0.3)
    step = 1e-2
    ends = [jnp.sum(sparse_softmax(a, scale=0.3 + d).values ** 2) for d in (step, -step)]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-2)


def test_errors():
    topology = Topology([0, 1], [0], (1, 1))
    with pytest.raises(TypeError, match=r"sparse_softmax: a must be a CSR matrix"):
        sparse_softmax(jnp.ones((1, 1)))
    with pytest.raises(TypeError, match=r"needs float32.*int32"):
        sparse_softmax(CSR(jnp.ones(1, jnp.int32), topology))
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        sparse_softmax(CSR(jnp.ones(1), topology), implementation="gpu")
