"""The persistent kernels on a GPU: the numbers of the plain path, bitwise the same each time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import PLATFORM
from recurrent_problems import CELLS, pattern

from jaxsparse import CSR, recurrent

pytestmark = pytest.mark.skipif(PLATFORM != "cuda", reason="needs a GPU")

# Rounding of a step's state, which the next steps contract.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


class Case:
    """Operands of a scan whose weights contract, dense or CSR."""

    def __init__(self, name, sparse, T, B, h, dtype, weights=None, seed=0, density=0.3):
        self.cell, gates, form = CELLS[name]
        rng = np.random.default_rng(seed)
        values = rng.standard_normal
        scale = 0.7 / np.sqrt(h * (density if sparse else 1))
        self.topology = pattern(gates * h, h, density, seed) if sparse else None
        size = (self.topology.nse,) if sparse else (h, gates * h)
        self.weights = jnp.asarray(values(size) * scale, weights or dtype)
        self.carry = jax.tree.map(lambda _: jnp.asarray(values((B, h)), jnp.float32), form)
        self.xs = jnp.asarray(values((T, B, gates * h)), dtype)
        self.bias = jnp.asarray(values(gates * h) / 2, dtype)

    @property
    def operands(self):
        return self.weights, self.carry, self.xs, self.bias

    def scan(self, **options):
        def function(weights, carry, xs, bias):
            w = weights if self.topology is None else CSR(weights, self.topology)
            return recurrent.scan(self.cell, w, carry, xs, recurrent_bias=bias, **options)

        return function

    def both(self, transform=lambda f: f, **options):
        """Results of a transformed scan by the kernel and by the plain path."""
        results = []
        for implementation in ("cuda", "xla"):
            function = jax.jit(transform(self.scan(implementation=implementation, **options)))
            if implementation == "cuda":
                assert "jaxsparse_recurrent_scan" in function.lower(*self.operands).as_text()
            results.append(jax.device_get(function(*self.operands)))
        return results

    def agree(self, transform=lambda f: f, **options):
        by_kernel, plain = self.both(transform, **options)
        tolerance = TOLERANCE[self.xs.dtype.name]
        for a, b in zip(jax.tree.leaves(by_kernel), jax.tree.leaves(plain), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            limit = tolerance * max(1.0, np.abs(b).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=0, atol=limit)


def gradient(function):
    """All cotangents, for cotangents that are not constant."""

    def transformed(*operands):
        results, pull = jax.vjp(function, *operands)
        weighted = jax.tree.map(
            lambda x: jnp.sin(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), results
        )
        return results, pull(weighted)

    return transformed


FORMS = [
    ("dense", False, "float32", None),
    ("dense", False, "bfloat16", None),
    ("dense", False, "float16", None),
    ("dense", False, "bfloat16", "float32"),
    ("sparse", True, "float32", None),
    ("sparse", True, "bfloat16", None),
    ("sparse", True, "float16", None),
    ("sparse", True, "bfloat16", "float32"),
]


@pytest.mark.parametrize("T, B, h", [(9, 4, 64), (6, 3, 37), (17, 1, 200), (5, 8, 96)])
@pytest.mark.parametrize("_, sparse, dtype, weights", FORMS)
@pytest.mark.parametrize("name", list(CELLS))
def test_values_and_gradients(name, _, sparse, dtype, weights, T, B, h):
    case = Case(name, sparse, T, B, h, dtype, weights)
    lengths = jnp.arange(B) * T // max(B - 1, 1) if h == 37 else None
    case.agree(gradient, reverse=h == 64, seq_lengths=lengths)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", list(CELLS))
def test_second_derivatives(name, sparse):
    case = Case(name, sparse, 6, 3, 40, "float32")

    def transform(function):
        def inner(*operands):
            return gradient(function)(*operands)[1]

        return lambda *operands: jax.jvp(inner, operands, jax.tree.map(jnp.sin, operands))

    case.agree(transform)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("B", [1, 2, 4, 7, 8, 13, 16])
def test_batches_and_larger_layers(B, sparse):
    for dtype in ("float32", "bfloat16"):
        if sparse and dtype == "float32" and B > 8:
            continue
        case = Case("LSTM", sparse, 12, B, 512, dtype, density=0.1)
        case.agree(gradient)


@pytest.mark.parametrize("sparse", [False, True])
def test_one_step_and_many(sparse):
    for T in (1, 2, 3, 3000):
        Case("GRU", sparse, T, 2, 48, "float32").agree()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_repeats_bitwise(sparse, dtype):
    case = Case("LSTM", sparse, 50, 4, 512, dtype)
    function = jax.jit(gradient(case.scan(implementation="cuda")))
    first = jax.device_get(function(*case.operands))
    for _ in range(20):
        again = jax.device_get(function(*case.operands))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    recurrent.check()


@pytest.mark.parametrize("bits", [0xFFFFFFFF, 0x7FC00000])
@pytest.mark.parametrize("sparse", [False, True])
def test_nan_stays_in_its_row(sparse, bits):
    """Also one whose bits are those of an exchange buffer that was not written yet."""
    case = Case("RNN", sparse, 8, 4, 64, "float32")
    bad = np.asarray(case.xs).copy()
    bad.view(np.uint32)[2, 1, :] = bits
    case.xs = jnp.asarray(bad)
    by_kernel, plain = (
        np.isnan(case.scan(implementation=i)(*case.operands)[1]) for i in ("cuda", "xla")
    )
    np.testing.assert_array_equal(by_kernel, plain)
    assert by_kernel[2, 1].all() and by_kernel[3:, 1].any()
    assert not by_kernel[:2].any() and not by_kernel[:, [0, 2, 3]].any()


@pytest.mark.parametrize("sparse", [False, True])
def test_bidirectional_and_vmap(sparse):
    a, b = (Case("LSTM", sparse, 7, 3, 48, "float32", seed=s) for s in (0, 1))

    def two(implementation):
        matrices = [c.weights if not sparse else CSR(c.weights, a.topology) for c in (a, b)]
        if sparse:
            matrices[1] = CSR(b.weights[: a.topology.nse], a.topology)
        return recurrent.bidirectional_scan(
            a.cell, matrices, (a.carry, b.carry), (a.xs, b.xs), implementation=implementation
        )

    if not sparse or b.weights.size >= a.topology.nse:
        for x, y in zip(*(jax.tree.leaves(two(i)) for i in ("cuda", "xla")), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)
    weights = jnp.stack([a.weights, 0.5 * a.weights])
    for implementation in ("cuda", "xla"):
        f = a.scan(implementation=implementation)
        many = jax.vmap(f, (0, None, None, None))(weights, *a.operands[1:])
        one = f(weights[1], *a.operands[1:])
        for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(x[1], y, rtol=0, atol=2e-5)


FUNCTIONS = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "erf": jax.lax.erf,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "rsqrt": lambda x: jax.lax.rsqrt(1 + x * x),
    "sin": jnp.sin,
    "max": lambda x: jnp.maximum(x, 0.5) - jnp.minimum(x, 0.25),
    "power": lambda x: jnp.abs(x) ** 1.7,
    "sign": lambda x: jnp.sign(x) * jnp.floor(x),
    "narrow": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_printed_functions(name):
    """A cell of one function, without recurrence: what the GPU's own instructions make of it."""
    rng = np.random.default_rng(0)
    xs = (rng.standard_normal((8, 4, 64)) * 10.0 ** rng.integers(-3, 2, (8, 4, 64))).astype("f4")
    weights, carry = jnp.zeros((64, 64)), jnp.zeros((4, 64))
    cell = recurrent.RNN(FUNCTIONS[name])
    _, ys = recurrent.scan(cell, weights, carry, jnp.asarray(xs), implementation="cuda")
    with jax.enable_x64(True):
        expected = np.asarray(FUNCTIONS[name](jnp.asarray(xs, jnp.float64)))
    if name == "narrow":
        expected = np.asarray(FUNCTIONS[name](jnp.asarray(xs)))
    # gelu's tail is a difference of nearly equal numbers, in any implementation.
    smallest = 2e-7 if name == "gelu" else 1e-37
    np.testing.assert_allclose(np.asarray(ys), expected, rtol=2e-6, atol=smallest)


def test_a_matrix_that_is_an_argument_is_packed_before():
    case = Case("GRU", True, 6, 4, 64, "float32")
    matrix = CSR(case.weights, case.topology)
    packed = recurrent.pack(matrix, batch=4, dtype=jnp.float32)

    def scan(matrix):
        return recurrent.scan(case.cell, matrix, case.carry, case.xs, implementation="cuda")[1]

    expected = case.scan(implementation="xla")(*case.operands[:3], jnp.zeros_like(case.bias))[1]
    np.testing.assert_allclose(jax.jit(scan)(packed), expected, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match=r"recurrent\.pack"):
        jax.jit(scan)(matrix)
