"""How the rows of a pattern are cut into units of about as many entries, whatever their lengths.

As ffi/cuda/row_cuts.h says. Kernels for graphs take them, whose rows have very different lengths.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxsparse import _ffi
from jaxsparse.batching import over_batch

NO_CUTS = (2,)
"""The shape of the zeros that are passed where no cuts come with a pattern."""


def row_cuts(row_offsets: Any, column_count: int, nse: int) -> Any:
    """Where each unit begins, and the last one ends: the row and the entry, side by side.

    Args:
        row_offsets: int32 ``(..., m + 1)``, an array of NumPy, or of JAX in a program.
        column_count: of the matrix.
        nse: stored entries, padding included.

    Returns:
        int32 ``(..., 2 * (units + 1))``, or None where no cuts come with such a pattern: rows are
        long, or not few places are stored.
    """
    m = row_offsets.shape[-1] - 1
    units = _ffi.row_units(m, column_count, nse)
    if not units:
        return None
    if isinstance(row_offsets, np.ndarray):
        cuts = np.zeros((*row_offsets.shape[:-1], 2 * (units + 1)), np.int32)
        for entry in np.ndindex(row_offsets.shape[:-1]):
            cuts[entry] = _of_one(np, row_offsets[entry], units)
        return cuts
    return over_batch(lambda x: _of_one(jnp, x, units), row_offsets.ndim - 1, row_offsets)


def _of_one(module: Any, offsets: Any, units: int) -> Any:
    m = offsets.shape[0] - 1
    places = offsets + _ffi.PLACES_OF_ROW * module.arange(m + 1, dtype=np.int32)  # of rows' begins
    wanted = _ffi.PLACES_OF_UNIT * module.arange(units + 1, dtype=np.int32)
    rows = module.searchsorted(places, wanted, side="right").astype(np.int32) - 1
    begins, ends = offsets[rows], offsets[module.minimum(rows + 1, m)]
    # Of the last places of a row, and behind all rows, there are no entries.
    within = module.minimum(begins + wanted - places[rows], ends)
    is_whole = ends - begins <= _ffi.MOST_OF_WHOLE_ROW
    at_end = ~is_whole & (within == ends)
    cuts = [rows + at_end, module.where(is_whole, begins, within)]
    return module.stack(cuts, axis=-1).astype(np.int32).reshape(-1)
