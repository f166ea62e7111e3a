"""Errors of the recurrent layers and cells: what they name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

nnx = pytest.importorskip("flax.nnx")

from nn_recurrent_problems import (  # noqa: E402
    IN,
    MGU,
    B,
    H,
    T,
    inputs,
)

from jaxsparse import Topology, masks  # noqa: E402
from jaxsparse.nn import (  # noqa: E402
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    RecurrentCell,
    SimpleCell,
    SparseLinear,
)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m: m(jnp.ones((B, T, 3))), ValueError, "inputs must have 5 features, .* got 3"),
        (lambda m: m(jnp.ones(IN)), ValueError, r"inputs must have at least 2 .* got shape \(5,\)"),
        (lambda m: m("x"), TypeError, "inputs must be an array, got str"),
        (lambda m: m(jnp.ones((B, T, IN), complex)), TypeError, "needs float32"),
        (
            lambda m: m(jnp.ones((B, T, IN)), seq_lengths=jnp.ones(3, int)),
            ValueError,
            r"seq_lengths must be integers of shape \(4,\), .* got int32 of shape \(3,\)",
        ),
        (
            lambda m: m(jnp.ones((B, T, IN)), seq_lengths=jnp.ones(B)),
            ValueError,
            "seq_lengths must be integers .* got float32",
        ),
        (
            lambda m: m(jnp.ones((B, T, IN)), seq_lengths="x"),
            TypeError,
            "seq_lengths must be an array, got str",
        ),
    ],
)
@pytest.mark.parametrize("name", ["RNN", "Bidirectional"])
def test_wrong_operands_are_named(name, call, error, message):
    rnn = RNN(LSTMCell(IN, H, rngs=nnx.Rngs(0)))
    layer = rnn if name == "RNN" else Bidirectional(rnn, rnn)
    with pytest.raises(error, match=message):
        call(layer)


def test_wrong_carries_are_named():
    layer, x = RNN(LSTMCell(IN, H, rngs=nnx.Rngs(0))), jnp.ones((B, T, IN))
    good = jnp.ones((B, H))
    with pytest.raises(TypeError, match=r"RNN: the carry of LSTMCell .* structure .*\(\*, \*\)"):
        layer(x, initial_carry=good)
    with pytest.raises(ValueError, match=r"RNN: .* shape \(4, 7\), .* got \(4, 5\)"):
        layer(x, initial_carry=(good, good[:, :5]))
    with pytest.raises(TypeError, match=r"RNN: carry must be an array, got str"):
        layer(x, initial_carry=(good, "x"))
    with pytest.raises(TypeError, match=r"needs float32.* got carry 1 int32"):
        layer(x, initial_carry=(good, good.astype(int)))
    with pytest.raises(TypeError, match=r"initial_carry must be a pair \(forward, backward\)"):
        Bidirectional(layer, layer)(x, initial_carry=good)
    with pytest.raises(ValueError, match=r"LSTMCell: inputs must have 5 features"):
        layer.cell((good, good), jnp.ones((B, 3)))


def test_unknown_cells_are_refused():
    with pytest.raises(TypeError, match=r"RNN: cell must be .*RecurrentCell, got str"):
        RNN("lstm")
    with pytest.raises(TypeError, match=r"got GRUCell: convert it by from_flax"):
        RNN(nnx.GRUCell(IN, H, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"Bidirectional: backward_rnn must be .* got GRUCell"):
        cell = GRUCell(IN, H, rngs=nnx.Rngs(0))
        Bidirectional(RNN(cell), cell)
    with pytest.raises(TypeError, match=r"RNN: rngs must be nnx.Rngs, a stream or a bool, got int"):
        RNN(GRUCell(IN, H, rngs=nnx.Rngs(0)), rngs=3)


def centred(x):
    return x - jnp.mean(x)


PRELU = nnx.PReLU()
SLOPE = PRELU.negative_slope
VECTOR = jnp.ones(1)


class Calling:
    """A function that is no module, but has one."""

    def __init__(self):
        self.function = PRELU

    def __call__(self, x):
        return self.function(x)


def in_closure(function):
    return lambda x: function(x)


@pytest.mark.parametrize(
    "function, held",
    [
        (PRELU.__call__, "PReLU"),
        (functools.partial(nnx.PReLU.__call__, PRELU), "PReLU"),
        (functools.partial(lambda x, slope: x * slope, slope=SLOPE), "Param"),
        (functools.partial(lambda x, slopes: x * slopes["a"][0], slopes={"a": [SLOPE]}), "Param"),
        (lambda x: PRELU(x), "PReLU"),
        (lambda x, function=PRELU: function(x), "PReLU"),
        (in_closure(PRELU), "PReLU"),
        (in_closure(in_closure(PRELU.__call__)), "PReLU"),
        (jax.jit(in_closure(PRELU)), "PReLU"),
        (nnx.jit(in_closure(PRELU)), "PReLU"),
        (Calling(), "PReLU"),
        (Calling().__call__, "PReLU"),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", type(x).__name__),
)
def test_functions_with_parameters_are_refused(function, held):
    message = rf"must be a function without parameters, got .*, which refers to a {held}"
    with pytest.raises(TypeError, match=f"GRUCell: activation_fn {message}"):
        GRUCell(IN, H, activation_fn=function, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=f"RecurrentCell: function {message}"):
        RecurrentCell(IN, H, functools.partial(applied, function), rngs=nnx.Rngs(0))


def applied(function, x, r, h):
    h = function(x[0] + r[0])
    return h, h


@pytest.mark.parametrize("function", [lambda x: x * VECTOR[0], lambda x: x + jnp.sum(VECTOR)])
def test_functions_of_other_arrays_are_refused(function):
    message = r"must be a function of its .*, which uses a constant array of shape \(1,\)"
    with pytest.raises(ValueError, match=rf"LSTMCell: gate_fn {message}"):
        LSTMCell(IN, H, gate_fn=function, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"RecurrentCell: function {message}"):
        RecurrentCell(IN, H, functools.partial(applied, function), rngs=nnx.Rngs(0))


def test_functions_of_traced_values_are_refused():
    def make(slope):
        SimpleCell(IN, H, activation_fn=lambda x: x * slope, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"SimpleCell: activation_fn .* uses a traced array"):
        jax.jit(make)(1.0)


class Unhashable:
    __hash__ = None

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"gate_fn": "sigmoid"}, TypeError, "GRUCell: gate_fn must be a function .* got str"),
        ({"activation_fn": nnx.PReLU()}, TypeError, "activation_fn must be .* got PReLU"),
        ({"gate_fn": Unhashable()}, TypeError, "gate_fn must be hashable, Unhashable is not"),
        ({"gate_fn": nnx.softmax}, ValueError, r"the cell GRU\(softmax, tanh\) fails"),
        ({"activation_fn": centred}, ValueError, r"GRU\(sigmoid, centred\) must be pointwise"),
        ({"activation_fn": jax.scipy.special.digamma}, ValueError, "digamma.* can't run inside"),
        ({"recurrent_sparsity": 1.5}, ValueError, r"sparsity must be in \[0, 1\), got 1.5"),
        (
            {"recurrent_topology": Topology.from_mask(masks.causal(), (H, H))},
            ValueError,
            r"topology must be one pattern of shape \(21, 7\)",
        ),
    ],
)
def test_wrong_options_of_cells_are_named(options, error, message):
    with pytest.raises(error, match=message):
        GRUCell(IN, H, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "function, options, error, message",
    [
        (MGU, {"gates": 3}, ValueError, "the cell MGU fails with 3 gates"),
        (MGU, {"gates": 2, "carry_like": (0, 0)}, ValueError, "the cell MGU fails with 2 gates"),
        (lambda x, r, h: h, {}, TypeError, r"must return \(carry, y\)"),
        ("tanh", {}, TypeError, "cell must be a function, got str"),
        (MGU, {"gates": 2, "carry_like": ()}, ValueError, "carry must have a leaf"),
        (MGU, {"gates": 2.0}, TypeError, r"RecurrentCell: gates must be an integer, got 2\.0"),
    ],
)
def test_wrong_cells_show_when_they_are_made(function, options, error, message):
    with pytest.raises(error, match=message):
        RecurrentCell(IN, H, function, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "layer, error, message",
    [
        (nnx.Embed(H, 3 * H, rngs=nnx.Rngs(0)), TypeError, "dense_h must be .* got Embed"),
        (
            nnx.Linear(H, 2 * H, rngs=nnx.Rngs(0)),
            ValueError,
            "dense_h must map 7 to 21 features, got 7 to 14",
        ),
        (
            SparseLinear(H, 3 * H, sparsity=0.5, activation="relu", rngs=nnx.Rngs(0)),
            ValueError,
            "dense_h must be the product and a bias alone",
        ),
        (
            nnx.Linear(H, 3 * H, dot_general=lambda *a, **k: None, rngs=nnx.Rngs(0)),
            ValueError,
            "dense_h must be the product and a bias alone",
        ),
    ],
)
def test_wrong_layers_in_a_cell_are_named(layer, error, message):
    cell = GRUCell(IN, H, rngs=nnx.Rngs(0))
    cell.dense_h = layer
    with pytest.raises(error, match=message):
        RNN(cell)(inputs(B, T, IN))


def test_wrong_options_that_are_set_afterwards_are_named():
    cell = GRUCell(IN, H, rngs=nnx.Rngs(0))
    cell.gate_fn = PRELU.__call__
    with pytest.raises(TypeError, match=r"GRUCell: gate_fn must be a function without parameters"):
        RNN(cell)(inputs(B, T, IN))
    cell.gate_fn = nnx.softmax
    with pytest.raises(ValueError, match=r"GRU\(softmax, tanh\)"):
        RNN(cell)(inputs(B, T, IN))
    with pytest.raises(AttributeError, match="function"):
        cell.function = MGU  # it follows from the options
