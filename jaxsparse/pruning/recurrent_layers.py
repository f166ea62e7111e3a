"""Recurrent layers whose cells get sparse weights, and dense ones again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import nnx

from jaxsparse.nn import RNN, Bidirectional, RecurrentCell, SparseLinear, pack
from jaxsparse.pruning.layers import dense_linear, obstacle_of_linear

Recurrent = RNN | Bidirectional

_PARTS = ("dense_i", "dense_h")


def _cells(layer: Recurrent) -> list[RecurrentCell]:
    """The cells of a layer, a shared one once."""
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
    return None if any(_dense_parts(layer)) else "its cells have no dense matrices"


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


def prepare(layer: Recurrent, inputs: Any, **options: Any) -> None:
    """Lays sparse weights out for scans of the batch size of a call, where a GPU runs them."""
    time_major = options.get("time_major")
    time_major = layer.time_major if time_major is None else time_major
    steps = inputs.shape[0 if time_major else -2]
    try:
        pack(layer, batch=math.prod(inputs.shape[:-1]) // max(steps, 1))
    except ValueError:
        # They don't fit on the chip: what will run is the plain path, so that is measured.
        return
