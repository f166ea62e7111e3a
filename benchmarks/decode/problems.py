"""Steps of decoding: caches of keys and values, and a query of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

SUITE = "decode"
ABOUT = "steps of decoding, one query to a cache, beside cuDNN and PyTorch"
KEY_HEADS = 8
PAGE = 64
_DRAWN = 2**26  # numbers that are drawn; more repeat them, moved along


@dataclass(frozen=True)
class Problem:
    """A cache, and the lengths of its sequences.

    Args:
        sequences: how many there are.
        length: keys that a sequence has room for.
        heads: of queries; 8 heads of keys.
        n: numbers of a head.
        ragged: whether sequences have random lengths, else all are full.
    """

    sequences: int
    length: int
    heads: int
    n: int
    ragged: bool = False

    suite = SUITE

    @property
    def name(self) -> str:
        """Unique in the suite."""
        name = f"{self.sequences}x{self.length}_heads{self.heads}"
        return name + ("_ragged" if self.ragged else "") + (f"_n{self.n}" if self.n != 128 else "")

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The keys of each sequence."""
        if not self.ragged:
            return np.full(self.sequences, self.length, np.int32)
        random = np.random.default_rng(0)
        return random.integers(1, self.length + 1, self.sequences).astype(np.int32)

    @property
    def nnz(self) -> int:
        """Keys of all sequences, which a head of each reads."""
        return int(self.lengths.sum(dtype=np.int64))

    def bytes_read(self, itemsize: int) -> int:
        """Of keys and values that are seen, each once."""
        return 2 * self.nnz * KEY_HEADS * self.n * itemsize

    def prepare(self) -> None:
        """Nothing is made before."""

    def operands(self, dtype: str) -> dict[str, jax.Array]:
        """Query, key and value by name, standard normal, on the device; caches are full."""
        of_query, *of_cache = jax.random.split(jax.random.key(0), 3)
        query = jax.random.normal(of_query, (self.sequences, 1, self.heads, self.n), dtype)
        shape = (self.sequences, self.length, KEY_HEADS, self.n)
        key, value = (_drawn(key, shape, dtype) for key in of_cache)
        return {"query": query, "key": key, "value": value}


def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Some sequences are drawn: others have the same numbers at other positions."""
    sequences, *rest = shape
    drawn = max(1, min(sequences, _DRAWN // int(np.prod(rest))))
    some = jax.random.normal(key, (drawn, *rest), dtype)
    parts = [jnp.roll(some, 331 * i, axis=1) for i in range(-(-sequences // drawn))]
    return jnp.concatenate(parts)[:sequences]


# Sequences, keys of each, heads, and whether lengths differ.
_ON_GPU = [
    (64, 32_768, 8, False),
    (64, 32_768, 32, False),
    (64, 32_768, 64, False),
    (64, 32_768, 32, True),
    (1, 131_072, 32, False),
    (8, 131_072, 32, False),
    (8, 4_096, 32, False),
]
_ON_CPU = [(4, 4_096, 8, False), (4, 4_096, 32, True), (1, 16_384, 8, False)]


def problems(
    platform: str, lengths: tuple[int, ...] | None, n: tuple[int, ...] | None
) -> Iterator[Problem]:
    """All of them, at their own lengths or at those asked for."""
    seen = set()
    for sequences, own, heads, ragged in _ON_CPU if platform == "cpu" else _ON_GPU:
        for length in lengths or (own,):
            for size in n or (128,):
                problem = Problem(sequences, length, heads, size, ragged)
                if problem not in seen:
                    seen.add(problem)
                    yield problem
