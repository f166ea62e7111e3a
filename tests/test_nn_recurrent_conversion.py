"""Recurrent layers from Flax's and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import BIAS, IN, LENGTHS, B, H, T, close, compiled, inputs  # noqa: E402

from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentCell,
    SimpleCell,
    SparseLinear,
    from_flax,
    to_flax,
)

OTHER = {"gate_fn": nnx.hard_sigmoid, "activation_fn": nnx.gelu}
# Flax's cell, its options, what it becomes, and what that becomes.
CELLS = {
    "simple": (nnx.SimpleCell, {}, SimpleCell, nnx.SimpleCell),
    "relu": (nnx.SimpleCell, {"activation_fn": nnx.relu}, SimpleCell, nnx.SimpleCell),
    "residual": (nnx.SimpleCell, {"residual": True}, SimpleCell, nnx.SimpleCell),
    "gru": (nnx.GRUCell, {}, GRUCell, nnx.GRUCell),
    "gru, other functions": (nnx.GRUCell, OTHER, GRUCell, nnx.GRUCell),
    "lstm": (nnx.LSTMCell, {}, LSTMCell, nnx.OptimizedLSTMCell),
    "lstm, other functions": (nnx.LSTMCell, OTHER, LSTMCell, nnx.OptimizedLSTMCell),
    "optimized lstm": (nnx.OptimizedLSTMCell, {}, LSTMCell, nnx.OptimizedLSTMCell),
}


def flax_cell(name, seed=0, **options):
    cls, functions, *_ = CELLS[name]
    return cls(IN, H, **BIAS, **functions, **options, rngs=nnx.Rngs(seed))


def kernels(parameters):
    """The parameters of any of the cells, those of an nnx.LSTMCell side by side."""
    if "ii" not in parameters:
        return parameters
    parts = {"dense_i": ("ii", "if_", "ig", "io"), "dense_h": ("hi", "hf", "hg", "ho")}
    return {
        layer: {
            kind: np.concatenate([parameters[name][kind] for name in names], -1)
            for kind in parameters[names[0]]
        }
        for layer, names in parts.items()
    }


@pytest.mark.parametrize("name, lengths", [*((name, LENGTHS) for name in CELLS), ("lstm", None)])
def test_converted_layers_compute_the_same(name, lengths):
    theirs = nnx.RNN(flax_cell(name))
    ours = from_flax(theirs)
    back = to_flax(ours)
    assert (type(ours.cell), type(back.cell)) == CELLS[name][2:]
    expected = kernels(nnx.to_pure_dict(nnx.state(theirs.cell, nnx.Param)))
    for layer in (ours, back):
        got = nnx.to_pure_dict(nnx.state(layer.cell, nnx.Param))
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    steps = jnp.full(B, T) if lengths is None else lengths
    valid = jnp.arange(T) < steps[:, None]

    def run(layers, x):
        for layer in layers:
            carry, y = layer(x, seq_lengths=lengths, return_carry=True)
            # Flax makes outputs past the end, too, and no carry of a row without steps.
            carry = jax.tree.map(lambda c: jnp.where((steps > 0)[:, None], c, 0), carry)
            yield carry, jnp.where(valid[..., None], y, 0)

    layers = nnx.List([theirs, ours, back])
    expected, *results = compiled(lambda *args: list(run(*args)))(layers, inputs(B, T, IN))
    for got in results:
        close(got, expected, atol=5e-6)  # exponentials of kernels on a GPU round more


def test_gradients_of_converted_layers_are_the_same():
    theirs = nnx.RNN(flax_cell("gru"))
    ours = from_flax(theirs)

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    gradient = compiled(nnx.grad(loss, argnums=(0, 1)))
    of_layers, of_x = zip(
        *(gradient(layer, inputs(B, T, IN)) for layer in (theirs, ours, to_flax(ours))), strict=True
    )
    expected, *others = (kernels(nnx.to_pure_dict(state)["cell"]) for state in of_layers)
    for got, got_x in zip(others, of_x[1:], strict=True):
        close(got_x, of_x[0], atol=5e-6)
        close(got, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_a_cell_alone_is_converted(name):
    theirs = flax_cell(name)
    ours = from_flax(theirs)
    x, carry = inputs(B, IN), theirs.initialize_carry((B, IN), nnx.Rngs(0))
    close(ours(carry, x), theirs(carry, x))
    close(to_flax(ours)(carry, x), theirs(carry, x))


def test_options_are_taken_over():
    options = {"time_major": True, "return_carry": True, "reverse": True, "keep_order": True}
    cell = flax_cell("optimized lstm", dtype=jnp.bfloat16)
    cell.dense_h.precision = jax.lax.Precision.HIGHEST
    theirs = nnx.RNN(cell, **options)
    ours = from_flax(theirs)
    back = to_flax(ours)
    for layer in (ours, back):
        assert {name: getattr(layer, name) for name in options} == options
        assert layer.cell.dtype == layer.cell.dense_i.dtype == jnp.bfloat16
        assert layer.cell.dense_h.precision == jax.lax.Precision.HIGHEST
    x = inputs(T, B, IN)
    (_, y), (_, expected) = ours(x), theirs(x)
    np.testing.assert_allclose(np.float32(y), expected, atol=0.02)


def test_parameters_are_copies():
    theirs = nnx.RNN(flax_cell("gru"))
    ours = from_flax(theirs)
    back, x = to_flax(ours), inputs(B, T, IN)
    expected = theirs(x)
    jax.tree.map(lambda a: a.delete(), nnx.state(ours, nnx.Param))
    np.testing.assert_array_equal(theirs(x), expected)
    np.testing.assert_array_equal(back(x), expected)


def test_bidirectional_layers_are_converted():
    rnns = [nnx.RNN(flax_cell(name, seed)) for name, seed in (("lstm", 0), ("gru", 1))]
    theirs = nnx.Bidirectional(*rnns, merge_fn=lambda a, b: a * b, return_carry=True)
    ours = from_flax(theirs)
    x = inputs(2, B, T, IN)
    assert isinstance(ours, Bidirectional)
    close(ours(x), theirs(x))
    close(to_flax(ours)(x), theirs(x))
    usual = nnx.Bidirectional(*rnns)
    close(to_flax(from_flax(usual))(x), usual(x))


def test_what_was_shared_stays_shared():
    cell = flax_cell("gru")
    one, two = nnx.RNN(cell), nnx.RNN(cell)
    for theirs in (nnx.Bidirectional(one, one), nnx.Bidirectional(one, two)):
        ours = from_flax(theirs)
        back = to_flax(ours)
        for layer in (ours, back):
            assert layer.forward_rnn.cell is layer.backward_rnn.cell
            same = layer.forward_rnn is layer.backward_rnn
            assert same == (theirs.forward_rnn is theirs.backward_rnn)


def test_random_carries_are_drawn_alike():
    with pytest.warns(UserWarning, match="carry_init"):
        cell = flax_cell("lstm", carry_init=nnx.initializers.normal(1.0))
    x = inputs(B, T, IN)
    make = [
        lambda: nnx.RNN(cell),
        lambda: nnx.RNN(cell, rngs=nnx.Rngs(3)),
        lambda: nnx.Bidirectional(nnx.RNN(cell), nnx.RNN(cell), rngs=nnx.Rngs(4)),
    ]
    for theirs in (m() for m in make):
        theirs(x)  # the stream has moved on
        ours = from_flax(theirs)
        back = to_flax(ours)
        expected = theirs(x)
        close(ours(x), expected)
        close(back(x), expected)
        assert not np.allclose(ours(x), expected)


def test_a_cell_that_keeps_its_random_stream():
    with pytest.warns(UserWarning):
        cell = nnx.GRUCell(
            IN, H, carry_init=nnx.initializers.normal(1.0), keep_rngs=True, rngs=nnx.Rngs(0)
        )
    theirs = nnx.RNN(cell, rngs=False)
    ours, x = from_flax(theirs), inputs(B, T, IN)
    expected = theirs(x)
    close(ours(x), expected)
    close(to_flax(from_flax(cell)).initialize_carry((B, IN)), cell.initialize_carry((B, IN)))


@pytest.mark.parametrize(
    "cls, options",
    [
        (GRUCell, {"use_recurrent_bias": True}),
        (LSTMCell, {"use_bias": True}),
        (LSTMCell, {"recurrent_sparsity": 0.6, "input_sparsity": 0.5}),
        (SimpleCell, {"recurrent_sparsity": 0.6, "residual": True}),
    ],
)
def test_what_flax_has_not_becomes_what_it_has(cls, options):
    ours = RNN(cls(IN, H, **BIAS, **options, rngs=nnx.Rngs(0)), return_carry=True)
    theirs = to_flax(ours)
    assert not any(isinstance(m, SparseLinear) for _, m in nnx.iter_modules(theirs))
    layers = nnx.List([ours, theirs, from_flax(theirs)])
    run = compiled(lambda layers, x: [layer(x) for layer in layers])
    expected, *results = run(layers, inputs(B, T, IN))
    for got in results:
        close(got, expected)


@pytest.mark.parametrize("option", ["activation_fn", "gate_fn"])
def test_functions_that_were_set_afterwards_are_taken_over(option):
    theirs, x = flax_cell("lstm"), inputs(B, T, IN)
    setattr(theirs, option, nnx.hard_tanh)
    ours = RNN(from_flax(theirs))
    close(ours(x), nnx.RNN(theirs)(x))
    setattr(ours.cell, option, nnx.gelu)
    close(to_flax(ours)(x), ours(x))


@pytest.mark.parametrize(
    "name, option, value, got",
    [
        ("hf", "dtype", jnp.bfloat16, "None of hi, bfloat16 of hf"),
        ("io", "precision", "high", "None of ig, high of io"),
        ("ig", "use_bias", True, "False of if_, True of ig"),
        ("ho", "preferred_element_type", "float32", "None of hg, float32 of ho"),
        ("if_", "promote_dtype", lambda x, dtype: x, "<lambda>"),
    ],
)
def test_gates_of_different_options_are_refused_by_name(name, option, value, got):
    cell = flax_cell("lstm")
    setattr(getattr(cell, name), option, value)
    with pytest.raises(ValueError, match=rf"from_flax: {option} must be the same .* got .*{got}"):
        from_flax(nnx.RNN(cell))


def test_options_of_many_spellings_are_the_same():
    cell = flax_cell("lstm", dtype="float32")
    cell.hi.dtype, cell.io.dtype = jnp.float32, np.dtype("float32")
    assert from_flax(cell).dense_h.dtype == jnp.float32


def test_sides_of_different_dtypes_are_refused_by_name():
    cell = flax_cell("gru")
    cell.dense_i.dtype = jnp.bfloat16
    with pytest.raises(ValueError, match=r"dtype must be .* got bfloat16 of dense_i, None of den"):
        from_flax(cell)


@pytest.mark.parametrize(
    "option, value",
    [("precision", "BF16_BF16_F32"), ("preferred_element_type", jnp.float16)],
)
def test_options_that_a_scan_cannot_follow_are_refused(option, value):
    cell = flax_cell("gru")
    setattr(cell.dense_h, option, value)
    with pytest.raises(ValueError, match=f"from_flax: dense_h: {option} must be"):
        from_flax(cell)


class DoubledLinear(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs)


class DoubledSparse(SparseLinear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs)


@pytest.mark.parametrize("side", ["dense_i", "dense_h"])
def test_layers_of_subclasses_are_refused_by_name(side):
    sizes = {"dense_i": (IN, 3 * H), "dense_h": (H, 3 * H)}[side]
    biased, rngs = side == "dense_i", nnx.Rngs(0)
    theirs = [
        DoubledLinear(*sizes, use_bias=biased, rngs=rngs),
        nnx.LoRALinear(*sizes, lora_rank=2, use_bias=biased, rngs=rngs),
        nnx.LoRA(sizes[0], 2, sizes[1], base_module=nnx.Linear(*sizes, rngs=rngs), rngs=rngs),
    ]
    for layer in theirs:
        cell = flax_cell("gru")
        setattr(cell, side, layer)
        with pytest.raises(TypeError, match=f"from_flax: {side} .* got {type(layer).__name__}"):
            from_flax(nnx.RNN(cell))
    ours = GRUCell(IN, H, rngs=nnx.Rngs(0))
    setattr(ours, side, DoubledSparse(*sizes, sparsity=0.5, rngs=rngs))
    with pytest.raises(TypeError, match=f"to_flax: {side} .* got DoubledSparse, a subclass"):
        to_flax(ours)


class OtherGRU(nnx.GRUCell):
    pass


def test_other_layers_are_refused_by_name():
    with pytest.raises(TypeError, match=r"from_flax: takes RNN, .* got .*\.OtherGRU"):
        from_flax(nnx.RNN(OtherGRU(IN, H, rngs=nnx.Rngs(0))))
    with pytest.raises(TypeError, match=r"from_flax: takes .* got flax.*\.Linear"):
        from_flax(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"to_flax: takes .* of jaxsparse.nn, got .*RecurrentCell"):
        own = lambda x, r, h: (x[0] * r[0], h)  # noqa: E731
        to_flax(RNN(RecurrentCell(IN, H, own, rngs=nnx.Rngs(0))))
    with pytest.raises(TypeError, match=r"to_flax: takes .* got flax.*\.GRUCell"):
        to_flax(flax_cell("gru"))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"gate_fn": nnx.softmax}, ValueError, r"the cell LSTM\(softmax, tanh\)"),
        ({"gate_fn": lambda x: x / jnp.max(x)}, ValueError, r"LSTM\(<lambda>, tanh\) must be poin"),
        ({"activation_fn": nnx.PReLU()}, TypeError, "activation_fn must be .* got PReLU"),
        (
            {"activation_fn": nnx.PReLU().__call__},
            TypeError,
            r"LSTMCell: activation_fn must be .* got PReLU\.__call__, which refers to a PReLU",
        ),
    ],
)
def test_functions_that_cannot_be_had_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        from_flax(nnx.RNN(nnx.LSTMCell(IN, H, **options, rngs=nnx.Rngs(0))))


def test_layers_that_cannot_be_had_are_refused():
    cell = flax_cell("gru")
    cell.dense_i.dot_general = lambda *a, **k: jax.lax.dot_general(*a, **k)
    with pytest.raises(ValueError, match="from_flax: dense_i must have dot_general"):
        from_flax(cell)
    cell = flax_cell("gru")
    cell.dense_i = nnx.Einsum("...i,ij->...j", (IN, 3 * H), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"from_flax: dense_i must be .* got Einsum"):
        from_flax(cell)
    ours = GRUCell(IN, H, rngs=nnx.Rngs(0))
    ours.dense_i = SparseLinear(IN, 3 * H, sparsity=0.5, activation="relu", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="to_flax: dense_i must have no activation, got 'relu'"):
        to_flax(ours)
