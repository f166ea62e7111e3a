"""linear: the product of a layer, whose activations have their features last."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import DTYPES, PLATFORM, assert_close
from covering import combinations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from reference import spmm as reference_spmm
from reference import to_dense

import jaxsparse
from jaxsparse import CSR, Topology, linear


def random_matrix(m, k, density=0.3, dtype=jnp.float32, seed=0):
    """With padding that is NaN: it must never be read."""
    rng = np.random.default_rng(seed)
    topology = Topology.from_mask(rng.random((m, k)) < density, nse=m * k)
    values = rng.standard_normal(topology.nse)
    values[topology.nnz :] = np.nan
    return CSR(jnp.asarray(values, dtype), topology)


@combinations(
    "implementation, leading, dtype, activation",
    ["xla", PLATFORM],
    [((),), ((1,),), ((19,),), ((3, 5),), ((2, 0, 4),)],
    DTYPES,
    [None, "relu", "gelu"],
)
def test_matches_the_dense_layer(implementation, leading, dtype, activation):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        a = random_matrix(11, 23, dtype=DTYPES[dtype])
        x = jnp.asarray(rng.standard_normal((*leading, 23)), DTYPES[dtype])
        bias = jnp.asarray(rng.standard_normal(11), DTYPES[dtype])
        y = linear(x, a, bias=bias, activation=activation, implementation=implementation)
    assert y.dtype == DTYPES[dtype] and y.shape == (*leading, 11)
    rows = np.asarray(x, np.float64).reshape(-1, 23).T
    expected = reference_spmm(a.values, a.topology, rows, bias, activation)
    magnitude = np.abs(to_dense(a.values, a.topology)) @ np.abs(rows) + 3
    assert_close(np.asarray(y, np.float64).reshape(-1, 11).T, expected, dtype, magnitude)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty_matrix(shape):
    a = CSR.fromdense(np.zeros(shape, np.float32))
    y = linear(jnp.ones((3, shape[1])), a, bias=jnp.full(shape[0], 2.0))
    np.testing.assert_array_equal(y, np.full((3, shape[0]), 2.0))


def test_derivatives():
    with jax.enable_x64(True):
        a = random_matrix(6, 7, dtype=jnp.float64)
        values = jnp.nan_to_num(a.values)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 7)))
        bias = jnp.linspace(-1, 1, 6)

        def function(values, x, bias):
            return linear(x, CSR(values, a.topology), bias=bias, activation="gelu")

        check_grads(function, (values, x, bias), order=2, modes=("fwd", "rev"))


def test_vmap_over_matrices():
    a, x = random_matrix(4, 5), jnp.arange(30.0).reshape(2, 3, 5)
    batch = jnp.stack([a.values, 2 * a.values])
    y = jax.vmap(lambda values, x: linear(x, CSR(values, a.topology)))(batch, x)
    for i in range(2):
        np.testing.assert_allclose(y[i], (i + 1) * linear(x[i], a), rtol=1e-6)


def ops_of(function, *args):
    """Opcodes and result types of the optimized program, fused ones included."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return [line.split(" = ", 1)[1] for line in text.splitlines() if " = " in line]


@pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU's kernels want them transposed")
def test_activations_are_not_transposed():
    a, x = random_matrix(64, 96), jnp.ones((32, 4, 96))

    def loss(a, x):
        return jnp.sum(linear(x, a, activation="relu") ** 2)

    moves = (" transpose(", " copy(")
    assert not [op for op in ops_of(linear, x, a) if any(move in op for move in moves)]
    of_x = ops_of(jax.grad(loss, 1), a, x)
    assert not [op for op in of_x if any(move in op for move in moves)]


def test_a_gpu_gets_rows_of_activations():
    a, x = random_matrix(64, 96), jnp.ones((32, 4, 96))
    program = jax.jit(linear).trace(x, a).lower(lowering_platforms=("cuda",)).as_text()
    call = next(line for line in program.splitlines() if "@jaxsparse_spmm(" in line)
    assert "dense_on_left = false" in call
    assert "tensor<96x128xf32>" in call
    assert "-> (tensor<64x128xf32>" in call  # and a workspace


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 CPU devices (tests/conftest.py)")
def test_sharded_batch_stays_sharded(kind):
    mesh = jax.make_mesh((8,), ("data",), (kind,), devices=jax.devices("cpu")[:8])
    with jax.default_device(jax.devices("cpu")[0]):
        a = random_matrix(6, 7)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((16, 3, 7)), jnp.float32)
        expected = linear(x, a)
        whole = jaxsparse.grad(lambda a, x: jnp.sum(linear(x, a) ** 2))(a, x)
        with jax.set_mesh(mesh):
            x = jax.device_put(x, NamedSharding(mesh, P("data")))
            a = jax.device_put(a, NamedSharding(mesh, P()))
            function = jax.jit(lambda x, a: linear(x, a))
            y = function(x, a)
            text = function.lower(x, a).compile().as_text()
            backward = jax.jit(jaxsparse.grad(lambda a, x: jnp.sum(linear(x, a) ** 2)))
            gradient = backward(a, x)
            of_gradient = backward.lower(a, x).compile().as_text()
        if kind == AxisType.Auto:  # each device sums over its part of the batch
            assert "all-gather" not in of_gradient and of_gradient.count(" all-reduce(") == 1
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), y.ndim)
        assert "all-gather" not in text and "all-reduce" not in text
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradient.values, whole.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (lambda a, x: (x[..., :3], a), ValueError, "linear: x of shape"),
        (lambda a, x: (x, np.eye(7)), TypeError, "linear: a must be a CSR matrix, got ndarray"),
        (lambda a, x: ("x", a), TypeError, "linear: x must be an array"),
        (
            lambda a, x: (x, CSR(a.values[None], a.topology)),
            ValueError,
            "linear: a must be one matrix",
        ),
    ],
)
def test_errors(arguments, error, message):
    a = random_matrix(6, 7)
    with pytest.raises(error, match=message):
        linear(*arguments(a, jnp.ones((2, 7))))


def test_wrong_options():
    a, x = random_matrix(6, 7), jnp.ones((2, 7))
    for options, message in (
        ({"bias": jnp.ones(7)}, "linear: bias must have shape"),
        ({"activation": "tanh"}, "linear: activation must be one of"),
        ({"precision": "nonsense"}, "linear: precision must be"),
        ({"precision": ("high", "high", "high")}, "linear: precision must be"),
        ({"precision": ()}, "linear: precision must be"),
        ({"precision": 2}, "linear: precision must be"),
        ({"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32}, "linear: precision must be"),
        ({"implementation": "tpu"}, "linear: implementation must be"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(x, a, **options)
