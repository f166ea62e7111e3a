"""Recurrent layers from Flax's and back, and from PyTorch's weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from covering import combinations  # noqa: E402
from nn_recurrent_problems import BIAS, IN, LENGTHS, B, H, T, close, compiled, inputs, leaves  # noqa: E402

from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentCell,
    RecurrentStack,
    SimpleCell,
    SparseLinear,
    from_flax,
    from_torch,
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


# ---- Flax ----


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
        close(got, expected)


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
    with pytest.raises(ValueError, match="from_flax: layers must have dot_general"):
        from_flax(cell)
    cell = flax_cell("gru")
    cell.dense_i = nnx.Einsum("...i,ij->...j", (IN, 3 * H), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"from_flax: dense_i must be .* got Einsum"):
        from_flax(cell)
    ours = GRUCell(IN, H, rngs=nnx.Rngs(0))
    ours.dense_i = SparseLinear(IN, 3 * H, sparsity=0.5, activation="relu", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="to_flax: Flax has no layer with an activation"):
        to_flax(ours)


# ---- PyTorch ----

KINDS = {"rnn": (1, SimpleCell), "gru": (3, GRUCell), "lstm": (4, LSTMCell)}


def state_dict(kind, *, layers=2, bidirectional=False, bias=True, seed=0):
    """Random weights under the names, and in the shapes, that torch.nn gives them."""
    rng = np.random.default_rng(seed)
    rows, sides = KINDS[kind][0] * H, ("", "_reverse")[: 1 + bidirectional]
    shapes = {}
    for layer in range(layers):
        features = IN if layer == 0 else H * len(sides)
        for side in sides:
            shapes[f"weight_ih_l{layer}{side}"] = (rows, features)
            shapes[f"weight_hh_l{layer}{side}"] = (rows, H)
            if bias:
                shapes[f"bias_ih_l{layer}{side}"] = shapes[f"bias_hh_l{layer}{side}"] = (rows,)
    return {k: np.float32(rng.normal(size=s) / 2) for k, s in shapes.items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def torch_step(kind, nonlinearity, x, r, carry):
    """One step by the formulas in the documentation of torch.nn; x and r with their biases."""
    if kind == "rnn":
        f = {"tanh": np.tanh, "relu": lambda a: np.maximum(a, 0)}[nonlinearity]
        return (f(x + r),)
    (h, *rest), gates = carry, KINDS[kind][0]
    x, r = np.split(x, gates, -1), np.split(r, gates, -1)
    if kind == "gru":
        reset, update = sigmoid(x[0] + r[0]), sigmoid(x[1] + r[1])
        new = np.tanh(x[2] + reset * r[2])
        return ((1 - update) * new + update * h,)
    i, f, g, o = (a + b for a, b in zip(x, r, strict=True))
    c = sigmoid(f) * rest[0] + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def torch_reference(weights, x, kind, nonlinearity="tanh"):
    """Outputs (T, B, ...) and the last carries in PyTorch's order, in float64."""
    weights = {k: np.float64(v) for k, v in weights.items()}
    x, last, layer = np.float64(x), [], 0
    while f"weight_ih_l{layer}" in weights:
        outputs = []
        for side in ("", "_reverse"):
            end = f"_l{layer}{side}"
            if f"weight_ih{end}" not in weights:
                continue
            carry = tuple(np.zeros((x.shape[1], H)) for _ in range(2 if kind == "lstm" else 1))
            ys = []
            for row in x[::-1] if side else x:
                a = row @ weights[f"weight_ih{end}"].T + weights.get(f"bias_ih{end}", 0)
                b = carry[0] @ weights[f"weight_hh{end}"].T + weights.get(f"bias_hh{end}", 0)
                carry = torch_step(kind, nonlinearity, a, b, carry)
                ys.append(carry[0])
            outputs.append(np.stack(ys[::-1] if side else ys))
            last.append(carry)
        x, layer = np.concatenate(outputs, -1), layer + 1
    return x, last


def torch_order(carry):
    """A carry as PyTorch gives it: (h,) or (h, c)."""
    return tuple(reversed(carry)) if isinstance(carry, tuple) else (carry,)


def last_carries(carries, bidirectional):
    flat = [c for pair in carries for c in pair] if bidirectional else carries
    return [torch_order(c) for c in flat]


@combinations(
    "kind, nonlinearity, bidirectional, bias",
    [("rnn", "tanh"), ("rnn", "relu"), ("gru", "tanh"), ("lstm", "tanh")],
    [False, True],
    [False, True],
)
def test_torch_weights_follow_the_documented_formulas(kind, nonlinearity, bidirectional, bias):
    weights = state_dict(kind, bidirectional=bidirectional, bias=bias)
    layers = from_torch(weights, nonlinearity=nonlinearity, time_major=True)
    assert [type(layer) for layer in layers] == [Bidirectional if bidirectional else RNN] * 2
    stack = RecurrentStack(layers, time_major=True, return_carry=True)
    x = inputs(T, B, IN)
    carries, y = stack(x)
    expected, last = torch_reference(weights, x, kind, nonlinearity)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    close(last_carries(carries, bidirectional), last, rtol=1e-5, atol=1e-5)


def test_torch_names_dtypes_and_options():
    weights = state_dict("gru", layers=1)
    model = {f"encoder.rnn.{k}": jnp.asarray(v, jnp.bfloat16) for k, v in weights.items()}
    model["decoder.weight"] = np.ones(3)
    (layer,) = from_torch(
        model, prefix="encoder.rnn.", dtype=jnp.float32, return_carry=True, recompute=True
    )
    assert layer.recompute and layer.return_carry and not layer.time_major
    assert type(layer.cell) is GRUCell and layer.cell.dtype == jnp.float32
    assert {p.dtype.name for p in leaves(nnx.state(layer, nnx.Param))} == {"bfloat16"}
    x = inputs(B, T, IN)
    rounded = {k: np.float32(jnp.asarray(v, jnp.bfloat16)) for k, v in weights.items()}
    expected, _ = torch_reference(rounded, np.swapaxes(x, 0, 1), "gru")
    np.testing.assert_allclose(layer(x)[1], np.swapaxes(expected, 0, 1), rtol=1e-5, atol=1e-5)


def test_a_stack_of_torch_layers_has_their_order_of_dimensions():
    layers = from_torch(state_dict("gru"), time_major=True, return_carry=True)
    x = inputs(T, B, IN)
    carries, expected = [], x
    for layer in layers:
        carry, expected = layer(expected)
        carries.append(carry)
    close(RecurrentStack(layers)(x), (tuple(carries), expected))


def test_torch_weights_are_copied():
    weights = state_dict("lstm", layers=1)
    (layer,) = from_torch(weights)
    before, x = layer(inputs(B, T, IN)), inputs(B, T, IN)
    for array in weights.values():
        array[...] = 0
    np.testing.assert_array_equal(layer(x), before)


def test_torch_layers_go_on_to_flax():
    (layer,) = from_torch(state_dict("gru", layers=1))
    x = inputs(B, T, IN)
    close(to_flax(layer)(x), layer(x))


def changed(**arrays):
    weights = state_dict("lstm", layers=1) | arrays
    return {k: v for k, v in weights.items() if v is not None}


@pytest.mark.parametrize(
    "weights, options, message",
    [
        (changed(weight_hr_l0=np.ones((3, H))), {}, "weight_hr_l0: .* proj_size is not supported"),
        (changed(weight_ho_l0=np.ones(3)), {}, "weight_ho_l0: .* keys must be like weight_ih_l0"),
        (changed(), {"prefix": "encoder."}, "state_dict must have encoder.weight_ih_l0, got the"),
        (changed(weight_ih_l0=None), {}, "weight_ih_l0 must be a matrix, got none"),
        (changed(weight_hh_l0=np.ones(H)), {}, r"weight_hh_l0 must be a matrix, got \(7,\)"),
        (changed(weight_hh_l0=np.ones((2 * H, H))), {}, r"of 1, 3, 4 gates, got \(14, 7\)"),
        (changed(weight_ih_l0=np.ones((9, IN))), {}, r"weight_ih_l0 must have shape \(28, 5\)"),
        (changed(bias_hh_l0=np.ones(9)), {}, r"bias_hh_l0 must have shape \(28,\), got \(9,\)"),
        (changed(bias_hh_l0=None), {}, "bias_ih_l0 and bias_hh_l0 come together"),
        (changed(weight_hh_l2=np.ones((4 * H, H))), {}, "weight_ih_l1 must be a matrix, got none"),
        (
            {**changed(), **{k.replace("l0", "l1"): v for k, v in changed().items()}},
            {},
            r"weight_ih_l1 must have shape \(28, 7\), got \(28, 5\)",
        ),
        (changed(), {"nonlinearity": "gelu"}, r"nonlinearity must be one of .* got 'gelu'"),
    ],
)
def test_torch_errors(weights, options, message):
    with pytest.raises(ValueError, match=f"from_torch: .*{message}"):
        from_torch(weights, **options)


def test_torch_weights_must_be_floating():
    weights = changed(bias_hh_l0=np.ones(4 * H, int))
    with pytest.raises(TypeError, match=r"from_torch: needs float32, .* got bias_hh_l0 int32"):
        from_torch(weights)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_torch(kind, bidirectional):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[kind](
        IN, H, num_layers=2, bidirectional=bidirectional, batch_first=True
    )
    stack = RecurrentStack(from_torch(module.state_dict()), return_carry=True)
    x, lengths = inputs(B, T, IN), [3, 1, 6, 2]
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.tensor(np.asarray(x)), lengths, batch_first=True, enforce_sorted=False
    )
    outputs, last = module(packed)
    outputs, _ = torch.nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
    torch.sin(outputs).sum().backward()
    carries, y = stack(x, seq_lengths=jnp.array(lengths))
    np.testing.assert_allclose(y, outputs.detach().numpy(), rtol=1e-5, atol=1e-6)
    last = [a.detach().numpy() for a in (last if kind == "lstm" else (last,))]
    close([np.stack(c) for c in zip(*last_carries(carries, bidirectional), strict=True)], last)
    gradient = nnx.grad(
        lambda stack: jnp.sum(jnp.sin(stack(x, seq_lengths=jnp.array(lengths))[1]))
    )(stack)
    names = ("forward_rnn", "backward_rnn") if bidirectional else (None,)
    for i, layer in nnx.to_pure_dict(gradient)["layers"].items():
        for name, side in zip(names, ("", "_reverse"), strict=False):
            cell = (layer[name] if name else layer)["cell"]
            for dense, end in (("dense_i", "ih"), ("dense_h", "hh")):
                for kind_, part in (
                    ("weight", cell[dense]["kernel"].T),
                    ("bias", cell[dense]["bias"]),
                ):
                    theirs = getattr(module, f"{kind_}_{end}_l{i}{side}").grad
                    np.testing.assert_allclose(part, theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_bfloat16_tensors_of_torch():
    torch = pytest.importorskip("torch")
    module = torch.nn.GRU(IN, H).to(torch.bfloat16)
    (layer,) = from_torch(module.state_dict())
    kernel = layer.cell.dense_h.kernel[...]
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.float32(kernel.T), module.weight_hh_l0.detach().float().numpy()
    )
