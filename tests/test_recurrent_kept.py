"""In which dtypes a gradient keeps the leaves of a carry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_problems import compiled, problem

from jaxsparse import CSR, recurrent
from jaxsparse.primitive import equations

leaves = jax.tree.leaves


def kept(name, leaf, dtype=jnp.bfloat16, **options):
    """The dtypes of the outputs of a scan that a gradient follows, beside its states."""
    p = problem(name, dtype=dtype)
    carry = jax.tree.map(lambda x: x.astype(leaf), p.carry)
    loss = lambda c, xs: p.scan(p.weights, c, xs, **options)[1].sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(carry, p.xs).jaxpr
    first, *_ = (e for e in equations(jaxpr) if "step" in e.params)
    _, *outputs = (v.aval.dtype.name for v in first.outvars)
    return outputs[len(leaves(carry)) :]


@pytest.mark.parametrize("name, read", [("LSTM", 1), ("GRU", 1), ("RNN", 0), ("SLSTM", 3)])
def test_leaves_are_kept_in_their_dtypes(name, read):
    products = ["bfloat16"]
    assert kept(name, jnp.float32) == products + ["float32"] * read
    assert kept(name, jnp.bfloat16) == products + ["bfloat16"] * read
    # No wider than what they are between steps, nor than is of use.
    with jax.enable_x64(True):
        assert kept(name, jnp.float64) == products + ["float32"] * read
        assert kept(name, jnp.float16, jnp.float64) == ["float64"] * (1 + read)
        assert kept(name, jnp.float64, jnp.float32) == ["float32"] * (1 + read)
    assert kept(name, jnp.float32, recompute=True) == ["float32"] * read


def test_each_leaf_has_a_dtype_of_its_own():
    p = problem("three_leaves", dtype=jnp.bfloat16)
    carry = {**p.carry, "slow": p.carry["slow"].astype(jnp.float32)}
    pull = jax.vjp(lambda c: p.scan(p.weights, c, p.xs)[1], carry)[1]
    sizes = [x.dtype.name for x in leaves(pull) if x.shape[-4:] == (5, 3, 1, 5)]
    assert sorted(sizes) == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_kept_leaf_is_the_carry(sparse):
    """By both directions, whose outputs are stacked: in float32, where bfloat16 would round."""
    p = problem("LSTM", sparse, dtype=jnp.bfloat16)
    weights = p.weights if p.topology is None else CSR(p.weights, p.topology)
    carry = jax.tree.map(lambda x: x.astype(jnp.float32), p.carry)

    def both(carry):
        pair = recurrent.bidirectional_scan(
            p.cell, (weights,) * 2, (carry,) * 2, (p.xs, p.xs[::-1])
        )
        return pair[1]

    pull = jax.jit(lambda c: jax.vjp(both, c)[1])(carry)
    (c,) = (x for x in leaves(pull) if x.dtype == jnp.float32 and x.shape == (2, 5, 3, 1, 5))
    np.testing.assert_array_equal(c[0, 0, :, 0], carry[0])
    np.testing.assert_array_equal(c[0, :, :, 0], c[1, ::-1, :, 0])
    after = p.scan(p.weights, carry, p.xs[:2])[0][0]
    np.testing.assert_allclose(c[0, 2, :, 0], after, rtol=1e-6)  # programs round differently
    assert np.any(after != after.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("name", ["LSTM", "SLSTM"])
def test_second_derivatives(name):
    """Whose scans have inputs, and give cotangents, of leaves in float32."""
    p = problem(name, dtype=jnp.bfloat16)

    def hessian_product(dtype, wide):
        cast = lambda tree, to: jax.tree.map(lambda x: x.astype(to), tree)  # noqa: E731
        given = cast((p.weights, p.xs), dtype)
        carry = cast(p.carry, wide)

        def loss(carry, operands):
            c, ys = p.scan(operands[0], carry, operands[1])
            return sum(jnp.sum(jnp.sin(x.astype(wide))) for x in leaves((c, ys)))

        slope = lambda c: jax.grad(loss, 1)(c, given)  # noqa: E731
        weighted = lambda c: sum(jnp.sum(jnp.cos(x.astype(wide))) for x in leaves(slope(c)))  # noqa: E731
        return compiled(jax.grad(weighted))(carry)

    with jax.enable_x64(True):
        got = hessian_product(jnp.bfloat16, jnp.float32)
        expected = hessian_product(jnp.float64, jnp.float64)
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * np.abs(b).max() + 1e-6)
