"""Products by packed matrices: every variant against the oracle, derivatives, batches, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import DTYPES, PLATFORM, assert_close, cases
from reference import spmm as reference
from test_packed import PATTERNS, parts_that_fit, random_matrix

from jaxsparse import CSR, H200, Device, Packed, Topology, explain, linear, spmm

IMPLEMENTATIONS = [*cases("packed_product"), (None, None)]
# pattern, columns of x, cell, parts, dtype, whether x is on the left, options
PRODUCTS = [
    ("odd", 1, 1, 1, "bfloat16", False, {}),
    ("uneven", 5, 1, 3, "float16", True, {"activation": "relu"}),
    ("70_percent", 16, 2, 2, "bfloat16", False, {"preferred_element_type": jnp.float32}),
    ("striped", 8, 1, 2, "float16", False, {"activation": "gelu"}),
    ("90_percent", 33, 2, 4, "bfloat16", True, {"preferred_element_type": jnp.float32}),
    ("many_columns", 2, 1, 8, "bfloat16", True, {}),
    ("full", 130, 2, 1, "float16", True, {}),
    ("70_percent", 24, 2, 2, "bfloat16", False, {}),
    ("nothing_stored", 3, 1, 1, "bfloat16", False, {"activation": "relu"}),
    ("no_rows", 3, 1, 1, "bfloat16", False, {}),
    ("no_columns", 3, 1, 1, "bfloat16", True, {}),
    ("padding", 0, 1, 1, "bfloat16", False, {}),
    ("odd", 1, 0, 1, "bfloat16", False, {}),
    ("98_percent", 1, 0, 4, "float16", True, {"activation": "gelu"}),
    ("uneven", 2, 0, 3, "float16", False, {"activation": "relu"}),
    ("striped", 3, 0, 2, "bfloat16", True, {"preferred_element_type": jnp.float32}),
    ("many_columns", 4, 0, 9, "bfloat16", False, {}),
    ("90_percent", 8, 0, 2, "bfloat16", False, {"preferred_element_type": jnp.float32}),
    ("70_percent", 21, 0, 1, "float16", True, {}),
    ("full", 40, 0, 1, "bfloat16", False, {}),
    ("nothing_stored", 1, 0, 1, "bfloat16", False, {"activation": "gelu"}),
    ("no_columns", 2, 0, 1, "bfloat16", True, {}),
]


def packs(variant, cell):
    """Whether a variant takes matrices with such cells."""
    return variant is None or variant.startswith("packed_gaps") == (cell == 0)


def random_x(k, n, dtype=jnp.bfloat16, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((k, n)), dtype)


@functools.partial(jax.jit, static_argnames=("left", "implementation", "variant", "activation"))
def compiled(packed, x, bias, left, implementation, variant, activation, wide):
    options = {"bias": bias, "activation": activation}
    options |= {"implementation": implementation, "variant": variant}
    options["preferred_element_type"] = None if wide is None else jnp.float32
    return linear(x.T, packed, **options).T if left else spmm(packed, x, **options)


@pytest.mark.parametrize("implementation, variant", IMPLEMENTATIONS)
@pytest.mark.parametrize("name, n, cell, parts, dtype, left, options", PRODUCTS)
def test_product(name, n, cell, parts, dtype, left, options, implementation, variant):
    if not packs(variant, cell):
        pytest.skip("of other matrices")
    topology = PATTERNS[name]()
    a = random_matrix(topology, dtype=DTYPES[dtype])
    packed = a.pack(cell=cell, parts=parts_that_fit(topology, parts, cell))
    x = random_x(topology.shape[1], n, DTYPES[dtype])
    rng = np.random.default_rng(2)
    bias = jnp.asarray(rng.standard_normal(topology.shape[0]), DTYPES[dtype])
    bias = bias if options else None
    wide = jnp.zeros(()) if "preferred_element_type" in options else None
    activation = options.get("activation")
    y = compiled(packed, x, bias, left, implementation, variant, activation, wide)
    expected = reference(a.values, topology, x, bias, activation)
    assert y.dtype == (jnp.float32 if wide is not None else DTYPES[dtype])
    magnitude = reference(np.abs(a.values), topology, np.abs(np.asarray(x, np.float64)))
    assert_close(y, expected, y.dtype, magnitude + (0 if bias is None else 1))
    again = compiled(packed, x, bias, left, implementation, variant, activation, wide)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(again))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("implementation, variant", IMPLEMENTATIONS)
@pytest.mark.parametrize("cell", [0, 1, 2])
def test_bad_numbers_stay_where_they_belong(implementation, variant, cell, bad):
    if not packs(variant, cell):
        pytest.skip("of other matrices")
    topology = PATTERNS["70_percent"]()
    a = random_matrix(topology)
    x = random_x(topology.shape[1], 4).at[7, 2].set(bad)
    packed = a.pack(cell=cell, parts=2)
    y = compiled(packed, x, None, False, implementation, variant, None, None)
    assert_close(y, reference(a.values, topology, x), jnp.bfloat16, np.full(y.shape, 40.0))
    a = CSR(a.values.at[5].set(bad), topology)
    x = random_x(topology.shape[1], 4)
    y = compiled(a.pack(cell=cell), x, None, True, implementation, variant, None, None)
    assert_close(y, reference(a.values, topology, x), jnp.bfloat16, np.full(y.shape, 40.0))


@pytest.mark.parametrize("cell", [0, 1])
def test_products_of_all_ranks(cell):
    topology = PATTERNS["odd"]()
    m, k = topology.shape
    a, dense = (
        (packed := random_matrix(topology).pack(cell=cell)),
        packed.todense().astype(jnp.float32),
    )
    x = random_x(k, 6)

    def check(y, expected):
        assert y.shape == expected.shape
        np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=0.01, atol=0.05)

    wide = x.astype(jnp.float32)
    check(a @ x[:, 0], dense @ wide[:, 0])
    check(a @ x, dense @ wide)
    stack = jnp.stack([x, 2 * x, -x])
    check(a @ stack, dense @ stack.astype(jnp.float32))
    check(linear(stack.swapaxes(1, 2), a), (dense @ stack.astype(jnp.float32)).swapaxes(1, 2))
    bias = jnp.arange(3 * m, dtype=jnp.bfloat16).reshape(3, m) / 64
    batched = jax.vmap(lambda x, b: spmm(a, x, bias=b, activation="relu"))
    expected = dense @ stack.astype(jnp.float32) + bias[..., None].astype(jnp.float32)
    check(batched(stack, bias), jax.nn.relu(expected))
    for axes in (1, 0), (2, 1), (0, 2):
        moved = jnp.moveaxis(stack, 0, axes[0])
        check(
            jax.vmap(lambda x: a @ x, axes[0], axes[1])(moved),
            jnp.moveaxis(dense @ stack.astype(jnp.float32), 0, axes[1]),
        )


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("cell", [0, 1, 2])
def test_derivatives(cell, left):
    """Of every order, in the values, x and the bias: those of the dense product."""
    topology = PATTERNS["odd"]()
    a, (m, k) = random_matrix(topology), topology.shape
    a = CSR(a.values * 0.25, topology)
    packed = a.pack(cell=cell, trainable=True)
    rows, columns = np.asarray(topology.row_indices), np.asarray(topology.column_indices)

    def by_packed(values, x, bias):
        y = linear(
            x,
            packed.repack(values),
            bias=bias,
            activation="gelu",
            preferred_element_type=jnp.float32,
        )
        return jnp.sum(jnp.sin(y))

    def by_dense(values, x, bias):
        dense = jnp.zeros((m, k)).at[rows, columns].set(values.astype(jnp.float32))
        z = jnp.dot(x.astype(jnp.float32), dense.T, precision="highest") + bias.astype(jnp.float32)
        return jnp.sum(jnp.sin(jax.nn.gelu(z)))

    rng = np.random.default_rng(3)
    operands = (a.values, random_x(3, k), jnp.asarray(rng.standard_normal(m), jnp.bfloat16))
    tangents = tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in operands)

    def along(function, order):
        for _ in range(order):
            function = functools.partial(lambda f, *xs: jax.jvp(f, xs, tangents)[1], function)
        return function

    for order in range(3):
        got, expected = (
            jax.jit(jax.value_and_grad(along(f, order), (0, 1, 2)))(*operands)
            for f in (by_packed, by_dense)
        )
        for actual, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert actual.dtype == wanted.dtype
            wanted = np.asarray(wanted, np.float32)
            limit = 0.03 * np.abs(wanted).max()
            np.testing.assert_allclose(np.asarray(actual, np.float32), wanted, atol=limit)


@pytest.mark.parametrize("cell, left", [(2, False), (2, True), (0, False)])
def test_gradient_of_numbers(cell, left):
    """Of a trainable matrix at its entries alone, so that what was pruned stays 0."""
    topology = PATTERNS["odd"]()
    a, (m, k) = random_matrix(topology), topology.shape
    x, ct = random_x(k, 3), random_x(m, 3, jnp.float32, seed=5)
    packed = a.pack(cell=cell, trainable=True)

    def loss(packed):
        options = {"preferred_element_type": jnp.float32}
        y = linear(x.T, packed, **options).T if left else spmm(packed, x, **options)
        return jnp.sum(ct * y)

    gradient = jax.grad(loss, allow_int=True)(packed).values
    dense = np.asarray(ct) @ np.asarray(x, np.float32).T
    stored = np.asarray(packed.sources) < topology.nse
    assert not np.asarray(gradient)[~stored].any()
    rows, columns = np.asarray(topology.row_indices), np.asarray(topology.column_indices)
    expected = dense[rows, columns][np.asarray(packed.sources)[stored]]
    np.testing.assert_allclose(
        np.asarray(gradient, np.float32)[stored], expected, rtol=0.02, atol=0.02
    )
    assert "sddmm" in str(jax.make_jaxpr(jax.grad(loss, allow_int=True))(packed))


def test_gradient_of_numbers_of_one_that_is_not_trainable():
    """That of the dense matrix, wherever a number stands, one that shortens a gap as well."""
    topology, ct = PATTERNS["98_percent"](), random_x(50, 2, jnp.float32, seed=5)
    x = random_x(topology.shape[1], 2)
    packed = random_matrix(topology).pack(cell=0, parts=2)

    def loss(packed, product):
        return jnp.sum(ct * product(packed).astype(jnp.float32))

    by_product, by_dense = (
        jax.grad(functools.partial(loss, product=product), allow_int=True)(packed).values
        for product in (lambda packed: packed @ x, lambda packed: packed.todense() @ x)
    )
    np.testing.assert_allclose(
        *(np.asarray(z, np.float32) for z in (by_product, by_dense)), rtol=0.02, atol=0.02
    )
    assert np.count_nonzero(by_product) > topology.nnz


def test_gradient_of_x_where_something_is_not_finite():
    topology = PATTERNS["odd"]()
    a = random_matrix(topology)
    packed, x = a.pack(), random_x(topology.shape[1], 2)
    _, pullback = jax.vjp(lambda x: packed @ x, x)
    ct = jnp.zeros((topology.shape[0], 2), jnp.bfloat16).at[3, 1].set(jnp.nan)
    (gradient,) = pullback(ct)
    touched = np.zeros(gradient.shape, bool)
    touched[:, 1] = np.asarray(a.todense())[3] != 0
    np.testing.assert_array_equal(np.isnan(np.asarray(gradient, np.float32)), touched)


def test_other_values_compile_nothing():
    topology = PATTERNS["odd"]()
    a, x = random_matrix(topology), random_x(topology.shape[1], 3)
    packed = a.pack(trainable=True)
    # A compiled program takes no operands but those of its form.
    product = jax.jit(lambda packed, x: packed @ x).lower(packed, x).compile()
    for seed in range(3):
        b = random_matrix(topology, seed)
        expected = reference(b.values, topology, x)
        assert_close(
            product(packed.repack(b.values), x), expected, jnp.bfloat16, np.full(expected.shape, 40)
        )


def test_parts_agree():
    topology = PATTERNS["50_percent"]()
    a, x = random_matrix(topology), random_x(topology.shape[1], 8)
    options = {"preferred_element_type": jnp.float32}
    results = [spmm(a.pack(parts=parts), x, **options) for parts in (1, 2, 3, 4)]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-4)


def test_explained():
    half = np.random.default_rng(0).random((1024, 2048)) < 0.5
    packed = random_matrix(Topology.from_mask(half)).pack()
    by_gaps = random_matrix(Topology.from_mask(half)).pack(cell=0)
    for a, n, variant in (
        (packed, 1, "packed_wgmma"),
        (packed, 16, "packed_wgmma"),
        (packed, 200, None),
        (by_gaps, 1, "packed_gaps"),
        (by_gaps, 16, "packed_gaps_mma"),
        (by_gaps, 40, None),
    ):
        call = explain(lambda x, a=a: a @ x, jnp.ones((2048, n), jnp.bfloat16), device=H200)[0]
        assert call.variant == variant and call.shape == (1024, 2048)
        assert "packed matrix" in str(call)
    (call,) = explain(lambda x: packed @ x, jnp.ones((2048, 8), jnp.bfloat16), device=H200)
    assert 2.5 < call.variants[0][1] < 20
    small = Device("A10", 86, 72, 101376)
    (call,) = explain(lambda x: packed @ x, jnp.ones((2048, 16), jnp.bfloat16), device=small)
    assert call.variant == "packed_mma"


def test_predicted_times_are_those_that_an_h200_took():
    m = k = 8192
    pieces, panels = 4 * m // 16, k // 512
    integers = {"starts": (pieces + 1,), "panels": (pieces, panels, 2), "rows": (m,)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in integers.items()}
    for cell, words, measured in (
        (1, 581_280, {1: 25.0, 16: 28.0, 64: 37.5}),
        (2, 237_872, {1: 17.8, 16: 20.0, 64: 27.3}),
    ):
        arrays["values"] = jax.ShapeDtypeStruct((words, 64), jnp.bfloat16)
        arrays["masks"] = jax.ShapeDtypeStruct((pieces, panels * 2 // cell, 32), jnp.uint32)
        packed = Packed.from_arrays(arrays, (m, k))
        assert (packed.cell, packed.parts) == (cell, 4)
        for n, microseconds in measured.items():
            x = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
            (call,) = explain(lambda a, x: a @ x, packed, x, device=H200)
            assert call.variant == "packed_wgmma"
            predicted = dict(call.variants)["packed_wgmma"]
            assert predicted == pytest.approx(microseconds, rel=0.1)


def test_export_with_an_open_number_of_columns():
    topology = PATTERNS["odd"]()
    packed = random_matrix(topology).pack()
    (b,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((b, topology.shape[1]), jnp.bfloat16)
    exported = jax.export.export(jax.jit(linear))(shape, packed)
    program = jax.export.deserialize(exported.serialize())
    x = random_x(5, topology.shape[1])
    np.testing.assert_array_equal(program.call(x, packed), linear(x, packed))


def test_errors():
    topology = PATTERNS["odd"]()
    m, k = topology.shape
    packed, x = random_matrix(topology).pack(), random_x(k, 3)
    with pytest.raises(ValueError, match=r"spmm: x of shape \(52, 3\) must have 53 rows"):
        spmm(packed, x[:-1])
    with pytest.raises(TypeError, match=r"matmul: x must be bfloat16.*got float32"):
        packed @ x.astype(jnp.float32)
    with pytest.raises(ValueError, match=r"linear: bias must have shape \(37,\).*got \(36,\)"):
        linear(x.T, packed, bias=jnp.zeros(m - 1, jnp.bfloat16))
    with pytest.raises(ValueError, match="activation must be one of"):
        spmm(packed, x, activation="tanh")
    with pytest.raises(TypeError, match="write linear"):
        x.T @ packed
    with pytest.raises(ValueError, match="takes one packed matrix, got a batch"):
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), packed)
        jax.vmap(lambda packed: packed @ x)(stack)
    with pytest.raises(ValueError, match="no variant 'nope'"):
        spmm(packed, x, variant="nope", implementation=PLATFORM)
