"""Cells that users write: parameters of each unit, gates of x alone, no y; and their errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_problems import compiled, pattern

from jaxsparse import CSR, recurrent

T, B, H = 5, 3, 4
LENGTHS = jnp.array([0, 5, 3])
sigmoid = jax.nn.sigmoid


def peephole(x, r, carry, weights):
    """An LSTM whose gates see the cell state, with a weight for each unit (Gers et al. 2002)."""
    (i, f, g, o), (c, _) = (a + b for a, b in zip(x, r, strict=True)), carry
    c, before = sigmoid(f + weights["f"] * c) * c, c
    c = c + sigmoid(i + weights["i"] * before) * jnp.tanh(g)
    h = sigmoid(o + weights["o"] * c) * jnp.tanh(c)
    return (c, h), h


def simple_recurrent_unit(x, r, carry, parameters):
    """SRU (Lei et al. 2018), whose gates have vectors in place of matrices; one dense gate more."""
    (skip, new, forget, reset), (mixed,), (c, _) = x, r, carry
    v_f, v_r = parameters
    f = sigmoid(forget + v_f * c)
    c = f * c + (1 - f) * (new + mixed)
    h = sigmoid(reset + v_r * c)
    h = h * c + (1 - h) * skip
    return (c, h), h


def zoneout(x, r, h):
    """A simple cell, units of which keep their state where the last gate of x is 0."""
    (x, kept), (r,) = x, r
    h = jnp.where(kept > 0, jnp.tanh(x + r), h)
    return h, h


def silent(x, r, h):
    """A simple cell without a y."""
    return jnp.tanh(x[0] + r[0]), None


LSTM_PARAMETERS = {"f": 0, "i": 0, "o": 0}
# name -> (cell, gates of x, gates of r, a carry and parameters of its form)
CELLS = {
    "peephole": (peephole, 4, 4, (0, 0), LSTM_PARAMETERS),
    "SRU": (simple_recurrent_unit, 4, 1, (0, 0), [0, 0]),
    "zoneout": (zoneout, 2, 1, 0, None),
    "silent": (silent, 1, 1, 0, None),
}


def operands(name, sparse, dtype=jnp.float32):
    _, of_x, of_r, carry, parameters = CELLS[name]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    topology = pattern(of_r * H, H, padding=0) if sparse else None
    weights = (draw(topology.nse) if sparse else draw(H, of_r * H)) / 4
    carry = jax.tree.map(lambda _: draw(B, H), carry)
    own = jax.tree.map(lambda _: draw(H), parameters)
    return (weights, carry, draw(T, B, of_x * H), draw(of_r * H), own), topology


def scanned(name, operands, topology, **options):
    weights, carry, xs, bias, own = operands
    weights = weights if topology is None else CSR(weights, topology)
    return recurrent.scan(
        CELLS[name][0], weights, carry, xs, recurrent_bias=bias, parameters=own, **options
    )


def looped(name, operands, topology, reverse=False, seq_lengths=None):
    """The same by `jax.lax.scan`."""
    cell, of_x, of_r, *_ = CELLS[name]
    weights, carry, xs, bias, own = operands
    dense = weights if topology is None else CSR(weights, topology).todense().T
    own = [] if own is None else [own]

    def step(carry, given):
        x, counts = given
        r = jnp.split(jax.tree.leaves(carry)[-1] @ dense + bias, of_r, -1)
        new, y = cell(jnp.split(x, of_x, -1), r, carry, *own)
        new = jax.tree.map(lambda a, b: jnp.where(counts, a, b), new, carry)
        return new, None if y is None else jnp.where(counts, y, 0)

    lengths = jnp.full(B, T) if seq_lengths is None else seq_lengths
    counts = (jnp.arange(T)[:, None] < lengths)[..., None]
    return jax.lax.scan(step, carry, (xs, counts), reverse=reverse)


def value_and_gradient(run, name, operands, topology, **options):
    def loss(operands):
        results = run(name, operands, topology, **options)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results)), results

    return compiled(jax.value_and_grad(loss, has_aux=True))(operands)


@pytest.mark.parametrize("options", [{}, {"reverse": True, "seq_lengths": LENGTHS}], ids=len)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "csr"])
@pytest.mark.parametrize("name", CELLS)
def test_values_and_gradients_are_those_of_a_loop(name, sparse, options):
    with jax.enable_x64(True):
        given, topology = operands(name, sparse, jnp.float64)
        got = value_and_gradient(scanned, name, given, topology, **options)
        expected = value_and_gradient(looped, name, given, topology, **options)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_no_y_is_none_of_no_steps_too():
    (weights, carry, xs, *_), _ = operands("silent", False)
    assert recurrent.scan(silent, weights, carry, xs[:0])[1] is None
    pairs = ((weights,) * 2, (carry,) * 2, (xs,) * 2)
    assert recurrent.bidirectional_scan(silent, *pairs)[1] == (None, None)


def test_parameters_of_two_directions_and_of_their_own_dtype():
    given, _ = operands("peephole", False)
    weights, carry, xs, _, own = given
    xs = xs.astype(jnp.bfloat16)
    other = jax.tree.map(lambda x: -x, own)

    def both(own, other):
        return recurrent.bidirectional_scan(
            peephole, (weights,) * 2, (carry,) * 2, (xs,) * 2, parameters=(own, other)
        )

    def each(own, other):
        runs = [
            recurrent.scan(peephole, weights, carry, xs, parameters=p, reverse=back)
            for p, back in ((own, False), (other, True))
        ]
        return tuple(zip(*runs, strict=True))

    def gradient(run):
        loss = lambda *o: sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(run(*o)))  # noqa: E731
        return compiled(jax.grad(loss, (0, 1)))(own, other)

    got, expected = gradient(both), gradient(each)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_an_infinite_derivative_in_the_padding_reaches_no_parameter():
    def cell(x, r, h, p):
        h = jnp.tanh(p / x[0] + r[0])
        return h, h

    def loss(p):
        xs, weights = jnp.ones((T, B, H)), jnp.eye(H)
        zero = jnp.zeros((B, H))
        ys = recurrent.scan(cell, weights, zero, xs, parameters=p, seq_lengths=LENGTHS)[1]
        return jnp.sum(ys)

    assert np.isfinite(compiled(jax.grad(loss))(jnp.ones(H))).all()


@pytest.mark.parametrize(
    "cell",
    [
        lambda x, r, h: (h[..., 0:1] * h, h),
        lambda x, r, h: (h / h.shape[-1], h),
        lambda x, r, h: (x[1] + h, h),
        lambda x, r, h: (jax.nn.softmax(h), h),
        lambda x, r, h: (h - jnp.mean(h), h),
        lambda x, r, h: (h @ jnp.ones((4, 4)), h),
        lambda x, r, h: h,
        lambda x, r, h: ((h, h), h),
        lambda x, r, h: (h, (h, h)),
        lambda x, r, h: (h[None], h),
        lambda x, r, h: (jax.scipy.special.digamma(h), h),
        lambda x, r, h: (h * jnp.arange(4.0), h),
        lambda x, r: (x, r),
    ],
)
def test_every_error_of_a_cell_says_what_pointwise_means(cell):
    with pytest.raises((TypeError, ValueError)) as raised:
        recurrent.scan(cell, jnp.eye(4), jnp.ones((3, 4)), jnp.ones((5, 3, 4)))
    message = str(raised.value)
    assert message.startswith("recurrent.scan: the cell ")
    assert "A cell is pointwise" in message and message.endswith("are its parameters=")
