"""The kinds of masks: for each, its predicate and the function that makes one."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.integers import INT32_MAX, integer
from jaxsparse.masks.arguments import (
    Table,
    clipped_to_int32,
    traced_or_integer,
    traced_or_integers,
)
from jaxsparse.masks.expression import Diagonals, Mask, array_of, kind
from jaxsparse.masks.intervals import Interval, Truth, look_up, look_up_flags


def _within(positions: Any, length: int) -> Any:
    return (positions >= 0) & (positions < length)


def _inside(operation: str, rows: Any, columns: Any, length: int) -> Any:
    """Where both positions are below the length; NumPy's must be."""
    inside = True
    for name, positions in ("rows", rows), ("columns", columns):
        valid = _within(positions, length)
        if not isinstance(positions, jax.Array) and not valid.all():
            outside = positions[~valid]
            raise IndexError(f"{operation}: {name} must be in [0, {length}), got {outside[0]}")
        inside = inside & valid
    return inside


@kind
class _Causal(Mask):
    _name = "causal"

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return columns <= rows

    @property
    def _diagonals(self) -> Diagonals:
        return Diagonals(None, 0)


def causal() -> Mask:
    """Every position up to the diagonal: ``columns <= rows``.

    Row 0 sees column 0. Where the last row shall see the last column instead, as of few queries
    behind many keys, see :func:`offset`.

    >>> causal()(2, np.arange(4))
    array([ True,  True,  True, False])
    """
    return _Causal()


@kind
class _Band(Mask):
    width: int
    _name = "band"

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return xp.abs(rows - columns) < self.width

    @property
    def _diagonals(self) -> Diagonals:
        return Diagonals(self.width - 1, self.width - 1)


def band(width: int) -> Mask:
    """The positions nearer to the diagonal than ``width``: ``|rows - columns| < width``.

    ``band(1)`` is the diagonal.

    Raises:
      TypeError, ValueError: if ``width`` is not an integer, or is less than 1.

    >>> band(2)(2, np.arange(5))
    array([False,  True,  True,  True, False])
    """
    return _Band(integer("band", "width", width, 1))


@kind
class _SlidingWindow(Mask):
    left: int
    right: int = 0
    _name = "sliding_window"

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        distance = rows - columns
        return (distance <= self.left) & (distance >= -self.right)

    @property
    def _diagonals(self) -> Diagonals:
        return Diagonals(self.left, self.right)


def sliding_window(left: int, right: int = 0) -> Mask:
    """The diagonal and so many positions beside it: ``-right <= rows - columns <= left``.

    The ``local_window_size=(left, right)`` of :func:`jax.nn.dot_product_attention`.

    Raises:
      TypeError, ValueError: if ``left`` or ``right`` is not an integer >= 0.

    >>> sliding_window(2, 1)(3, np.arange(6))
    array([False,  True,  True,  True,  True, False])
    """
    left = integer("sliding_window", "left", left, 0)
    right = integer("sliding_window", "right", right, 0)
    return _SlidingWindow(left, right)


@kind
class _Strided(Mask):
    stride: int
    _name = "strided"

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return (rows - columns) % self.stride == 0

    def _strides(self) -> frozenset[int]:
        return frozenset({self.stride})


def strided(stride: int) -> Mask:
    """Every ``stride``-th diagonal: ``(rows - columns) % stride == 0``.

    The strided pattern of Child et al., "Generating Long Sequences with Sparse Transformers",
    2019, https://arxiv.org/abs/1904.10509.

    Raises:
      TypeError, ValueError: if ``stride`` is not an integer, or is less than 1.

    >>> strided(3)(4, np.arange(6))
    array([False,  True, False, False,  True, False])
    """
    return _Strided(integer("strided", "stride", stride, 1))


@kind
class _Block(Mask):
    size: int
    _name = "block"

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return rows // self.size == columns // self.size


def block(size: int) -> Mask:
    """Square blocks along the diagonal: ``rows // size == columns // size``.

    Raises:
      TypeError, ValueError: if ``size`` is not an integer, or is less than 1.

    >>> block(2)(2, np.arange(5))
    array([False, False,  True,  True, False])
    """
    return _Block(integer("block", "size", size, 1))


@kind
class _Documents(Mask):
    ids: Table | jax.Array
    _name = "documents"
    _children = ("ids",)

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        inside = self._check_positions(rows, columns)
        ids = xp.asarray(array_of(self.ids))
        if not ids.size:  # JAX gathers nothing from an empty array.
            return inside
        return inside & (ids[rows] == ids[columns])

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        ids = array_of(self.ids)
        if isinstance(ids, Interval) or not ids.size:
            return Truth.unknown(rows.xp)
        inside: Truth = _within(rows, ids.size) & _within(columns, ids.size)
        return inside & (look_up(ids, rows) == look_up(ids, columns))

    def _check_positions(self, rows: Any, columns: Any) -> Any:
        return _inside("documents", rows, columns, array_of(self.ids).size)


def documents(ids: Sequence[int] | npt.NDArray[np.integer] | jax.Array) -> Mask:
    """The positions whose row and column are of one document: ``ids[rows] == ids[columns]``.

    ``ids`` holds one int32 per position of a packed sequence, the same for rows and columns. It may
    be a traced array: then the mask is one of the program (`Topology.from_mask` needs ``nse``). A
    position past its end raises an IndexError on NumPy arrays and is not stored on JAX arrays,
    whose values cannot raise.

    Raises:
      TypeError, ValueError: if ``ids`` is not an integer sequence, not 1-D or outside int32.

    >>> documents([7, 7, 9, 7])(0, np.arange(4))
    array([ True,  True, False,  True])
    """
    array = traced_or_integers("documents", "ids", ids)
    if isinstance(array, jax.Array):
        return _Documents(array)
    table = Table(array)
    if not np.array_equal(table.array, array):
        raise ValueError(f"documents: ids must be int32, got [{array.min()}, {array.max()}]")
    return _Documents(table)


@kind
class _Padding(Mask):
    length: Table | jax.Array
    _name = "padding"
    _children = ("length",)

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        return columns < array_of(self.length)


def padding(length: int | jax.Array) -> Mask:
    """The keys of a sequence, not the padding behind it: ``columns < length``.

    ``causal() | padding(n)`` is the mask of a prefix language model, whose first ``n`` positions
    see each other. ``length`` may be a traced integer; a batch of sequences takes a pattern each:
    ``jax.vmap(lambda n: Topology.from_mask(causal() & padding(n), shape, nse=...))(lengths)``.

    Raises:
      TypeError, ValueError: if ``length`` is not one integer in [0, 2**31).

    >>> padding(2)(0, np.arange(4))
    array([ True,  True, False, False])
    """
    return _Padding(traced_or_integer("padding", "length", length, 0))


@kind
class _GlobalTokens(Mask):
    positions: Table | jax.Array
    _name = "global_tokens"
    _children = ("positions",)

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        tokens = array_of(self.positions)
        return xp.isin(rows, tokens) | xp.isin(columns, tokens)


def global_tokens(positions: Sequence[int] | npt.NDArray[np.integer] | jax.Array) -> Mask:
    """The positions whose row or column is of a token that sees all and is seen by all.

    The global attention of Beltagy et al., "Longformer: The Long-Document Transformer", 2020,
    https://arxiv.org/abs/2004.05150. ``positions`` may be a traced array.

    Raises:
      TypeError, ValueError: if ``positions`` is not a sequence of integers in [0, 2**31).

    >>> global_tokens([0, 3])(np.arange(3)[:, None], np.arange(5))
    array([[ True,  True,  True,  True,  True],
           [ True, False, False,  True, False],
           [ True, False, False,  True, False]])
    """
    array = traced_or_integers("global_tokens", "positions", positions)
    if isinstance(array, jax.Array):
        return _GlobalTokens(clipped_to_int32(array))
    if array.size and not (array.min() >= 0 and array.max() <= INT32_MAX):
        raise ValueError(
            f"global_tokens: positions must be in [0, 2**31), got [{array.min()}, {array.max()}]"
        )
    return _GlobalTokens(Table(np.unique(array)))


@kind
class _Random(Mask):
    sparsity: float
    length: int
    seed: int = 0
    band_width: int = 0
    _name = "random"

    def _stored(self, xp: Any, rows: Any, columns: Any) -> Any:
        inside = self._check_positions(rows, columns)
        with np.errstate(over="ignore"):  # NumPy warns of the intended wrap-around of scalars.
            key = _lowbias32(np.uint32(self.seed))
            # Even counters for rows and odd ones for columns, so that no two inputs coincide.
            counters = (2 * rows.astype(np.uint32), 2 * columns.astype(np.uint32) + 1)
            bits = _lowbias32(_lowbias32(counters[0] + key) + _lowbias32(counters[1] + key))
        thresholds = xp.asarray(_thresholds(self.sparsity, self.length, self.band_width))
        return inside & (bits >> 1 < thresholds[xp.abs(rows - columns)])

    def _truth(self, rows: Interval, columns: Interval) -> Truth:
        thresholds = _thresholds(self.sparsity, self.length, self.band_width)
        distances = abs(rows - columns)
        may = look_up_flags(thresholds > 0, distances).may
        must = look_up_flags(thresholds == 2**31, distances).must
        inside: Truth = _within(rows, self.length) & _within(columns, self.length)
        return inside & Truth(rows.xp, may, must)

    def _check_positions(self, rows: Any, columns: Any) -> Any:
        return _inside("random", rows, columns, self.length)


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

    >>> from jaxsparse.masks import nonzero
    >>> row_offsets, _ = nonzero(random(0.9, 1000), (1000, 1000))
    >>> round(int(row_offsets[-1]) / (1000 * 999), 2)
    0.1
    """
    if not isinstance(sparsity, numbers.Real):
        raise TypeError(f"random: sparsity must be a real number, got {sparsity!r}")
    sparsity = float(sparsity)
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"random: sparsity must be in [0, 1], got {sparsity}")
    length = integer("random", "length", length, 1)
    seed = integer("random", "seed", seed, 0, 2**32)
    band_width = integer("random", "band_width", band_width, 0)
    return _Random(sparsity, length, seed, band_width)


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
