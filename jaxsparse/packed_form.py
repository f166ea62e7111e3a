"""The form of a packed matrix: how it is to be packed, and of what shapes its arrays must be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsparse.ops.packed_places import (
    LANES,
    PANEL_COLUMNS,
    SIXTEEN_BITS,
    STRIP_ROWS,
    masks_of_panel,
)
from jaxsparse.quantization import LARGEST

if TYPE_CHECKING:
    from jaxsparse.packed import Packed

DTYPES = (*SIXTEEN_BITS, *LARGEST)
"""What numbers may be."""

MOST_PARTS = 8


def cell_for(row_offsets: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> int:
    """Pairs take fewer instructions: of few entries, or of both of most, hardly more bytes.

    A random pattern has 0.33 of its places in pairs if it is 82 % sparse.
    """
    nnz, places = int(row_offsets[-1]), shape[0] * shape[1]
    pairs = columns[:nnz] // 2
    begins = np.append(True, pairs[1:] != pairs[:-1])[:nnz]
    begins[row_offsets[:-1][row_offsets[:-1] < nnz]] = True
    in_pairs = 2 * np.count_nonzero(begins)  # places, by columns that rise
    return 2 if in_pairs < 0.33 * places or nnz > 0.9 * in_pairs else 1


def most_parts(k: int) -> int:
    """The most parts into which k columns are cut, so that each has a panel."""
    return min(MOST_PARTS, max(1, math.ceil(k / PANEL_COLUMNS)))


def parts_for(m: int, k: int) -> int:
    """The number of parts with which a product is predicted to take least on an H200."""

    def microseconds(parts: int) -> float:
        # A block of sixteen warps has up to four parts, and others those that are left: a cluster.
        ranges = math.gcd(parts, 4)
        blocks = parts // ranges
        # More than two are in one of eight groups of multiprocessors, of which some are smaller.
        at_once = 132 if blocks <= 2 else (8 * (16 // blocks) - 2) * blocks
        rounds = math.ceil(math.ceil(m * ranges / (16 * STRIP_ROWS)) * blocks / at_once)
        # Fewer warps that copy have others wait; each doubling pads streams by 3 to 10 %.
        panel = (1.05 if ranges == 4 else 1.2) * (1 + 0.05 * math.log2(parts / 4))
        panels = math.ceil(k / (PANEL_COLUMNS * parts))
        # A block makes one tile after another; each cluster waits for its own first words.
        if blocks == 1:
            return 8 + rounds * panels * panel
        return rounds * (6.5 + panels * panel) + 0.5 * blocks

    return min(range(1, most_parts(k) + 1), key=microseconds)


def check_shapes(operation: str, packed: Packed) -> None:
    """Raises a ValueError, naming the array, unless all are of a matrix of the shape; any array."""
    m, k = packed.shape
    pieces = math.ceil(m / STRIP_ROWS) * packed.parts
    count = math.ceil(k / (PANEL_COLUMNS * packed.parts))
    integers, wide = np.dtype(np.int32), np.dtype(np.float32)
    if packed.quantized != (packed.scales is not None):
        raise ValueError(
            f"{operation}: scales of a packed matrix must be there for values of 8 bits alone, got "
            f"{'none' if packed.scales is None else 'some'} for {packed.dtype}"
        )
    if packed.quantized and packed.cell != 1:
        raise ValueError(
            f"{operation}: cell of a packed matrix of {packed.dtype} must be 1, got {packed.cell}"
        )
    expected: dict[str, tuple[tuple[int | None, ...], tuple[Any, ...]]] = {
        "rows": ((m,), (integers,)),  # first, as it tells most
        "values": ((None, (4 if packed.quantized else 2) * LANES), DTYPES),
        "masks": ((pieces, count * masks_of_panel(packed.cell), LANES), (np.dtype(np.uint32),)),
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


def _listed(dtypes: Any) -> str:
    *names, last = map(str, dtypes)
    return f"{', '.join(names)} or {last}" if names else last
