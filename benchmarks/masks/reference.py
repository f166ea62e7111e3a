"""Attention in float64, for some rows and some keys: no array of all positions is made."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks.masks.problems import Problem
from jaxsparse import masks
from jaxsparse.masks import Mask

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Results = npt.NDArray[Any]  # of any floating dtype

_POSITIONS = 2**23  # of the rows that are checked, over all heads and keys
_MOST_POSITIONS = 2**22  # of the queries that see a key, and of all keys that these see
_MOST_VIEWERS = 2048
_FEWEST = 16  # terms of a sum in which rounding averages out


class Attended(NamedTuple):
    """The result of some rows, and the gradients of the sum of its squares, over some keys."""

    out: Floats
    query: Floats
    key: Floats
    value: Floats


@dataclass(frozen=True)
class Expected:
    """What is compared.

    Args:
        rows: spread evenly over all queries.
        out: of these rows (rows, heads, n).
        slopes: those of the rows that see enough keys for a sum in which rounding averages out.
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


def attend(query: Floats, key: Floats, value: Floats, seen: npt.NDArray[np.bool_]) -> Attended:
    """Of rows (rows, heads, n) over keys, where they see them."""
    scale = query.shape[-1] ** -0.5
    result = Attended(*(np.zeros(x.shape) for x in (query, query, key, key)))
    for head in range(query.shape[1]):
        q, k, v = (x[:, head] for x in (query, key, value))
        scores = np.where(seen, scale * (q @ k.T), -np.inf)
        most = scores.max(-1, keepdims=True)
        p = np.exp(scores - np.where(np.isfinite(most), most, 0))
        p /= np.maximum(p.sum(-1, keepdims=True), np.finfo(float).tiny)
        out = p @ v
        slope = 2 * out
        ds = scale * p * (slope @ v.T - np.sum(slope * out, -1, keepdims=True))
        for array, of_head in zip(result, (out, ds @ k, ds.T @ q, p.T @ slope), strict=True):
            array[:, head] = of_head
    return result


class _Operands:
    """Rows of a problem's operands, rounded to a dtype, in float64 on the host."""

    def __init__(self, problem: Problem, dtype: str):
        self._arrays, self._dtype = problem.operands(), dtype

    def of(self, name: str, positions: Indices) -> Floats:
        rounded = self._arrays[name][0, jnp.asarray(positions)].astype(self._dtype)
        return np.asarray(rounded.astype(jnp.float32)).astype(np.float64)

    @property
    def length(self) -> int:
        return int(self._arrays["key"].shape[1])

    def seen(self, mask: Mask, rows: Indices) -> npt.NDArray[np.bool_]:
        return np.asarray(mask(rows[:, None], np.arange(self.length)[None, :]))

    def attend(self, rows: Indices, keys: Indices, seen: npt.NDArray[np.bool_]) -> Attended:
        return attend(self.of("query", rows), self.of("key", keys), self.of("value", keys), seen)


@functools.lru_cache(maxsize=4)  # the implementations share them: of the mask, and of causal ones
def expected(problem: Problem, dtype: str, causal: bool) -> Expected:
    """Of the problem's mask, or of causal attention over as many positions."""
    mask = masks.causal() if causal else problem.mask
    length, operands = problem.length, _Operands(problem, dtype)
    count = min(length, max(16, min(256, _POSITIONS // (problem.heads * length))))
    rows = np.unique(np.linspace(0, length - 1, count).round().astype(np.int64))
    seen = operands.seen(mask, rows)
    keys, counts = np.flatnonzero(seen.any(0)), seen.sum(1)
    of_rows = operands.attend(rows, keys, seen[:, keys])
    enough = counts >= min(_FEWEST, counts.max())
    of_keys = [made for key in _candidates(length) if (made := _of_key(operands, mask, key))]
    shape = (-1, *of_rows.out.shape[1:])
    return Expected(
        rows,
        of_rows.out,
        rows[enough],
        of_rows.query[enough],
        np.array([key for key, _, _ in of_keys], np.int64),
        np.array([gradient for _, gradient, _ in of_keys]).reshape(shape),
        np.array([gradient for _, _, gradient in of_keys]).reshape(shape),
    )


def _candidates(length: int) -> list[int]:
    """One of them near the end, where few queries see it even if all later ones do."""
    return sorted({length // 4, length // 2, 3 * length // 4, max(0, length - 25)})


def _of_key(operands: _Operands, mask: Mask, key: int) -> tuple[int, Floats, Floats] | None:
    """A key with its gradient and that of its value; None if too many queries see it, or few."""
    viewers = np.flatnonzero(np.asarray(mask(np.arange(operands.length), np.array([key]))))
    if not _FEWEST <= viewers.size <= _MOST_VIEWERS:
        return None
    seen = operands.seen(mask, viewers)
    keys = np.flatnonzero(seen.any(0))
    if viewers.size * keys.size > _MOST_POSITIONS:
        return None
    attended = operands.attend(viewers, keys, seen[:, keys])
    at = int(np.searchsorted(keys, key))
    return key, attended.key[at], attended.value[at]
