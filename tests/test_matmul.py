"""spmm and sddmm: every legal variant against the oracle, options, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import DTYPES, PLATFORM, assert_close, cases, fits
from covering import combinations
from edge_cases import EDGE_CASES as PROBLEMS
from hypothesis import given, settings
from hypothesis import strategies as st
from operands import batch_of_patterns, draw, problem, values_for
from reference import sddmm as reference_sddmm
from reference import spmm as reference_spmm
from reference import to_dense

from jaxsparse import CSR, Topology, explain, sddmm, spmm
from jaxsparse.ops.multiply import multiply


@functools.partial(jax.jit, static_argnames=("transpose", "dense_on_left", "options"))
def product(a, x, bias, transpose, dense_on_left, options):
    return multiply(
        "spmm", a, x, bias=bias, transpose=transpose, dense_on_left=dense_on_left, **dict(options)
    )


BOTH = (False, True)
SPMM_CASES = [
    (implementation, variant, left)
    for implementation, variant in cases("spmm")
    for left in (False, True)
    if fits("spmm", variant, dense_on_left=left)
]
RIGHT_CASES = [case[:2] for case in SPMM_CASES if not case[2]]
SAMPLED_CASES = [
    (*case, dtype)
    for dtype in DTYPES
    for case in cases("sddmm")
    if fits("sddmm", case[1], dtype=dtype)
]
TYPED_CASES = [
    (*case, dtype)
    for dtype in DTYPES
    for case in SPMM_CASES
    if fits("spmm", case[1], dtype=dtype, dense_on_left=case[2])
]


@combinations(
    "name, implementation, variant, left, dtype, transpose",
    PROBLEMS,
    [(*case, transpose) for case in TYPED_CASES for transpose in BOTH],
)
def test_spmm(name, implementation, variant, left, transpose, dtype):
    topology, n = problem(name)
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        values = values_for(topology, DTYPES[dtype], rng)
        inner, rows = topology.shape if transpose else topology.shape[::-1]
        x = draw(rng, (inner, n), DTYPES[dtype])
        options = (("implementation", implementation), ("variant", variant))
        out = product(CSR(values, topology), x.T if left else x, None, transpose, left, options)
        assert out.dtype == DTYPES[dtype]
        dense = to_dense(values, topology)
        dense = dense.T if transpose else dense
        x = np.asarray(x, np.float64)
        expected, magnitude = dense @ x, np.abs(dense) @ np.abs(x)
    flip = (lambda y: y.T) if left else (lambda y: y)
    assert out.shape == flip(np.empty((rows, n))).shape
    assert_close(out, flip(expected), dtype, flip(magnitude))


# Sizes that fill a GPU; a tenth of the rows and columns gives each thread of a CPU several tasks.
MANY = 1 if PLATFORM == "cuda" else 10
SIZES = {
    "many": (201, 413, 139),
    "wide_tiles": (4500 // MANY, 70, 130),
    "widest_tiles": (8500 // MANY, 70, 50),
}


@combinations(
    "size, transpose, implementation, variant, left, dtype",
    [
        ("many", False),
        ("many", True),
        ("wide_tiles", False),
        ("widest_tiles", False),
    ],
    TYPED_CASES,
)
def test_many_tiles(implementation, variant, left, dtype, size, transpose):
    """Sizes beyond any tile, and none a multiple of one; enough rows for the widest tiles."""
    m, k, n = SIZES[size]
    rng = np.random.default_rng(8)
    topology = Topology.from_mask(rng.random((m, k)) < 0.2)
    with jax.enable_x64(True):
        values = values_for(topology, DTYPES[dtype], rng)
        x = draw(rng, (m if transpose else k, n), DTYPES[dtype])
        options = (("implementation", implementation), ("variant", variant))
        out = product(CSR(values, topology), x.T if left else x, None, transpose, left, options)
    dense, x64 = to_dense(values, topology), np.asarray(x, np.float64)
    dense = dense.T if transpose else dense
    assert_close(out.T if left else out, dense @ x64, dtype, np.abs(dense) @ np.abs(x64))


@combinations(
    "implementation, variant, left, dtype, transpose",
    [case for case in TYPED_CASES if not case[2]],
    BOTH,
)
def test_few_long_rows(implementation, variant, left, dtype, transpose):
    """More rows than there are groups for: on a GPU others help with those that are long."""
    rng = np.random.default_rng(9)
    mask = rng.random((600, 700)) < np.where(np.arange(600)[:, None] % 97 == 5, 0.9, 0.01)
    topology = Topology.from_mask(mask.T if transpose else mask)
    with jax.enable_x64(True):
        values = values_for(topology, DTYPES[dtype], rng)
        x = draw(rng, (700, 2048 // MANY), DTYPES[dtype])
        options = (("implementation", implementation), ("variant", variant))
        out = product(CSR(values, topology), x, None, transpose, left, options)
    dense, x64 = to_dense(values, topology), np.asarray(x, np.float64)
    dense = dense.T if transpose else dense
    assert_close(out, dense @ x64, dtype, np.abs(dense) @ np.abs(x64))


@combinations(
    "implementation, variant, left, dtype, with_bias, activation",
    TYPED_CASES,
    BOTH,
    [None, "relu", "gelu"],
)
def test_epilogue(implementation, variant, left, dtype, with_bias, activation):
    topology, n = problem("odd")
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        values = values_for(topology, DTYPES[dtype], rng)
        x = draw(rng, (topology.shape[1], n), DTYPES[dtype])
        bias = draw(rng, topology.shape[0], DTYPES[dtype]) if with_bias else None
        options = (
            ("activation", activation),
            ("implementation", implementation),
            ("variant", variant),
        )
        out = product(CSR(values, topology), x.T if left else x, bias, False, left, options)
    out = out.T if left else out
    expected = reference_spmm(values, topology, x, bias, activation)
    magnitude = np.abs(to_dense(values, topology)) @ np.abs(np.asarray(x, np.float64)) + 3
    assert_close(out, expected, dtype, magnitude)


@pytest.mark.parametrize("implementation", ["xla", PLATFORM])
def test_gelu_at_its_limits(implementation):
    z = jnp.array([-np.inf, -1e38, -1e36, -30, -5, 0, 5, 30, 1e18, np.inf, np.nan], jnp.float32)
    identity = CSR.fromdense(np.eye(z.size, dtype=np.float32))
    out = spmm(identity, z[:, None], activation="gelu", implementation=implementation)[:, 0]
    np.testing.assert_allclose(out, jax.nn.gelu(z), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["xla", PLATFORM])
def test_preferred_element_type(implementation, dtype):
    topology, n = problem("uneven")
    rng = np.random.default_rng(2)
    values, x, y = (
        values_for(topology, DTYPES[dtype], rng),
        draw(rng, (topology.shape[1], n), DTYPES[dtype]),
        draw(rng, (topology.shape[0], n), DTYPES[dtype]),
    )
    options = {"preferred_element_type": jnp.float32, "implementation": implementation}
    out = spmm(CSR(values, topology), x, **options)
    assert out.dtype == jnp.float32
    dense, x64 = to_dense(values, topology), np.asarray(x, np.float64)
    assert_close(out, dense @ x64, "float32", np.abs(dense) @ np.abs(x64))
    sampled = sddmm(y, x, topology, **options)
    assert sampled.dtype == jnp.float32
    magnitude = reference_sddmm(np.abs(y), np.abs(x), topology)
    assert_close(sampled.values, reference_sddmm(y, x, topology), "float32", magnitude)


@functools.partial(jax.jit, static_argnames=("implementation", "variant"))
def sampled(x, y, topology, scale_by, implementation, variant):
    return sddmm(
        x, y, topology, scale_by=scale_by, implementation=implementation, variant=variant
    ).values


def by_every_kernel(operation, topology, values, x, y):
    """Products A x, or the values of y x^T at the pattern of A."""
    if operation == "sddmm":
        return [sampled(y, x, topology, None, *case) for case in cases("sddmm")]
    a = CSR(values, topology)
    return [spmm(a, x, implementation=i, variant=v) for i, v in RIGHT_CASES]


def assert_refused(call):
    """A variant that is asked for by its name says that it does not take the problem."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="does not fit this problem"):
        jax.block_until_ready(call())


@combinations(
    "name, implementation, variant, dtype, scaled",
    PROBLEMS,
    [(*case, scaled) for case in SAMPLED_CASES for scaled in BOTH],
)
def test_sddmm(name, implementation, variant, scaled, dtype):
    topology, d = problem(name)
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        x, y = (draw(rng, (size, d), DTYPES[dtype]) for size in topology.shape)
        scale_by = values_for(topology, DTYPES[dtype], rng) if scaled else None
        if not fits("sddmm", variant, dtype=dtype, d=d):
            assert_refused(lambda: sampled(x, y, topology, scale_by, implementation, variant))
            return
        out = sampled(x, y, topology, scale_by, implementation, variant)
    finite = None if scale_by is None else np.nan_to_num(np.asarray(scale_by, np.float64))
    expected = reference_sddmm(x, y, topology, finite)
    magnitude = reference_sddmm(
        np.abs(x), np.abs(y), topology, None if finite is None else np.abs(finite)
    )
    assert_close(out, expected, dtype, magnitude)


@pytest.mark.parametrize("d", [40, 139])
@pytest.mark.parametrize("implementation, variant, dtype", SAMPLED_CASES)
def test_many_sampled_tiles(implementation, variant, dtype, d):
    """Sizes beyond any tile, and batch entries at odd places; some tiles have no entries."""
    rng = np.random.default_rng(10)
    mask = rng.random((201, 413)) < 0.2
    mask[:90, 100:300] = False
    topology = Topology.from_mask(mask)
    with jax.enable_x64(True):
        x, y = (draw(rng, (3, size, d), DTYPES[dtype]) for size in topology.shape)
        if not fits("sddmm", variant, dtype=dtype, d=d):
            assert_refused(lambda: sampled(x, y, topology, None, implementation, variant))
            return
        out = sampled(x, y, topology, None, implementation, variant)
    for i in range(3):
        magnitude = reference_sddmm(np.abs(x[i]), np.abs(y[i]), topology)
        assert_close(out[i], reference_sddmm(x[i], y[i], topology), dtype, magnitude)


@combinations(
    "shape, density, d, implementation, variant, dtype",
    [((160, 70), 0.05), ((16, 6000), 0.6)],
    [80, 520],
    SAMPLED_CASES,
)
def test_sampled_rows(implementation, variant, dtype, shape, density, d):
    """Of few entries, which warps share and which load rows of x of their own, or of many."""
    rng = np.random.default_rng(11)
    mask = rng.random(shape) < density
    mask[shape[0] // 5 : shape[0] // 2], mask[3] = False, True
    topology = Topology.from_mask(mask, nse=int(mask.sum()) + 9)
    with jax.enable_x64(True):
        x, y = (draw(rng, (size, d), DTYPES[dtype]) for size in topology.shape)
        if not fits("sddmm", variant, dtype=dtype, d=d):
            assert_refused(lambda: sampled(x, y, topology, None, implementation, variant))
            return
        out = sampled(x, y, topology, None, implementation, variant)
    magnitude = reference_sddmm(np.abs(x), np.abs(y), topology)
    assert_close(out, reference_sddmm(x, y, topology), dtype, magnitude)


@combinations(
    "shape, density, d, implementation, variant, dtype",
    [((160, 3100), 0.85), ((20000 // MANY, 700), 0.03)],
    [32, 36],
    SAMPLED_CASES,
)
def test_many_sampled_entries(implementation, variant, dtype, shape, density, d):
    """So many that a warp takes several times 32: of rows of x of their own, or of shared ones."""
    rng = np.random.default_rng(12)
    mask = rng.random(shape) < density * rng.uniform(0.5, 1.17, (shape[0], 1))
    mask[shape[0] // 5 : shape[0] // 2] = False
    topology = Topology.from_mask(mask, nse=int(mask.sum()) + 70)
    with jax.enable_x64(True):
        x, y = (draw(rng, (size, d), DTYPES[dtype]) for size in topology.shape)
        out = sampled(x, y, topology, None, implementation, variant)
    magnitude = reference_sddmm(np.abs(x), np.abs(y), topology)
    assert_close(out, reference_sddmm(x, y, topology), dtype, magnitude)


@st.composite
def patterns(draw_):
    """Masks in a fixed frame, so that few shapes are compiled: rows empty, full, or in between."""
    rows = draw_(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=6, max_size=6))
    seed = draw_(st.integers(0, 2**16))
    uniform = np.random.default_rng(seed).random((6, 11))
    return uniform < np.asarray(rows)[:, None]


@pytest.mark.smoke
@settings(max_examples=40, deadline=None)
@given(mask=patterns(), seed=st.integers(0, 2**16))
def test_random_patterns(mask, seed):
    topology = Topology.from_mask(mask, nse=66)
    rng = np.random.default_rng(seed)
    values, x = values_for(topology, jnp.float32, rng), draw(rng, (11, 18), jnp.float32)
    y = draw(rng, (6, 18), jnp.float32)
    for implementation, variant in cases("spmm"):
        for left in (False, True):
            if fits("spmm", variant, dense_on_left=left):
                options = (("implementation", implementation), ("variant", variant))
                out = product(CSR(values, topology), x.T if left else x, None, False, left, options)
                magnitude = reference_spmm(np.abs(values), topology, np.abs(x))
                out = out.T if left else out
                assert_close(out, reference_spmm(values, topology, x), "float32", magnitude)
    for implementation, variant in cases("sddmm"):
        out = sampled(y, x, topology, None, implementation, variant)
        magnitude = reference_sddmm(np.abs(y), np.abs(x), topology)
        assert_close(out, reference_sddmm(y, x, topology), "float32", magnitude)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation, variant, left", SPMM_CASES)
def test_bad_numbers_stay_in_their_rows(implementation, variant, left, bad):
    topology, _ = problem("odd")
    rng = np.random.default_rng(4)
    x = rng.standard_normal((topology.shape[1], 9)).astype(np.float32)
    x[3] = bad
    x[7, 2] = bad
    values = values_for(topology, jnp.float32, rng)
    options = (("implementation", implementation), ("variant", variant))
    out = product(CSR(values, topology), x.T if left else x, None, False, left, options)
    out = out.T if left else out
    expected = reference_spmm(values, topology, x)
    assert np.isfinite(expected).any() and not np.isfinite(expected).all()
    magnitude = np.nan_to_num(np.abs(expected), nan=0, posinf=0) + 10
    assert_close(out, expected, "float32", magnitude)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("implementation, variant", cases("sddmm"))
def test_bad_numbers_stay_in_their_entries(implementation, variant, bad):
    topology, d = problem("odd")
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((size, d)).astype(np.float32) for size in topology.shape)
    x[4, 1] = bad
    y[6, 0] = bad
    out = np.asarray(sampled(x, y, topology, None, implementation, variant))
    rows = np.asarray(topology.row_indices)
    touched = (rows == 4) | (np.asarray(topology.column_indices) == 6)
    assert touched.any()
    np.testing.assert_array_equal(~np.isfinite(out), touched)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["uneven", "few_tiles"])
def test_results_repeat_bitwise(name, dtype):
    """Where blocks share tiles of the result, and in gradients, too."""
    rng = np.random.default_rng(6)
    few_tiles = Topology.from_mask(rng.random((70, 900)) < 0.2)
    topology = few_tiles if name == "few_tiles" else problem(name)[0]
    values, x = values_for(topology, dtype, rng), draw(rng, (topology.shape[1], 64), dtype)
    y = draw(rng, (topology.shape[0], 64), dtype)
    a = CSR(values, topology)

    def results():
        products = by_every_kernel("spmm", topology, values, x, y)
        samples = by_every_kernel("sddmm", topology, values, x, y)
        gradients = jax.grad(lambda v, x: jnp.sum((CSR(v, topology) @ x) * y), (0, 1))(values, x)
        return [a @ x, y.T @ a, sddmm(y, x, topology).values, *products, *samples, *gradients]

    first = results()
    for _ in range(5):
        again = results()
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("implementation, variant", RIGHT_CASES)
def test_batch_slices_of_any_alignment(implementation, variant, n):
    # Odd sizes put every batch entry at another alignment.
    topology, _ = problem("odd")
    rng = np.random.default_rng(7)
    values = values_for(topology, jnp.float32, rng, batch=(5,))
    x = draw(rng, (5, topology.shape[1], n), jnp.float32)
    out = spmm(CSR(values, topology), x, implementation=implementation, variant=variant)
    expected = np.stack([reference_spmm(values[i], topology, x[i]) for i in range(5)])
    assert_close(out, expected, "float32", np.full(expected.shape, 50.0))


NEEDS_MEMORY = pytest.mark.skipif(PLATFORM != "cuda", reason="needs 10 GB of memory to itself")


def fitting(operation, function, *operands):
    """The kernels that take a function's one operation when they are asked for by name."""
    names = []
    for _, variant in cases(operation):
        if variant is not None:
            (call,) = explain(functools.partial(function, variant=variant), *operands)
            names += [variant] if variant in dict(call.variants) else []
    return names


@NEEDS_MEMORY
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_offsets_beyond_two_gigabytes(left):
    """More than 2^31 elements in x: the last row is what is read. By every kernel, one by one."""
    wide = 2**20 + 7
    rows = 2**31 // wide + 2
    topology = Topology([0, 1, 2], [rows - 1, 0], (2, rows))
    shape = (wide, rows) if left else (rows, wide)
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    a = CSR(jnp.asarray([2.0, -1.0], jnp.bfloat16), topology)
    expected = [2 * x[:, -1], -x[:, 0]] if left else [2 * x[-1], -x[0]]

    def forced(a, x, variant=None):
        options = {"transpose": False, "dense_on_left": left, "variant": variant}
        return multiply("spmm", a, x, **options)

    names = fitting("spmm", forced, a, x)
    assert {"tensor_cores", "staged_rows", "tiled_rows"} <= {*names}
    for variant in (None, *names):
        out = forced(a, x, variant)
        for i in range(2):
            part = out[:, i] if left else out[i]
            np.testing.assert_array_equal(part, expected[i], err_msg=str(variant))


@NEEDS_MEMORY
def test_results_beyond_two_gigabytes():
    """More than 2^31 elements in the result: its last row is one of those that hold something."""
    wide = 2**20 + 7
    rows = 2**31 // wide + 2
    offsets = np.full(rows + 1, 1)
    offsets[0], offsets[-1] = 0, 2
    topology = Topology(offsets, [1, 0], (rows, 2))
    x = jax.random.normal(jax.random.key(1), (2, wide), jnp.bfloat16)
    a = CSR(jnp.asarray([2.0, -1.0], jnp.bfloat16), topology)
    names = fitting("spmm", spmm, a, x)
    assert {"tensor_cores", "generic_rows"} <= {*names}
    for variant in (None, *names):
        out = spmm(a, x, variant=variant)
        for row, expected in ((0, 2 * x[1]), (rows // 2, 0 * x[0]), (rows - 1, -x[0])):
            np.testing.assert_array_equal(out[row], expected, err_msg=str(variant))


@NEEDS_MEMORY
def test_sampled_rows_beyond_two_gigabytes():
    """More than 2^31 elements in y."""
    d = 2**20 + 7
    rows = 2**31 // d + 2
    topology = Topology([0, 2], [0, rows - 1], (1, rows))
    y = jax.random.normal(jax.random.key(2), (rows, d), jnp.bfloat16)
    x = jnp.zeros((1, d), jnp.bfloat16).at[0, -3:].set(jnp.asarray([1.0, -2.0, 0.5], jnp.bfloat16))
    expected = np.asarray(y[jnp.asarray([0, rows - 1]), -3:], np.float32) @ [1, -2, 0.5]
    sample = functools.partial(sddmm, preferred_element_type=jnp.float32)
    names = fitting("sddmm", sample, x, y, topology)
    assert {"tiled_entries", "generic_entries"} <= {*names}
    for variant in (None, *names):
        values = sample(x, y, topology, variant=variant).values
        np.testing.assert_allclose(values, expected, rtol=1e-5, err_msg=str(variant))


@pytest.mark.parametrize("operation", ["spmm", "sddmm"])
def test_columns_beyond_signed_16_bits(operation):
    """Indices take 16 bits up to 65,536 columns; none may be read as a negative number."""
    rng, k, n = np.random.default_rng(12), 2**16, 4
    columns = np.concatenate([[0, 2**15 - 1], np.arange(2**15, 2**16, 97), [2**16 - 1]])
    topology = Topology([0, 2, 2, columns.size], columns, (3, k))
    values, x = values_for(topology, jnp.float32, rng), draw(rng, (k, n), jnp.float32)
    y = draw(rng, (3, n), jnp.float32)
    if operation == "sddmm":
        expected = reference_sddmm(y, x, topology)
    else:
        expected = reference_spmm(values, topology, x)
    for out in by_every_kernel(operation, topology, values, x, y):
        assert_close(out, expected, "float32", np.full(expected.shape, 1000.0))


@pytest.mark.parametrize("operation", ["spmm", "sddmm"])
def test_more_batch_entries_than_fit_a_grid_dimension(operation):
    """Two of a grid's three have 65,535 blocks at most."""
    rng, rows, batch = np.random.default_rng(13), 2, (70_001,)
    columns = rng.integers(0, 3, rows)
    topology = Topology(np.arange(rows + 1), columns, (rows, 3))
    values, x = values_for(topology, jnp.float32, rng, batch), draw(rng, (*batch, 3, 2), "float32")
    y = draw(rng, (*batch, rows, 2), jnp.float32)
    taken = np.asarray(x, np.float64)[..., columns, :]
    if operation == "sddmm":
        expected = (taken * np.asarray(y, np.float64)).sum(-1)
    else:
        expected = np.asarray(values, np.float64)[..., None] * taken
    for out in by_every_kernel(operation, topology, values, x, y):
        assert_close(out, expected, "float32", np.full(expected.shape, 10.0))


def test_broadcast_batches():
    topology, n = problem("odd")
    rng = np.random.default_rng(8)
    values = values_for(topology, jnp.float32, rng, batch=(2, 1))
    x = draw(rng, (3, topology.shape[1], n), jnp.float32)
    out = spmm(CSR(values, topology), x)
    assert out.shape == (2, 3, topology.shape[0], n)
    for i, j in np.ndindex(2, 3):
        expected = reference_spmm(values[i, 0], topology, x[j])
        assert_close(out[i, j], expected, "float32", np.full(expected.shape, 50.0))


def test_number_of_batch_dimensions():
    topology, n = problem("odd")
    rng = np.random.default_rng(9)
    a = CSR(values_for(topology, jnp.float32, rng), topology)
    x = draw(rng, (2, 1, 1, 1, 1, 1, 1, 2, topology.shape[1], n), jnp.float32)
    np.testing.assert_array_equal(
        spmm(a, x)[1, ..., 1, :, :].squeeze(), spmm(a, x[1, ..., 1, :, :]).squeeze()
    )
    with pytest.raises(ValueError, match="spmm: takes at most 8 batch dimensions"):
        spmm(a, x[None])


@pytest.mark.parametrize("implementation, variant", RIGHT_CASES)
def test_batch_of_patterns(implementation, variant):
    rng, topology, values, each = batch_of_patterns()
    x = draw(rng, (3, 15, 6), jnp.float32)
    options = (("implementation", implementation), ("variant", variant))
    out = product(CSR(values, topology), x, None, False, False, options)
    back = product(CSR(values, topology), out, None, True, False, options)
    for i in range(3):
        expected = reference_spmm(values[i], each[i], x[i])
        assert_close(out[i], expected, "float32", np.full(expected.shape, 20.0))
        dense = to_dense(values[i], each[i])
        assert_close(back[i], dense.T @ expected, "float32", np.full((15, 6), 100.0))


@pytest.mark.parametrize("implementation, variant", cases("sddmm"))
def test_sampled_batch_of_patterns(implementation, variant):
    rng, topology, _, each = batch_of_patterns()
    x, y = draw(rng, (3, 12, 6), jnp.float32), draw(rng, (3, 15, 6), jnp.float32)
    out = sddmm(x, y, topology, implementation=implementation, variant=variant).values
    for i in range(3):
        expected = reference_sddmm(x[i], y[i], each[i])
        assert_close(out[i], expected, "float32", np.full(expected.shape, 50.0))


def small():
    topology = Topology([0, 2, 3], [0, 2, 1], (2, 3))
    return CSR(jnp.ones(3), topology)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda a: spmm(a.todense(), jnp.ones((3, 1))), TypeError, "spmm: a must be a CSR"),
        (lambda a: spmm(a, "x"), TypeError, "spmm: x must be an array, got str"),
        (lambda a: spmm(a, jnp.ones(3)), ValueError, r"at least 2 dimensions, got shape \(3,\)"),
        (lambda a: spmm(a, jnp.ones((4, 2))), ValueError, r"shape \(4, 2\) must have 3 rows"),
        (lambda a: jnp.ones((2, 5)) @ a, ValueError, r"shape \(2, 5\) must have 2 columns"),
        (lambda a: spmm(a, jnp.ones((3, 2), complex)), TypeError, "needs float32.*complex"),
        (lambda a: spmm(a, jnp.ones((3, 1)), bias=jnp.ones(3)), ValueError, r"bias must .*2\)"),
        (lambda a: spmm(a, jnp.ones((3, 1)), activation="tanh"), ValueError, "activation must"),
        (
            lambda a: spmm(a, jnp.ones((3, 1)), precision="TF32_TF32_F32"),
            ValueError,
            r"spmm: precision must be None, a jax\.lax\.Precision, .* got 'TF32_TF32_F32'",
        ),
        (
            lambda a: spmm(a, jnp.ones((3, 1)), preferred_element_type=jnp.bfloat16),
            ValueError,
            "preferred_element_type must be float",
        ),
        (lambda a: spmm(a, jnp.ones((3, 1)), implementation="tpu"), ValueError, "one of"),
        (lambda a: spmm(a, jnp.ones((3, 1)), variant="nope"), ValueError, "no variant 'nope'"),
        (
            lambda a: spmm(a, jnp.ones((3, 1)), implementation="xla", variant="rows"),
            ValueError,
            "no variant",
        ),
        (
            lambda a: sddmm(jnp.ones((2, 4)), jnp.ones((3, 5)), a.topology),
            ValueError,
            "sddmm: x and y",
        ),
        (lambda a: sddmm(jnp.ones((2, 4)), jnp.ones((3, 4)), a), TypeError, "must be a Topology"),
        (
            lambda a: sddmm(jnp.ones((2, 4)), jnp.ones((3, 4)), a.topology, scale_by=jnp.ones(2)),
            ValueError,
            r"scale_by must have shape \(..., 3\)",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(small())


def test_variant_that_does_not_fit():
    variant = "panels" if PLATFORM == "cpu" else "generic_dots"
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"variant '{variant}' does not fit"):
        spmm(small(), jnp.ones((3, 1)), variant=variant).block_until_ready()


def test_batches_that_do_not_broadcast():
    a = CSR(jnp.ones((2, 3)), small().topology)
    with pytest.raises(ValueError, match=r"spmm: batch dimensions .*'values': \(2,\).*'x': \(4,\)"):
        spmm(a, jnp.ones((4, 3, 1)))


def test_mixed_dtypes_promote():
    out = spmm(small().astype(jnp.bfloat16), jnp.ones((3, 2), jnp.float32))
    assert out.dtype == jnp.float32
    assert spmm(small(), np.ones((3, 2), np.int32)).dtype == jnp.float32
