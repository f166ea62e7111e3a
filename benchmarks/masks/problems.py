"""Masks at the lengths where they matter: expressions, never arrays of all positions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsparse import masks
from jaxsparse.masks import Mask

SUITE = "masks"
ABOUT = "masks of attention, beside FlexAttention and cuDNN"
HEADS = 8

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)  # a problem is itself alone, so that what is made of it is kept
class Problem:
    """A mask, and the size of the operands.

    Args:
        kind: a key of ``KINDS``.
        length: how many queries there are, and keys.
        n: numbers of a head.
        mask: which keys a query sees, a part of the earlier ones and its own.
        size: of the band, the documents, the stride or the window; None where there is none.
        ids: the document of each position.
        traced: an array, and the same mask made of it, so that a program can make it.
    """

    kind: str
    length: int
    n: int
    mask: Mask
    size: int | None = None
    ids: Ids | None = None
    traced: tuple[jax.Array, Callable[[jax.Array], Mask]] | None = None

    suite = SUITE
    heads = HEADS

    @property
    def name(self) -> str:
        """Unique in the suite."""
        size = "" if self.size is None else str(self.size)
        return f"{self.kind}{size}_{self.length}" + (f"_n{self.n}" if self.n != 128 else "")

    @property
    def window(self) -> int | None:
        """How many earlier keys a query sees, if it sees all of these and no others."""
        return self.size - 1 if self.size and self.kind in ("band", "window") else None

    @functools.cached_property
    def nnz(self) -> int:
        """How many positions are stored, counted on the device."""
        columns = jnp.arange(self.length)

        def of_row(row: jax.Array) -> jax.Array:
            return jnp.sum(self.mask(row, columns), dtype=jnp.int32)

        rows = jnp.arange(self.length)
        counts = jax.jit(lambda rows: jax.lax.map(of_row, rows, batch_size=128))(rows)
        return int(np.asarray(counts).sum(dtype=np.int64))

    def prepare(self) -> None:
        """Counts what is stored."""
        _ = self.nnz

    def operands(self) -> dict[str, jax.Array]:
        """Query, key and value by name: float32, standard normal; on the device."""
        return _drawn(self.length, self.n)


@functools.lru_cache(maxsize=1)  # problems of one length follow each other
def _drawn(length: int, n: int) -> dict[str, jax.Array]:
    names = ("query", "key", "value")
    keys = jax.random.split(jax.random.key(0), len(names))
    return {
        name: jax.random.normal(key, (1, length, HEADS, n), jnp.float32)
        for name, key in zip(names, keys, strict=True)
    }


def _paper(length: int, n: int) -> Problem:
    width = min(256, length // 4)
    scattered = masks.random(0.95, length, band_width=width)
    mask = (masks.band(width) | scattered) & masks.causal()
    return Problem("paper", length, n, mask, width)


def _band(length: int, n: int) -> Problem:
    width = min(256, length // 4)
    return Problem("band", length, n, masks.band(width) & masks.causal(), width)


def _documents(length: int, n: int) -> Problem:
    """A packed sequence: documents of random lengths, one behind the other."""
    mean = min(1024, length // 8)
    lengths = np.random.default_rng(0).integers(1, 2 * mean, length)
    ids = np.repeat(np.arange(length, dtype=np.int32), lengths)[:length]

    def packed(ids: Ids | jax.Array) -> Mask:
        return masks.documents(ids) & masks.causal()

    return Problem("documents", length, n, packed(ids), mean, ids, (jnp.asarray(ids), packed))


def _strided(length: int, n: int) -> Problem:
    stride = min(128, length // 32)
    return Problem("strided", length, n, masks.strided(stride) & masks.causal(), stride)


def _causal(length: int, n: int) -> Problem:
    return Problem("causal", length, n, masks.causal())


def _window(length: int, n: int) -> Problem:
    size = min(1024, length // 8)
    mask = masks.sliding_window(size - 1)
    # Of a traced offset, so that the program can't know the mask.
    traced = (jnp.int32(0), lambda zero: masks.offset(mask, rows=zero, columns=zero))
    return Problem("window", length, n, mask, size, traced=traced)


# kind -> its problem of a length, and the length on a GPU
KINDS: dict[str, tuple[Callable[[int, int], Problem], int]] = {
    "paper": (_paper, 12_288),
    "band": (_band, 12_288),
    "documents": (_documents, 12_288),
    "strided": (_strided, 12_288),
    "causal": (_causal, 12_288),
    "window": (_window, 131_072),
}
LENGTH_ON_CPU = 1024
SHORTEST = 32
"""For which the strided mask still has a stride."""


def problems(
    platform: str, lengths: tuple[int, ...] | None, n: tuple[int, ...] | None
) -> Iterator[Problem]:
    """Every kind, at its own length or at those asked for."""
    for length in lengths or (None,):
        for make, on_gpu in KINDS.values():
            own = LENGTH_ON_CPU if platform == "cpu" else on_gpu
            yield from (make(length or own, size) for size in n or (128,))
