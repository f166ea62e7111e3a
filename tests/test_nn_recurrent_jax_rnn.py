"""Recurrent layers from the flat weights of jax.experimental.rnn, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import rnn

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import BIAS, IN, B, H, T, close, inputs, leaves  # noqa: E402

from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentStack,
    from_jax_rnn,
    to_jax_rnn,
)

LENGTHS = jnp.array([3, 2, 6, 1])


def sizes(depth, bidirectional, features=IN):
    return {
        "input_size": features,
        "hidden_size": H,
        "num_layers": depth,
        "bidirectional": bidirectional,
    }


def random_weights(**shape):
    return 2 * rnn.init_lstm_weight(jax.random.key(0), **shape)


def reference(weights, x, h, c, **shape):
    """Outputs and last states of JAX's own reference, rows (layers, B, h)."""
    parts = rnn.unpack_lstm_weights(weights, **shape)
    return rnn.lstm_ref(x, h, c, *parts, LENGTHS, **shape, dropout=0.0)


def carries_of(h, c, depth, bidirectional):
    """The same carries as layers here have them."""
    flat = list(zip(c, h, strict=True))
    each = list(zip(flat[::2], flat[1::2], strict=True)) if bidirectional else flat
    return each if depth > 1 else each[0]


@pytest.mark.parametrize("depth, bidirectional", [(1, False), (3, False), (1, True), (2, True)])
def test_values_and_gradients_are_those_of_the_reference(depth, bidirectional):
    shape = sizes(depth, bidirectional)
    weights, x = random_weights(**shape), inputs(B, T, IN)
    rows = depth * (1 + bidirectional)
    h, c = inputs(rows, B, H, seed=1), inputs(rows, B, H, seed=2)

    def ours(weights, x, h, c):
        layer = from_jax_rnn(weights, **shape, return_carry=True)
        start = carries_of(h, c, depth, bidirectional)
        carries, y = layer(x, initial_carry=start, seq_lengths=LENGTHS)
        last = leaves(carries)  # c and h, one after the other
        return y, jnp.stack(last[1::2]), jnp.stack(last[::2])

    def theirs(weights, x, h, c):
        return reference(weights, x, h, c, **shape)

    def run(function):
        def loss(*arguments):
            results = function(*arguments)
            return sum(jnp.sum(jnp.sin(a)) for a in results), results

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))

    (_, got), gradients = run(ours)(weights, x, h, c)
    (_, expected), of_reference = run(theirs)(weights, x, h, c)
    close(got, expected, rtol=1e-5, atol=1e-5)
    close(gradients, of_reference, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(to_jax_rnn(from_jax_rnn(weights, **shape)), weights)


def test_own_layers_become_flat_weights():
    rngs = nnx.Rngs(0)
    options = BIAS | {"rngs": rngs}
    both = [RNN(LSTMCell(IN, H, recurrent_sparsity=0.5, **options)) for _ in range(2)]
    top = [RNN(LSTMCell(2 * H, H, use_bias=True, **options)) for _ in range(2)]
    stack = RecurrentStack([Bidirectional(*both), Bidirectional(*top)], dropouts=0.1)
    weights, shape = to_jax_rnn(stack), sizes(2, True)
    assert weights.shape == (rnn.get_num_params_in_lstm(**shape),) and weights.dtype == jnp.float32
    x, zeros = inputs(B, T, IN), jnp.zeros((4, B, H))
    y = stack(x, seq_lengths=LENGTHS, deterministic=True)
    close(reference(weights, x, zeros, zeros, **shape)[0], y, rtol=1e-5, atol=1e-5)


def test_options():
    shape = sizes(2, False)
    layer = from_jax_rnn(
        random_weights(**shape).astype(jnp.bfloat16),
        **shape,
        dropout=0.2,
        time_major=True,
        dtype=jnp.float32,
        recompute=True,
        rngs=nnx.Rngs(0),
    )
    assert layer.time_major and layer.layers[0].recompute and layer.dropouts[0].rate == 0.2
    assert {p.dtype.name for p in leaves(nnx.state(layer, nnx.Param))} == {"bfloat16"}
    assert to_jax_rnn(layer).dtype == jnp.bfloat16
    assert layer(inputs(T, B, IN)).dtype == jnp.float32


def test_errors():
    weights = random_weights(**sizes(1, False))
    with pytest.raises(ValueError, match=r"from_jax_rnn: weights must have shape \(1764,\) .*got"):
        from_jax_rnn(weights, **sizes(1, False, features=54))
    with pytest.raises(ValueError, match="from_jax_rnn: num_layers must be at least 1, got 0"):
        from_jax_rnn(weights, **sizes(0, False))
    with pytest.raises(TypeError, match="from_jax_rnn: input_size must be an integer"):
        from_jax_rnn(weights, **sizes(1, False, features=5.0))
    with pytest.raises(TypeError, match=r"from_jax_rnn: needs float32, .* got weights int32"):
        from_jax_rnn(weights.astype(int), **sizes(1, False))
    with pytest.raises(
        TypeError, match=r"to_jax_rnn: layer\.cell must be of LSTMCell, got GRUCell"
    ):
        to_jax_rnn(RNN(GRUCell(IN, H, rngs=nnx.Rngs(0))))
