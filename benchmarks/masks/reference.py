"""Attention in float64, for some rows and some keys: no array of all positions is made."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks.masks.problems import Problem
from jaxsparse import masks
from jaxsparse.masks import Mask

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Results = npt.NDArray[Any]  # of any floating dtype

_POSITIONS_AT_A_TIME = 2**19  # for which a mask's temporaries stay in cache

# What follows bounds the time that it takes, to about a second on a machine of 16 cores.
_POSITIONS = 2**22  # of the rows that are checked, over all heads and keys
_MOST_ROWS = 256
_MOST_VIEWERS = 2048  # of a key that is checked: the queries that see it
_MOST_POSITIONS = 2**21  # of these and of all keys that they see
_FEWEST = 16  # terms of a sum in which rounding averages out


@dataclass(frozen=True)
class Expected:
    """What is compared: results, and gradients of the sum of their squares.

    Args:
        rows: spread evenly over all queries.
        out: of these rows (rows, heads, n).
        slopes: those of the rows that see so many keys that rounding averages out.
        query: the gradient of these.
        keys: spread over the keys, of those that few enough queries see.
        key: the gradient of these.
        value: the gradient of their values.
    """

    rows: Indices
    out: Floats
    slopes: Indices
    query: Floats
    keys: Indices
    key: Floats
    value: Floats

    def errors(self, out: Results) -> tuple[float, int]:
        """The greatest error of a row of a head of a result (1, length, heads, n); rows."""
        return _error(out[0, self.rows], self.out, (-1,)), self.rows.size

    def errors_of_gradients(
        self, query: Results, key: Results, value: Results
    ) -> tuple[float, int]:
        """The same of the gradients of rows and keys, over all heads."""
        compared = (
            (query, self.slopes, self.query),
            (key, self.keys, self.key),
            (value, self.keys, self.value),
        )
        errors = [_error(array[0, at], wanted, (1, 2)) for array, at, wanted in compared]
        return max(errors), self.slopes.size + self.keys.size


def _error(actual: Results, wanted: Floats, axes: tuple[int, ...]) -> float:
    """The most by which a vector along some axes is off, over its length; infinite for NaN."""
    if actual.shape != wanted.shape:
        return float("inf")
    off, length = (
        np.sqrt(np.sum(np.square(x), axes)) for x in (actual.astype(np.float64) - wanted, wanted)
    )
    errors = off / np.where(length > 0, length, 1)
    return float(errors.max(initial=0)) if np.isfinite(errors).all() else float("inf")


def _seen(mask: Mask, rows: Indices, length: int) -> npt.NDArray[np.bool_]:
    """Which keys each row sees (rows, length)."""
    every, count = np.arange(length), max(1, _POSITIONS_AT_A_TIME // length)
    parts = [rows[i : i + count] for i in range(0, rows.size, count)]
    return np.concatenate([mask(part[:, None], every[None, :]) for part in parts])


class _Attended:
    """Rows of attention over the keys that any of them sees; heads stand first."""

    def __init__(self, problem: Problem, dtype: str, mask: Mask, rows: Indices):
        seen = _seen(mask, rows, problem.length)
        self.keys, self.counts = np.flatnonzero(seen.any(0)), seen.sum(1)
        self.positions = rows.size * self.keys.size
        self._seen, self._rows = seen[:, self.keys], rows
        self._operands, self._dtype = problem.operands(), jnp.dtype(dtype)
        self._scale = problem.n**-0.5

    def _operand(self, name: str, positions: Indices) -> Floats:
        rounded = np.asarray(self._operands[name])[0, positions].astype(self._dtype)
        exact: Floats = rounded.astype(np.float64)
        return exact.swapaxes(0, 1)

    @functools.cached_property
    def query(self) -> Floats:
        return self._operand("query", self._rows)

    @functools.cached_property
    def key(self) -> Floats:
        return self._operand("key", self.keys)

    @functools.cached_property
    def value(self) -> Floats:
        return self._operand("value", self.keys)

    @functools.cached_property
    def probabilities(self) -> Floats:
        p: Floats = np.matmul(self.query, self.key.mT)
        p *= self._scale
        p[:, ~self._seen] = -np.inf
        most = p.max(-1, keepdims=True)
        np.exp(p - np.where(np.isfinite(most), most, 0), out=p)
        p /= np.maximum(p.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
        return p

    @functools.cached_property
    def out(self) -> Floats:
        out: Floats = self.probabilities @ self.value
        return out

    def _of_scores(self, probabilities: Floats, value: Floats) -> Floats:
        """The gradient of scores, of those of some keys."""
        slopes = 2 * self.out
        sums = np.sum(slopes * self.out, -1, keepdims=True)
        of_scores: Floats = self._scale * probabilities * (slopes @ value.mT - sums)
        return of_scores

    def gradient_of_query(self) -> Floats:
        gradient: Floats = self._of_scores(self.probabilities, self.value) @ self.key
        return gradient

    def gradients_of_key(self, key: int) -> tuple[Floats, Floats]:
        """Of a key that no other rows see, and of its value (heads, n)."""
        at = np.searchsorted(self.keys, [key])
        p = self.probabilities[..., at]
        of_key = self._of_scores(p, self.value[:, at]).mT @ self.query
        return of_key[:, 0], (p.mT @ (2 * self.out))[:, 0]


@functools.lru_cache(maxsize=4)  # the implementations share them: of the mask, and of causal ones
def expected(problem: Problem, dtype: str, causal: bool) -> Expected:
    """Of the problem's mask, or of causal attention over as many positions."""
    mask = masks.causal() if causal else problem.mask
    length = problem.length
    count = max(16, min(_MOST_ROWS, _POSITIONS // (problem.heads * length)))
    rows = np.unique(np.linspace(0, length - 1, count).round().astype(np.int64))
    of_rows = _Attended(problem, dtype, mask, rows)
    enough = of_rows.counts >= min(_FEWEST, of_rows.counts.max())
    found = [_of_first(problem, dtype, mask, candidates) for candidates in _candidates(length)]
    of_keys = [pair for pair in found if pair is not None]
    shape = (-1, problem.heads, problem.n)
    return Expected(
        rows,
        of_rows.out.swapaxes(0, 1),
        rows[enough],
        of_rows.gradient_of_query().swapaxes(0, 1)[enough],
        np.array([key for key, _, _ in of_keys], np.int64),
        np.array([gradient for _, gradient, _ in of_keys]).reshape(shape),
        np.array([gradient for _, _, gradient in of_keys]).reshape(shape),
    )


def _candidates(length: int) -> tuple[tuple[int, ...], ...]:
    """Keys inside, and one near the end, which few queries see even if all later ones do."""
    return (length // 2, length // 4, 3 * length // 4), (max(0, length - _FEWEST),)


def _of_first(
    problem: Problem, dtype: str, mask: Mask, candidates: tuple[int, ...]
) -> tuple[int, Floats, Floats] | None:
    """The first key that some queries see but not too many, its gradient and that of its value."""
    for key in candidates:
        viewers = np.flatnonzero(np.asarray(mask(np.arange(problem.length), key)))
        if _FEWEST <= viewers.size <= _MOST_VIEWERS:
            of_viewers = _Attended(problem, dtype, mask, viewers)
            if of_viewers.positions <= _MOST_POSITIONS:
                return key, *of_viewers.gradients_of_key(key)
    return None
