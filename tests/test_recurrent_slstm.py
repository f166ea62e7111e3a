"""The sLSTM against its formula without a stabiliser, and its gradients in 16 bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_problems import CELLS, pattern

from jaxsparse import CSR, recurrent

T, B, H = 40, 4, 32
leaves = jax.tree.leaves


def unstabilised(weights, xs):
    """The formula without m, from zeros; in float64 for gates that are not large."""
    h = weights.shape[0]

    def step(carry, x):
        c, n, state = carry
        i, f, z, o = jnp.split(x + state @ weights, 4, -1)
        c = jax.nn.sigmoid(f) * c + jnp.exp(i) * jnp.tanh(z)
        n = jax.nn.sigmoid(f) * n + jnp.exp(i)
        state = jax.nn.sigmoid(o) * c / n
        return (c, n, state), state

    return jax.lax.scan(step, (jnp.zeros((xs.shape[1], h), xs.dtype),) * 3, xs)[1]


def operands(bias, dtype=jnp.float64):
    """Of numbers that bfloat16 holds; the weights contract."""
    draw = np.random.default_rng(0).standard_normal
    weights, xs = draw((H, 4 * H)) / (2 * np.sqrt(H)), draw((T, B, 4 * H))
    xs[..., :H] += bias
    weights, xs = (jnp.asarray(x).astype(jnp.bfloat16).astype(dtype) for x in (weights, xs))
    return weights, xs, jnp.asarray(draw((T, B, H)))


def from_zeros(weights, xs, leaf, **options):
    b, width = xs.shape[1:]
    zeros = (jnp.zeros((b, width // 4), leaf),) * 4
    return recurrent.scan(recurrent.SLSTM, weights, zeros, xs, **options)[1]


def gradients(function, weights, xs, cotangent):
    loss = lambda w, x: jnp.sum(function(w, x).astype(cotangent.dtype) * cotangent)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, xs)


def test_slstm_is_its_formula():
    with jax.enable_x64(True):
        given = operands(3.0)
        got = gradients(functools.partial(from_zeros, leaf=jnp.float64), *given)
        expected = gradients(unstabilised, *given)
        for a, b in zip(leaves(got), leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_slstm_of_large_gates():
    """What would overflow without the stabiliser; and a gate that closes for good."""
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.standard_normal((T, B, 4 * H)) * 300, jnp.float32)
    weights = operands(0.0, jnp.float32)[0]
    results = gradients(
        functools.partial(from_zeros, leaf=jnp.float32), weights, xs, jnp.ones((T, B, H))
    )
    assert all(np.isfinite(x).all() for x in leaves(results))
    ys = from_zeros(weights, xs, jnp.float32)
    assert np.abs(ys).max() <= 1 and np.abs(ys).max() > 0.9
    # With open forget gates and all inputs but the first one closed, c and n stay as they are.
    xs = jnp.zeros((T, 1, 4)).at[..., 1].set(50.0).at[1:, :, 0].set(-500.0).at[..., 2].set(0.5)
    ys = from_zeros(jnp.zeros((1, 4)), xs.astype(jnp.float32), jnp.float32)
    np.testing.assert_allclose(ys[:, 0, 0], np.tanh(0.5) / 2, rtol=1e-6)


def error(got, expected):
    got, expected = np.float64(got), np.float64(expected)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("bias", [0, 5, 10, 20])
def test_slstm_gradients_in_bfloat16(bias):
    """Within the rounding of results for any input gate, if the leaves of the carry are float32."""
    with jax.enable_x64(True):
        weights, xs, cotangent = operands(bias)
        _, expected = gradients(functools.partial(from_zeros, leaf=jnp.float64), *operands(bias))
        narrow = (weights.astype(jnp.float32), xs.astype(jnp.bfloat16), cotangent)
        errors = {}
        for leaf in (jnp.float32, jnp.bfloat16):
            _, got = gradients(functools.partial(from_zeros, leaf=leaf), *narrow)
            errors[leaf] = [error(a, b) for a, b in zip(got, expected, strict=True)]
    assert max(errors[jnp.float32]) < 3e-3
    if bias >= 5:  # the measure tells them apart
        assert min(errors[jnp.bfloat16]) > 4e-3


def test_slstm_starts_anew():
    weights, xs, _ = operands(5.0, jnp.float32)
    resets = jnp.zeros((T, B), bool).at[jnp.array([9, 30]), jnp.array([0, 2])].set(True)
    topology = pattern(4 * H, H)
    a = CSR(jnp.linspace(-0.2, 0.2, topology.nse), topology)
    for w in (weights, a):
        got = from_zeros(w, xs, jnp.float32, resets=resets)
        for row, begin in ((0, 9), (2, 30), (1, 0)):
            alone = from_zeros(w, xs[begin:, row : row + 1], jnp.float32)
            np.testing.assert_allclose(got[begin:, row], alone[:, 0], rtol=2e-6, atol=2e-6)


def test_gates_and_carry_of_slstm():
    cell, gates, form = CELLS["SLSTM"]
    ones = jnp.ones(1)
    (c, n, m, h), y = cell(
        (2 * ones, ones, ones, ones), (0 * ones,) * gates, (0 * ones,) * len(form)
    )
    assert (c, n, m) == (jnp.tanh(1.0), 1, 2) and h == y
    np.testing.assert_allclose(y, jax.nn.sigmoid(1.0) * jnp.tanh(1.0), rtol=1e-6)
