"""A layer of a recurrent stack, and its arguments checked."""

from __future__ import annotations

import dataclasses
import functools
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
    parameter_leaves,
)
from jaxsparse.recurrent.cells import Cell


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["recurrent", "input", "bias", "recurrent_bias", "parameters", "mask"],
    meta_fields=["cell", "skip"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    r"""A recurrent layer of a stack (`stack_scan`): its cell, its weights, what it does beside.

    Step t of layer l, whose input is the output :math:`o^{l-1}` of the layer below, or ``xs``:

    .. math::
        a_t = o^{l-1}_t W + b, \quad r_t = h_{t-1} U + c, \quad
        (\mathrm{carry}_t, y_t) = \operatorname{cell}(a_t, r_t, \mathrm{carry}_{t-1}), \quad
        o^l_t = m_t y_t + o^{l-n}_t

    A layer is a pytree: its arrays are leaves, all else is static.

    Args:
        cell: as that of ``scan``; it must return a y. Every layer may have another one.
        recurrent: U: ``(h, gates * h)``, or a CSR matrix ``(gates * h, h)``.
        input: W: ``(k, gates * h)`` for an input of k features, or a CSR matrix
            ``(gates * h, k)``. None in the first layer: ``xs`` are pre-activations, as those of
            ``scan``.
        bias: b ``(gates * h,)``.
        recurrent_bias: c ``(gates * h,)``.
        parameters: what the cell learns for each unit, as that of ``scan``.
        skip: n, a number of layers: adds the output of the layer n below to this one's; for
            layer n, counted from 1, that is ``xs``. The widths must be equal. None adds nothing.
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
    """

    def __init__(
        self,
        operation: str,
        index: int,
        layer: Any,
        carry: Any,
        shape: tuple[int, int],
        features: int,
    ):
        if not isinstance(layer, Layer):
            raise TypeError(
                f"{operation}: layer {index} must be a recurrent.Layer, got {type(layer).__name__}"
            )
        of_layer = f"{operation}: layer {index}"
        check_cell(of_layer, layer.cell)
        self.cell, self.name = layer.cell, of_layer
        self.recurrent = as_weights(of_layer, "recurrent", layer.recurrent)
        check_floating(of_layer, recurrent=_values(self.recurrent))
        h, rows = _oriented(self.recurrent)
        if h == 0 or rows == 0 or rows % h:
            raise ValueError(
                f"{of_layer}: recurrent must be (h, gates * h), or a CSR matrix (gates * h, h), "
                f"got shape {tuple(self.recurrent.shape)}"
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
        self.skip = layer.skip
        if self.skip is not None and (
            type(self.skip) is not int or not 1 <= self.skip <= index + 1
        ):
            raise ValueError(
                f"{of_layer}: skip must be None or a number of layers from 1 to {index + 1}, "
                f"got {self.skip!r}"
            )

    def _check_input(self, given: Any, features: int) -> None:
        self.input = as_weights(self.name, "input", given)
        check_floating(self.name, input=_values(self.input))
        k, columns = _oriented(self.input)
        if k != features or columns == 0 or columns % self.h:
            raise ValueError(
                f"{self.name}: input must be (k, gates * h), or a CSR matrix (gates * h, k), for "
                f"an input of k = {features} features and h = {self.h} units, got shape "
                f"{tuple(self.input.shape)}"
            )
        self.input_gates = columns // self.h


def _values(matrix: Any) -> Any:
    return matrix.values if isinstance(matrix, CSR) else matrix


def _oriented(matrix: Any) -> tuple[int, int]:
    """The shape of weights that a row of features is multiplied by, from the left."""
    rows, columns = matrix.shape
    return (columns, rows) if isinstance(matrix, CSR) else (rows, columns)
