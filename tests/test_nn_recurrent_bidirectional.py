"""Layers of both directions against Flax's, and against two of one direction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import (  # noqa: E402
    IN,
    LENGTHS,
    UNEVEN,
    B,
    H,
    T,
    check_against_flax,
    close,
    compiled,
    dense_twin,
    inputs,
    pair,
    primitives,
    random_carry,
    scans,
)

from jaxsparse import Topology  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
)


def both(first, second, **options):
    """Bidirectional layers of ours and of Flax's."""
    (a, x), (b, y) = first, second
    return (
        Bidirectional(RNN(a), RNN(b), **options),
        nnx.Bidirectional(nnx.RNN(x), nnx.RNN(y), **options),
    )


@pytest.mark.parametrize("second, lengths", [("lstm", LENGTHS), ("gru", None)])
def test_bidirectional_is_that_of_flax(second, lengths):
    ours, theirs = both(pair("lstm"), pair(second, seed=9))
    x = inputs(B, T, IN)
    start = tuple(random_carry(rnn.cell, B) for rnn in (ours.forward_rnn, ours.backward_rnn))
    steps = jnp.full(B, T) if lengths is None else lengths
    valid = jnp.arange(T) < steps[:, None]
    check_against_flax(ours, theirs, x, valid, initial_carry=start, seq_lengths=lengths)
    names = primitives(ours, x)
    assert scans(names) == (1 if second == "lstm" else 2)


@pytest.mark.parametrize("time_major", [False, True])
def test_bidirectional_options(time_major):
    merge = {"merge_fn": lambda a, b: a - 2 * b}
    ours, theirs = both(pair("gru"), pair("gru", seed=9), **merge, time_major=time_major)
    x = inputs(*((T, 2, 3) if time_major else (2, 3, T)), IN)
    close(ours(x, return_carry=True), theirs(x, return_carry=True))
    # The layers' own order does not count.
    ours.forward_rnn.reverse = ours.backward_rnn.time_major = True
    close(ours(x), theirs(x))


def test_bidirectional_of_two_patterns():
    cells = [
        GRUCell(IN, H, recurrent_topology=Topology.from_mask(mask), rngs=nnx.Rngs(i))
        for i, mask in enumerate([UNEVEN, UNEVEN[::-1] & UNEVEN])
    ]
    x = inputs(B, T, IN)
    forward, backward = (RNN(cell) for cell in cells)
    layer = Bidirectional(forward, backward)
    y = layer(x, seq_lengths=LENGTHS)
    expected = [
        forward(x, seq_lengths=LENGTHS),
        backward(x, seq_lengths=LENGTHS, reverse=True, keep_order=True),
    ]
    close(y, jnp.concatenate(expected, -1))
    assert scans(primitives(layer, x)) == 1
    mixed = Bidirectional(forward, RNN(dense_twin(cells[1])[0]))
    close(mixed(x, seq_lengths=LENGTHS), y)


def test_bidirectional_may_share_a_layer():
    rnn = RNN(GRUCell(IN, H, rngs=nnx.Rngs(0)))
    layer, x = Bidirectional(rnn, rnn), inputs(B, T, IN)

    def gradient(layer, **options):
        loss = nnx.grad(lambda layer, x: jnp.sum(layer(x, **options) ** 2))
        return nnx.to_pure_dict(compiled(loss)(layer, x))

    (got,) = gradient(layer).values()  # one layer, under one of its names
    parts = [gradient(rnn, reverse=reverse) for reverse in (False, True)]
    close(got, jax.tree.map(jnp.add, *parts), rtol=1e-4, atol=1e-5)


def test_bidirectional_random_carries():
    init = {"carry_init": nnx.initializers.normal(1.0)}
    ours = Bidirectional(*(RNN(GRUCell(IN, H, **init, rngs=nnx.Rngs(i))) for i in range(2)))
    with pytest.warns(UserWarning, match="carry_init"):
        theirs = nnx.Bidirectional(
            *(nnx.RNN(nnx.GRUCell(IN, H, **init, rngs=nnx.Rngs(i))) for i in range(2))
        )
    x = inputs(B, T, IN)
    close(ours(x), theirs(x))
    close(ours(x, rngs=nnx.Rngs(8)), theirs(x, rngs=nnx.Rngs(8)))
