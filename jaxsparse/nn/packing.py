"""Sparse recurrent weights of a model, laid out for a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsparse import recurrent
from jaxsparse.device import has_gpu
from jaxsparse.nn.cells import RecurrentCell
from jaxsparse.nn.linear import SparseLinear, as_integer
from jaxsparse.recurrent.layout import ScanLayouts


def pack(model: nnx.Module, *, batch: int, dtype: Any = None, device: Any = None) -> None:
    """Lays the sparse recurrent weights of a model out for persistent scans, in place.

    Under ``nnx.jit`` a model is an argument, whose patterns are not known when scans are made:
    their layouts must be part of it, or they stay in dense form if that fits. Call this once, after
    the model is made or restored, and after each change of a pattern. Without a GPU it does
    nothing.

    A layout is made for one batch size, dtype and kind of GPU; it is not for checkpoints:
    :func:`unpack` a model before its whole state is saved.

    Args:
        model: a layer or model with `RecurrentCell` in it.
        batch: rows of a batch on one device, the product of all batch dimensions.
        dtype: of the computation; by default each cell's ``dtype`` or, without one, its
            ``param_dtype``.
        device: a description of the GPU (`jaxsparse.Device`) to lay out for, whether it
            is here or not.

    Raises:
        TypeError: if ``batch`` is no integer.
        ValueError: if weights do not fit the GPU, saying where in the model and why, or their
            pattern is not concrete.

    >>> from jaxsparse.nn import RNN, LSTMCell
    >>> from jaxsparse import H200
    >>> layer = RNN(LSTMCell(32, 64, recurrent_sparsity=0.9, rngs=nnx.Rngs(0)))
    >>> pack(layer, batch=4, device=H200)
    >>> list(layer.cell.dense_h.topology[...].layouts)
    ['tile_starts', 'scan_layout']
    """
    batch = as_integer("pack", "batch", batch)
    if device is None and not has_gpu():
        return
    for path, cell in _sparse_cells(model):
        state_dtype = jnp.dtype(dtype or cell.dtype or cell.param_dtype)
        layer = cell.dense_h
        try:
            packed = recurrent.pack(
                layer.weight.astype(state_dtype), batch=batch, dtype=state_dtype, device=device
            )
        except ValueError as error:
            place = ".".join(map(str, path)) or "the layer itself"
            raise ValueError(f"pack: at {place}: {error}") from error
        # Layouts are kept and found again: a donated model must not delete them.
        layer.topology[...] = jax.tree.map(jnp.copy, packed.topology)


def unpack(model: nnx.Module) -> None:
    """Takes away what :func:`pack` put into a model: its state is as it was made.

    >>> from jaxsparse.nn import RNN, LSTMCell
    >>> from jaxsparse import H200
    >>> layer = RNN(LSTMCell(32, 64, recurrent_sparsity=0.9, rngs=nnx.Rngs(0)))
    >>> pack(layer, batch=4, device=H200)
    >>> unpack(layer)
    >>> list(layer.cell.dense_h.topology[...].layouts)
    ['tile_starts']
    """
    for _, cell in _sparse_cells(model):
        topology = cell.dense_h.topology
        layouts = dict(topology[...].layouts)
        layouts.pop(ScanLayouts.name, None)
        topology[...] = topology[...].with_layouts(layouts)


def _sparse_cells(model: nnx.Module) -> list[tuple[Any, Any]]:
    return [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, RecurrentCell) and isinstance(module.dense_h, SparseLinear)
    ]
