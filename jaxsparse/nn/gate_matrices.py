"""Recurrent layers from and to the matrices that PyTorch and cuDNN know them by.

A layer is, for each direction, ``weight_ih`` (gates h, k) and ``weight_hh`` (gates h, h), one row
for each output, and ``bias_ih`` and ``bias_hh`` (gates h,), or neither bias. The gates lie in the
order i f g o and r z n, which is that of `jaxsparse.nn`, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse import recurrent
from jaxsparse.nn.affine import check_affine, dense_kernel
from jaxsparse.nn.cells import GRUCell, LSTMCell, RecurrentCell, SimpleCell, check_layers
from jaxsparse.nn.recurrent import RNN, Bidirectional, concatenated
from jaxsparse.nn.stack import RecurrentStack

Layer = RNN | Bidirectional | RecurrentStack
# The matrices and biases by kind; of all layers by their number and whether they run backward.
Matrices = dict[str, jax.Array]
MatricesOfLayers = Mapping[tuple[int, bool], Matrices]

NONLINEARITIES = {"tanh": nnx.tanh, "relu": nnx.relu}
_CELLS: dict[int, Any] = {1: SimpleCell, 3: GRUCell, 4: LSTMCell}  # by the number of gates
# What PyTorch's and cuDNN's cells of each kind compute.
_FUNCTIONS: dict[Any, tuple[Any, ...]] = {
    SimpleCell: tuple(recurrent.elman(f) for f in NONLINEARITIES.values()),
    GRUCell: (recurrent.GRU,),
    LSTMCell: (recurrent.LSTM,),
}
_SIDES = (("dense_i", "ih"), ("dense_h", "hh"))


def name_of(kind: str, layer: int, backward: bool) -> str:
    """PyTorch's name of a matrix: "weight_ih_l0", "bias_hh_l1_reverse"."""
    return f"{kind}_l{layer}{'_reverse' if backward else ''}"


# ---- From matrices ----


def layers_of(
    operation: str,
    matrices: MatricesOfLayers,
    *,
    prefix: str = "",
    nonlinearity: str = "tanh",
    dtype: Any,
    dropout: float,
    time_major: bool,
    return_carry: bool,
    rngs: Any,
    options: Mapping[str, Any],
) -> Layer:
    """The layers that compute with these matrices; several as a `RecurrentStack`.

    Args:
        operation: what errors name.
        matrices: of all layers; arrays that nothing else may change.
        prefix: stands before the names in errors.
        nonlinearity: of cells with one gate.
        dtype, time_major, return_carry, options: of the layers.
        dropout, rngs: of the stack.

    Raises:
        ValueError: for matrices that are missing or whose shapes don't fit, naming them.
    """
    depth = 1 + max(layer for layer, _ in matrices)
    sides = sorted({backward for _, backward in matrices})
    layers: list[RNN | Bidirectional] = []
    features = None  # those of the inputs are the first layer's own
    for i in range(depth):
        rnns = []
        for backward in sides:
            of_side = matrices.get((i, backward), {})
            names = {kind: prefix + name_of(kind, i, backward) for kind in _KINDS}
            cell = _cell(operation, names, of_side, features, nonlinearity, dtype)
            rnns.append(RNN(cell, time_major=time_major, return_carry=return_carry, **options))
        features = sum(rnn.cell.hidden_features for rnn in rnns)
        if len(rnns) == 1:
            layers.append(rnns[0])
        else:
            layers.append(Bidirectional(*rnns, time_major=time_major, return_carry=return_carry))
    if depth == 1:
        return layers[0]
    # A dropout of rate 0 would be one more stream of random keys in the state.
    return RecurrentStack(layers, dropouts=dropout or None, rngs=rngs)


_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _cell(
    operation: str,
    names: dict[str, str],
    matrices: Matrices,
    features: int | None,
    nonlinearity: str,
    dtype: Any,
) -> RecurrentCell:
    """A cell of the matrices of one layer and direction, and of so many features if known."""
    for kind in ("weight_ih", "weight_hh"):
        if kind not in matrices or matrices[kind].ndim != 2:
            got = matrices[kind].shape if kind in matrices else "none"
            raise ValueError(f"{operation}: {names[kind]} must be a matrix, got {got}")
    rows, h = matrices["weight_hh"].shape
    features = matrices["weight_ih"].shape[1] if features is None else features
    if h == 0 or rows % h or rows // h not in _CELLS:
        raise ValueError(
            f"{operation}: {names['weight_hh']} must have shape (gates * h, h) of "
            f"{', '.join(map(str, _CELLS))} gates, got {(rows, h)}"
        )
    expected = {"weight_ih": (rows, features), "bias_ih": (rows,), "bias_hh": (rows,)}
    for kind, shape in expected.items():
        if kind in matrices and matrices[kind].shape != shape:
            raise ValueError(
                f"{operation}: {names[kind]} must have shape {shape}, got {matrices[kind].shape}"
            )
    if ("bias_ih" in matrices) != ("bias_hh" in matrices):
        raise ValueError(
            f"{operation}: {names['bias_ih']} and {names['bias_hh']} come together, got one of them"
        )
    cls = _CELLS[rows // h]
    activation = {"activation_fn": NONLINEARITIES[nonlinearity]} if cls is SimpleCell else {}
    param_dtype = matrices["weight_hh"].dtype
    zeros = nnx.initializers.zeros
    biased = "bias_ih" in matrices
    cell = cls(
        features,
        h,
        use_bias=biased,
        use_recurrent_bias=biased,
        kernel_init=zeros,
        recurrent_kernel_init=zeros,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(0),
        **activation,
    )
    for name, side in _SIDES:
        layer = getattr(cell, name)
        layer.kernel.set_value(matrices[f"weight_{side}"].T)
        if biased:
            layer.bias.set_value(matrices[f"bias_{side}"])
    converted: RecurrentCell = cell
    return converted


# ---- To matrices ----


def matrices_of(
    operation: str,
    layer: Any,
    classes: tuple[Any, ...] = tuple(_FUNCTIONS),
    biased: bool = False,
) -> MatricesOfLayers:
    """The matrices of a layer or a stack, copied.

    Args:
        operation: what errors name.
        layer: an `RNN`, `Bidirectional` or `RecurrentStack`.
        classes: those that cells may have.
        biased: all biases are there, zeros for those that the layers have not; else only if the
            layers have one.

    Raises:
        TypeError: for other layers and cells, subclasses included.
        ValueError: for what PyTorch and cuDNN have not, naming it.
    """
    layers = _layers(operation, layer)
    _check_same(operation, "class", {name: type(one).__name__ for name, one in layers.items()})
    cells: dict[tuple[int, bool], RecurrentCell] = {}
    names = {}
    for i, (name, one) in enumerate(layers.items()):
        for backward, (side, rnn) in enumerate(_directions(operation, name, one).items()):
            cells[i, bool(backward)] = rnn.cell
            names[i, bool(backward)] = f"{side}.cell"
    for key, cell in cells.items():
        _check_cell(operation, names[key], cell, classes)
    functions = {names[key]: cell.function.__name__ for key, cell in cells.items()}
    _check_same(operation, "function", functions)
    units = {names[key]: cell.hidden_features for key, cell in cells.items()}
    _check_same(operation, "hidden_features", units)
    biased = biased or any(
        getattr(cell, name).bias is not None for cell in cells.values() for name, _ in _SIDES
    )
    return {key: _matrices(cell, biased) for key, cell in cells.items()}


def _layers(operation: str, layer: Any) -> dict[str, Any]:
    """The layers by the names that errors give them."""
    if type(layer) is not RecurrentStack:
        return {"layer": layer}
    if layer.skip is not None or any(norm is not None for norm in layer.norms):
        raise ValueError(
            f"{operation}: a RecurrentStack must have neither norms nor a skip, which PyTorch and "
            "cuDNN have not"
        )
    return {f"layers[{i}]": one for i, one in enumerate(layer.layers)}


def _directions(operation: str, name: str, layer: Any) -> dict[str, RNN]:
    """An RNN, or two of them, by their names."""
    if type(layer) is RNN:
        if layer.reverse:
            raise ValueError(
                f"{operation}: {name} must not be reversed: PyTorch and cuDNN run backward only "
                "beside a layer that runs forward"
            )
        return {name: layer}
    if type(layer) is not Bidirectional:
        raise TypeError(
            f"{operation}: {name} must be an RNN, a Bidirectional or, around them, a "
            f"RecurrentStack, got {type(layer).__module__}.{type(layer).__name__}"
        )
    if layer.merge_fn not in _CONCATENATIONS:
        raise ValueError(
            f"{operation}: {name} must concatenate its outputs, got merge_fn {layer.merge_fn}"
        )
    return {f"{name}.{side}": getattr(layer, side) for side in ("forward_rnn", "backward_rnn")}


# nnx.Bidirectional has a function of its own, which `from_flax` takes over.
_CONCATENATIONS = (
    concatenated,
    inspect.signature(nnx.Bidirectional.__init__).parameters["merge_fn"].default,
)


def _check_cell(operation: str, name: str, cell: Any, classes: tuple[Any, ...]) -> None:
    if type(cell) not in classes:
        expected = " or ".join(cls.__name__ for cls in classes)
        raise TypeError(f"{operation}: {name} must be of {expected}, got {type(cell).__name__}")
    if cell.function not in _FUNCTIONS[type(cell)]:
        known = ", ".join(function.__name__ for function in _FUNCTIONS[type(cell)])
        raise ValueError(
            f"{operation}: {name} must compute what PyTorch and cuDNN do, {known}, got "
            f"{cell.function.__name__}"
        )
    for layer, _ in _SIDES:
        check_affine(operation, f"{name}.{layer}", getattr(cell, layer))
    check_layers(f"{operation}: {name}", cell)


def _check_same(operation: str, what: str, values: dict[str, Any]) -> None:
    first = next(iter(values))
    for name, value in values.items():
        if value != values[first]:
            raise ValueError(
                f"{operation}: {what} must be the same everywhere, got {values[first]} of {first} "
                f"and {value} of {name}"
            )


def _matrices(cell: RecurrentCell, biased: bool) -> Matrices:
    matrices = {}
    for name, side in _SIDES:
        layer = getattr(cell, name)
        kernel = dense_kernel(layer)
        matrices[f"weight_{side}"] = jnp.copy(kernel.T)
        if biased and layer.bias is None:
            matrices[f"bias_{side}"] = jnp.zeros(kernel.shape[1], kernel.dtype)
        elif biased:
            matrices[f"bias_{side}"] = jnp.copy(layer.bias[...])
    return matrices
