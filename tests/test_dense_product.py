"""spmm and sddmm by XLA's dense product: where a GPU takes it, its results, its precision."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM, assert_close
from covering import combinations
from operands import batch_of_patterns, draw, problem, values_for
from reference import sddmm as reference_sddmm
from reference import spmm as reference_spmm
from reference import to_dense

from jaxsparse import CSR, Topology, sddmm, spmm
from jaxsparse.ops import arguments, bilinear
from jaxsparse.ops.dense_product import dense_sddmm, dense_spmm, dense_spmm_pays
from jaxsparse.ops.multiply import multiply
from jaxsparse.primitive import bind_local, equations


@pytest.fixture
def own_kernels(monkeypatch):
    """Instead of a GPU's, which the dense product falls back on, this machine's."""
    if PLATFORM != "cuda":
        replaced = {"implementation": None}
        monkeypatch.setattr(
            "jaxsparse.ops.dense_product.bind_local",
            lambda p, *xs, **params: bind_local(p, *xs, **params | replaced),
        )


def short(x):
    """With numbers that TF32 holds, which a GPU multiplies in."""
    return x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x


def dense_product(a, x, bias=None, *, transpose=False, left=False, activation=None, wide=False):
    dense = [a.values, x] if bias is None else [a.values, x, bias]
    (values, x, *rest), pattern = arguments.align(
        dense, (1, 2, 1)[: len(dense)], x.dtype, a.topology
    )
    has_bias = bias is not None
    epilogue = {"has_bias": has_bias, "activation": activation, "with_preactivation": True}
    plain = bias is None and activation is None
    compute = functools.partial(
        dense_spmm,
        primitive=bilinear.spmm_p if plain else bilinear.spmm_epilogue_p,
        activate=bilinear.ACTIVATIONS[activation],
        transpose=transpose,
        dense_on_left=left,
        out_dtype=jnp.dtype(jnp.float32) if wide else x.dtype,
        precision="tensorfloat32",
        columns=None,
        **({} if plain else epilogue),
    )
    y, *z = jax.jit(compute)(values, *pattern, x, *rest)
    if z:
        again = bilinear.ACTIVATIONS[activation](z[0].astype(jnp.float32)).astype(y.dtype)
        error = 4 * float(jnp.finfo(y.dtype).eps)
        np.testing.assert_allclose(np.float32(y), np.float32(again), error, error)
    return y


NARROW = ["float32", "bfloat16", "float16"]
BOTH = (False, True)


@combinations(
    "name, transpose, left, dtype",
    ["square", "odd", "uneven", "empty_rows", "padding"],
    BOTH,
    BOTH,
    NARROW,
)
def test_dense_product(own_kernels, name, transpose, left, dtype):
    topology, n = problem(name)
    rng = np.random.default_rng(0)
    a = CSR(short(values_for(topology, dtype, rng)), topology)
    x = short(draw(rng, (topology.shape[0 if transpose else 1], n), dtype))
    dense = to_dense(a.values, topology)
    dense = dense.T if transpose else dense
    x64 = np.asarray(x, np.float64)
    expected, magnitude = dense @ x64, np.abs(dense) @ np.abs(x64)
    for wide in (False, True):
        options = {"transpose": transpose, "left": left, "wide": wide}
        out = dense_product(a, x.T if left else x, **options)
        assert out.dtype == ("float32" if wide else dtype)
        assert_close(out.T if left else out, expected, out.dtype, magnitude)


@combinations("activation, left, dtype", [None, "relu", "gelu"], BOTH, NARROW)
def test_epilogue_of_the_dense_product(own_kernels, activation, left, dtype):
    topology, n = problem("odd")
    rng = np.random.default_rng(1)
    a = CSR(short(values_for(topology, dtype, rng)), topology)
    x, bias = short(draw(rng, (topology.shape[1], n), dtype)), draw(rng, topology.shape[0], dtype)
    out = dense_product(a, x.T if left else x, bias, left=left, activation=activation)
    expected = reference_spmm(a.values, topology, x, bias, activation)
    magnitude = np.abs(to_dense(a.values, topology)) @ np.abs(np.asarray(x, np.float64)) + 10
    assert_close(out.T if left else out, expected, dtype, magnitude)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_numbers_stay_in_their_rows_of_a_dense_product(own_kernels, bad, dtype):
    topology, n = problem("odd")
    rng = np.random.default_rng(4)
    values = values_for(topology, dtype, rng)
    x = draw(rng, (topology.shape[1], n), dtype).at[3].set(bad).at[7, 2].set(bad)
    expected = reference_spmm(values, topology, x)
    assert np.isfinite(expected).any() and not np.isfinite(expected).all()
    magnitude = np.nan_to_num(np.abs(expected), nan=0, posinf=0) + 10
    assert_close(dense_product(CSR(values, topology), x), expected, dtype, magnitude)


@pytest.mark.parametrize("dtype", NARROW)
def test_bad_values_in_a_dense_product(own_kernels, dtype):
    """They are stored, so they reach what they multiply; sums overflow as in a kernel."""
    topology, n = problem("odd")
    rng = np.random.default_rng(5)
    values = values_for(topology, dtype, rng).at[4].set(np.inf).at[70].set(np.nan)
    values = values.at[20].set(jnp.finfo(dtype).max)
    x = 4 + jnp.abs(draw(rng, (topology.shape[1], n), dtype))
    a = CSR(values, topology)
    out, own = dense_product(a, x), spmm(a, x)
    assert not np.isfinite(own).all(1).all() and np.isfinite(own).any()
    np.testing.assert_array_equal(np.isnan(out), np.isnan(own))
    np.testing.assert_array_equal(np.isinf(out), np.isinf(own))


def test_when_a_dense_product_is_left_to_a_kernel(monkeypatch):
    """Where x is not finite, or columns of a traced pattern do not rise."""

    def kernel(primitive, *operands, **params):
        avals = primitive.abstract_eval(*map(jax.typeof, operands), **params)[0]
        return [jnp.full(aval.shape, -7, aval.dtype) for aval in avals]

    monkeypatch.setattr("jaxsparse.ops.dense_product.bind_local", kernel)
    rng = np.random.default_rng(3)
    x = draw(rng, (6, 5), jnp.float32)
    values = draw(rng, 6, jnp.float32)

    def left_to_kernel(columns, x, offsets=(0, 2, 4, 4, 5)):
        @jax.jit
        def run(offsets, columns, x):
            return dense_product(CSR(values, Topology(offsets, columns, (4, 6))), x)

        return np.all(run(jnp.array(offsets), jnp.array(columns), x) == -7)

    assert not left_to_kernel([0, 3, 1, 2, 0, 0], x)  # with padding
    assert not left_to_kernel([0, 3, 3, 4, 4, 5], x, (0, 2, 2, 4, 6))
    assert left_to_kernel([0, 0, 1, 2, 0, 0], x)
    assert left_to_kernel([0, 3, 2, 1, 0, 0], x)
    for bad in (np.nan, np.inf, -np.inf):
        assert left_to_kernel([0, 3, 1, 2, 0, 0], x.at[5, 0].set(bad))


def test_columns_twice_in_a_dense_product(own_kernels):
    """They add up in float32, whatever the operands."""
    columns = jnp.array([1, 1, 1, 0, 2])
    values, x = jnp.array([1, 2**-9, 2**-9, 1, 1], "bfloat16"), jnp.ones((3, 2), "bfloat16")

    @jax.jit
    def run(columns):
        a = CSR(values, Topology(jnp.array([0, 3, 5]), columns, (2, 3)))
        return dense_product(a, x, wide=True)

    np.testing.assert_array_equal(run(columns), [[1 + 2**-8] * 2, [2.0] * 2])


@pytest.mark.parametrize("bad", [False, True])
def test_batches_of_a_dense_product(own_kernels, bad):
    topology, n = problem("odd")
    rng = np.random.default_rng(8)
    bias = draw(rng, topology.shape[0], jnp.float32)
    x = short(draw(rng, (3, topology.shape[1], n), jnp.float32))
    if bad:
        x = x.at[1, 5, 2].set(np.nan)
    for batch in ((), (2, 1)):
        values = short(values_for(topology, jnp.float32, rng, batch))
        out = dense_product(CSR(values, topology), x, bias)
        assert out.shape == (*batch[:1], 3, topology.shape[0], n)
        for at in np.ndindex(out.shape[:-2]):
            matrix = values[(at[0], 0) if batch else ()]
            expected = reference_spmm(matrix, topology, x[at[-1]], bias)
            assert_close(out[at], expected, "float32", np.full(expected.shape, 50.0))
    rng, topology, values, each = batch_of_patterns()
    values, x = short(values), short(draw(rng, (15, 6), jnp.float32))
    out = dense_product(CSR(values, topology), x)
    back = dense_product(CSR(values, topology), short(out), transpose=True)
    for i in range(3):
        expected = reference_spmm(values[i], each[i], x)
        assert_close(out[i], expected, "float32", np.full(expected.shape, 20.0))
        expected = to_dense(values[i], each[i]).T @ np.asarray(short(out)[i], np.float64)
        assert_close(back[i], expected, "float32", np.full((15, 6), 100.0))


@pytest.mark.parametrize("shape", [(0, 20), (20, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_dense_product_without_rows_or_columns(shape, dtype):
    """There may be padding."""
    x, y = (jax.ShapeDtypeStruct((size, 512), dtype) for size in shape)
    offsets, columns = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (shape[0] + 1, 5))

    def call(x, y, offsets, columns):
        return sddmm(x, y, Topology(offsets, columns, shape)).values

    traced = jax.jit(call).trace(x, y, offsets, columns)
    assert "jaxsparse_sddmm" in traced.lower(lowering_platforms=("cuda",)).as_text()


@combinations(
    "name, dtype, scaled",
    ["odd", "uneven", "empty_rows", "padding", "nothing_stored"],
    NARROW,
    BOTH,
)
def test_entries_of_a_dense_product(name, dtype, scaled):
    topology, d = problem(name)
    rng = np.random.default_rng(2)
    x, y = (draw(rng, (size, d), dtype) for size in topology.shape)
    scale = [values_for(topology, dtype, rng)] if scaled else []
    ranks = (2, 2, 1)[: 2 + len(scale)]
    (x_, y_, *rest), pattern = arguments.align([x, y, *scale], ranks, x.dtype, topology)
    params = {"scaled": scaled, "out_dtype": x.dtype, "columns": None}
    compute = functools.partial(dense_sddmm, **params)
    (out,) = jax.jit(compute)(x_, y_, *pattern, *rest)
    finite = [np.nan_to_num(np.asarray(v, np.float64)) for v in scale]
    expected = reference_sddmm(x, y, topology, *finite)
    magnitude = reference_sddmm(np.abs(x), np.abs(y), topology, *map(np.abs, finite))
    assert_close(out, expected, dtype, magnitude)
    batched = jax.jit(compute)(x_[None], *(v[None] for v in (y_, *pattern, *rest)))[0]
    np.testing.assert_array_equal(batched, out[None])


@pytest.mark.parametrize(
    "dtype, shape, d, density, taken",
    [
        ("float32", (2048, 512), 2048, 0.3, True),
        ("float32", (2048, 512), 2048, 0.1, False),
        ("float32", (64, 256), 3136, 0.3, False),  # a GPU's multiprocessors would mostly wait
        ("float32", (8192, 2048), 256, 0.5, False),
        ("float64", (2048, 512), 2048, 0.3, False),
        ("bfloat16", (8192, 2048), 512, 0.1, True),
        ("float16", (2048, 512), 2048, 0.1, True),
        ("bfloat16", (2048, 512), 2048, 0.005, False),
        ("bfloat16", (512, 512), 512, 0.1, False),
        ("bfloat16", (9000, 9000), 512, 0.3, False),  # it would take more than 256 MiB
    ],
)
def test_where_a_gpu_picks_from_a_dense_product(dtype, shape, d, density, taken):
    m, k = shape
    nse = int(m * k * density)
    with jax.enable_x64(dtype == "float64"):
        x, y, scale_by = (jax.ShapeDtypeStruct(s, dtype) for s in ((m, d), (k, d), (nse,)))
        offsets, columns = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (m + 1, nse))

        def is_dense(*scale_by, **options):
            def call(x, y, offsets, columns, *scale_by):
                scale = dict(zip(["scale_by"], scale_by, strict=False))
                return sddmm(x, y, Topology(offsets, columns, shape), **scale, **options).values

            traced = jax.jit(call).trace(x, y, offsets, columns, *scale_by)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            return "jaxsparse_sddmm" not in text and "dot_general" in text

        assert is_dense() == is_dense(scale_by) == taken
        assert not is_dense(variant="tiled_entries") and not is_dense(implementation="cuda")


@pytest.mark.parametrize("batched", ["patterns", "x"])
def test_dense_products_of_a_batch(batched):
    """One serves all patterns; as many as there are of x would take more than 256 MiB."""
    m, k, d, nse, batch = 2048, 512, 2048, 300_000, (100,)
    of_x, of_patterns = (batch if batched == name else () for name in ("x", "patterns"))
    x = jax.ShapeDtypeStruct((*of_x, m, d), jnp.float32)
    y = jax.ShapeDtypeStruct((k, d), jnp.float32)
    offsets = jax.ShapeDtypeStruct((*of_patterns, m + 1), jnp.int32)
    columns = jax.ShapeDtypeStruct((*of_patterns, nse), jnp.int32)

    def call(x, y, offsets, columns):
        return sddmm(x, y, Topology(offsets, columns, (m, k))).values

    traced = jax.jit(call).trace(x, y, offsets, columns)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("jaxsparse_sddmm" in text) == (batched == "x")


TF32 = "tensorfloat32"


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "dtype, density, n, precision, taken",
    [
        ("bfloat16", 0.2, 2048, None, True),
        ("float16", 0.2, 2048, "highest", True),
        ("bfloat16", 0.2, 128, None, False),
        ("bfloat16", 0.01, 2048, None, False),
        ("float32", 0.2, 2048, None, False),
        ("float32", 0.2, 2048, "highest", False),
        ("float32", 0.2, 2048, "TF32_TF32_F32_X3", False),
        ("float32", 0.2, 2048, TF32, True),
        ("float32", 0.2, 2048, "bfloat16", True),
        ("float32", 0.2, 2048, "TF32_TF32_F32", True),
        ("float32", 0.01, 2048, TF32, False),
    ],
)
def test_where_a_gpu_takes_a_dense_product(dtype, density, n, precision, taken, left):
    """Only for what it is faster for, and where the precision allows it."""
    m, k = 4096, 2048
    nse = int(m * k * density)
    offsets, columns = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (m + 1, nse))
    values = jax.ShapeDtypeStruct((nse,), dtype)
    x = jax.ShapeDtypeStruct((n, k) if left else (k, n), dtype)

    def call(values, offsets, columns, x, **options):
        a = CSR(values, Topology(offsets, columns, (m, k)))
        return multiply("spmm", a, x, transpose=False, dense_on_left=left, **options)

    def is_dense(**options):
        with jax.default_matmul_precision(precision):
            traced = jax.jit(functools.partial(call, **options)).trace(values, offsets, columns, x)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "jaxsparse_spmm" in text
        return "dot_general" in text

    assert is_dense() == taken
    assert not is_dense(variant="tiled_rows") and not is_dense(implementation="cuda")
    if dtype == "float32":
        assert not is_dense(precision=jax.lax.Precision.HIGHEST)


def test_a_dense_matrix_takes_no_more_than_it_may():
    def pays(m, k, n, dtype="bfloat16", density=0.25, batch=(), x_batch=(), transpose=False):
        sizes = (m + 1, nse := int(m * k * density), m, k + 1, nse, k, nse, 0, 2, 2)
        one = (1,) * len(batch)
        pattern = [jax.core.ShapedArray((*one, size), jnp.dtype("int32")) for size in sizes]
        values = jax.core.ShapedArray((*batch, nse), jnp.dtype(dtype))
        x = jax.core.ShapedArray((*x_batch, m if transpose else k, n), jnp.dtype(dtype))
        params = {"dense_on_left": False, "transpose": transpose, "columns": None}
        return dense_spmm_pays(params, [values, *pattern, x])

    assert pays(8192, 16384, 2048) and not pays(8192, 16385, 2048)
    assert pays(8192, 8192, 2048, "float32") and not pays(8192, 8193, 2048, "float32")
    assert pays(2048, 2048, 2048, batch=(32,), x_batch=(32,))
    assert not pays(2048, 2048, 2048, batch=(33,), x_batch=(33,))
    assert pays(2048, 2048, 2048, batch=(1,), x_batch=(99,))
    assert not pays(8192, 2048, 2048, "float64")
    wide = 1 << 25  # XLA's products with one row round more than those of the kernels
    assert pays(2, wide, 2048) and not pays(1, wide, 2048)
    assert pays(wide, 2, 2048, transpose=True) and not pays(wide, 1, 2048, transpose=True)
    for m, k, n in ((0, 9, 2048), (9, 0, 2048), (9, 9, 0), (1, 1, 1)):
        assert not pays(m, k, n)
    (open_size,) = jax.export.symbolic_shape("b")
    assert not pays(8192, 2048, open_size)


def precisions(function, *arguments):
    """Of the products in a program, in its order."""
    eqns = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    return [e.params["precision"] for e in eqns if e.primitive.name.startswith("jaxsparse_spmm")]


def test_the_precision_goes_with_the_product():
    """That of where it was called, to all that is made of it; what is compiled is kept apart."""
    topology = problem("odd")[0]
    values, x = jnp.ones(topology.nse), jnp.ones((topology.shape[1], 4))

    def call(values, x, **options):
        return spmm(CSR(values, topology), x, **options)

    def fused(values, x):
        return call(values, x, activation="relu").sum()

    with jax.default_matmul_precision(TF32):
        _, transposed = jax.vjp(call, values, x)
        _, tangent = jax.linearize(call, values, x)
        assert precisions(call, values, x) == [TF32]
        assert precisions(jax.vmap(call, (None, 0)), values, x[None]) == [TF32]
        assert set(precisions(jax.grad(fused, (0, 1)), values, x)) == {TF32}
        exact = ("highest", "high", ("default", jax.lax.Precision.HIGH))
        for precision in exact:
            assert precisions(functools.partial(call, precision=precision), values, x) == [None]
        for precision in ("default", "bfloat16", jax.lax.Precision.DEFAULT, ["default"] * 2):
            assert precisions(functools.partial(call, precision=precision), values, x) == [TF32]
        out = call(values, x)  # which a CPU computes as ever
    for precision in (None, "highest", "F32_F32_F32"):
        with jax.default_matmul_precision(precision):
            assert precisions(transposed, jnp.ones_like(out)) == [TF32]
            assert set(precisions(tangent, values, x)) == {TF32}
            assert precisions(call, values, x) == [None]
    if PLATFORM == "cpu":
        np.testing.assert_array_equal(out, call(values, x))
    jitted = jax.jit(call)
    for precision in (None, TF32, None, "bfloat16", TF32):
        with jax.default_matmul_precision(precision):
            assert precisions(jitted, values, x) == [precision]
