"""Steps of training of dynamic networks: what an update makes of parameters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_bench_dynamic import made_data, small  # noqa: F401

from benchmarks.dynamic import training


@pytest.mark.parametrize("most_joined", [40, 1 << 20])
def test_parameters_are_updated_together(most_joined, monkeypatch):
    """Whether they are one array or not, a state has what `added` makes of its parameters."""
    monkeypatch.setattr(training, "MOST_JOINED", most_joined)
    problem = small("tree_lstm")
    params = problem.net.parameters(problem.sizes)
    rng = np.random.default_rng(1)
    words = np.array([2, -1, 2, 0])
    others = {n: rng.standard_normal(x.shape) for n, x in training.without_table(params).items()}
    grads = jax.tree.map(jnp.float32, (others, rng.standard_normal((4, problem.embedding))))
    params = jax.tree.map(jnp.asarray, params)
    expected = training.added(params, grads, words, -0.5)
    state = training.State.of(params, "bfloat16")
    assert 0 < len(state.shapes) < len(params) - (most_joined == 40)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    state = jax.jit(lambda state, grads: state.added(grads, words, -0.5))(state, grads)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, state.params, expected)
    for name, x in training.without_table(state.params).items():
        np.testing.assert_array_equal(state.read[name], x.astype("bfloat16"))
    state = training.State.of(params, "float32")
    jax.tree.map(close, state.added(grads, words, -0.5).read, expected)
