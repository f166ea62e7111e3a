"""Recurrent layers from Flax's own, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse.nn.cells import GRUCell, LSTMCell, RecurrentCell, SimpleCell, check_layers
from jaxsparse.nn.headwise import HeadwiseLinear
from jaxsparse.nn.linear import LINEAR_OPTIONS, SparseLinear, check_call
from jaxsparse.nn.recurrent import RNN, Bidirectional


def from_flax(layer: Any) -> Any:
    """The layer of `jaxsparse.nn` that computes what a recurrent layer of Flax computes.

    Parameters are copied, without their metadata; modules that were shared stay so. Outputs of
    valid steps, carries and gradients are the same; :class:`RNN` tells what differs past the end of
    a row.

    Args:
        layer: an nnx.RNN or nnx.Bidirectional of the cells nnx.SimpleCell, GRUCell, LSTMCell or
            OptimizedLSTMCell, or one of these cells. It is left as it is.

    Returns:
        An `RNN`, `Bidirectional`, `SimpleCell`, `GRUCell` or `LSTMCell`.

    Raises:
        TypeError: for other layers and cells, subclasses included; for layers in a cell that have a
            call of their own (nnx.LoRALinear has one); and for a gate or activation function that
            has parameters, refers to a module or variable, or can't be hashed.
        ValueError: if such a function is not pointwise or uses what can't run in a kernel, naming
            it; if a layer has a ``dot_general`` of its own or other options that a scan can't
            follow, and if the layers of a cell differ in theirs, naming the option.

    >>> theirs = nnx.RNN(nnx.GRUCell(3, 5, rngs=nnx.Rngs(0)))
    >>> ours = from_flax(theirs)
    >>> x = jax.random.normal(jax.random.key(0), (2, 7, 3))
    >>> bool(jnp.allclose(ours(x), theirs(x), atol=1e-6))
    True
    """
    return _converted("from_flax", layer, _FROM_FLAX, {})


def to_flax(layer: Any) -> Any:
    """The recurrent layer of Flax that computes what one of `jaxsparse.nn` computes.

    Parameters are copied, sparse weights and those of heads as dense kernels. An LSTM becomes an
    nnx.OptimizedLSTMCell. Where a cell has a bias that Flax's has not, the Flax cell gets a layer
    with a bias.

    Args:
        layer: an `RNN`, `Bidirectional`, `SimpleCell`, `GRUCell` or `LSTMCell`. It is left as it
            is. Flax's layers have no ``recompute``, ``implementation`` and ``variant``.

    Returns:
        An nnx.RNN, nnx.Bidirectional, nnx.SimpleCell, GRUCell or OptimizedLSTMCell.

    Raises:
        TypeError: for other layers, subclasses included, and for cells of your own, for which Flax
            has none.
        ValueError: for a `SparseLinear` with an activation or an nnx.Linear with a ``dot_general``
            of its own.

    >>> ours = RNN(LSTMCell(3, 5, recurrent_sparsity=0.5, rngs=nnx.Rngs(0)))
    >>> type(to_flax(ours).cell).__name__
    'OptimizedLSTMCell'
    """
    return _converted("to_flax", layer, _TO_FLAX, {})


def _converted(operation: str, module: Any, table: dict[Any, Any], made: dict[int, Any]) -> Any:
    """What the table makes of a module; the same for a module that is met again."""
    if type(module) not in table:
        names = ", ".join(cls.__name__ for cls in table)
        raise TypeError(
            f"{operation}: takes {names} of {_HOME[operation]}, got {type(module).__module__}."
            f"{type(module).__name__}"
        )
    if id(module) not in made:
        convert = table[type(module)]
        made[id(module)] = convert(module, lambda inner: _converted(operation, inner, table, made))
    return made[id(module)]


def _own_rngs(stream: Any) -> Any:
    return nnx.data(None) if stream is None else jax.tree.map(jnp.copy, stream)


# ---- From Flax ----


def _rnn_from_flax(rnn: nnx.RNN, convert: Any) -> RNN:
    cell = convert(rnn.cell)
    options = {name: getattr(rnn, name) for name in _RNN_OPTIONS}
    layer = RNN(cell, **options, rngs=False)
    if cell.carry_init is not None:
        layer.rngs = _own_rngs(rnn.rngs)
    return layer


def _bidirectional_from_flax(layer: nnx.Bidirectional, convert: Any) -> Bidirectional:
    rnns = [convert(rnn) for rnn in (layer.forward_rnn, layer.backward_rnn)]
    options = {name: getattr(layer, name) for name in _BIDIRECTIONAL_OPTIONS}
    converted = Bidirectional(*rnns, **options, rngs=False)
    if any(rnn.cell.carry_init is not None for rnn in rnns):
        converted.rngs = _own_rngs(layer.rngs)
    return converted


def _cell_from_flax(cls: Any, functions: tuple[str, ...], inputs: Any, states: Any) -> Any:
    """How to convert a cell whose layers of these names lie side by side."""

    def convert(cell: Any, _: Any) -> RecurrentCell:
        options = {name: getattr(cell, name) for name in (*functions, *_CELL_OPTIONS)}
        layers = [{name: getattr(cell, name) for name in names} for names in (inputs, states)]
        # A scan computes in one dtype.
        _check_same("from_flax", "dtype", layers[0] | layers[1])
        options["carry_init"] = cell.carry_init
        dense = [_joined("from_flax", side) for side in layers]
        converted: RecurrentCell = _with_layers(cls, cell, options, *dense)
        check_layers("from_flax", converted)
        return converted

    return convert


# ---- To Flax ----


def _rnn_to_flax(rnn: RNN, convert: Any) -> nnx.RNN:
    options = {name: getattr(rnn, name) for name in _RNN_OPTIONS}
    layer = nnx.RNN(convert(rnn.cell), **options)
    if rnn.rngs is not None:
        layer.rngs = _own_rngs(rnn.rngs)
    return layer


def _bidirectional_to_flax(layer: Bidirectional, convert: Any) -> nnx.Bidirectional:
    options = {name: getattr(layer, name) for name in _BIDIRECTIONAL_OPTIONS}
    rnns = (convert(layer.forward_rnn), convert(layer.backward_rnn))
    converted = nnx.Bidirectional(*rnns, **options)
    if layer.rngs is not None:
        converted.rngs = _own_rngs(layer.rngs)
    return converted


def _cell_to_flax(cls: Any, functions: tuple[str, ...]) -> Any:
    def convert(cell: RecurrentCell, _: Any) -> Any:
        options = {name: getattr(cell, name) for name in (*functions, *_CELL_OPTIONS)}
        layers = [_joined("to_flax", {name: getattr(cell, name)}) for name in _SIDES]
        converted = _with_layers(cls, cell, options, *layers)
        converted.carry_init = cell.carry_init  # given to the constructor it would warn
        return converted

    return convert


# ---- Both ways ----


def _with_layers(
    cls: Any, like: Any, options: Any, dense_i: nnx.Linear, dense_h: nnx.Linear
) -> Any:
    """A cell of these layers; its own, which they replace, are made of zeros."""
    zeros = nnx.initializers.zeros
    cell = cls(
        like.in_features,
        like.hidden_features,
        kernel_init=zeros,
        recurrent_kernel_init=zeros,
        rngs=nnx.Rngs(0),
        **options,
    )
    cell.dense_i = dense_i
    cell.dense_h = dense_h
    cell.rngs = _own_rngs(like.rngs)
    return cell


def _joined(operation: str, layers: dict[str, Any]) -> nnx.Linear:
    """A dense layer whose outputs are those of several, side by side.

    Args:
        operation: what errors name.
        layers: by their names.
    """
    one = next(iter(layers.values()))
    for name, layer in layers.items():
        expected = f"{operation}: {name} must be an nnx.Linear, a SparseLinear or a HeadwiseLinear"
        check_call(expected, layer, nnx.Linear, SparseLinear, HeadwiseLinear)
        if getattr(layer, "activation", None) is not None:
            raise ValueError(f"{operation}: Flax has no layer with an activation")
        dot_general = getattr(layer, "dot_general", jax.lax.dot_general)
        if dot_general is not jax.lax.dot_general:
            raise ValueError(
                f"{operation}: layers must have dot_general=jax.lax.dot_general, got {dot_general}"
            )
    for option in LINEAR_OPTIONS:
        _check_same(operation, option, layers)
    kernel = jnp.concatenate([_kernel(layer) for layer in layers.values()], -1)
    bias: Any = None
    if one.bias is not None:
        bias = jnp.concatenate([layer.bias[...] for layer in layers.values()])
    options = {name: getattr(one, name) for name in LINEAR_OPTIONS}
    return nnx.Linear(
        *kernel.shape,
        kernel_init=lambda *_: jnp.copy(kernel),
        bias_init=lambda *_: jnp.copy(bias),
        **options,
        rngs=nnx.Rngs(0),
    )


def _check_same(operation: str, option: str, layers: dict[str, Any]) -> None:
    """Raises ValueError for layers that differ in an option and are to become one."""
    values = {name: getattr(layer, option) for name, layer in layers.items()}
    if option in _DTYPES:  # which have many spellings
        values = {name: value and jnp.dtype(value) for name, value in values.items()}
    one = next(iter(values.values()))
    if any(value != one for value in values.values()):
        got = ", ".join(f"{value} of {name}" for name, value in values.items())
        raise ValueError(f"{operation}: {option} must be the same in a cell's layers, got {got}")


def _kernel(layer: Any) -> jax.Array:
    if isinstance(layer, HeadwiseLinear):
        return layer.matrix
    return layer.weight.todense().T if isinstance(layer, SparseLinear) else layer.kernel[...]


_HOME = {"from_flax": "flax.nnx", "to_flax": "jaxsparse.nn"}
_RNN_OPTIONS = ("time_major", "return_carry", "reverse", "keep_order")
_BIDIRECTIONAL_OPTIONS = ("merge_fn", "time_major", "return_carry")
_CELL_OPTIONS = ("dtype", "param_dtype", "promote_dtype")
_DTYPES = ("dtype", "param_dtype", "preferred_element_type")
_GATED = ("gate_fn", "activation_fn")
_SIMPLE = ("residual", "activation_fn")
_SIDES = ("dense_i", "dense_h")
_LAYERS = tuple((name,) for name in _SIDES)
_FROM_FLAX = {
    nnx.RNN: _rnn_from_flax,
    nnx.Bidirectional: _bidirectional_from_flax,
    nnx.SimpleCell: _cell_from_flax(SimpleCell, _SIMPLE, *_LAYERS),
    nnx.GRUCell: _cell_from_flax(GRUCell, _GATED, *_LAYERS),
    nnx.LSTMCell: _cell_from_flax(
        LSTMCell, _GATED, ("ii", "if_", "ig", "io"), ("hi", "hf", "hg", "ho")
    ),
    nnx.OptimizedLSTMCell: _cell_from_flax(LSTMCell, _GATED, *_LAYERS),
}
_TO_FLAX = {
    RNN: _rnn_to_flax,
    Bidirectional: _bidirectional_to_flax,
    SimpleCell: _cell_to_flax(nnx.SimpleCell, _SIMPLE),
    GRUCell: _cell_to_flax(nnx.GRUCell, _GATED),
    LSTMCell: _cell_to_flax(nnx.OptimizedLSTMCell, _GATED),
}
