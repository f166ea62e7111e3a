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


def cell_for(density: float) -> int:
    """Pairs take fewer instructions, and of few entries hardly more bytes."""
    return 2 if density < 0.18 else 1


def parts_for(m: int, k: int, most: int) -> int:
    """The number of parts by which the blocks of an H200 are done first."""
    groups = math.ceil(m / (8 * STRIP_ROWS))

    def clocks(parts: int) -> float:
        # The blocks of all parts are a cluster, in one of eight groups of multiprocessors.
        at_once = 132 if parts <= 2 else 8 * (16 // parts * parts)
        waves = math.ceil(groups * parts / at_once)
        panels = math.ceil(k / (PANEL_COLUMNS * parts))
        # Of eight strips a panel has 128 fragments. Each doubling pads streams by 3 to 10 %.
        return waves * (panels * 128 * 12 + 1000) * (1 + 0.05 * math.log2(parts)) + 500 * parts

    return min(range(1, most + 1), key=clocks)


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
