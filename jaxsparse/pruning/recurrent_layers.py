"""Recurrent layers and cells that get sparse weights, and dense ones again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import nnx

from jaxsparse.nn import RNN, Bidirectional, RecurrentCell, SparseLinear, pack, unpack
from jaxsparse.pruning.layers import dense_linear, obstacle_of_linear

Recurrent = RNN | Bidirectional | RecurrentCell

_PARTS = ("dense_i", "dense_h")


def _cells(layer: Recurrent) -> list[RecurrentCell]:
    """The cells of a layer, a shared one once; of a cell itself."""
    if isinstance(layer, RecurrentCell):
        return [layer]
    rnns = [layer] if isinstance(layer, RNN) else [layer.forward_rnn, layer.backward_rnn]
    return list({id(rnn.cell): rnn.cell for rnn in rnns}.values())


def _dense_parts(layer: Recurrent) -> Iterator[tuple[RecurrentCell, str, nnx.Linear]]:
    for cell in _cells(layer):
        for name in _PARTS:
            part = getattr(cell, name)
            if type(part) is nnx.Linear and obstacle_of_linear(part) is None:
                yield cell, name, part


def weights(layer: Recurrent) -> list[np.ndarray]:
    """The dense matrices of the cells, inputs' and states'."""
    return [np.asarray(part.kernel[...]).T for _, _, part in _dense_parts(layer)]


def obstacle(layer: Recurrent) -> str | None:
    """Why a recurrent layer can't become sparse, or None."""
    if any(_dense_parts(layer)):
        return None
    parts = [getattr(cell, name) for cell in _cells(layer) for name in _PARTS]
    found = [obstacle_of_linear(part) for part in parts if type(part) is nnx.Linear]
    return found[0] if found else "it has no dense matrices"


def to_sparse(layer: Recurrent) -> Recurrent:
    """A copy in which those matrices that have zeros are sparse."""

    def replace(layer: Recurrent) -> None:
        for cell, name, part in list(_dense_parts(layer)):
            if not np.asarray(part.kernel[...]).all():
                setattr(cell, name, SparseLinear.from_dense(part))

    return _changed(layer, replace)


def to_dense(layer: Recurrent) -> Recurrent:
    """A copy in which all matrices are dense."""

    def replace(layer: Recurrent) -> None:
        for cell in _cells(layer):
            for name in _PARTS:
                if isinstance(part := getattr(cell, name), SparseLinear):
                    setattr(cell, name, dense_linear(part))

    return _changed(layer, replace)


def _changed(layer: Recurrent, change: Callable[[Recurrent], None]) -> Recurrent:
    copy: Recurrent = nnx.clone(layer)
    change(copy)
    return copy


def prepare(layer: RNN | Bidirectional, inputs: Any, **options: Any) -> str | None:
    """Lays sparse weights out for scans of the batch size of a call, where a GPU runs them.

    Returns:
        Why they are not laid out, or None.
    """
    time_major = options.get("time_major")
    time_major = layer.time_major if time_major is None else time_major
    steps = inputs.shape[0 if time_major else -2]
    return _packed(layer, math.prod(inputs.shape[:-1]) // max(steps, 1))


def prepare_cell(cell: RecurrentCell, carry: Any, inputs: Any) -> str | None:
    """The same for the steps that a cell makes."""
    return _packed(cell, math.prod(inputs.shape[:-1]))


def _packed(layer: Recurrent, batch: int) -> str | None:
    try:
        pack(layer, batch=batch)
    except ValueError as error:
        # What will run is the dense form or the plain path, in all cells, so that is measured.
        unpack(layer)
        return str(error)
    return None
