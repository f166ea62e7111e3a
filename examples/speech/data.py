"""Utterances: read from a file or generated, checked, and put into padded batches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..common.errors import UserError, one_line
from . import digits

ARRAYS = ("feat", "offset", "text")  # Without these a file is no corpus.
PARTS = ("train", "test")
HELD_OUT_EVERY = 10  # Of a file that does not say which utterances are for testing.
GENERATED = {"train": 2000, "test": 200}  # Utterances.
BLANK = 0  # The symbol of CTC that stands for no character.


@dataclass(frozen=True)
class Utterances:
    """Frames of features, one utterance after the other, and what each one says."""

    features: np.ndarray  # float32 (frames, features).
    offsets: np.ndarray  # Where each one begins, and the end: integers (utterances + 1,).
    texts: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> np.ndarray:
        """How many frames each has."""
        return np.diff(self.offsets)

    def frames(self, index: int) -> np.ndarray:
        """The features of one, (frames, features)."""
        return self.features[self.offsets[index] : self.offsets[index + 1]]

    def scaled(self, mean: np.ndarray, scale: np.ndarray) -> Utterances:
        """The same with features less their mean, divided by a scale."""
        features = ((self.features - mean) / scale).astype(np.float32)
        return replace(self, features=features)

    def chosen(self, which: np.ndarray) -> Utterances:
        """Those of a mask."""
        indices = np.flatnonzero(which)
        return Utterances(
            self.features[np.repeat(which, self.lengths)],
            np.cumsum([0, *self.lengths[indices]]),
            [self.texts[i] for i in indices],
        )


@dataclass(frozen=True)
class Corpus:
    """What to train on and what is held out, with features of mean 0 and variance 1."""

    train: Utterances
    held_out: Utterances
    alphabet: str  # Symbol i of the model is character i - 1; symbol 0 is the blank.
    frame_ms: float  # From one frame to the next.
    source: str
    digest: str  # SHA-256 of the content.

    @property
    def features(self) -> int:
        """Numbers in a frame."""
        return self.train.features.shape[1]

    @property
    def description(self) -> str:
        """What there is, in a line."""
        minutes = [x.offsets[-1] * self.frame_ms / 60_000 for x in (self.train, self.held_out)]
        return (
            f"{self.source}, {len(self.train):,} utterances to train on ({minutes[0]:.1f} "
            f"minutes), {len(self.held_out):,} held out ({minutes[1]:.1f} minutes), "
            f"{self.features} features a frame, {len(self.alphabet)} different characters"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What tells the corpus from others, as JSON values."""
        return {"source": self.source, "sha256": self.digest, "alphabet": self.alphabet}

    def encode(self, text: str) -> list[int]:
        """The symbols of a text."""
        return [self.alphabet.index(character) + 1 for character in text]


def load(path: Path | None, seed: int) -> Corpus:
    """Reads a corpus, or (None) generates spoken digits."""
    if path is None:
        train, test = (
            Utterances(*digits.generate(GENERATED[part], (seed, i))) for i, part in enumerate(PARTS)
        )
        frame_ms, source = digits.FRAME_MS, f"generated digits of seed {seed}"
    else:
        train, test, frame_ms = read(path)
        source = str(path.resolve())
    digest = hashlib.sha256()
    for part in (train, test):
        for array in (part.features, part.offsets.astype("<i8")):
            digest.update(np.ascontiguousarray(array))
        digest.update("\n".join(part.texts).encode())
    # Of all that is trained on, as an utterance's own mean is known only at its end.
    mean, scale = train.features.mean(0, np.float64), train.features.std(0, dtype=np.float64)
    train, test = (x.scaled(mean, np.where(scale > 0, scale, 1)) for x in (train, test))
    alphabet = "".join(sorted(set().union(*train.texts, *test.texts)))
    return Corpus(train, test, alphabet, frame_ms, source, digest.hexdigest())


def read(path: Path) -> tuple[Utterances, Utterances, float]:
    """Reads an .npz file: what to train on, what is held out, and milliseconds a frame.

    ===========  ===============================  ===============================================
    array        dtype and shape                  what
    ===========  ===============================  ===============================================
    feat         floating (frames, features)      the frames of all utterances, one after another
    offset       integers (utterances + 1,)       utterance i is ``feat[offset[i]:offset[i + 1]]``
    text         strings (utterances,)            what each one says
    split        strings (utterances,), optional  "train" or "test"; without it every tenth is held
                                                  out
    frame_ms     a number, optional               from one frame to the next: 10 without it
    ===========  ===============================  ===============================================
    """
    try:
        with np.load(path) as archive:
            arrays = dict(archive)
    except OSError as error:
        raise UserError(f"--data {path}: expected an .npz file, got: {error}") from error
    except Exception as error:  # A damaged archive, or another kind of file, fails in any way.
        raise UserError(
            f"--data {path}: expected an .npz file of plain arrays, got: {one_line(error)}"
        ) from error

    def check(ok: Any, name: str, expected: str, actual: Any) -> None:
        if not ok:
            raise UserError(f"--data {path}: expected {name} to be {expected}, got {actual}")

    if missing := [name for name in ARRAYS if name not in arrays]:
        raise UserError(
            f"--data {path}: expected arrays {', '.join(ARRAYS)}, got none named "
            f"{' or '.join(missing)}, but {', '.join(arrays) or 'no array'}"
        )
    feat, offset, text = (arrays[name] for name in ARRAYS)
    floating = np.issubdtype(feat.dtype, np.floating) and feat.ndim == 2 and feat.size
    check(floating, "feat", "floating numbers (frames, features)", _kind(feat))
    integers = np.issubdtype(offset.dtype, np.integer) and offset.ndim == 1 and len(offset) > 1
    check(integers, "offset", "integers (utterances + 1,)", _kind(offset))
    count = len(offset) - 1
    strings = text.dtype.kind == "U" and text.shape == (count,)
    check(strings, "text", f"strings ({count},), as offset has {count + 1} numbers", _kind(text))
    offset = offset.astype(np.int64)
    ends = (int(offset[0]), int(offset[-1]))
    check(ends == (0, len(feat)), "offset", f"from 0 to the {len(feat)} frames of feat", ends)
    for i in np.flatnonzero(np.diff(offset) < 1)[:1]:
        pair = f"{offset[i]} and {offset[i + 1]} at {i}"
        check(False, "offset", "rising, a frame at least for each utterance", pair)
    for i in np.flatnonzero(~np.isfinite(feat).all(1))[:1]:
        check(False, "feat", "finite", f"a number that is not in frame {i}")
    for i in np.flatnonzero(np.char.strip(text) == "")[:1]:
        check(False, "text", "a transcript of each utterance", f"an empty one of utterance {i}")
    split = arrays.get("split", np.where(np.arange(count) % HELD_OUT_EVERY, *PARTS))
    named = split.dtype.kind == "U" and split.shape == (count,) and set(split) == set(PARTS)
    check(named, "split", f"'train' or 'test' ({count},), and some of both", _described(split))
    frame_ms = arrays.get("frame_ms", np.array(10.0))
    positive = frame_ms.shape == () and frame_ms.dtype.kind in "iuf" and 0 < frame_ms < np.inf
    check(positive, "frame_ms", "a positive number", _described(frame_ms))
    everything = Utterances(feat.astype(np.float32), offset, [str(x) for x in text])
    return (*(everything.chosen(split == part) for part in PARTS), float(frame_ms))


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"


def _described(array: np.ndarray) -> str:
    few = ", ".join(map(str, np.unique(array)[:4])) if array.dtype.kind in "Uiuf" else ""
    return f"{_kind(array)} {few}".rstrip()


class Batches:
    """Utterances in padded batches, each of like lengths: a bucket has one shape."""

    def __init__(
        self,
        corpus: Corpus,
        part: Utterances,
        *,
        batch: int,
        stride: int,
        buckets: int,
        noise: float = 0.0,
    ):
        self.corpus, self.part, self.batch, self.noise = corpus, part, batch, noise
        by_length = np.argsort(part.lengths, kind="stable")
        groups = np.array_split(by_length, min(buckets, -(-len(part) // batch)))
        self.buckets = [Bucket(group, part, stride) for group in groups]

    @property
    def per_epoch(self) -> int:
        """How many batches make a pass over all utterances."""
        return sum(-(-len(bucket.members) // self.batch) for bucket in self.buckets)

    def training(self, index: int, seed: int) -> dict[str, np.ndarray]:
        """The batch of a step, which the two numbers decide: a resumed run goes on with them.

        Each pass has another order. What is missing in the last batch of a bucket is filled up with
        the first utterances of that bucket.
        """
        epoch, place = divmod(index, self.per_epoch)
        rng = np.random.default_rng((seed, epoch))
        batches = []
        for bucket in self.buckets:
            count = -(-len(bucket.members) // self.batch)
            members = np.resize(rng.permutation(bucket.members), count * self.batch)
            batches += [(bucket, x) for x in members.reshape(count, self.batch)]
        batch = self.padded(*batches[rng.permutation(len(batches))[place]])
        if self.noise:
            noise = np.random.default_rng((seed, epoch, place)).normal(size=batch["frames"].shape)
            batch["frames"] += (self.noise * noise).astype(np.float32)
        return batch

    def all(self) -> list[tuple[list[int], dict[str, np.ndarray]]]:
        """Batches that have each utterance once, with the indices of these."""
        chunks = [
            (bucket, bucket.members[i : i + self.batch])
            for bucket in self.buckets
            for i in range(0, len(bucket.members), self.batch)
        ]
        return [(list(map(int, x)), self.padded(bucket, x)) for bucket, x in chunks]

    def padded(self, bucket: Bucket, members: np.ndarray) -> dict[str, np.ndarray]:
        """Utterances as arrays of one length; rows beyond the last one are empty."""
        lengths, label_lengths = np.zeros((2, self.batch), np.int32)
        frames = np.zeros((self.batch, bucket.frames, self.corpus.features), np.float32)
        labels = np.full((self.batch, bucket.characters), BLANK, np.int32)
        for row, index in enumerate(members):
            features, symbols = self.part.frames(index), self.corpus.encode(self.part.texts[index])
            lengths[row], label_lengths[row] = len(features), len(symbols)
            frames[row, : len(features)], labels[row, : len(symbols)] = features, symbols
        return {
            "frames": frames,
            "lengths": lengths,
            "labels": labels,
            "label_lengths": label_lengths,
        }


class Bucket:
    """Utterances of like lengths, and the shape that all of them fit."""

    def __init__(self, members: np.ndarray, part: Utterances, stride: int):
        self.members = members
        self.frames = int(-(-part.lengths[members].max() // stride) * stride)
        self.characters = max(len(part.texts[i]) for i in members)


def check_lengths(corpus: Corpus, stride: int) -> None:
    """Raises a UserError if an utterance has too few steps for its characters.

    CTC gives each character a step at least, and a blank between two that are equal.
    """
    for part in (corpus.train, corpus.held_out):
        for text, frames in zip(part.texts, part.lengths, strict=True):
            needed = len(text) + sum(a == b for a, b in pairwise(text))
            if (steps := -(-frames // stride)) < needed:
                raise UserError(
                    f"--stride: expected at least {needed} steps for {text!r}, got {steps} of "
                    f"{frames} frames; lower --stride"
                )
