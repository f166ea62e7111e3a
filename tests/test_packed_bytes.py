"""Packed matrices of 8 bits: how numbers are rounded, their places, products, files, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close
from reference import packed_matrix
from reference import spmm as reference
from test_packed import PATTERNS, parts_that_fit, random_matrix, striped, through_checkpoints
from test_packed_product import IMPLEMENTATIONS, compiled, packs, random_x

from jaxsparse import CSR, EXPORT_DISABLED_CHECKS, H200, Device, Packed, Topology, explain, linear
from jaxsparse.quantization import dequantized, quantized

DTYPES = [jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)]
FORMS = [
    (variant, cell) for cell in (0, 1) for variant in IMPLEMENTATIONS if packs(variant[1], cell)
]
LARGEST = {"int8": 127, "float8_e4m3fn": 448}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# By gaps places are those of 16 bits, whatever the pattern is.
SOME_PATTERNS = [
    ([*PATTERNS][::2], 1),
    ([*PATTERNS][1::2], 1),
    (["odd", "98_percent", "padding", "striped", "nothing_stored"], 0),
]
each_cell = pytest.mark.parametrize("cell", [0, 1])
each_form = pytest.mark.parametrize("dtype, cell", [(DTYPES[0], 0), (DTYPES[1], 1)])


def steps(exact, dtype):
    """Between neighbours of the dtype at these magnitudes."""
    if dtype == jnp.int8:
        return np.ones_like(exact)
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-6))) - 3)


def rows_of(topology):
    return np.asarray(topology.row_indices)[: int(topology.nnz)]


@each_dtype
@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16"])
def test_each_number_is_off_by_half_a_step_at_most(dtype, wide):
    """Whatever the magnitudes of rows are; rows of zeros and empty ones have scale 0."""
    mask = np.random.default_rng(0).random((40, 300)) < 0.4
    mask[3] = False
    topology = Topology.from_mask(mask)
    rng, rows = np.random.default_rng(1), rows_of(topology)
    magnitudes = 2.0 ** rng.uniform(-12, 12, 40)
    magnitudes[5] = 0
    if wide != "float16":
        magnitudes[[6, 7]] = 3e-39, 1e38
    values = rng.standard_normal(topology.nnz) * np.exp(rng.uniform(-8, 0, topology.nnz))
    values = jnp.asarray(values * magnitudes[rows], wide)
    numbers, scales = quantized(values, topology.row_indices, m=40, dtype=dtype)
    exact, scales = np.asarray(values, np.float64), np.asarray(scales, np.float64)
    assert numbers.dtype == dtype and (scales[[3, 5]] == 0).all()
    got, scale = np.asarray(numbers, np.float64) * scales[rows], scales[rows]
    stored = scale > 0
    assert not got[~stored].any()
    step = scale[stored] * steps(exact[stored] / scale[stored], dtype)
    error = np.abs(got - exact)[stored] / step
    assert error.max() <= 0.5 + 1e-4 and error.max() > 0.45  # and not less, as rounding goes
    # The largest of each row is the largest of the dtype, but where steps are float32's least.
    normal = rows[stored] != 6
    most = np.zeros(40)
    np.maximum.at(
        most, rows[stored][normal], np.abs(np.asarray(numbers, np.float64))[stored][normal]
    )
    assert set(most) <= {0, LARGEST[str(dtype)]}


@each_dtype
def test_numbers_that_are_not_finite(dtype):
    """Their rows are NaN, where anything is stored, and in products."""
    topology = PATTERNS["70_percent"]()
    rows = rows_of(topology)
    for bad, cell in (np.nan, 1), (-np.inf, 0):
        a = random_matrix(topology, dtype=jnp.float32)
        a = CSR(a.values.at[40].set(bad), topology)
        packed = a.pack(dtype, cell=cell).verify()
        expected = np.zeros(topology.shape, bool)
        expected[rows[40]] = np.asarray(a.todense() != 0)[rows[40]]
        np.testing.assert_array_equal(np.isnan(packed.todense()), expected)
        y = np.asarray(packed @ random_x(topology.shape[1], 3), np.float32)
        np.testing.assert_array_equal(np.isnan(y).all(1), np.arange(len(y)) == rows[40])
        assert np.isnan(y).sum() == 3


@pytest.mark.parametrize("names, cell", SOME_PATTERNS)
def test_every_place(names, cell):
    """The numbers that lanes read from their streams, or walk to, stand where they should."""
    for number, name in enumerate(names):
        dtype, parts = DTYPES[number % 2], 1 + 2 * (number // 2 % 2)
        topology = PATTERNS[name]()
        m = topology.shape[0]
        a = random_matrix(topology)
        parts = parts_that_fit(topology, parts, cell)
        packed = a.pack(dtype, cell=cell, parts=parts, repackable=True)
        numbers, scales = quantized(a.values, topology.row_indices, m=m, dtype=dtype)
        expected = np.zeros(topology.shape)
        columns = np.asarray(topology.column_indices)[: int(topology.nnz)]
        expected[rows_of(topology), columns] = np.asarray(numbers, np.float64)[: int(topology.nnz)]
        np.testing.assert_array_equal(packed_matrix(packed), expected, err_msg=name)
        np.testing.assert_array_equal(packed.scales, scales)
        dense = expected.astype(np.float32) * np.asarray(scales)[:, None]
        np.testing.assert_array_equal(packed.todense(), dense)
        stored = topology.nnz if cell else np.count_nonzero(expected)
        assert np.asarray(packed.stored()).sum() == stored
        assert packed.verify() is packed and packed.cell == cell


def test_few_rows_serve_a_panel():
    """Whatever the pattern is, in 32 rows of words; and there is little padding."""
    for topology in striped(33, 1500, 512), PATTERNS["0_percent"](), PATTERNS["uneven"]():
        free, needed = np.moveaxis(np.asarray(random_matrix(topology).pack(jnp.int8).panels), -1, 0)
        assert (needed - free <= 32).all() and (np.diff(free, axis=1) >= 0).all()
    half = Topology.from_mask(np.random.default_rng(0).random((256, 4096)) < 0.5)
    packed = random_matrix(half).pack(jnp.int8, parts=1)
    assert packed.nbytes < 0.36 * 2 * packed.size
    assert "int8" in repr(packed) and "% of dense in 16 bits, cell 1" in repr(packed)


# pattern, columns of x, cell, parts, dtype of x, whether x is on the left, activation, float32
# results
PRODUCTS = [
    ("odd", 1, 1, 1, "bfloat16", False, None, False),
    ("uneven", 5, 1, 3, "float16", True, "relu", False),
    ("70_percent", 16, 1, 2, "bfloat16", False, None, True),
    ("striped", 33, 1, 2, "float16", False, "gelu", True),
    ("many_columns", 130, 1, 8, "bfloat16", True, None, True),
    ("nothing_stored", 3, 1, 1, "bfloat16", False, "relu", False),
    ("no_rows", 3, 1, 1, "bfloat16", True, None, False),
    ("no_columns", 3, 1, 1, "float16", False, None, False),
    ("odd", 1, 0, 1, "float16", False, "relu", False),
    ("98_percent", 1, 0, 4, "bfloat16", True, None, True),
    ("striped", 2, 0, 2, "bfloat16", False, "gelu", False),
    ("uneven", 4, 0, 3, "float16", True, None, True),
    ("many_columns", 8, 0, 9, "bfloat16", False, None, False),
    ("70_percent", 21, 0, 1, "float16", True, None, True),
    ("full", 40, 0, 1, "bfloat16", False, "relu", False),
    ("nothing_stored", 1, 0, 1, "float16", True, None, False),
]


@pytest.mark.parametrize("implementation, variant", IMPLEMENTATIONS)
@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_product(number, implementation, variant):
    """That of the matrix that is stored, in float64: nothing is rounded but sums and results."""
    name, n, cell, parts, of_x, left, activation, wide = PRODUCTS[number]
    if not packs(variant, cell):
        pytest.skip("of other matrices")
    dtype = DTYPES[number % 2]
    topology = PATTERNS[name]()
    m, k = topology.shape
    parts = parts_that_fit(topology, parts, cell)
    packed = random_matrix(topology).pack(dtype, cell=cell, parts=parts)
    x = random_x(k, n, of_x)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal(m), of_x) if activation else None
    wanted = jnp.zeros(()) if wide else None
    y = compiled(packed, x, bias, left, implementation, variant, activation, wanted)
    rows, columns = rows_of(topology), np.asarray(topology.column_indices)
    values = np.zeros(topology.nse)
    values[: len(rows)] = np.asarray(packed.todense(), np.float64)[rows, columns[: len(rows)]]
    expected = reference(values, topology, x, bias, activation)
    assert y.dtype == (jnp.float32 if wide else of_x)
    magnitude = reference(np.abs(values), topology, np.abs(np.asarray(x, np.float64)))
    assert_close(y, expected, y.dtype, magnitude + 1)
    again = compiled(packed, x, bias, left, implementation, variant, activation, wanted)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(again))


@each_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("by, cell", FORMS)
def test_bad_x_stays_where_it_belongs(by, cell, bad, dtype):
    """By gaps a number that is rounded to 0 is none, in cells it is."""
    topology = PATTERNS["70_percent"]()
    a = random_matrix(topology)
    rows, column = rows_of(topology), np.asarray(topology.column_indices)[: int(topology.nnz)]
    zero = np.flatnonzero(column == 7)[0]
    a = CSR(a.values.at[zero].set(1e-7), topology)
    packed = a.pack(dtype, cell=cell, parts=2)
    assert packed.stored()[rows[zero], 7] == (cell != 0) and not packed.todense()[rows[zero], 7]
    x = random_x(topology.shape[1], 4).at[7, 2].set(bad)
    y = compiled(packed, x, None, False, *by, None, None)
    touched = np.zeros(y.shape, bool)
    touched[:, 2] = np.asarray(packed.stored())[:, 7]
    np.testing.assert_array_equal(~np.isfinite(np.asarray(y, np.float32)), touched)


@each_form
@pytest.mark.parametrize("left", [False, True])
def test_derivatives_of_x(left, dtype, cell):
    """Of every order, and of the bias: those of the dense product."""
    topology = PATTERNS["odd"]()
    m, k = topology.shape
    packed = random_matrix(topology).pack(dtype, cell=cell)
    dense = packed.todense()

    def loss(product):
        return lambda x, bias: jnp.sum(jnp.sin(product(x, bias)))

    def by_packed(x, bias):
        options = {"bias": bias, "activation": "gelu", "preferred_element_type": jnp.float32}
        return linear(x, packed, **options) if left else linear(x[::-1], packed, **options)[::-1]

    def by_dense(x, bias):
        z = jnp.dot(x.astype(jnp.float32), dense.T, precision="highest")
        return jax.nn.gelu(z + bias.astype(jnp.float32))

    operands = (0.3 * random_x(3, k), random_x(1, m)[0])
    tangents = (random_x(3, k, seed=5), random_x(1, m, seed=6)[0])

    def along(f):
        return lambda *xs: jax.jvp(f, xs, tangents)[1]

    for change in (lambda f: f), along, (lambda f: along(along(f))):
        got, wanted = (
            jax.jit(jax.grad(change(loss(product)), (0, 1)))(*operands)
            for product in (by_packed, by_dense)
        )
        for actual, expected in zip(got, wanted, strict=True):
            assert actual.dtype == jnp.bfloat16
            expected = np.asarray(expected, np.float32)
            limit = 0.03 * np.abs(expected).max()
            np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=limit)


@each_form
def test_numbers_have_no_derivatives(dtype, cell):
    a = random_matrix(PATTERNS["odd"]())
    packed, x = a.pack(dtype, cell=cell, repackable=True), random_x(53, 2)
    message = "numbers of 8 bits and their scales have no derivatives"
    for activation in None, "relu":

        def loss(p, activation=activation):
            y = linear(x.T, p, activation=activation)
            return jnp.sum(y.astype(jnp.float32))

        with pytest.raises(TypeError, match=message):
            jax.grad(loss, allow_int=True)(packed)
        with pytest.raises(TypeError, match=message):
            jax.grad(lambda v, loss=loss: loss(packed.repack(v)))(a.values)
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda v: packed.repack(v).todense().sum())(a.values)
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda p: p.todense().sum(), allow_int=True)(packed)
    with pytest.raises(ValueError, match=rf"{dtype} is not trainable, .* repackable=True"):
        a.pack(dtype, trainable=True)


@each_form
def test_other_values(dtype, cell):
    """`repack` gives the bits of packing anew, under jit without compiling again."""
    topology = PATTERNS["padding"]()
    pack = functools.partial(CSR.pack, dtype=dtype, cell=cell)
    packed = pack(random_matrix(topology), repackable=True)
    traced = []

    @jax.jit
    def repack(packed, values):
        traced.append(values)
        return packed.repack(values)

    for seed in 1, 2:
        b = random_matrix(topology, seed, jnp.float32)
        for again in repack(packed, b.values), packed.repack(b.values):
            jax.tree.map(np.testing.assert_array_equal, again, pack(b, repackable=True))
    assert len(traced) == 1
    with pytest.raises(ValueError, match="trainable=True or repackable=True"):
        pack(random_matrix(topology)).repack(b.values)


@each_cell
def test_batches_and_back_to_rows(cell):
    topology = PATTERNS["odd"]()
    packed = random_matrix(topology).pack(jnp.int8, cell=cell)
    dense, x = packed.todense(), jnp.stack([random_x(53, 6), random_x(53, 6, seed=7)])
    y = jax.vmap(lambda x: packed @ x, 0, 1)(x)
    expected = jnp.moveaxis(dense @ x.astype(jnp.float32), 0, 1)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=0.01, atol=0.05)
    back = CSR.from_packed(packed)
    assert back.dtype == jnp.float32
    np.testing.assert_array_equal(back.todense(), dense)


@each_form
def test_tree_files_and_export(dtype, cell, tmp_path):
    a, x = random_matrix(PATTERNS["uneven"]()), random_x(2100, 3)
    packed = a.pack(dtype, cell=cell, parts=2)
    assert len(jax.tree.leaves(packed)) == 6 and set(packed.arrays) == {*Packed.ARRAYS, "scales"}
    run = jax.jit(lambda packed, x: (packed, packed @ x))
    exported = jax.export.export(run, disabled_checks=EXPORT_DISABLED_CHECKS)(packed, x)
    called, y = jax.export.deserialize(exported.serialize()).call(packed, x)
    np.testing.assert_array_equal(y, packed @ x)
    for each in *through_checkpoints(packed, tmp_path), called:
        assert (each.shape, each.cell, each.parts, each.dtype) == (packed.shape, cell, 2, dtype)
        jax.tree.map(np.testing.assert_array_equal, each.verify(), packed)


def test_scales_are_leaves_of_8_bits_alone():
    """Arrays by name are those that are leaves, whatever a function puts in their places."""
    a = random_matrix(PATTERNS["odd"]())
    for dtype in (None, *DTYPES):
        packed = a.pack(dtype)
        named, tree = jax.tree_util.tree_flatten_with_path(packed)
        assert [path[0].name for path, _ in named] == list(packed.arrays)
        assert list(packed.arrays) == [*Packed.ARRAYS, "scales"][: len(named)]
        assert jax.tree.structure(jax.tree.map(lambda _: 0, packed)) == tree


def test_explained():
    half = np.random.default_rng(0).random((1024, 2048)) < 0.5
    a = random_matrix(Topology.from_mask(half))
    times, small = {}, Device("A10", 86, 72, 101376)

    def product(packed, x):
        return packed @ x

    for dtype in (jnp.bfloat16, *DTYPES):
        packed = a.pack(dtype)
        for n, variant in (1, "packed_wgmma"), (16, "packed_wgmma"), (200, None):
            x = jnp.ones((2048, n), jnp.float16 if dtype == jnp.int8 else jnp.bfloat16)
            (call,) = explain(product, packed, x, device=H200)
            assert call.variant == variant and call.shape == (1024, 2048)
        assert (f"numbers in {jnp.dtype(dtype)}" in str(call)) == (dtype in DTYPES)
        (call,) = explain(product, packed, x[:, :16], device=small)
        assert call.variant == "packed_mma"
        times[str(jnp.dtype(dtype))] = dict(call.variants)["packed_mma"]
        by_gaps = a.pack(dtype, columns=1)
        (call,) = explain(product, by_gaps, x[:, :1], device=H200)
        assert (by_gaps.cell, call.variant) == (0, "packed_gaps")
        times[f"{jnp.dtype(dtype)} by gaps"] = dict(call.variants)["packed_gaps"]
        (call,) = explain(product, packed, x[:, :1], device=H200)
        assert dict(call.variants)["packed_wgmma"] > times[f"{jnp.dtype(dtype)} by gaps"]
    assert times["bfloat16"] < times["int8"] < times["float8_e4m3fn"]
    assert times["int8 by gaps"] == times["float8_e4m3fn by gaps"] < times["bfloat16 by gaps"]


def test_errors():
    a = random_matrix(PATTERNS["odd"]())
    packed = a.pack(jnp.int8)
    with pytest.raises(ValueError, match="cell must be None, 0 or 1 for int8, got 2"):
        a.pack(jnp.int8, cell=2)
    with pytest.raises(ValueError, match=r"dtype must be bfloat16, .*e4m3fn, got float8_e5m2"):
        a.pack(jnp.float8_e5m2)
    with pytest.raises(
        ValueError, match="values must be floating and of 16 bits at least, got int8"
    ):
        a.astype(jnp.int8).pack()
    with pytest.raises(TypeError, match=r"x must be bfloat16 or float16 .* of int8, got float32"):
        packed @ jnp.ones((53, 2))
    without = {name: x for name, x in packed.arrays.items() if name != "scales"}
    with pytest.raises(ValueError, match=r"scales of a packed .* got none for int8"):
        Packed.from_arrays(without, packed.shape)
    with pytest.raises(ValueError, match=r"scales of a packed .* got some for bfloat16"):
        Packed.from_arrays(a.pack().arrays | {"scales": packed.scales}, packed.shape)
    with pytest.raises(ValueError, match=r"scales of .* must have shape \(37,\), got \(36,\)"):
        Packed.from_arrays(packed.arrays | {"scales": packed.scales[1:]}, packed.shape)
    arrays = a.pack(jnp.float8_e4m3fn).arrays
    arrays["values"] = arrays["values"].at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match=r"Packed\.verify: values of 8 bits must not be NaN"):
        Packed.from_arrays(arrays, packed.shape)
    for bad in -1, jnp.inf:
        scales = packed.scales.at[2].set(bad)
        with pytest.raises(ValueError, match=r"scales must be finite and not below 0, or NaN"):
            Packed.from_arrays(packed.arrays | {"scales": scales}, packed.shape)


@pytest.mark.parametrize("by, cell", FORMS)
def test_sums_of_large_x(by, cell):
    """They are finite as far as is documented for rows of one entry, though scales come last."""
    topology = Topology.from_mask(np.eye(40, 300, dtype=bool))
    values = jnp.asarray(np.random.default_rng(0).uniform(1e-3, 1, 40), jnp.float32)
    for dtype, largest in zip(DTYPES, (2.6e36, 7.5e35), strict=True):
        packed = CSR(values, topology).pack(dtype, cell=cell)
        x = jnp.full((300, 3), largest, jnp.bfloat16)
        y = compiled(packed, x, None, False, *by, None, jnp.zeros(()))
        exact = np.asarray(packed.todense(), np.float64) @ np.asarray(x, np.float64)
        np.testing.assert_allclose(y, exact, rtol=1e-6)


@each_cell
def test_products_round_sums_alone(cell):
    """int8 beside x of whole numbers is exact, whatever the scale: nothing is rounded before."""
    topology = PATTERNS["50_percent"]()
    m, k = topology.shape
    numbers = np.random.default_rng(0).integers(-127, 128, topology.nse)
    numbers[np.unique(rows_of(topology), return_index=True)[1]] = 127
    packed = CSR(jnp.asarray(numbers / 8, jnp.float32), topology).pack(jnp.int8, cell=cell)
    np.testing.assert_array_equal(packed.scales, np.full(m, 0.125, np.float32))
    x = jnp.asarray(np.random.default_rng(1).integers(-9, 10, (k, 4)), jnp.bfloat16)
    expected = np.asarray(packed.todense(), np.float64) @ np.asarray(x, np.float64)
    y = functools.partial(linear, preferred_element_type=jnp.float32)(x.T, packed).T
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(
        packed.todense(), dequantized(packed.todense() * 8, packed.scales)
    )
