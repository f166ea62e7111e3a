"""Cells with functions and options of one's own, set afterwards, and in subclasses."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import (  # noqa: E402
    BIAS,
    IN,
    MGU,
    B,
    H,
    T,
    close,
    inputs,
    leaves,
    random_carry,
)

from jaxsparse import recurrent  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentCell,
    SimpleCell,
    SparseLinear,
    cell_functions,
)

# ---- Cells ----


def leaky(x, r, carry):
    (x,), (r,) = x, r
    membrane = 0.9 * carry["membrane"] + 0.1 * (x + r)
    return {"membrane": membrane, "state": jax.nn.relu(membrane)}, membrane


@pytest.mark.parametrize(
    "function, gates, carry_like, sparse",
    [(MGU, 2, 0, {"recurrent_sparsity": 0.4}), (leaky, 1, {"membrane": 0, "state": 0}, {})],
)
def test_a_cell_of_ones_own(function, gates, carry_like, sparse):
    cell = RecurrentCell(
        IN,
        H,
        function,
        gates=gates,
        carry_like=carry_like,
        use_recurrent_bias=True,
        **BIAS,
        **sparse,
        rngs=nnx.Rngs(0),
    )
    x, start = inputs(B, T, IN), random_carry(cell, B)
    layer = cell.dense_h
    kernel = layer.weight.todense().T if sparse else layer.kernel[...]
    carry, ys = start, []
    for t in range(T):
        state = leaves(carry)[-1]
        r = jnp.split(state @ kernel + layer.bias[...], gates, -1)
        carry, y = function(jnp.split(cell.dense_i(x[:, t]), gates, -1), r, carry)
        ys.append(y)
    got = RNN(cell, return_carry=True)(x, initial_carry=start)
    close(got, (carry, jnp.stack(ys, 1)))


def test_a_cell_makes_one_step_and_runs_in_flax():
    cell = LSTMCell(IN, H, recurrent_sparsity=0.5, **BIAS, rngs=nnx.Rngs(0))
    x, start = inputs(2, B, T, IN), random_carry(cell, 2, B)
    expected = RNN(cell, return_carry=True)(x, initial_carry=start)
    close(nnx.RNN(cell, return_carry=True)(x, initial_carry=start), expected)
    carry, y = cell(start, x[:, :, 0])
    close(y, expected[1][:, :, 0])
    assert jax.tree.map(jnp.shape, carry) == ((2, B, H), (2, B, H))


def test_the_same_functions_make_the_same_cell():
    make = lambda **o: LSTMCell(IN, H, **o, rngs=nnx.Rngs(0)).function  # noqa: E731
    assert make() is recurrent.LSTM
    assert make(gate_fn=nnx.hard_sigmoid) is make(gate_fn=nnx.hard_sigmoid)
    assert GRUCell(IN, H, rngs=nnx.Rngs(0)).function is recurrent.GRU
    assert SimpleCell(IN, H, rngs=nnx.Rngs(0)).function is recurrent.elman("tanh")


def test_functions_of_constant_scalars_are_taken():
    slope = jnp.float32(0.5)
    for function in (lambda x: x * slope, functools.partial(jnp.multiply, np.float32(0.5))):
        layer = RNN(SimpleCell(IN, H, activation_fn=function, rngs=nnx.Rngs(0)))
        half = RNN(SimpleCell(IN, H, activation_fn=lambda x: 0.5 * x, rngs=nnx.Rngs(0)))
        close(layer(inputs(B, T, IN)), half(inputs(B, T, IN)))


@pytest.mark.parametrize("make", ["residual_rnn", "gru", "lstm"])
def test_functions_that_nothing_uses_are_not_kept(make):
    make = getattr(cell_functions, make)

    def made():
        function = lambda x: x  # noqa: E731
        make(*(function,) * (1 if make is cell_functions.residual_rnn else 2))
        return weakref.ref(function)

    first, *_ = [made() for _ in range(1100)]  # more than are kept
    gc.collect()
    assert first() is None


# ---- Options that are set afterwards ----


@pytest.mark.parametrize(
    "cls, option, value",
    [
        (SimpleCell, "activation_fn", nnx.relu),
        (SimpleCell, "residual", True),
        (GRUCell, "gate_fn", nnx.hard_sigmoid),
        (GRUCell, "activation_fn", nnx.gelu),
        (LSTMCell, "gate_fn", nnx.hard_sigmoid),
        (LSTMCell, "activation_fn", nnx.relu),
    ],
)
def test_options_that_are_set_afterwards_count(cls, option, value):
    cell = cls(IN, H, rngs=nnx.Rngs(0))
    layer, x = RNN(cell), inputs(B, T, IN)
    before = layer(x)
    setattr(cell, option, value)
    made = cls(IN, H, **{option: value}, rngs=nnx.Rngs(0))
    expected = RNN(made)(x)
    assert not np.allclose(before, expected, atol=1e-3)
    run = nnx.jit(lambda layer, x: layer(x))
    for y in (layer(x), run(layer, x), nnx.clone(layer)(x)):
        close(y, expected)
    carry = random_carry(cell, B)
    close(cell(carry, x[:, 0]), made(carry, x[:, 0]))
    assert nnx.graphdef(cell) == nnx.graphdef(made)


def test_a_function_of_ones_own_may_be_set_afterwards():
    cell, other = (
        RecurrentCell(IN, H, recurrent.elman(f), rngs=nnx.Rngs(0)) for f in ("tanh", "relu")
    )
    cell.function = recurrent.elman("relu")
    close(RNN(cell)(inputs(B, T, IN)), RNN(other)(inputs(B, T, IN)))


# ---- Code of a subclass ----


class Doubled(GRUCell):
    """Its call is not what a scan of its function computes."""

    def __call__(self, carry, inputs):
        carry, y = super().__call__(carry, inputs)
        return carry, 2 * y


class Shifted(GRUCell):
    """What a scan asks for, it may define anew."""

    @property
    def function(self):
        return cell_functions.gru(nnx.hard_sigmoid, self.activation_fn)

    def initialize_carry(self, *args, **options):
        return super().initialize_carry(*args, **options) + 1


def test_a_cell_with_a_call_of_its_own_is_refused_by_name():
    cell, x = Doubled(IN, H, rngs=nnx.Rngs(0)), inputs(B, T, IN)
    with pytest.raises(TypeError, match=r"RNN: cell must have the call of RecurrentCell, got Doub"):
        RNN(cell)
    plain = GRUCell(IN, H, rngs=nnx.Rngs(0))
    for layer in (RNN(plain), Bidirectional(RNN(plain), RNN(plain))):
        (layer if isinstance(layer, RNN) else layer.backward_rnn).cell = cell
        with pytest.raises(TypeError, match=r"got Doubled with one of its own.*nnx.RNN runs it"):
            layer(x)
    close(nnx.RNN(cell)(x), 2 * RNN(plain)(x))


def test_a_subclass_that_leaves_the_call_alone_is_honoured():
    cell, x = Shifted(IN, H, rngs=nnx.Rngs(0)), inputs(B, T, IN)
    plain = RNN(GRUCell(IN, H, gate_fn=nnx.hard_sigmoid, rngs=nnx.Rngs(0)))
    close(RNN(cell)(x), plain(x, initial_carry=jnp.ones((B, H))))


class Adapted(SparseLinear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


@pytest.mark.parametrize(
    "make",
    [
        lambda *sizes: nnx.LoRALinear(*sizes, lora_rank=2, rngs=nnx.Rngs(0)),
        lambda *sizes: Adapted(*sizes, sparsity=0.5, rngs=nnx.Rngs(0)),
    ],
    ids=["lora", "sparse"],
)
def test_layers_of_subclasses(make):
    """The call of dense_i is a cell's own; that of dense_h is the scan's."""
    cell, x = GRUCell(IN, H, rngs=nnx.Rngs(0)), inputs(B, T, IN)
    cell.dense_i = layer = make(IN, 3 * H)
    if isinstance(layer, nnx.LoRALinear):
        layer.lora.lora_b[...] = jnp.ones_like(layer.lora.lora_b[...])
    carry, ys = jnp.zeros((B, H)), []
    for step in jnp.swapaxes(x, 0, 1):
        carry, y = recurrent.GRU(
            jnp.split(layer(step), 3, -1), jnp.split(cell.dense_h(carry), 3, -1), carry
        )
        ys.append(y)
    np.testing.assert_allclose(RNN(cell)(x), jnp.stack(ys, 1), rtol=1e-5, atol=1e-5)
    cell.dense_h = make(H, 3 * H)
    name = type(layer).__name__
    with pytest.raises(
        TypeError, match=rf"dense_h must be .* got {name}, a subclass, whose own call"
    ):
        RNN(cell)(x)
