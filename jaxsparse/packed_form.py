"""The form of a packed matrix: how its numbers are to be laid out for a GPU."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxsparse.ops import packed_gaps
from jaxsparse.ops.packed_places import SIXTEEN_BITS
from jaxsparse.ops.packed_streams import LANES, PANEL_COLUMNS, STRIP_ROWS
from jaxsparse.quantization import LARGEST

DTYPES = (*SIXTEEN_BITS, *LARGEST)
"""What numbers may be."""

MOST_PARTS = 8
MOST_COLUMNS_OF_GAPS = 16
"""Of x, for which gaps can be faster than cells."""

_MULTIPROCESSORS = 132  # of an H200, whose times are predicted
_BYTES = 4.2e6  # that come from its memory in a microsecond
_BYTES_OF_GAPS = {2: 4.7e6, 1: 3.9e6}  # of numbers of so many bytes: piece by piece, in order
_CLOCKS = 1755  # in a microsecond
_COLUMNS_OF_PART = 8192  # at most, of a matrix with gaps: multiprocessors keep x of them
_OF_PART_BY_SIXTEEN = 6144  # the same where x has more than 8 columns


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


def form_for(
    row_offsets: np.ndarray,
    columns: np.ndarray,
    row_order: np.ndarray,
    *,
    shape: tuple[int, int],
    n: int | None,
    dtype: Any,
) -> int:
    """The cell with which a product by n columns is predicted to take least; None: by many."""
    cell = 1 if jnp.dtype(dtype) in LARGEST else cell_for(row_offsets, columns, shape)
    if n is None or n > MOST_COLUMNS_OF_GAPS:
        return cell
    of_gaps = microseconds_of_gaps(np.diff(row_offsets)[row_order], shape[1], n, dtype)
    nnz = int(row_offsets[-1])
    return 0 if of_gaps < microseconds_of_streams(nnz, shape, cell, dtype, n) else cell


def range_of_parts(k: int, cell: int) -> tuple[int, int]:
    """The fewest and the most parts into which k columns are cut.

    Each has a panel; of a matrix with gaps multiprocessors keep the x that belongs to a part.
    """
    most = min(MOST_PARTS, max(1, math.ceil(k / PANEL_COLUMNS)))
    least = max(1, math.ceil(k / _COLUMNS_OF_PART)) if cell == 0 else 1
    return least, max(least, most)


def parts_for(m: int, k: int, cell: int, n: int | None = None) -> int:
    """The number of parts with which a product by n columns is predicted to take least."""
    return _parts_of_gaps(m, k, n or 1) if cell == 0 else _parts_of_streams(m, k)


# ---- Cells of 1 and 2: streams, multiplied by tensor cores ----


def _parts_of_streams(m: int, k: int) -> int:
    """Those of the least time; of pairs they are the same."""
    _, most = range_of_parts(k, 1)
    return min(range(1, most + 1), key=lambda parts: _by_instructions(m, k, parts))


def microseconds_of_streams(
    nnz: int, shape: tuple[int, int], cell: int, dtype: Any, n: int = 1
) -> float:
    """What a product with n columns, at most 16, takes: instructions for panels, or bytes.

    All places take instructions, stored or not; those of pairs take 0.58 of the others', and those
    of e4m3 1.1 times as long. Four streams of bytes are padded more than two of other numbers.
    """
    m, k = shape
    of_panel = 0.58 if cell == 2 else 1.1 if dtype == jnp.float8_e4m3fn else 1
    panels = _by_instructions(m, k, _parts_of_streams(m, k), of_panel)
    of_entry = 1.25 if jnp.dtype(dtype) in LARGEST else 2.1
    more = 3 if n > 8 else 0
    return more + max(panels, 4.5 + (of_entry * nnz + m * k / (8 * cell)) / _BYTES)


def _by_instructions(m: int, k: int, parts: int, of_panel: float = 1) -> float:
    # A block of sixteen warps has up to four parts, and others those that are left: a cluster.
    ranges = math.gcd(parts, 4)
    blocks = parts // ranges
    # More than two are in one of eight groups of multiprocessors, of which some are smaller.
    at_once = _MULTIPROCESSORS if blocks <= 2 else (8 * (16 // blocks) - 2) * blocks
    rounds = math.ceil(math.ceil(m * ranges / (16 * STRIP_ROWS)) * blocks / at_once)
    # Fewer warps that copy have others wait; each doubling pads streams by 3 to 10 %.
    panel = of_panel * (1.05 if ranges == 4 else 1.2) * (1 + 0.05 * math.log2(parts / 4))
    panels = math.ceil(k / (PANEL_COLUMNS * parts))
    # A block makes one tile after another; each cluster waits for its own first words.
    if blocks == 1:
        return 8 + rounds * panels * panel
    return rounds * (6.5 + panels * panel) + 0.5 * blocks


# ---- Cell 0: gaps, multiplied by lanes, or by tensor cores ----


def _parts_of_gaps(m: int, k: int, n: int) -> int:
    """As many as give each multiprocessor 3 pieces, unless they are short."""
    parts, most = range_of_parts(k, 0)
    if n > 8:
        parts = max(parts, min(math.ceil(k / _OF_PART_BY_SIXTEEN), most))
    pieces = parts * math.ceil(m / packed_gaps.STRIP_ROWS)
    while 2 * parts <= most and pieces < 3 * _MULTIPROCESSORS and k >= 1024 * parts:
        parts, pieces = 2 * parts, 2 * pieces
    return parts


def microseconds_of_gaps(lengths: np.ndarray, k: int, n: int, dtype: Any) -> float:
    """What a product with n columns takes: the longest of what passes at the same time.

    Args:
        lengths: entries of each row, longest first, which is nearly the order of strips.
        k: columns of the matrix.
        n: columns of x, at most 16.
        dtype: of the numbers. Each has half a byte more, for its gap.
    """
    entries, dtype = (
        entries_of_gaps(lengths, k, _parts_of_gaps(len(lengths), k, n)),
        jnp.dtype(dtype),
    )
    of_memory = entries * (float(dtype.itemsize) + 0.5) / _BYTES_OF_GAPS[dtype.itemsize]
    if n == 1:
        of_entry = _INSTRUCTIONS + _INSTRUCTIONS_OF_8_BITS.get(dtype, 0)
        clocks = entries / LANES * of_entry / (4 * _MULTIPROCESSORS)  # each takes one of four warps
        return 4 + max(of_memory, clocks / _CLOCKS)
    planes = math.ceil(n / 8)
    clocks = max(entries * _SHARED_BYTES * planes / 128, entries / 64 * _CLOCKS_OF_PRODUCT)
    return 4 + max(of_memory, 1.1 * clocks / _MULTIPROCESSORS / _CLOCKS)


# Of a warp for an entry of each of its lanes, as an H200 was measured.
_INSTRUCTIONS = 6.2
# Of shared memory for an entry and 8 columns of x; of one of four tensor cores for 16 entries.
_SHARED_BYTES, _CLOCKS_OF_PRODUCT = 17, 7
# More of them to convert a number, counted in machine code.
_INSTRUCTIONS_OF_8_BITS = {jnp.dtype(jnp.int8): 1.1, jnp.dtype(jnp.float8_e4m3fn): 0.7}


def entries_of_gaps(lengths: np.ndarray, k: int, parts: int) -> float:
    """About how many entries a pattern takes, those that shorten gaps and padding included.

    Were the columns of each row random, advances of a stream, with each number up to 15 places,
    would be geometric and cut off there, and its count that of a renewal process. The longest of a
    row's 8 streams is 1.4 standard deviations longer than the mean. Of one part the rows of a strip
    have equally long ones, of more it is nearly the longest of 64. Rounding adds half a step.
    """
    per_row = packed_gaps.STREAMS_OF_ROW
    rows = np.zeros(-(-len(lengths) // packed_gaps.STRIP_ROWS) * packed_gaps.STRIP_ROWS)
    rows[: len(lengths)] = lengths
    longest = rows.reshape(-1, packed_gaps.STRIP_ROWS).max(1, initial=0)  # of each strip
    density = np.clip(longest / max(k, 1), 1e-6, 1)
    behind = np.arange(packed_gaps.LARGEST_GAP)[:, None]
    farther = (1 - density) ** behind  # how likely an advance is longer
    mean = farther.sum(0)
    variance = ((2 * behind + 1) * farther).sum(0) - mean**2
    of_stream = k / (per_row * parts) / mean
    deviations = 1.4 if parts == 1 else 2.0
    padding = deviations * np.sqrt(of_stream * variance) / mean + packed_gaps.STEP_OF_STREAM / 2
    of_piece = per_row * packed_gaps.STRIP_ROWS * (of_stream + padding)
    return float(parts * np.sum(of_piece[longest > 0]))
