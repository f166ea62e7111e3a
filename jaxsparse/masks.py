"""Masks: which (row, column) positions of an (m, k) pattern are stored.

A :class:`Mask` is a predicate on positions: rows are queries, columns are keys. Masks combine by
``&``, ``|`` and ``~``. :func:`nonzero` turns one into row offsets and column indices on the host,
:func:`nonzero_traced` does so under :func:`jax.jit`.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

_INT32_MAX = 2**31 - 1
_BLOCK_POSITIONS = 2**20  # Few enough for the temporaries of a mask to stay in cache.

_CALL, _NOT, _AND, _OR = 3, 2, 1, 0  # How tightly the parts of an expression bind, as in Python.


@dataclass(frozen=True, repr=False)
class Mask:
    """An immutable predicate ``mask(rows, columns) -> bool array``, made by the functions below.

    ``rows`` and ``columns`` are integers in [0, 2**31), of shapes that broadcast as in a NumPy
    ufunc. The result is a JAX array if either is one, traced or not; else it is a NumPy array, and
    no JAX backend is started.

    The expression that made a mask is its ``repr``, by which masks compare equal and hash: a mask
    can be a static argument of :func:`jax.jit`.

    Raises:
      TypeError: if ``rows`` or ``columns`` are not integers.

    >>> mask = band(2) & causal()
    >>> mask
    band(2) & causal()
    >>> mask(np.arange(3)[:, None], np.arange(3))
    array([[ True, False, False],
           [ True,  True, False],
           [False,  True,  True]])
    """

    _expression: str
    _predicate: Callable[[Any, Any, Any], Any] = field(compare=False)
    _binding: int = field(default=_CALL, compare=False)

    def __call__(self, rows: ArrayLike, columns: ArrayLike) -> npt.NDArray[np.bool_] | jax.Array:
        xp: Any = jnp if isinstance(rows, jax.Array) or isinstance(columns, jax.Array) else np
        positions = []
        for name, operand in ("rows", rows), ("columns", columns):
            array = xp.asarray(operand)
            if not xp.issubdtype(array.dtype, xp.integer):
                raise TypeError(f"{self}: {name} must be integers, got dtype {array.dtype}")
            # Signed, so that differences are exact; narrow, as memory traffic is the cost.
            positions.append(array.astype(np.int32, copy=False))
        stored: npt.NDArray[np.bool_] | jax.Array = self._predicate(xp, *positions)
        return stored

    def __repr__(self) -> str:
        return self._expression

    def _operand(self, binding: int) -> str:
        return self._expression if self._binding >= binding else f"({self._expression})"

    def _combine(self, other: Mask, symbol: str, binding: int, combine: Callable[..., Any]) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        expression = f"{self._operand(binding)} {symbol} {other._operand(binding + 1)}"
        operands = (self._predicate, other._predicate)
        return Mask(expression, lambda *args: combine(*(p(*args) for p in operands)), binding)

    def __and__(self, other: Mask) -> Mask:
        return self._combine(other, "&", _AND, operator.and_)

    def __or__(self, other: Mask) -> Mask:
        return self._combine(other, "|", _OR, operator.or_)

    def __invert__(self) -> Mask:
        return Mask(f"~{self._operand(_NOT)}", lambda *args: ~self._predicate(*args), _NOT)


def _integer(operation: str, name: str, value: Any, minimum: int, limit: int = 2**31) -> int:
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{operation}: {name} must be an integer, got {value!r}") from None
    if value < minimum:
        raise ValueError(f"{operation}: {name} must be >= {minimum}, got {value}")
    if value >= limit:
        raise ValueError(f"{operation}: {name} must be < {limit}, got {value}")
    return int(value)


def _inside(operation: str, xp: Any, rows: Any, columns: Any, length: int) -> Any:
    inside = True
    for name, positions in ("rows", rows), ("columns", columns):
        valid = (positions >= 0) & (positions < length)
        if xp is np and not valid.all():
            outside = positions[~valid]
            raise IndexError(f"{operation}: {name} must be in [0, {length}), got {outside[0]}")
        inside = inside & valid
    return inside


def causal() -> Mask:
    """Every position up to the diagonal: ``columns <= rows``.

    >>> causal()(2, np.arange(4))
    array([ True,  True,  True, False])
    """
    return Mask("causal()", lambda xp, rows, columns: columns <= rows)


def band(width: int) -> Mask:
    """The positions nearer to the diagonal than ``width``: ``|rows - columns| < width``.

    ``band(1)`` is the diagonal.

    Raises:
      TypeError, ValueError: if ``width`` is not an integer, or is less than 1.

    >>> band(2)(2, np.arange(5))
    array([False,  True,  True,  True, False])
    """
    width = _integer("band", "width", width, 1)
    return Mask(f"band({width})", lambda xp, rows, columns: xp.abs(rows - columns) < width)


def strided(stride: int) -> Mask:
    """Every ``stride``-th diagonal: ``(rows - columns) % stride == 0``.

    The strided pattern of Child et al., "Generating Long Sequences with Sparse Transformers",
    2019, https://arxiv.org/abs/1904.10509.

    Raises:
      TypeError, ValueError: if ``stride`` is not an integer, or is less than 1.

    >>> strided(3)(4, np.arange(6))
    array([False,  True, False, False,  True, False])
    """
    stride = _integer("strided", "stride", stride, 1)
    return Mask(f"strided({stride})", lambda xp, rows, columns: (rows - columns) % stride == 0)


def block(size: int) -> Mask:
    """Square blocks along the diagonal: ``rows // size == columns // size``.

    Raises:
      TypeError, ValueError: if ``size`` is not an integer, or is less than 1.

    >>> block(2)(2, np.arange(5))
    array([False, False,  True,  True, False])
    """
    size = _integer("block", "size", size, 1)
    return Mask(f"block({size})", lambda xp, rows, columns: rows // size == columns // size)


def documents(ids: Sequence[int] | npt.NDArray[np.integer]) -> Mask:
    """The positions whose row and column are of one document: ``ids[rows] == ids[columns]``.

    ``ids`` holds one int32 per position of a packed sequence. A position past its end raises an
    IndexError on NumPy arrays and is not stored on JAX arrays, whose values cannot raise.

    Raises:
      TypeError, ValueError: if ``ids`` is not an integer sequence, not 1-D or outside int32.

    >>> documents([7, 7, 9, 7])(0, np.arange(4))
    array([ True,  True, False,  True])
    """
    array = np.asarray(ids)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"documents: ids must be integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"documents: ids must be 1-D, got shape {array.shape}")
    table = array.astype(np.int32)
    if not np.array_equal(table, array):
        raise ValueError(f"documents: ids must be int32, got [{array.min()}, {array.max()}]")

    def predicate(xp: Any, rows: Any, columns: Any) -> Any:
        inside = _inside("documents", xp, rows, columns, table.size)
        document = xp.asarray(table)
        return inside & (document[rows] == document[columns])

    return Mask(f"documents({tuple(table.tolist())})", predicate)


def random(sparsity: float, length: int, *, seed: int = 0, band_width: int = 0) -> Mask:
    """Random positions, stored with a probability inversely proportional to their distance.

    At the distance d = ``|rows - columns|`` from the diagonal a position is stored with probability
    p(d) = min(1, c / d) if d >= max(1, ``band_width``), else never. c is such that of the positions
    of a (``length``, ``length``) pattern at those distances a fraction 1 - ``sparsity`` is stored
    on average. ``band(w) | random(sparsity, length, band_width=w)``, of which ``& causal()`` keeps
    the lower half, is the attention mask of Gale et al., "Sparse GPU Kernels for Deep Learning",
    2020, section VII-C, https://arxiv.org/abs/2006.10901.

    The choice is a hash of (row, column, ``seed``): the same on NumPy and JAX arrays, on every
    machine, and however the pattern is cut into calls. A position past ``length`` raises an
    IndexError on NumPy arrays and is not stored on JAX arrays, whose values cannot raise.

    Raises:
      TypeError, ValueError: if ``sparsity`` is not in [0, 1], or ``length`` >= 1, ``seed`` in
        [0, 2**32) or ``band_width`` >= 0 is not an integer in its range.

    >>> row_offsets, _ = nonzero(random(0.9, 1000), (1000, 1000))
    >>> round(int(row_offsets[-1]) / (1000 * 999), 2)
    0.1
    """
    if not isinstance(sparsity, numbers.Real):
        raise TypeError(f"random: sparsity must be a real number, got {sparsity!r}")
    sparsity = float(sparsity)
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"random: sparsity must be in [0, 1], got {sparsity}")
    length = _integer("random", "length", length, 1)
    seed = _integer("random", "seed", seed, 0, 2**32)
    band_width = _integer("random", "band_width", band_width, 0)
    table = _thresholds(sparsity, length, band_width)

    def predicate(xp: Any, rows: Any, columns: Any) -> Any:
        inside = _inside("random", xp, rows, columns, length)
        with np.errstate(over="ignore"):  # NumPy warns of the intended wrap-around of scalars.
            key = _lowbias32(np.uint32(seed))
            # Even counters for rows and odd ones for columns, so that no two inputs coincide.
            counters = (2 * rows.astype(np.uint32), 2 * columns.astype(np.uint32) + 1)
            bits = _lowbias32(_lowbias32(counters[0] + key) + _lowbias32(counters[1] + key))
        return inside & (bits >> 1 < xp.asarray(table)[xp.abs(rows - columns)])

    options = (f", seed={seed}" if seed else "") + (f", {band_width=}" if band_width else "")
    return Mask(f"random({sparsity}, {length}{options})", predicate)


def _lowbias32(x: Any) -> Any:
    """C. Wellons' bijection of uint32 of low avalanche bias, github.com/skeeto/hash-prospector."""
    x = x ^ (x >> 16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= np.uint32(0x846CA68B)
    x ^= x >> 16
    return x


@functools.lru_cache(maxsize=16)
def _thresholds(sparsity: float, length: int, band_width: int) -> npt.NDArray[np.uint32]:
    """2**31 p(d) by distance d: what a 31-bit hash stays below with probability p(d)."""
    distance = np.arange(length, dtype=np.float64)
    positions = length - distance  # On one side of the diagonal.
    positions[: max(1, band_width)] = 0
    # sum_d positions(d) min(1, c / d) is linear in c between integers, so interpolation inverts it.
    share = positions / np.maximum(1, distance)
    beyond = np.cumsum(share[::-1])[::-1] - share
    expected = np.cumsum(positions) + distance * beyond
    constant = np.interp((1 - sparsity) * positions.sum(), expected, distance)
    probability = np.minimum(1, constant / np.maximum(1, distance)) * (positions > 0)
    thresholds: npt.NDArray[np.uint32] = np.rint(probability * 2**31).astype(np.uint32)
    return thresholds


def _shape(operation: str, shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"{operation}: shape must be (m, k), got {shape}")
    return _integer(operation, "m", shape[0], 0), _integer(operation, "k", shape[1], 0)


def _check_stored(operation: str, stored: Any, shape: tuple[int, int]) -> None:
    if stored.shape != shape or stored.dtype != np.bool_:
        raise ValueError(
            f"{operation}: mask must return bool {shape}, got {stored.dtype} {stored.shape}"
        )


def nonzero(
    mask: Callable[[Any, Any], Any], shape: tuple[int, int], *, block_rows: int | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The stored positions of an (m, k) pattern in row-major order, computed on the host.

    Args:
      mask: a :class:`Mask`, or any callable that takes int32 ``rows`` (b, 1) and ``columns``
        (1, k) to bool (b, k).
      shape: (m, k).
      block_rows: how many rows b to evaluate at a time, which bounds the memory taken; by default
        as many as have 2**20 positions.

    Returns:
      ``row_offsets`` int32 (m + 1,) and ``column_indices`` int32 (nnz,): row i stores the columns
      ``column_indices[row_offsets[i]:row_offsets[i + 1]]``, ascending.

    Raises:
      TypeError, ValueError: if ``shape`` is not two integers in [0, 2**31), ``block_rows`` is not
        an integer >= 1, the mask returns another shape or dtype, or nnz exceeds 2**31 - 1.

    >>> nonzero(causal(), (3, 3))
    (array([0, 1, 3, 6], dtype=int32), array([0, 0, 1, 0, 1, 2], dtype=int32))
    """
    m, k = _shape("nonzero", shape)
    if block_rows is None:
        block_rows = max(1, _BLOCK_POSITIONS // max(1, k))
    block_rows = _integer("nonzero", "block_rows", block_rows, 1)
    columns = np.arange(k, dtype=np.int32)
    counts, column_indices, nnz = [np.zeros(1, np.int64)], [columns[:0]], 0
    for start in range(0, m, block_rows):
        rows = np.arange(start, min(start + block_rows, m), dtype=np.int32)
        stored = np.asarray(mask(rows[:, None], columns[None, :]))
        _check_stored("nonzero", stored, (rows.size, k))
        counts.append(np.count_nonzero(stored, axis=1))
        nnz += int(counts[-1].sum())
        if nnz > _INT32_MAX:  # Before the indices of the remaining rows exhaust the memory.
            raise ValueError(f"nonzero: nnz must be <= {_INT32_MAX}, got {nnz} by row {rows[-1]}")
        column_indices.append((np.flatnonzero(stored) % k).astype(np.int32))
    row_offsets = np.cumsum(np.concatenate(counts)).astype(np.int32)
    return row_offsets, np.concatenate(column_indices)


def nonzero_traced(
    mask: Callable[[Any, Any], Any], shape: tuple[int, int], nse: int
) -> tuple[jax.Array, jax.Array]:
    """The first ``nse`` stored positions of an (m, k) pattern in row-major order, in JAX.

    The variant of :func:`nonzero` to be traced, of static sizes: ``row_offsets`` int32 (m + 1,) is
    clipped to ``nse``, and ``column_indices`` int32 (nse,) is 0 from ``row_offsets[-1]`` on. All
    m k positions are evaluated at once.

    Raises:
      TypeError, ValueError: if ``shape`` is not two integers >= 0 of a product below 2**31, ``nse``
        is not an integer in [0, 2**31), or the mask returns another shape or dtype.

    >>> nonzero_traced(causal(), (3, 3), nse=4)
    (Array([0, 1, 3, 4], dtype=int32), Array([0, 0, 1, 0], dtype=int32))
    """
    m, k = _shape("nonzero_traced", shape)
    nse = _integer("nonzero_traced", "nse", nse, 0)
    if m * k > _INT32_MAX:
        raise ValueError(f"nonzero_traced: m * k must be <= {_INT32_MAX}, got {m} * {k}")
    columns = jnp.arange(k, dtype=jnp.int32)
    stored = jnp.asarray(mask(jnp.arange(m, dtype=jnp.int32)[:, None], columns[None, :]))
    _check_stored("nonzero_traced", stored, (m, k))
    stops = jnp.cumsum(jnp.sum(stored, axis=1, dtype=jnp.int32))
    row_offsets = jnp.minimum(jnp.pad(stops, (1, 0)), nse)
    column_indices = jnp.nonzero(stored, size=nse, fill_value=0)[1]
    return row_offsets, column_indices.astype(jnp.int32)
