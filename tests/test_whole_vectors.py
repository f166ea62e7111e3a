"""Zeros behind rows that are no whole vectors: where a GPU gets them, and what becomes of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import combinations
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse
from jaxsparse import CSR, H200, Topology, backend, explain, sddmm, spmm
from jaxsparse.ops import bilinear, whole_vectors
from jaxsparse.ops.multiply import multiply

MASK = np.random.default_rng(0).random((1024, 1024)) < 0.1
LARGE = Topology.from_mask(MASK)
SMALL = Topology.from_mask(MASK[:20, :30])
PIXELS = 49


def array(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


@pytest.fixture
def padded(monkeypatch):
    """Kernels of this machine get 3 zeros, whatever that costs."""
    asked = []

    def always(call, made, dimension, device):
        asked.append(dimension)
        _, size = whole_vectors._arrays_with(dimension, call)
        return made._replace(padded=(dimension, size + 3))

    def undo():
        asked.clear()
        monkeypatch.setattr(bilinear, "with_whole_vectors", whole_vectors.with_whole_vectors)

    monkeypatch.setattr(bilinear, "with_whole_vectors", always)
    return asked, undo


BOTH = (False, True)


@combinations("left, transpose, activation, batched", BOTH, BOTH, [None, "gelu"], BOTH)
def test_zeros_change_nothing(padded, left, transpose, activation, batched):
    values = array(SMALL.nse).at[7].set(jnp.inf)
    x = array(*(2, 3) * batched, 5, 20 if transpose else 30)
    x = x if left else jnp.swapaxes(x, -1, -2)
    bias = array(30 if transpose else 20)

    def value_and_gradient(values, x, bias):
        product = functools.partial(multiply, "spmm", transpose=transpose, dense_on_left=left)
        a = CSR(values, SMALL)
        y = product(a, x) if activation is None else product(a, x, bias=bias, activation=activation)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 0) ** 2), y

    def run():
        function = jax.value_and_grad(value_and_gradient, (0, 1), has_aux=True)
        return jax.jit(lambda *xs: function(*xs))(values, x, bias)

    asked, undo = padded
    with_zeros = run()
    assert {*asked} == {"n", "d"}
    undo()
    expected = run()
    assert not asked and np.isfinite(expected[0][1]).any()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), with_zeros, expected)


def test_each_device_pads_its_own_columns(padded):
    devices = jax.devices("cpu")[:4]
    if len(devices) < 4:
        pytest.skip("needs 4 CPU devices (tests/conftest.py)")
    mesh = jax.make_mesh((4,), ("data",), devices=devices)
    a, x = CSR(array(SMALL.nse), SMALL), array(30, 4 * 7)

    def loss(a, x):
        return jnp.sum(jnp.sin(a @ x))

    cut = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
    replicated = jax.device_put(a, NamedSharding(mesh, P()))
    product = jax.jit(lambda a, x: a @ x)
    text = product.lower(replicated, cut).compile().as_text()
    assert "f32[30,10]" in text and "f32[30,31]" not in text
    assert not [op for op in (" all-", " collective-") if op in text]
    with jax.set_mesh(mesh):
        gradient = jax.jit(jaxsparse.grad(loss, (0, 1)))(replicated, cut)
    _, undo = padded
    undo()
    np.testing.assert_allclose(product(replicated, cut), jax.jit(spmm)(a, x), rtol=1e-5, atol=1e-6)
    expected = jax.jit(jaxsparse.grad(loss, (0, 1)))(a, x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradient, expected
    )


def lowered_for_a_gpu(function, *operands):
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return next(line for line in text.splitlines() if "@jaxsparse_s" in line)


def product(x, **options):
    return spmm(CSR(jnp.ones(LARGE.nse, x.dtype), LARGE), x, **options)


@pytest.mark.parametrize("dtype, columns", [("float32", 52), ("bfloat16", 56)])
def test_a_gpu_gets_whole_vectors(dtype, columns):
    x = jax.ShapeDtypeStruct((1024, PIXELS), dtype)
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    call = lowered_for_a_gpu(product, x)
    assert f"tensor<1024x{columns}x{short}>" in call and f"x{PIXELS}x{short}" not in call
    assert f"-> (tensor<1024x{columns}x{short}>" in call
    of_rows = lowered_for_a_gpu(lambda x: jaxsparse.linear(x.T, CSR(array(LARGE.nse), LARGE)), x)
    assert f"tensor<1024x{columns}x" in of_rows or dtype != "float32"
    explained, whole = (
        explain(product, jax.ShapeDtypeStruct((1024, n), dtype), device=H200)[0]
        for n in (PIXELS, columns)
    )
    assert explained.variants == whole.variants and not whole.remark
    assert explained.remark.startswith(f"rows of {PIXELS} numbers are padded to {columns}")


def test_a_gpu_gets_zeros_only_where_they_pay():
    x = jax.ShapeDtypeStruct((1024, PIXELS), jnp.float32)
    unpadded = f"tensor<1024x{PIXELS}xf32>"
    assert unpadded in lowered_for_a_gpu(functools.partial(product, variant="tiled_rows"), x)
    few = CSR(array(SMALL.nse), SMALL)
    small = jax.ShapeDtypeStruct((30, PIXELS), jnp.float32)
    assert f"tensor<30x{PIXELS}xf32>" in lowered_for_a_gpu(lambda x: few @ x, small)
    assert "x1xf32>" in lowered_for_a_gpu(product, jax.ShapeDtypeStruct((1024, 1), jnp.float32))
    of_values = jax.ShapeDtypeStruct((1024, 243), jnp.float32)
    sampled = lowered_for_a_gpu(lambda x, y: sddmm(x, y, LARGE).values, of_values, of_values)
    assert "tensor<1024x244xf32>" in sampled and "tensor<1024x243xf32>" not in sampled


def test_a_program_for_any_number_of_columns():
    (n,) = export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((1024, n), jnp.float32)
    disabled = backend.EXPORT_DISABLED_CHECKS
    exported = export.export(jax.jit(product), platforms=["cuda"], disabled_checks=disabled)(x)
    assert "stablehlo.pad" not in exported.mlir_module()
