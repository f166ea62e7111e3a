"""How the rows of a pattern are cut into units of about as many entries, whatever their lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _ffi
from jaxsparse.batching import over_batch
from jaxsparse.layouts.kind import LayoutKind
from jaxsparse.pattern import is_concrete, to_device

if TYPE_CHECKING:
    from jaxsparse.topology import Topology

NO_CUTS = (2,)
"""The shape of the zeros that are passed where no cuts come with a pattern."""


class RowCuts(LayoutKind):
    """Cuts of the rows of a pattern, and of its transpose: a pair, either of which may be None.

    As ffi/cuda/row_cuts.h says. Kernels for graphs take them, whose rows have very different
    lengths; where a topology has none other kernels serve. The package registers it behind the
    kinds whose arrays older files have.
    """

    name = "row_cuts"
    derived = True

    def make(self, topology: Topology, **options: Any) -> Any:
        cuts = _of_both(topology, np.asarray)
        return None if cuts is None else to_device(cuts)

    def make_traced(self, topology: Topology, **options: Any) -> Any:
        return _of_both(topology, jnp.asarray)

    def transpose(self, layout: Any, transposed: Topology) -> Any:
        return layout[::-1]

    def operands(self, topology: Topology, *, given: bool) -> tuple[Any, ...]:
        """Cuts of each pattern that there is; zeros for none."""
        cuts = topology.layouts.get(self.name) if given else None
        # Beside a traced pattern a part of the program, not a constant that this takes.
        traced = isinstance(topology.row_offsets, jax.core.Tracer)
        none = (jnp if traced else np).zeros((*topology.batch_shape, *NO_CUTS), np.int32)
        parts = 2 if topology.has_transpose else 1
        return tuple(none if x is None else x for x in (cuts or (None, None))[:parts])

    def with_transpose(self, layout: Any, topology: Topology) -> Any:
        return self._made_anew(topology)

    def without_transpose(self, layout: Any) -> Any:
        return None if layout[0] is None else (layout[0], None)

    def pad(self, layout: Any, padded: Topology) -> Any:
        """Where more places count as stored there may be none."""
        return self._made_anew(padded)

    def _made_anew(self, topology: Topology) -> Any:
        known = is_concrete(topology.row_offsets, topology.column_indices)
        return self.make(topology) if known else self.make_traced(topology)

    def verify(self, layout: Any, topology: Topology) -> None:
        expected = self.make(topology) or (None, None)
        if not all(
            one is other if other is None else np.array_equal(one, other)
            for one, other in zip(layout, expected, strict=True)
        ):
            raise ValueError(f"the cuts of rows of {topology!r} are not those of its offsets")


def _of_both(topology: Topology, as_array: Any) -> tuple[Any, Any] | None:
    (m, k), t, nse = topology.shape, topology.transposed_pattern, topology.nse
    rows = row_cuts(as_array(topology.row_offsets), k, nse)
    columns = None if t is None else row_cuts(as_array(t.row_offsets), m, nse)
    return None if rows is None and columns is None else (rows, columns)


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
