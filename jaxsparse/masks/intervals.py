"""Interval arithmetic: what a mask can be at all positions of many cells at once.

Positions of a cell are two intervals of integers. A mask's predicate, computed with intervals in
place of positions, says for each cell whether some position may be stored, and whether all must be.
It is sound and not exact: what is said not to be stored is not, what must be stored is, and the
rest is undecided. Numbers are int32 and wrap around as those of the masks do: an operation that
might has any integer as its result.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

LEAST, GREATEST = -(2**31), 2**31 - 1
_BLOCK = 64  # A range of so many positions lies in two blocks of a table.


class Truth:
    """Whether something may hold at a position of each cell, and whether it must at all."""

    __slots__ = ("may", "must", "xp")
    __array_ufunc__ = None  # so that NumPy leaves operators to this class

    def __init__(self, xp: Any, may: Any, must: Any):
        self.xp, self.may, self.must = xp, may, must

    @staticmethod
    def unknown(xp: Any) -> Truth:
        """What may hold and need not."""
        return Truth(xp, xp.asarray(True), xp.asarray(False))

    def of(self, other: Any) -> Truth:
        """The same of what is known, a bool or an array of bool."""
        if isinstance(other, Truth):
            return other
        known = self.xp.asarray(other)
        return Truth(self.xp, known, known)

    def __and__(self, other: Any) -> Truth:
        other = self.of(other)
        return Truth(self.xp, self.may & other.may, self.must & other.must)

    def __or__(self, other: Any) -> Truth:
        other = self.of(other)
        return Truth(self.xp, self.may | other.may, self.must | other.must)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Truth:
        return Truth(self.xp, ~self.must, ~self.may)

    def __xor__(self, other: Any) -> Truth:
        other = self.of(other)
        differ: Truth = self & ~other | ~self & other
        return differ

    def select(self, otherwise: Any, chosen: Any) -> Any:
        """The value of ``chosen`` where this holds, else of ``otherwise``, both of one kind."""
        where = self.xp.where
        if isinstance(chosen, Truth):
            both = chosen.must & otherwise.must
            must = where(self.must, chosen.must, where(self.may, both, otherwise.must))
            either = chosen.may | otherwise.may
            return Truth(
                self.xp, where(self.must, chosen.may, where(self.may, either, otherwise.may)), must
            )
        low = self.xp.minimum(chosen.low, otherwise.low)
        high = self.xp.maximum(chosen.high, otherwise.high)
        return Interval(
            self.xp,
            where(self.must, chosen.low, where(self.may, low, otherwise.low)),
            where(self.must, chosen.high, where(self.may, high, otherwise.high)),
        )


class Interval:
    """An int32 at each position of each cell: the least and the greatest that it can be.

    Attributes:
        low, high: int32 arrays that broadcast.
        congruent: None, or a modulus and an interval: what it is differs from some integer in that
            by a multiple of the modulus. So the remainders of positions can be known that lie far
            apart.
    """

    __slots__ = ("congruent", "high", "low", "xp")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # so that NumPy leaves operators to this class

    def __init__(self, xp: Any, low: Any, high: Any, congruent: tuple[int, Interval] | None = None):
        self.xp, self.low, self.high, self.congruent = xp, low, high, congruent

    @staticmethod
    def unknown(xp: Any) -> Interval:
        """Any integer."""
        return Interval(xp, xp.asarray(LEAST, np.int32), xp.asarray(GREATEST, np.int32))

    def of(self, other: Any) -> Interval:
        """The same of what is known, an integer or an array of them."""
        if isinstance(other, Interval):
            return other
        known = self.xp.asarray(other, np.int32)
        return Interval(self.xp, known, known)

    def truth(self, stored: Any) -> Truth:
        """What a predicate of this interval returned."""
        return Truth.unknown(self.xp).of(stored)

    def _unless_wrapped(
        self, low: Any, high: Any, *about: Any, congruent: tuple[int, Interval] | None = None
    ) -> Interval:
        """Computed bounds, or those of any integer where one may have wrapped around.

        ``about`` are the bounds in float32, whose rounding is far less than what they stay below.
        """
        exact = True
        for bound in about:
            exact = exact & (self.xp.abs(bound) < 2.0**30)

        def bounded(low: Any, high: Any, congruent: Any = None) -> Interval:
            where = self.xp.where
            bounds = where(exact, low, LEAST), where(exact, high, GREATEST)
            return Interval(self.xp, *bounds, congruent)

        if congruent is not None:
            modulus, residue = congruent
            congruent = modulus, bounded(residue.low, residue.high)
        return bounded(low, high, congruent)

    def _congruences(self, other: Interval) -> tuple[int, Interval, Interval] | None:
        """A modulus, and what both are congruent to by it, if that is known."""
        known = self.congruent or other.congruent
        if known is None:
            return None
        modulus, residues = known[0], []
        for x in self, other:
            if x.congruent is not None and x.congruent[0] == modulus:
                residues.append(x.congruent[1])
            elif x.low is x.high:  # a number
                residues.append(x.monotone(lambda v: v % modulus))
            else:
                return None
        return modulus, residues[0], residues[1]

    def __add__(self, other: Any) -> Interval:
        other = self.of(other)
        pairs = (self.low, other.low), (self.high, other.high)
        about = (_float(x) + _float(y) for x, y in pairs)
        known = self._congruences(other)
        congruent = None if known is None else (known[0], known[1] + known[2])
        return self._unless_wrapped(*(x + y for x, y in pairs), *about, congruent=congruent)

    def __sub__(self, other: Any) -> Interval:
        other = self.of(other)
        pairs = (self.low, other.high), (self.high, other.low)
        about = (_float(x) - _float(y) for x, y in pairs)
        known = self._congruences(other)
        congruent = None if known is None else (known[0], known[1] - known[2])
        return self._unless_wrapped(*(x - y for x, y in pairs), *about, congruent=congruent)

    def __neg__(self) -> Interval:
        negative: Interval = self.of(0) - self
        return negative

    def __mul__(self, other: Any) -> Interval:
        other, xp = self.of(other), self.xp
        corners = [(x, y) for x in (self.low, self.high) for y in (other.low, other.high)]
        products = [x * y for x, y in corners]
        low, high = products[0], products[0]
        for product in products[1:]:
            low, high = xp.minimum(low, product), xp.maximum(high, product)
        return self._unless_wrapped(low, high, *(_float(x) * _float(y) for x, y in corners))

    def __abs__(self) -> Interval:
        xp = self.xp
        low = xp.maximum(xp.maximum(self.low, -self.high), 0)
        return self._unless_wrapped(
            low, xp.maximum(-self.low, self.high), _float(self.low), _float(self.high)
        )

    def minimum(self, other: Any) -> Interval:
        """The smaller one."""
        other = self.of(other)
        low, high = self.xp.minimum(self.low, other.low), self.xp.minimum(self.high, other.high)
        return Interval(self.xp, low, high)

    def maximum(self, other: Any) -> Interval:
        """The larger one."""
        other = self.of(other)
        low, high = self.xp.maximum(self.low, other.low), self.xp.maximum(self.high, other.high)
        return Interval(self.xp, low, high)

    def monotone(self, function: Any) -> Interval:
        """What a function gives that does not fall."""
        return Interval(self.xp, function(self.low), function(self.high))

    def __floordiv__(self, divisor: int) -> Interval:
        return self.monotone(lambda x: x // divisor)

    def __mod__(self, divisor: int) -> Interval:
        """The remainder of floor division by a positive integer."""
        quotient, xp = self // divisor, self.xp
        same = quotient.low == quotient.high
        low = xp.where(same, self.low % divisor, 0)
        high = xp.where(same, self.high % divisor, divisor - 1)
        if self.congruent is not None and self.congruent[0] % divisor == 0:
            residue = self.congruent[1] % divisor
            low, high = xp.maximum(low, residue.low), xp.minimum(high, residue.high)
        return Interval(xp, low, high)

    def __lt__(self, other: Any) -> Truth:
        other = self.of(other)
        return Truth(self.xp, self.low < other.high, self.high < other.low)

    def __le__(self, other: Any) -> Truth:
        other = self.of(other)
        return Truth(self.xp, self.low <= other.high, self.high <= other.low)

    def __gt__(self, other: Any) -> Truth:
        return self.of(other) < self

    def __ge__(self, other: Any) -> Truth:
        return self.of(other) <= self

    def __eq__(self, other: Any) -> Truth:  # type: ignore[override]
        other = self.of(other)
        must = (self.low == other.high) & (self.high == other.low)
        return Truth(self.xp, (self.low <= other.high) & (other.low <= self.high), must)

    def __ne__(self, other: Any) -> Truth:  # type: ignore[override]
        equal: Truth = self == other
        return ~equal


def _float(x: Any) -> Any:
    return x.astype(np.float32)


class Module:
    """What a mask's predicate calls in place of NumPy's or JAX's functions, for intervals."""

    def __init__(self, xp: Any):
        self._xp = xp

    def abs(self, x: Interval) -> Interval:
        """The absolute value."""
        return abs(x)

    def isin(self, x: Interval, values: Any) -> Truth:
        """Whether a position is one of the values."""
        xp = self._xp
        if isinstance(values, Interval):
            return Truth.unknown(xp)
        ordered = xp.sort(xp.asarray(values, np.int32))
        new = xp.concatenate([xp.ones(min(ordered.size, 1), bool), ordered[1:] != ordered[:-1]])
        before = _counts(xp, new)
        count = (
            before[xp.searchsorted(ordered, x.high, side="right")]
            - before[xp.searchsorted(ordered, x.low, side="left")]
        )
        return Truth(xp, count > 0, (count > 0) & (count == x.high - x.low + 1))


def _counts(xp: Any, flags: Any) -> Any:
    """How many flags of a vector are set before each, and at the end."""
    zero = xp.zeros(1, np.int32)
    return xp.concatenate([zero, xp.cumsum(flags, dtype=np.int32)])


def look_up(table: Any, positions: Interval) -> Interval:
    """The entries of a table, not empty, at positions, which are clamped into it."""
    xp = positions.xp
    of_table = _module_of(xp, table)
    table = of_table.asarray(table, np.int32)
    first, last = (xp.clip(x, 0, table.size - 1) // _BLOCK for x in (positions.low, positions.high))
    blocks = of_table.pad(table, (0, -table.size % _BLOCK), mode="edge").reshape(-1, _BLOCK)

    def bound(reduce: Any, choose: Any) -> Any:
        of_block = xp.asarray(reduce(blocks, axis=1))
        near = choose(of_block[first], of_block[last])
        return xp.where(last - first > 1, reduce(table), near)

    return Interval(xp, bound(of_table.min, xp.minimum), bound(of_table.max, xp.maximum))


def _module_of(xp: Any, table: Any) -> Any:
    """What computes on a table: NumPy on one of its own, so that XLA has no constants to fold."""
    return xp if isinstance(table, jax.Array) else np


def look_up_flags(flags: Any, positions: Interval) -> Truth:
    """Whether flags of a vector, not empty, are set at positions, which are clamped into it."""
    xp = positions.xp
    before = xp.asarray(_counts(_module_of(xp, flags), flags))
    first, last = (xp.clip(x, 0, len(flags) - 1) for x in (positions.low, positions.high))
    count = before[last + 1] - before[first]
    return Truth(xp, count > 0, count == last - first + 1)


def without_arrays(mask: Any) -> Any:
    """A mask whose traced arrays may hold any integers, to be bounded on the host."""
    return jax.tree.map(lambda _: Interval.unknown(np), mask)
