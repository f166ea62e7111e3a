"""Stacks of recurrent layers against their formula."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

import nn_recurrent_problems as problems  # noqa: E402
from nn_recurrent_problems import compiled, inputs  # noqa: E402

from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentStack,
    SimpleCell,
)

IN, H, T, B = 3, 5, 6, 4
LENGTHS = jnp.array([3, 0, 6, 1])
VALID = (jnp.arange(T)[None] < LENGTHS[:, None])[..., None]

close = functools.partial(problems.close, rtol=1e-5, atol=1e-6)


def simple(depth, features=H, **options):
    rngs = nnx.Rngs(0)
    options = {"activation_fn": nnx.relu, "bias_init": nnx.initializers.normal(0.5)} | options
    return [RNN(SimpleCell(features, H, **options, rngs=rngs)) for _ in range(depth)]


@pytest.mark.parametrize("skip, ends", [(None, []), (1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2])])
def test_skips_span_n_layers(skip, ends):
    layers = simple(4)
    # Units that are nearly equal, all 0 for instance, make rounding errors large.
    norms = [nnx.LayerNorm(H, epsilon=0.1, rngs=nnx.Rngs(i)) for i in range(4)]
    stack, x = RecurrentStack(layers, norms=norms, skip=skip), inputs(B, T, H)
    y = start = x
    for i, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        y = layer(norm(y))
        if i in ends:
            y = start = y + start
    close(stack(x), y)


@pytest.mark.parametrize("time_major", [False, True])
def test_carries_and_lengths_reach_every_layer(time_major):
    rngs = nnx.Rngs(0)
    first = Bidirectional(*(RNN(GRUCell(IN, H, rngs=rngs)) for _ in range(2)))
    second = RNN(GRUCell(2 * H, H, recurrent_sparsity=0.5, rngs=rngs))
    stack = RecurrentStack([first, second], time_major=time_major, return_carry=True)
    x = inputs(B, T, IN)
    start = ((jnp.ones((B, H)), inputs(B, H)), inputs(B, H, seed=1))
    middle = first(x, initial_carry=start[0], seq_lengths=LENGTHS, return_carry=True)
    last = second(middle[1], initial_carry=start[1], seq_lengths=LENGTHS, return_carry=True)
    x = jnp.swapaxes(x, 0, 1) if time_major else x
    carries, y = stack(x, initial_carry=start, seq_lengths=LENGTHS)
    close((carries, jnp.swapaxes(y, 0, 1) if time_major else y), ((middle[0], last[0]), last[1]))
    close(
        stack(x, initial_carry=(None, start[1]), return_carry=False),
        stack(x, initial_carry=(2 * (jnp.zeros((B, H)),), start[1]))[1],
    )


@pytest.mark.parametrize("time_major", [False, True])
def test_batch_statistics_are_those_of_the_steps_that_count(time_major):
    norm = nnx.BatchNorm(H, momentum=0.0, rngs=nnx.Rngs(0))
    stack = RecurrentStack(simple(1), norms=[norm], skip=1, time_major=time_major)
    x = inputs(B, T, H)
    padded = jnp.where(VALID, x, jnp.nan)
    y = stack(jnp.swapaxes(padded, 0, 1) if time_major else padded, seq_lengths=LENGTHS)
    steps = np.asarray(x)[np.broadcast_to(VALID, x.shape)].reshape(-1, H)
    np.testing.assert_allclose(norm.mean[...], steps.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.var[...], steps.var(0), rtol=1e-4)
    y = jnp.swapaxes(y, 0, 1) if time_major else y
    assert not np.any(np.where(VALID, 0, y)) and np.isfinite(y).all()


@pytest.mark.parametrize("time_major", [False, True])
def test_running_averages_see_no_padding_and_stay(time_major):
    norms = [nnx.BatchNorm(H, use_running_average=True, rngs=nnx.Rngs(i)) for i in range(2)]
    for i, norm in enumerate(norms):
        norm.mean[...], norm.var[...] = inputs(H, seed=i), 1 + inputs(H, seed=i) ** 2
        norm.scale[...], norm.bias[...] = inputs(H, seed=i + 2), inputs(H, seed=i + 4)
    stack = RecurrentStack(simple(2), norms=norms, skip=2, time_major=time_major)
    x, before = inputs(B, T, H), nnx.state(stack, nnx.BatchStat)
    padded = jnp.where(VALID, x, jnp.nan)
    y = stack(jnp.swapaxes(padded, 0, 1) if time_major else padded, seq_lengths=LENGTHS)
    y = jnp.swapaxes(y, 0, 1) if time_major else y
    for row, length in enumerate(LENGTHS):
        alone = x[row, :length]
        for layer, norm in zip(stack.layers, norms, strict=True):
            scale = norm.scale[...] / jnp.sqrt(norm.var[...] + norm.epsilon)
            alone = layer((alone - norm.mean[...]) * scale + norm.bias[...], time_major=False)
        close(y[row], jnp.pad(alone + x[row, :length], ((0, T - length), (0, 0))))
    close(nnx.state(stack, nnx.BatchStat), before)


# ---- Dropout ----


def test_dropouts_stand_before_the_skips():
    def dropout(i):
        return nnx.Dropout(0.4, rngs=nnx.Rngs(dropout=i))

    layers, x = simple(4), inputs(B, T, H)
    stack = RecurrentStack(layers, dropouts=[dropout(0), None, dropout(2), dropout(3)], skip=2)
    y = start = x
    for i, layer in enumerate(layers):
        y = layer(y) if i == 1 else dropout(i)(layer(y))
        if i % 2:
            y = start = y + start
    close(stack(x), y)
    assert not np.allclose(stack(x), y)  # the streams have moved on
    expected = RecurrentStack(layers, skip=2)(x)
    close(stack(x, deterministic=True), expected)
    stack.eval()
    close(stack(x), expected)
    assert not np.allclose(stack(x, deterministic=False), expected)


def test_one_rate_drops_what_each_layer_but_the_last_gives():
    layers, x = simple(3, bias_init=nnx.initializers.zeros), inputs(B, T, H)
    stack = RecurrentStack(layers, dropouts=0.3, rngs=nnx.Rngs(0))
    assert [d and d.rate for d in stack.dropouts] == [0.3, 0.3, None]
    given = RecurrentStack(layers, dropouts=0.3)
    one, again, other = (given(x, rngs=nnx.Rngs(dropout=i)) for i in (5, 5, 6))
    close(one, again)
    assert not np.allclose(one, other) and not np.allclose(one, given(x, rngs=nnx.Rngs(5)))
    assert not np.allclose(stack(x), stack(x))
    with pytest.raises(ValueError, match="no `rngs` argument was provided to Dropout"):
        given(x)
    assert RecurrentStack(layers[:1], dropouts=0.3).dropouts[0] is None


# ---- Checkpoints ----


def checkpointed(every):
    """A stack of all that a run holds, with the random keys and statistics that it changes."""
    rngs = nnx.Rngs(0)
    both = Bidirectional(*(RNN(GRUCell(IN, H, rngs=rngs)) for _ in range(2)))
    narrowing = RNN(LSTMCell(2 * H, H, recurrent_sparsity=0.5, rngs=rngs))
    return RecurrentStack(
        [both, narrowing, *simple(3)],
        norms=[None, nnx.LayerNorm(2 * H, rngs=rngs), nnx.BatchNorm(H, rngs=rngs), jnp.tanh, None],
        dropouts=0.3,
        rngs=rngs,
        checkpoint_every=every,
        return_carry=True,
    )


def test_checkpoints_change_no_value_and_no_gradient():
    def run(stack, x):
        def loss(stack, x):
            carries, y = stack(x, seq_lengths=LENGTHS)
            return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves((carries, y))), (carries, y)

        results = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(stack, x)
        counts = nnx.state(stack, nnx.RngCount)
        return results, nnx.state(stack, nnx.BatchStat), counts

    x = jnp.where(VALID, inputs(B, T, IN), jnp.nan)
    expected, *results = (
        jax.tree.leaves(compiled(run)(checkpointed(every), x)) for every in (None, 2, 9)
    )
    for got in results:
        close(got, expected, rtol=2e-5, atol=2e-5)
    assert all(np.isfinite(a).all() for a in expected)


def test_a_checkpointed_gradient_keeps_what_goes_into_each_run():
    def kept(every):
        stack, x = RecurrentStack(simple(6), checkpoint_every=every), inputs(B, T, H)
        graphdef, parameters = nnx.split(stack)
        run = lambda p, x: nnx.merge(graphdef, p)(x)  # noqa: E731
        _, pull = jax.vjp(run, parameters, x)
        arrays = [a for a in jax.tree.leaves(pull) if a.size >= x.size]
        return len({id(a) for a in arrays})

    assert [kept(k) for k in (1, 2, 3, 6)] == [6, 3, 2, 1] and kept(None) >= 12


def test_a_residual_stack_trains_on_padded_sequences():
    layers = simple(4, recurrent_sparsity=0.4)
    stack = RecurrentStack(
        layers, norms=[nnx.BatchNorm(H, rngs=nnx.Rngs(0)) for _ in layers], skip=2
    )
    x = jnp.where(VALID, inputs(B, T, H), jnp.nan)
    target = jnp.where(VALID, inputs(B, T, H, seed=1), 0)
    optimizer = nnx.Optimizer(stack, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit(donate_argnames=("stack", "optimizer"))
    def step(stack, optimizer, x):
        def loss(stack):
            return jnp.mean((stack(x, seq_lengths=LENGTHS) - target) ** 2)

        value, gradients = nnx.value_and_grad(loss)(stack)
        optimizer.update(stack, gradients)
        return value

    losses = [step(stack, optimizer, x) for _ in range(25)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(nnx.state(stack, nnx.Param)))


@pytest.mark.parametrize("kind", ["stack", "bidirectional"])
@pytest.mark.parametrize("option", ["time_major", "return_carry"])
def test_options_that_are_not_given_are_those_of_the_layers(option, kind):
    cells = [SimpleCell(H, H, rngs=nnx.Rngs(i)) for i in range(2)]

    def made(first, second, **options):
        layers = RNN(cells[0], **{option: first}), RNN(cells[1], **{option: second})
        if kind == "stack":
            return RecurrentStack(layers, **options)
        return Bidirectional(*layers, **options)

    names = ["layers[0]", "layers[1]"] if kind == "stack" else ["forward_rnn", "backward_rnn"]
    x = inputs(B, T, H)
    for value in (False, True):
        layer = made(value, value)
        assert getattr(layer, option) is value
        close(layer(x), made(value, value, **{option: value})(x))
        # What is given counts more than what the layers say, also where they disagree.
        for first in (False, True):
            close(made(first, not value, **{option: value})(x), layer(x))
        assert getattr(RecurrentStack([layer]), option) is value
    message = f"{option} must be given or the same in all layers, got True of {names[0]} and False "
    with pytest.raises(ValueError, match=re.escape(f"{message}of {names[1]}")):
        made(True, False)


def test_layers_without_an_option_leave_it_to_the_others():
    class Doubling(nnx.Module):
        def __call__(self, x, **_):
            return None, 2 * x

    layers = [Doubling(), RNN(SimpleCell(H, H, rngs=nnx.Rngs(0)), time_major=True)]
    assert RecurrentStack(layers).time_major and not RecurrentStack(layers[:1]).time_major


def test_errors():
    layers = simple(2)
    with pytest.raises(ValueError, match="got 0 layers and 0 norms"):
        RecurrentStack([])
    with pytest.raises(ValueError, match="got 2 layers and 1 norms"):
        RecurrentStack(layers, norms=[None])
    with pytest.raises(ValueError, match="skip must be at least 1, got 0"):
        RecurrentStack(layers, skip=0)
    with pytest.raises(TypeError, match=r"RecurrentStack: skip must be an integer, got 1\.5"):
        RecurrentStack(layers, skip=1.5)
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        RecurrentStack(layers, checkpoint_every=0)
    with pytest.raises(ValueError, match="dropouts must be one rate or as many as layers, 2, got"):
        RecurrentStack(layers, dropouts=[0.1])
    with pytest.raises(ValueError, match=r"dropouts must be a rate in \[0, 1\), got 1"):
        RecurrentStack(layers[:1], dropouts=1)
    with pytest.raises(ValueError, match=r"dropouts\[0\] must be a rate in \[0, 1\), got -1"):
        RecurrentStack(layers, dropouts=[-1, None])
    with pytest.raises(TypeError, match=r"dropouts\[1\] must be a rate, .* got LayerNorm"):
        RecurrentStack(layers, dropouts=[None, nnx.LayerNorm(H, rngs=nnx.Rngs(0))])
    wide = RecurrentStack(simple(1, IN), skip=1)
    with pytest.raises(ValueError, match=r"the skip that ends at layer 0 .* \(4, 6, 3\) and \(4,"):
        wide(inputs(B, T, IN))
    stack = RecurrentStack(layers)
    with pytest.raises(ValueError, match=r"initial_carry must have 2 carries, .* got 1"):
        stack(inputs(B, T, H), initial_carry=[None])
    with pytest.raises(ValueError, match=r"RecurrentStack: seq_lengths must be integers of shape"):
        stack(inputs(B, T, H), seq_lengths=jnp.ones(3, int))
