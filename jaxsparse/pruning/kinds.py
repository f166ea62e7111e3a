"""The kinds of layers that can be sparse: a table from the dense type to its sparse twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import nnx

from jaxsparse.nn import (
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    PackedLinear,
    RecurrentCell,
    SimpleCell,
    SparseConv1x1,
    SparseLinear,
)
from jaxsparse.nn.convolution import obstacle_of_conv
from jaxsparse.pruning import layers, recurrent_layers


@dataclass(frozen=True)
class Kind:
    """How layers of one type become sparse, and dense again.

    Args:
        sparse: the type of the sparse layer.
        weights: dense layer -> its matrices (outputs, inputs) that would be sparse.
        obstacle: dense layer -> why it can't be sparse, or None.
        to_sparse: dense layer -> a sparse one with a copy of its weights that are not 0.
        to_dense: sparse layer -> a dense one with a copy of its weights.
        prepare: (sparse layer, arguments of a call) makes it ready for such calls, in place; it
            returns a remark for the table, or None. None if there is nothing to do.
        to_packed: (sparse layer, its inputs) -> layers whose weights are packed for few columns, by
            the names of their forms, "cells" and "gaps", or why they can't be, because they would
            be rounded more than the layer does for instance. Inputs have shapes and dtypes. With
            ``dtype=``, if weights of one are asked for.
        packed: the type of such a layer, which ``to_dense`` takes too; None if it is that of
            ``sparse``, or there is none.
        has: layer, dense or sparse -> whether it is of this kind; others of its type are as layers
            that have none.
    """

    sparse: type[nnx.Module]
    weights: Callable[[Any], list[np.ndarray]]
    obstacle: Callable[[Any], str | None]
    to_sparse: Callable[[Any], nnx.Module]
    to_dense: Callable[[Any], nnx.Module]
    prepare: Callable[..., str | None] | None = None
    to_packed: Callable[..., Mapping[str, nnx.Module] | str] = lambda *_, **__: (
        "its type has no packed form"
    )
    packed: type[nnx.Module] | None = None
    has: Callable[[Any], bool] = lambda layer: True


def _of_linear(layer: nnx.Linear) -> list[np.ndarray]:
    return [np.asarray(layer.kernel[...]).T]


def _of_conv(layer: nnx.Conv) -> list[np.ndarray]:
    return [np.asarray(layer.kernel[...]).reshape(-1, layer.out_features).T]


def _of_linear_general(layer: nnx.LinearGeneral) -> list[np.ndarray]:
    return [np.asarray(layer.kernel[...]).reshape(math.prod(layer.in_features), -1).T]


def _recurrent(cls: type[nnx.Module], prepare: Callable[..., str | None]) -> Kind:
    # Sparse or dense, a recurrent layer is of one type: its cell's matrices are what changes.
    return Kind(
        sparse=cls,
        weights=recurrent_layers.weights,
        obstacle=recurrent_layers.obstacle,
        to_sparse=recurrent_layers.to_sparse,
        to_dense=recurrent_layers.to_dense,
        prepare=prepare,
    )


KINDS: Mapping[type[nnx.Module], Kind] = MappingProxyType(
    {
        nnx.Linear: Kind(
            sparse=SparseLinear,
            weights=_of_linear,
            obstacle=layers.obstacle_of_linear,
            to_sparse=SparseLinear.from_dense,
            to_dense=layers.dense_linear,
            to_packed=layers.packed_linear,
            packed=PackedLinear,
        ),
        # The projections of nnx.MultiHeadAttention.
        nnx.LinearGeneral: Kind(
            sparse=layers.SparseLinearGeneral,
            weights=_of_linear_general,
            obstacle=layers.obstacle_of_linear_general,
            to_sparse=layers.SparseLinearGeneral.from_dense,
            to_dense=layers.dense_linear_general,
            to_packed=layers.packed_linear_general,
        ),
        nnx.Conv: Kind(
            sparse=SparseConv1x1,
            weights=_of_conv,
            obstacle=obstacle_of_conv,
            to_sparse=SparseConv1x1.from_dense,
            to_dense=layers.dense_conv,
            prepare=layers.remark_on_conv,
            has=lambda layer: all(size == 1 for size in layer.kernel_size),
        ),
        RNN: _recurrent(RNN, recurrent_layers.prepare),
        Bidirectional: _recurrent(Bidirectional, recurrent_layers.prepare),
        # Cells that the model steps itself.
        SimpleCell: _recurrent(SimpleCell, recurrent_layers.prepare_cell),
        GRUCell: _recurrent(GRUCell, recurrent_layers.prepare_cell),
        LSTMCell: _recurrent(LSTMCell, recurrent_layers.prepare_cell),
        RecurrentCell: _recurrent(RecurrentCell, recurrent_layers.prepare_cell),
    }
)
