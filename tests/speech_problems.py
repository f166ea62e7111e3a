"""What the tests of the speech recognisers share: small options, a small corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("flax", "matplotlib", "optax", "orbax.checkpoint", "tqdm"):
    pytest.importorskip(package)

TINY = ["--hidden=8", "--batch=4", "--steps=6", "--eval-every=4", "--checkpoint-every=4"]
TINY += ["--stride=2", "--buckets=1", "--quiet"]
STEPS = 6
FEATURES = 5
WORDS = ("AB", "BA", "CAB")


def make_arrays(count: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a corpus of a format that examples/speech reads."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, 1 + i % 2)) for i in range(count)]
    lengths = [4 * len(text) + int(rng.integers(8)) for text in texts]
    return {
        "feat": rng.normal(3, 2, (sum(lengths), FEATURES)).astype(np.float32),
        "offset": np.cumsum([0, *lengths]),
        "text": np.array(texts),
        "split": np.array(["test" if i % 4 == 3 else "train" for i in range(count)]),
        "frame_ms": np.array(20),
    }


def write_corpus(path: Path, **changes: Any) -> Path:
    """Writes such a file, with some arrays changed, or left out where they are None."""
    arrays = {k: v for k, v in (make_arrays() | changes).items() if v is not None}
    np.savez(path, **arrays)
    return path
