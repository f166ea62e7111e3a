"""Dropout in attention: which probabilities are kept, and that all forms keep the same."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from attention_problems import operands, random_mask

from jaxsparse import BlockMask, Topology, sparse_attention
from jaxsparse.ops import dropout


def test_keeps_the_share_of_each_row_and_column():
    seeds = jnp.asarray([3, 4], jnp.uint32)[:, None, None]
    at = jnp.arange(1000, dtype=jnp.int32)
    kept = np.asarray(dropout.kept(seeds, at[:, None], at, jnp.float32(0.3)))
    for axes in ((1, 2), (1,), (2,)):
        deviation = kept.mean(axes) - 0.7
        count = np.prod([kept.shape[a] for a in axes])
        assert np.abs(deviation).max() < 5 * math.sqrt(0.21 / count)
    first, second = kept - 0.7
    # Neither heads nor neighbours tell of one another.
    for x, y in (
        (first, second),
        (first[1:], first[:-1]),
        (first[:, 1:], first[:, :-1]),
        (first[1:, 1:], first[:-1, :-1]),
    ):
        assert abs(np.mean(x * y)) < 5 * 0.21 / 1000


def test_is_the_same_in_every_path(monkeypatch):
    q, k, v = operands(2, 100, 90, 4, 2, 8, 8, "float32")
    mask = random_mask((100, 90))
    sinks = jnp.arange(4.0)
    options = {"dropout_key": jax.random.key(1), "dropout_rate": 0.25, "return_lse": True}
    stored = BlockMask.from_dense(mask), Topology.from_mask(mask)
    runs = [
        functools.partial(sparse_attention, q, k, v, of, sinks=sinks, **options) for of in stored
    ]
    results = [run(implementation=i) for run in runs for i in ("xla", None)]
    without = sparse_attention(q, k, v, stored[0], sinks=sinks, return_lse=True)
    monkeypatch.setattr("jaxsparse.ops.sparse_attention.block_mask", lambda mask: None)
    results.append(runs[1]())
    for out, lse in results[1:]:
        np.testing.assert_allclose(out, results[0][0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse, results[0][1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results[0][1], without[1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(results[0][0], without[0], atol=1e-2)


def test_derivatives_take_the_rate_for_a_constant():
    """Of first and second order alike."""
    q, k, v = operands(1, 6, 7, 2, 2, 4, 4, "float32")

    def loss(q, rate):
        out = sparse_attention(q, k, v, dropout_key=jax.random.key(0), dropout_rate=rate)
        return jnp.sum(out**2)

    by_both = jax.grad(loss, (0, 1))
    of_query, of_rate = by_both(q, 0.25)
    assert of_rate == 0 and jnp.any(of_query != 0)
    _, along = jax.jvp(lambda rate: by_both(q, rate), (0.25,), (1.0,))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), along)
