"""Recurrent layers from PyTorch's weights and modules, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from covering import combinations  # noqa: E402
from nn_recurrent_problems import BIAS, IN, B, H, T, close, inputs, leaves  # noqa: E402

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
    to_torch,
)

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


def check_same_arrays(got, expected):
    assert list(got) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)


@combinations(
    "kind, nonlinearity, bidirectional, bias",
    [("rnn", "tanh"), ("rnn", "relu"), ("gru", "tanh"), ("lstm", "tanh")],
    [False, True],
    [False, True],
)
def test_torch_weights_follow_the_documented_formulas(kind, nonlinearity, bidirectional, bias):
    weights = state_dict(kind, bidirectional=bidirectional, bias=bias)
    stack = from_torch(weights, nonlinearity=nonlinearity, time_major=True, return_carry=True)
    assert [type(one) for one in stack.layers] == [Bidirectional if bidirectional else RNN] * 2
    x = inputs(T, B, IN)
    carries, y = stack(x)
    expected, last = torch_reference(weights, x, kind, nonlinearity)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    close(last_carries(carries, bidirectional), last, rtol=1e-5, atol=1e-5)
    check_same_arrays(to_torch(stack), weights)


def test_torch_names_dtypes_and_options():
    weights = state_dict("gru", layers=1)
    model = {f"encoder.rnn.{k}": jnp.asarray(v, jnp.bfloat16) for k, v in weights.items()}
    model["decoder.weight"] = np.ones(3)
    layer = from_torch(
        model, prefix="encoder.rnn.", dtype=jnp.float32, return_carry=True, recompute=True
    )
    assert layer.recompute and layer.return_carry and not layer.time_major
    assert type(layer.cell) is GRUCell and layer.cell.dtype == jnp.float32
    assert {p.dtype.name for p in leaves(nnx.state(layer, nnx.Param))} == {"bfloat16"}
    x = inputs(B, T, IN)
    rounded = {k: np.float32(jnp.asarray(v, jnp.bfloat16)) for k, v in weights.items()}
    expected, _ = torch_reference(rounded, np.swapaxes(x, 0, 1), "gru")
    np.testing.assert_allclose(layer(x)[1], np.swapaxes(expected, 0, 1), rtol=1e-5, atol=1e-5)


def test_torch_weights_are_copied():
    weights = state_dict("lstm", layers=1)
    layer = from_torch(weights)
    before, x = layer(inputs(B, T, IN)), inputs(B, T, IN)
    for array in weights.values():
        array[...] = 0
    np.testing.assert_array_equal(layer(x), before)


def own_layers(name):
    """Layers of the kinds that state dicts do not make, and PyTorch's kind of them."""
    rngs = nnx.Rngs(0)
    if name == "lstm":  # without the bias of its inputs
        sizes = (IN, H, H)
        kinds = ({"recurrent_sparsity": 0.5}, {}, {"heads": 7})
        return RecurrentStack(
            [
                RNN(LSTMCell(n, H, **weights, **BIAS, rngs=rngs))
                for n, weights in zip(sizes, kinds, strict=True)
            ],
            dropouts=[None, nnx.Dropout(0.0), None],
        )
    if name == "gru":  # without the bias of its states, merged by Flax's own function
        cells = [nnx.GRUCell(IN, H, **BIAS, rngs=rngs) for _ in range(2)]
        return from_flax(nnx.Bidirectional(*map(nnx.RNN, cells)))
    options = {"activation_fn": nnx.relu, "input_sparsity": 0.5, "use_bias": False}
    return RNN(SimpleCell(IN, H, **options, rngs=rngs))


@pytest.mark.parametrize("kind, nonlinearity", [("lstm", "tanh"), ("gru", "tanh"), ("rnn", "relu")])
def test_layers_become_torch_weights(kind, nonlinearity):
    layer, x = own_layers(kind), inputs(B, T, IN)
    weights = to_torch(layer)
    expected, _ = torch_reference(weights, np.swapaxes(x, 0, 1), kind, nonlinearity)
    y = layer(x)
    np.testing.assert_allclose(y, np.swapaxes(expected, 0, 1), rtol=1e-5, atol=1e-5)
    assert any("bias" in name for name in weights) == (kind != "rnn")
    prefixed = {f"a.{name}": array for name, array in weights.items()}
    check_same_arrays(to_torch(layer, prefix="a."), prefixed)
    close(from_torch(prefixed, prefix="a.", nonlinearity=nonlinearity)(x), y, atol=1e-5)
    jax.tree.map(lambda a: a.delete(), nnx.state(layer, nnx.Param))
    assert all(np.isfinite(a).all() for a in weights.values())


class OtherGRU(GRUCell):
    pass


def cell(cls=GRUCell, features=IN, units=H, **options):
    return cls(features, units, **options, rngs=nnx.Rngs(0))


def with_activation():
    layer = cell()
    layer.dense_i = SparseLinear(IN, 3 * H, sparsity=0.5, activation="relu", rngs=nnx.Rngs(0))
    return layer


@pytest.mark.parametrize(
    "layers, options, error, message",
    [
        (
            [nnx.RNN(nnx.GRUCell(IN, H, rngs=nnx.Rngs(0)))],
            {},
            TypeError,
            r"layers\[0\] must be an ",
        ),
        ([RNN(cell(OtherGRU))], {}, TypeError, r"layers\[0\]\.cell must be of .* got OtherGRU"),
        (
            [RNN(RecurrentCell(IN, H, lambda x, r, h: (x[0] * r[0], h), rngs=nnx.Rngs(0)))],
            {},
            TypeError,
            r"layers\[0\]\.cell must be of SimpleCell or GRUCell or LSTMCell, got RecurrentCell",
        ),
        ([RNN(cell())], {"skip": 1}, ValueError, "must have neither norms nor a skip"),
        ([RNN(cell())], {"norms": [jnp.tanh]}, ValueError, "must have neither norms nor a skip"),
        ([RNN(cell(), reverse=True)], {}, ValueError, r"layers\[0\] must not be reversed"),
        (
            [Bidirectional(RNN(cell()), RNN(cell()), merge_fn=jnp.add)],
            {},
            ValueError,
            r"layers\[0\] must concatenate its outputs, got merge_fn <.*add",
        ),
        (
            [RNN(cell()), Bidirectional(RNN(cell()), RNN(cell()))],
            {},
            ValueError,
            r"class must be the same .* got RNN of layers\[0\] and Bidirectional of layers\[1\]",
        ),
        (
            [Bidirectional(RNN(cell()), RNN(cell(LSTMCell)))],
            {},
            ValueError,
            r"function must be the same .* got GRU of .* and LSTM of layers\[0\]\.backward_rnn",
        ),
        (
            [RNN(cell()), RNN(cell(features=H, units=9))],
            {},
            ValueError,
            r"hidden_features must be the same .* got 7 of .* and 9 of layers\[1\]\.cell",
        ),
        (
            [RNN(cell(SimpleCell, residual=True))],
            {},
            ValueError,
            r"what PyTorch and cuDNN do, elman\(tanh\), elman\(relu\), got residual RNN\(tanh\)",
        ),
        (
            [RNN(cell(gate_fn=nnx.hard_sigmoid))],
            {},
            ValueError,
            r"GRU, got GRU\(hard_sigmoid, tanh",
        ),
        (
            [RNN(with_activation())],
            {},
            ValueError,
            r"cell\.dense_i must have no activation, got 'r",
        ),
    ],
)
def test_what_torch_has_not_is_refused_by_name(layers, options, error, message):
    with pytest.raises(error, match=f"to_torch: .*{message}"):
        to_torch(RecurrentStack(layers, **options))


def test_torch_layers_go_on_to_flax():
    layer = from_torch(state_dict("gru", layers=1))
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


def test_dropout_is_that_between_layers():
    x = inputs(B, T, IN)
    stack = from_torch(state_dict("gru", layers=3), dropout=0.3, rngs=nnx.Rngs(0))
    assert [d and d.rate for d in stack.dropouts] == [0.3, 0.3, None]
    assert not np.allclose(stack(x), stack(x))
    stack.eval()
    close(stack(x), from_torch(state_dict("gru", layers=3))(x))
    close(
        from_torch(state_dict("gru", layers=1), dropout=0.3)(x),
        from_torch(state_dict("gru", layers=1))(x),
    )


# ---- With torch itself ----


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    module.manual_seed(0)
    return module


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_torch(torch, kind, bidirectional):
    module = {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[kind](
        IN, H, num_layers=2, bidirectional=bidirectional, batch_first=True
    )
    stack = from_torch(module, return_carry=True)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_back_to_torch(torch, dtype):
    module = torch.nn.GRU(IN, H, 2, bidirectional=True).to(getattr(torch, dtype))
    layer = from_torch(module)
    kernel = layer.layers[1].backward_rnn.cell.dense_h.kernel[...]
    assert kernel.dtype == dtype
    theirs = module.weight_hh_l1_reverse.detach().float().numpy()
    np.testing.assert_array_equal(np.float32(kernel.T), theirs)
    back = torch.nn.GRU(IN, H, 2, bidirectional=True).to(getattr(torch, dtype))
    back.load_state_dict({k: torch.from_dlpack(v) for k, v in to_torch(layer).items()})
    for name, tensor in module.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


@pytest.mark.parametrize("kind, nonlinearity", [("lstm", "tanh"), ("rnn", "relu")])
def test_torch_computes_what_layers_compute(torch, kind, nonlinearity):
    layer, x = own_layers(kind), inputs(B, T, IN)
    weights = {k: torch.from_dlpack(v) for k, v in to_torch(layer).items()}
    if kind == "lstm":
        module = torch.nn.LSTM(IN, H, 3, batch_first=True)
    else:
        module = torch.nn.RNN(IN, H, nonlinearity=nonlinearity, bias=False, batch_first=True)
    module.load_state_dict(weights)
    expected = module(torch.tensor(np.asarray(x)))[0].detach().numpy()
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_options_of_torch_modules_are_taken_over(torch):
    module = torch.nn.RNN(IN, H, 3, nonlinearity="relu", dropout=0.4)
    layer = from_torch(module, rngs=nnx.Rngs(0))
    assert layer.time_major and layer.layers[2].cell.activation_fn is nnx.relu
    assert [d and (d.rate, d.deterministic) for d in layer.dropouts] == [(0.4, False)] * 2 + [None]
    module.eval()
    layer, x = from_torch(module), inputs(T, B, IN)
    expected = module(torch.tensor(np.asarray(x)))[0].detach().numpy()
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
    # What is given counts more.
    other = from_torch(module, dropout=0.1, nonlinearity="tanh", time_major=False)
    assert other.dropouts[0].rate == 0.1 and other.layers[0].cell.activation_fn is nnx.tanh
    assert not other.time_major


def test_other_modules_of_torch_are_refused(torch):
    class OtherGRU(torch.nn.GRU):
        pass

    with pytest.raises(TypeError, match=r"takes a torch.nn.RNN, GRU or LSTM, or .* got .*OtherGRU"):
        from_torch(OtherGRU(IN, H))
    with pytest.raises(TypeError, match=r"got torch.nn.modules.linear.Linear"):
        from_torch(torch.nn.Linear(IN, H))
    with pytest.raises(ValueError, match="weight_hr_l0: an LSTM with proj_size is not supported"):
        from_torch(torch.nn.LSTM(IN, H, proj_size=3))
