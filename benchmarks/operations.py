"""What each operation computes: shapes of its operands, and a float64 reference for some rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from jaxsparse.topology import Topology

Shapes = dict[str, tuple[int, ...]]
Operands = Mapping[str, np.ndarray]

# Largest difference over largest value that rounding explains: operands are rounded alike on both
# sides, so it is that of products, sums and the result. TF32 rounds its operands itself.
TOLERANCE = {"float32": 1e-5, "tensorfloat32": 2**-8, "bfloat16": 2**-6, "float16": 2**-9}
TOLERANCE |= {"int8": 2**-5, "float8_e4m3fn": 2**-3}  # of weights that are rounded to 8 bits

_CHECKED_POSITIONS = 2**23


@dataclass(frozen=True)
class Rows:
    """Some rows of a pattern, to be checked: their indices, their entries, offsets among these.

    Of a transposed pattern ``entries`` are those of the pattern itself.
    """

    rows: np.ndarray
    entries: np.ndarray
    offsets: np.ndarray
    columns: np.ndarray
    width: int

    @property
    def row_of_entry(self) -> np.ndarray:
        """For each entry, which of these rows it is in."""
        return np.repeat(np.arange(self.rows.size), np.diff(self.offsets))


def rows_to_check(
    topology: Topology, heads: int = 1, n: int = 1, *, transposed: bool = False
) -> Rows:
    """All rows of a small pattern; else as many, evenly spread, as cost a second or so.

    For each head a row costs its k positions, or n numbers if the other operand is wider.
    """
    m, k = topology.shape[::-1] if transposed else topology.shape
    pattern = topology.transposed_pattern if transposed else topology.pattern
    count = min(m, max(16, _CHECKED_POSITIONS // max(1, heads * max(k, n))))
    rows = np.unique(np.linspace(0, m - 1, count).round().astype(np.int64)) if m else np.arange(0)
    offsets = np.asarray(pattern.row_offsets, np.int64)
    lengths = offsets[rows + 1] - offsets[rows]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    entries = np.arange(starts[-1]) + np.repeat(offsets[rows] - starts[:-1], lengths)
    columns = np.asarray(pattern.column_indices)[entries]
    if transposed:
        entries = np.asarray(topology.permutation)[entries]
    return Rows(rows, entries, starts, columns, k)


def _spmm(operands: Operands, part: Rows) -> np.ndarray:
    values = operands["values"][part.entries]
    shape = (part.rows.size, part.width)
    matrix = scipy.sparse.csr_array((values, part.columns, part.offsets), shape=shape)
    product: np.ndarray = matrix @ operands["x"]
    return product


def _sddmm(operands: Operands, part: Rows) -> np.ndarray:
    products = operands["x"][part.rows] @ operands["y"].T
    sampled: np.ndarray = products[part.row_of_entry, part.columns]
    return sampled


def _spmm_bias_relu(operands: Operands, part: Rows) -> np.ndarray:
    z: np.ndarray = _spmm(operands, part) + operands["bias"][part.rows, None]
    y: np.ndarray = np.maximum(z, 0)
    return y


def _gradient_of_values(operands: Operands, part: Rows) -> np.ndarray:
    return _sddmm({"x": operands["dy"], "y": operands["x"]}, part)


def _gradient_of_x(operands: Operands, part: Rows) -> np.ndarray:
    """Of a part of the transposed pattern."""
    return _spmm({"values": operands["values"], "x": operands["dy"]}, part)


def _row_softmax(scores: np.ndarray) -> np.ndarray:
    """Along the last axis; zeros where a row is -inf altogether."""
    most = np.max(scores, -1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(np.isfinite(most), most, 0))
    total = e.sum(-1, keepdims=True)
    softmax: np.ndarray = e / np.where(total > 0, total, 1)
    return softmax


def _sparse_softmax(operands: Operands, part: Rows) -> np.ndarray:
    scores = np.full((part.rows.size, part.width), -np.inf)
    at = (part.row_of_entry, part.columns)
    scores[at] = operands["values"][part.entries]
    stored: np.ndarray = _row_softmax(scores)[at]
    return stored


def _maxima(operands: Operands, part: Rows) -> np.ndarray:
    """Of rows without entries 0."""
    values = operands["values"][part.entries]
    most = np.full(part.rows.size, -np.inf)
    np.maximum.at(most, part.row_of_entry, values)
    return np.where(np.isneginf(most), 0, most)


def _logsumexp(operands: Operands, part: Rows) -> np.ndarray:
    most, rows = _maxima(operands, part), part.row_of_entry
    terms = np.exp(operands["values"][part.entries] - most[rows])
    sums = np.bincount(rows, terms, part.rows.size)
    logarithms: np.ndarray = most + np.log(np.where(sums > 0, sums, 1))
    return logarithms


def _attend(operands: Operands, part: Rows, stored: np.ndarray) -> np.ndarray:
    query, key, value = (operands[name][0] for name in ("query", "key", "value"))
    out = np.empty((part.rows.size, *query.shape[1:]))
    for head in range(query.shape[1]):
        scores = query[part.rows, head] @ key[:, head].T / np.sqrt(query.shape[-1])
        out[:, head] = _row_softmax(np.where(stored, scores, -np.inf)) @ value[:, head]
    return out


def _sparse_attention(operands: Operands, part: Rows) -> np.ndarray:
    stored = np.zeros((part.rows.size, part.width), bool)
    stored[part.row_of_entry, part.columns] = True
    return _attend(operands, part, stored)


def _causal_attention(operands: Operands, part: Rows) -> np.ndarray:
    return _attend(operands, part, np.arange(part.width) <= part.rows[:, None])


def _of_rows(out: Any, part: Rows) -> Any:
    return out[part.rows]


def _of_entries(out: Any, part: Rows) -> Any:
    return out[part.entries]


def _of_positions(out: Any, part: Rows) -> Any:
    return out[0, part.rows]


@dataclass(frozen=True)
class Computation:
    """A result to compare with: its reference for some rows, and where a full result has these.

    The rows are those of the pattern, or of the transposed one.
    """

    reference: Callable[[Operands, Rows], np.ndarray]
    part: Callable[[Any, Rows], Any]
    transposed: bool = False


COMPUTATIONS: dict[str, tuple[Computation, ...]] = {
    "spmm": (Computation(_spmm, _of_rows),),
    "spmm_bias_relu": (Computation(_spmm_bias_relu, _of_rows),),
    "spmm_pullback": (
        Computation(_gradient_of_values, _of_entries),
        Computation(_gradient_of_x, _of_rows, transposed=True),
    ),
    "sddmm": (Computation(_sddmm, _of_entries),),
    "sparse_softmax": (Computation(_sparse_softmax, _of_entries),),
    "maxima": (Computation(_maxima, _of_rows),),
    "logsumexp": (Computation(_logsumexp, _of_rows),),
    "sparse_attention": (Computation(_sparse_attention, _of_positions),),
    "causal_attention": (Computation(_causal_attention, _of_positions),),
    "copy": (Computation(lambda operands, part: operands["values"][part.entries], _of_entries),),
}
"""By name, one for each result."""


@dataclass(frozen=True)
class MeasuredOperation:
    """An operation to measure.

    Args:
        shapes: of its operands by name, from topology, n and heads.
        computes: a key of ``COMPUTATIONS``.
        kernel: the operation of ``python -m jaxsparse info`` whose variants can be forced, or None.
        has_n: whether its operands have a size n.
        on_device: whether the device's time is meant, where there is a device, or the caller's.
        products: how often its forward pass multiplies and adds n numbers for each stored entry.
    """

    shapes: Callable[[Topology, int | None, int], Shapes]
    computes: str
    kernel: str | None
    has_n: bool = True
    on_device: bool = True
    products: int = 0


def _product_shapes(topology: Topology, n: Any, heads: int) -> Shapes:
    return {"values": (topology.nse,), "x": (topology.shape[1], n)}


def _epilogue_shapes(topology: Topology, n: Any, heads: int) -> Shapes:
    return {**_product_shapes(topology, n, heads), "bias": (topology.shape[0],)}


def _pullback_shapes(topology: Topology, n: Any, heads: int) -> Shapes:
    return {**_product_shapes(topology, n, heads), "dy": (topology.shape[0], n)}


def _sampled_shapes(topology: Topology, n: Any, heads: int) -> Shapes:
    return {"x": (topology.shape[0], n), "y": (topology.shape[1], n)}


def _values_shapes(topology: Topology, n: Any, heads: int) -> Shapes:
    return {"values": (topology.nse,)}


def _attention_shapes(topology: Topology, n: Any, heads: int) -> Shapes:
    t, s = topology.shape
    return {"query": (1, t, heads, n), "key": (1, s, heads, n), "value": (1, s, heads, n)}


MEASURED: dict[str, MeasuredOperation] = {
    "spmm": MeasuredOperation(_product_shapes, "spmm", "spmm", products=1),
    "spmm_bias_relu": MeasuredOperation(_epilogue_shapes, "spmm_bias_relu", "spmm", products=1),
    "spmm_pullback": MeasuredOperation(_pullback_shapes, "spmm_pullback", None, products=2),
    "sddmm": MeasuredOperation(_sampled_shapes, "sddmm", "sddmm", products=1),
    "sparse_softmax": MeasuredOperation(
        _values_shapes, "sparse_softmax", "sparse_softmax", has_n=False
    ),
    "reduce_rows": MeasuredOperation(_values_shapes, "maxima", "reduce_rows", has_n=False),
    "sparse_attention": MeasuredOperation(_attention_shapes, "sparse_attention", None),
    "dispatch": MeasuredOperation(_product_shapes, "spmm", None, on_device=False),
}


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the largest expected value; infinite for another shape or NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    scale = np.max(np.abs(expected), initial=0) or 1
    error = float(np.max(np.abs(np.asarray(actual, np.float64) - expected), initial=0) / scale)
    return error if np.isfinite(error) else float("inf")
