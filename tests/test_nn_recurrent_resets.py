"""Recurrent layers over rows of several episodes, against each episode alone."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import (  # noqa: E402
    IN,
    H,
    close,
    compiled,
    inputs,
    primitives,
    scans,
)

from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentStack,
    SimpleCell,
)

T = 6
ROWS = (2, 2)  # batch dimensions
LENGTHS = jnp.array([[6, 4], [0, 5]])
STARTS = np.zeros((*ROWS, T), bool)
STARTS[0, 0, [0, 2, 3]] = STARTS[0, 1, [3, 4, 5]] = STARTS[1, 0] = STARTS[1, 1, 2] = True


def layer_of(kind):
    rngs = nnx.Rngs(0)
    cell = lambda features=IN: LSTMCell(features, H, recurrent_sparsity=0.5, rngs=rngs)  # noqa: E731
    if kind == "rnn":
        return RNN(cell())
    if kind == "reversed":
        return RNN(cell(), reverse=True, keep_order=True)
    if kind == "pair":
        return Bidirectional(RNN(GRUCell(IN, H, rngs=rngs)), RNN(GRUCell(IN, H, rngs=rngs)))
    first = Bidirectional(RNN(cell()), RNN(GRUCell(IN, H, rngs=rngs)))  # two scans
    second = RNN(SimpleCell(2 * H, H, rngs=rngs), reverse=True, keep_order=True)
    return RecurrentStack([first, second, RNN(cell(H))])


def episodes(lengths):
    """(row, begin, end) of each."""
    for row in np.ndindex(*ROWS):
        length = int(lengths[row])
        cuts = [0, *(t for t in range(1, length) if STARTS[row][t]), length]
        yield from ((row, a, b) for a, b in itertools.pairwise(cuts) if b > a)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("kind", ["rnn", "reversed", "pair", "stack"])
def test_each_episode_is_as_it_is_alone(kind, time_major):
    """In whatever direction layers run; neither padding nor what stands there ends an episode."""
    layer, x = layer_of(kind), inputs(*ROWS, T, IN)
    lengths = None if kind == "pair" else LENGTHS
    alone = jax.jit(lambda x: layer(x[None])[0])
    counts = np.full(ROWS, T) if lengths is None else np.asarray(lengths)
    expected = np.zeros((*ROWS, T, alone(x[0, 0]).shape[-1]))
    for row, a, b in episodes(counts):
        expected[(*row, slice(a, b))] = alone(x[(*row, slice(a, b))])
    swapped = (lambda x: jnp.moveaxis(x, -2, 0)) if time_major else (lambda x: x)
    resets = jnp.moveaxis(jnp.asarray(STARTS), -1, 0) if time_major else STARTS
    got = compiled(
        lambda layer, x: layer(x, seq_lengths=lengths, resets=resets, time_major=time_major)
    )(layer, swapped(x))
    close(got, swapped(jnp.asarray(expected, jnp.float32)), rtol=1e-5, atol=1e-6)
    if kind == "pair":
        names = primitives(lambda x: layer(x, resets=STARTS), x)
        assert scans(names) == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_carries(reverse):
    """The initial one is that of the episode that runs first, the last one of the last."""
    layer = RNN(LSTMCell(IN, H, rngs=nnx.Rngs(0)), reverse=reverse, return_carry=True)
    x, lengths = inputs(2, T, IN), jnp.array([T, 4])
    first = jax.tree.map(lambda i: inputs(2, H, seed=i), (1, 2))
    resets = jnp.zeros((2, T), bool).at[:, 3].set(True)
    carry, ys = layer(x, resets=resets, initial_carry=first, seq_lengths=lengths)
    parts = {0: (x[:, :3], jnp.array([3, 3])), 1: (x[:, 3:], jnp.array([3, 1]))}
    begin, end = (1, 0) if reverse else (0, 1)
    _, of_begin = layer(parts[begin][0], initial_carry=first, seq_lengths=parts[begin][1])
    expected, _ = layer(parts[end][0], seq_lengths=parts[end][1])
    close(carry, expected)
    # Made in that order: what ran first lies first.
    close(ys[0, :3], of_begin[0])
    close(ys[1, : 1 if reverse else 3], of_begin[1, : 1 if reverse else 3])


def test_a_layer_that_takes_no_resets_is_given_none():
    class Doubled(nnx.Module):
        def __call__(self, inputs, *, initial_carry, seq_lengths, return_carry, time_major, rngs):
            return initial_carry, 2 * inputs

    stack = RecurrentStack([Doubled()])
    close(stack(jnp.ones((1, T, IN))), 2 * jnp.ones((1, T, IN)))
    with pytest.raises(TypeError, match="resets"):
        stack(jnp.ones((1, T, IN)), resets=jnp.zeros((1, T), bool))


@pytest.mark.parametrize("kind, name", [("rnn", "RNN"), ("pair", "Bidirectional"), ("stack", "")])
@pytest.mark.parametrize(
    "resets, got",
    [(np.zeros((*ROWS, T)), "float"), (np.zeros((T, *ROWS), bool), r"bool of shape \(6, 2, 2\)")],
)
def test_errors(kind, name, resets, got):
    name = name or "RecurrentStack"
    text = rf"{name}: resets must be booleans of shape \(2, 2, 6\).*got {got}"
    with pytest.raises(ValueError, match=text):
        layer_of(kind)(inputs(*ROWS, T, IN), resets=resets)
