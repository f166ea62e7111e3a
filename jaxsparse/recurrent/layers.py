"""A layer of a recurrent stack, and its arguments checked."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from jaxsparse.csr import CSR
from jaxsparse.ops.arguments import check_floating
from jaxsparse.recurrent.arguments import (
    as_array_of_rank,
    as_vector,
    as_weights,
    carry_leaves,
    check_cell,
    heads_and_sizes,
    parameter_leaves,
)
from jaxsparse.recurrent.cells import Cell
from jaxsparse.recurrent.layer_step import Norm


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "recurrent",
        "input",
        "bias",
        "recurrent_bias",
        "parameters",
        "norm_scale",
        "norm_shift",
        "mask",
    ],
    meta_fields=["cell", "skip", "norm", "norm_epsilon", "between"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    r"""A recurrent layer of a stack (`stack_scan`): its cell, its weights, what it does beside.

    Step t of layer l, whose input is the output :math:`o^{l-1}` of the layer below, or ``xs``:

    .. math::
        a_t = N(o^{l-1}_t) W + b, \quad r_t = h_{t-1} U + c, \quad
        (\mathrm{carry}_t, y_t) = \operatorname{cell}(a_t, r_t, \mathrm{carry}_{t-1}), \quad
        o^l_t = m_t y_t + o^{l-n}_t

    A layer is a pytree: its arrays are leaves, all else is static.

    Args:
        cell: as that of ``scan``; it must return a y. Every layer may have another one.
        recurrent: U: ``(h, gates * h)``; a CSR matrix ``(gates * h, h)``; or ``(heads, d, gates *
            d)``, the blocks of a block-diagonal matrix, as of ``scan``.
        input: W: ``(k, gates * h)`` for an input of k features; a CSR matrix ``(gates * h, k)``; or
            ``(heads, k / heads, gates * h / heads)``. None in the first layer: ``xs`` are
            pre-activations, as those of ``scan``.
        bias: b ``(gates * h,)``.
        recurrent_bias: c ``(gates * h,)``.
        parameters: what the cell learns for each unit, as that of ``scan``.
        skip: n, a number of layers: adds the output of the layer n below to this one's; for
            layer n, counted from 1, that is ``xs``. The widths must be equal. None adds nothing.
        norm: N, over the features of what comes in, for each step and row: None; "layer", the
            difference from their mean over its root mean square; "rms", the features over
            theirs.
        norm_scale: ``(k,)``, by which what is normalised is multiplied, or None.
        norm_shift: ``(k,)``, what is added to that, or None.
        norm_epsilon: is added to the mean square. Where a gradient keeps products, and in waves,
            that of "layer" is the mean of the squares less the square of the mean: where features
            hardly differ, it should be larger.
        between: a function ``(o, counts)`` of the whole output ``(T, B, k)`` of the layer below and
            of the steps that count, booleans ``(T, B)`` or None: what the layer takes in the place
            of o, ``(T, B, k')``. It may mix steps and rows, as a convolution or a batch norm does;
            so it waits until the layers below are through all steps.
        mask: m, by which y is multiplied, as in dropout: ``(T, B, h)``, or ``(1, B, h)`` for all
            steps alike.

    >>> import jax.numpy as jnp
    >>> from jaxsparse.recurrent import LSTM, Layer
    >>> layer = Layer(LSTM, recurrent=jnp.zeros((3, 12)), input=jnp.zeros((5, 12)))
    >>> layer.skip is None
    True
    """

    cell: Cell
    recurrent: Any
    input: Any = None
    bias: Any = None
    recurrent_bias: Any = None
    parameters: Any = None
    skip: int | None = None
    norm: str | None = None
    norm_scale: Any = None
    norm_shift: Any = None
    norm_epsilon: float = 1e-6
    between: Callable[[Any, Any], Any] | None = None
    mask: Any = None


class CheckedLayer:
    """The checked operands of a layer.

    Args:
        operation: what errors name.
        index: of the layer, for errors.
        layer: what is checked.
        carry: its initial carry.
        shape: T and B.
        features: of what comes in.
        side: of a pair, for errors.
    """

    def __init__(
        self,
        operation: str,
        index: int,
        layer: Layer,
        carry: Any,
        shape: tuple[int, int],
        features: int,
        side: str = "",
    ):
        of_layer = f"{operation}: {side}layer {index}"
        check_cell(of_layer, layer.cell)
        self.cell, self.name, self.features = layer.cell, of_layer, features
        self.between = layer.between
        self.recurrent = as_weights(of_layer, "recurrent", layer.recurrent)
        check_floating(of_layer, recurrent=_values(self.recurrent))
        _, h, rows = heads_and_sizes(self.recurrent)
        if h == 0 or rows == 0 or rows % h:
            raise ValueError(
                f"{of_layer}: recurrent must be (h, gates * h), (heads, d, gates * d), or a CSR "
                f"matrix (gates * h, h), got shape {tuple(self.recurrent.shape)}"
            )
        self.h, self.gates = h, rows // h
        self.input: Any = None
        self.input_gates = features // h
        if layer.input is not None:
            self._check_input(layer.input, features)
        elif index > 0:
            raise ValueError(f"{of_layer}: input is None, which only that of layer 0 may be")
        elif features == 0 or features % h:
            raise ValueError(
                f"{of_layer}: input is None, so the last dimension of xs must be gates * h, a "
                f"multiple of {h}, got {features}"
            )
        b = shape[1]
        self.carry, self.tree = carry_leaves(of_layer, "carry", carry, (b, h))
        self.bias, self.recurrent_bias = None, None
        if layer.bias is not None:
            self.bias = as_vector(of_layer, "bias", layer.bias, self.input_gates * h)
        if layer.recurrent_bias is not None:
            given = layer.recurrent_bias
            self.recurrent_bias = as_vector(of_layer, "recurrent_bias", given, rows)
        self.parameters, self.parameter_tree = parameter_leaves(
            of_layer, "parameters", layer.parameters, h
        )
        self.mask: Any = None
        if layer.mask is not None:
            self.mask = as_array_of_rank(of_layer, "mask", layer.mask, 3)
            check_floating(of_layer, mask=self.mask)
            if self.mask.shape not in ((*shape, h), (1, b, h)):
                raise ValueError(
                    f"{of_layer}: mask must have shape (T, B, h) = {(*shape, h)} or (1, B, h), "
                    f"got {self.mask.shape}"
                )
        self._check_norm(layer, features)
        self.skip = layer.skip
        if self.skip is not None and (
            type(self.skip) is not int or not 1 <= self.skip <= index + 1
        ):
            raise ValueError(
                f"{of_layer}: skip must be None or a number of layers from 1 to {index + 1}, "
                f"got {self.skip!r}"
            )

    @property
    def form(self) -> Any:
        """What both directions of a pair must share, beside what a scan of both asks for."""
        return (
            f"{self.h} units",
            f"{self.input_gates} gates",
            f"input {'None' if self.input is None else 'given'}",
            f"recurrent_bias {'None' if self.recurrent_bias is None else 'given'}",
        )

    def _check_norm(self, layer: Layer, features: int) -> None:
        self.norm: Norm | None = None
        vectors = {"norm_scale": layer.norm_scale, "norm_shift": layer.norm_shift}
        if layer.norm is None:
            if given := [name for name, x in vectors.items() if x is not None]:
                raise ValueError(f"{self.name}: {given[0]} is given, but norm is None")
            return
        if layer.norm not in ("layer", "rms"):
            raise ValueError(
                f"{self.name}: norm must be None, 'layer' or 'rms', got {layer.norm!r}"
            )
        if self.input is None:
            raise ValueError(f"{self.name}: norm needs the weights input, which are None")
        epsilon = layer.norm_epsilon
        if not isinstance(epsilon, int | float) or not 0 <= epsilon < math.inf:
            raise ValueError(
                f"{self.name}: norm_epsilon must be a number that is not negative, got {epsilon!r}"
            )
        self.norm = Norm(layer.norm, float(epsilon))
        self.norm_scale, self.norm_shift = (
            None if x is None else as_vector(self.name, name, x, features)
            for name, x in vectors.items()
        )

    def _check_input(self, given: Any, features: int) -> None:
        self.input = as_weights(self.name, "input", given)
        check_floating(self.name, input=_values(self.input))
        heads, k, columns = heads_and_sizes(self.input)
        if k != features or columns == 0 or columns % self.h or self.h % heads:
            raise ValueError(
                f"{self.name}: input must be (k, gates * h), (heads, k / heads, gates * h / "
                f"heads), or a CSR matrix (gates * h, k), for an input of k = {features} features "
                f"and h = {self.h} units, got shape {tuple(self.input.shape)}"
            )
        self.input_gates = columns // self.h


def _values(matrix: Any) -> Any:
    return matrix.values if isinstance(matrix, CSR) else matrix


def between_layers(
    operation: str,
    i: int,
    function: Callable[[Any, Any], Any],
    below: jax.Array,
    mask: Any,
    dtype: Any,
) -> jax.Array:
    """What a layer takes in the place of the output below it."""
    if not callable(function):
        raise TypeError(
            f"{operation}: layer {i}: between must be a function or None, got "
            f"{type(function).__name__}"
        )
    name = f"{operation}: layer {i}: what between returns"
    made = as_array_of_rank(
        f"{operation}: layer {i}", "what between returns", function(below, mask), 3
    )
    check_floating(name, between=made)
    if made.shape[:2] != below.shape[:2]:
        raise ValueError(
            f"{name} must have shape (T, B, k') = {(*below.shape[:2], 'k')}, got {made.shape}"
        )
    return made.astype(dtype)


def check_counts(operation: str, item: str, layers: Any, carries: Any) -> None:
    """TypeError or ValueError unless there are layers, and as many carries."""
    for name, x in (("layers", layers), ("carries", carries)):
        if not isinstance(x, list | tuple):
            raise TypeError(
                f"{operation}: {name} must be a list or a tuple, got {type(x).__name__}"
            )
    if not layers or len(layers) != len(carries):
        raise ValueError(
            f"{operation}: needs at least one {item}, and a carry for each, got {len(layers)} and "
            f"{len(carries)} carries"
        )
