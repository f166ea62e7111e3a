"""Whether the arrays of a packed matrix belong together: their shapes, and what they hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxsparse.ops import packed_gaps, packed_streams
from jaxsparse.ops.packed_places import numbers_of_row, strip_rows
from jaxsparse.ops.packed_streams import LANES
from jaxsparse.packed_form import DTYPES

if TYPE_CHECKING:
    from jaxsparse.packed import Packed


def check_shapes(operation: str, packed: Packed) -> None:
    """Raises a ValueError, naming the array, unless all are of a matrix of the shape; any array."""
    m, k = packed.shape
    pieces = math.ceil(m / strip_rows(packed.cell)) * packed.parts
    integers, wide = np.dtype(np.int32), np.dtype(np.float32)
    if packed.quantized != (packed.scales is not None):
        raise ValueError(
            f"{operation}: scales of a packed matrix must be there for values of 8 bits alone, got "
            f"{'none' if packed.scales is None else 'some'} for {packed.dtype}"
        )
    if packed.cell == 0:
        count, masks = 1, (*packed.values.shape[:1], LANES)
    else:
        count = math.ceil(k / (packed_streams.PANEL_COLUMNS * packed.parts))
        masks = (pieces, count * packed_streams.masks_of_panel(packed.cell), LANES)
    if packed.quantized and packed.cell == 2:
        raise ValueError(
            f"{operation}: cell of a packed matrix of {packed.dtype} must be 0 or 1, got 2"
        )
    expected: dict[str, tuple[tuple[int | None, ...], tuple[Any, ...]]] = {
        "rows": ((m,), (integers,)),  # first, as it tells most
        "values": ((None, numbers_of_row(packed.cell, quantized=packed.quantized)), DTYPES),
        "masks": (masks, (np.dtype(np.uint32),)),
        "starts": ((pieces + 1,), (integers,)),
        "panels": ((pieces, count, 2), (integers,)),
    }
    if packed.scales is not None:
        expected["scales"] = ((m,), (wide,))
    if packed.sources is not None and packed.topology is not None:
        expected["sources"] = (packed.values.shape, (integers,))
        if packed.topology.shape != packed.shape:
            raise ValueError(
                f"{operation}: topology of a packed matrix {packed.shape} must have that shape, "
                f"got {packed.topology.shape}"
            )
    for name, (shape, dtypes) in expected.items():
        array = getattr(packed, name)
        got = array.shape
        if len(got) != len(shape) or any(
            b not in (None, a) for a, b in zip(got, shape, strict=True)
        ):
            wanted = str(shape).replace("None", "w")
            raise ValueError(
                f"{operation}: {name} of a packed matrix {packed.shape} with cells of "
                f"{packed.cell} in {packed.parts} parts must have shape {wanted}, got {got}"
            )
        if array.dtype not in dtypes:
            raise ValueError(
                f"{operation}: {name} of a packed matrix must be {_listed(dtypes)}, "
                f"got {array.dtype}"
            )


def check_arrays(operation: str, packed: Packed) -> None:
    """Raises a ValueError if arrays of the right shapes hold what no packed matrix has."""
    arrays = packed.values, packed.masks, packed.starts, packed.panels, packed.rows
    values, masks, starts, panels, rows = map(np.asarray, arrays)
    if values.shape[0] != starts[-1]:
        raise ValueError(
            f"{operation}: values must have {starts[-1]} rows, as starts say, got {values.shape[0]}"
        )
    if not np.array_equal(np.sort(rows), np.arange(packed.shape[0])):
        raise ValueError(f"{operation}: rows must name each row once")
    if values.dtype == jnp.float8_e4m3fn and np.isnan(values.astype(np.float32)).any():
        raise ValueError(
            f"{operation}: values of 8 bits must not be NaN, which their scales are instead"
        )
    if packed.scales is not None:
        scales = np.asarray(packed.scales)
        if (scales < 0).any() or np.isinf(scales).any():
            raise ValueError(f"{operation}: scales must be finite and not below 0, or NaN")
    if packed.cell == 0:
        expected_panels, steps = _panels_of_gaps(operation, packed)
    else:
        expected_panels, steps = packed_streams.panels_of(
            jnp.asarray(masks), cell=packed.cell, numbers=values.shape[1] // LANES
        )
    if starts[0] != 0 or not np.array_equal(np.diff(starts), steps):
        raise ValueError(f"{operation}: starts are not where the masks' words begin")
    if not np.array_equal(panels, expected_panels):
        raise ValueError(f"{operation}: panels are not what the masks read")
    if packed.sources is not None and packed.topology is not None:
        found = np.sort(np.asarray(packed.sources), axis=None)
        nnz, nse = int(packed.topology.row_offsets[-1]), packed.topology.nse
        if not np.array_equal(found[:nnz], np.arange(nnz)) or (found[nnz:] != nse).any():
            raise ValueError(
                f"{operation}: sources must name each of {nnz} entries once, and {nse} else"
            )


def _panels_of_gaps(operation: str, packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    """What panels and steps of pieces must be; that each number with a gap stands in the matrix."""
    (m, k), parts, starts = packed.shape, packed.parts, np.asarray(packed.starts)
    pieces = len(starts) - 1
    steps = np.zeros(pieces, np.int32)
    if packed.values.size and pieces and (np.diff(starts) >= 0).all():
        has_gap = np.asarray(packed_gaps.gaps_of(packed.masks)) > 0
        if np.asarray(packed.values).reshape(has_gap.shape)[~has_gap].any():
            raise ValueError(f"{operation}: values must be 0 where masks have no gap")
        places = packed_gaps.places(packed.masks, packed.starts, columns=k, parts=parts)
        row, column, piece = map(np.asarray, places)
        if (has_gap & ((row >= m) | (column >= k))).any():
            raise ValueError(f"{operation}: masks have gaps that lead out of the matrix")
        of_step = packed_gaps.by_streams(has_gap)
        of_streams = of_step.reshape(-1, *of_step.shape[2:])
        of_piece = np.repeat(piece, of_step.shape[1])
        same = of_piece[1:] == of_piece[:-1]
        if (of_streams[1:] & ~of_streams[:-1] & same[:, None, None]).any():
            raise ValueError(f"{operation}: masks have gaps behind the last number of a stream")
        step = np.arange(len(piece)) + 1 - starts[piece]
        np.maximum.at(steps, piece, np.where(has_gap.any((1, 2)), step, 0))
    return np.stack([np.zeros_like(steps), steps], -1)[:, None], steps


def _listed(dtypes: Any) -> str:
    *names, last = map(str, dtypes)
    return f"{', '.join(names)} or {last}" if names else last
