"""What the tests of the pruning transformation share: a schedule, parameters, runs, comparisons."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

optax = pytest.importorskip("optax")

from jaxsparse.pruning import polynomial  # noqa: E402

CUBIC = polynomial(0.25, begin=2, end=10, frequency=2)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), a, b)


def parameters(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "first": {"kernel": jnp.asarray(rng.standard_normal((12, 8)), dtype)},
        "second": {
            "kernel": jnp.asarray(rng.standard_normal((8, 6)), dtype),
            "bias": jnp.zeros(6, dtype),
        },
    }


def gradients_at(step, params):
    """Large and uneven, so that many weights change sign and place."""
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda x: jnp.asarray(
            rng.standard_normal(x.shape) * 4.0 ** rng.integers(-8, 3, x.shape), x.dtype
        ),
        params,
    )


def run(tx, params, steps, update=None, state=None, start=0):
    """(params, state) after each step."""

    @jax.jit
    def jitted(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    update = jitted if update is None else update
    state = tx.init(params) if state is None else state
    history = []
    for step in range(start, start + steps):
        params, state = update(gradients_at(step, params), state, params)
        history.append((params, state))
    return history
